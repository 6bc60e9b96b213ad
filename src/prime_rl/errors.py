"""The error that means "the user can mend this", and how commands print."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NEVER_WORKED = "no episode has succeeded"  # begins the message of an error that a restart would meet again
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """Bad input or a broken surrounding: entrypoints print it as one line (`error: …`) and exit with status 1."""


def say(text: str) -> None:
    """Print. Once the terminal or pipe is closed (`rl … | head`) lines are dropped, and the run goes on."""
    with until_closed():
        print(printable(text), flush=True)


def printable(text: str) -> str:
    """Return text without what controls a terminal, but for tabs and ends of lines."""
    return _CONTROL.sub("?", text)


@contextmanager
def until_closed() -> Iterator[None]:
    """Print; where stdout was closed, drop what is printed from here on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        with open(os.devnull, "w") as nowhere:  # nor may the interpreter report the broken pipe at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def user_errors(text: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise an exception of `kinds` as a UserError, of `text` and the exception's own. A UserError stays as it is."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{text}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's message on one line, cut to 300 characters, URLs in it without user and password."""
    return re.sub(r"://[^/\s]*@", "://", " ".join(str(error).split()))[:300]
