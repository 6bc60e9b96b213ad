"""The exceptions that mean "the user can mend this"."""

FOR_GOOD = 78  # exit status (EX_CONFIG of sysexits.h) of a process that is not to be started again before that


class UserError(Exception):
    """Bad input or a broken surrounding: entrypoints print it as one line (`error: …`) and exit with status 1."""
