"""The exceptions that mean "the user can mend this"."""


class UserError(Exception):
    """Bad input or a broken surrounding: entrypoints print it as one line (`error: …`) and exit with status 1."""
