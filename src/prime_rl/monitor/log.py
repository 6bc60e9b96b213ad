"""One way to log: `HH:MM:SS LEVEL message` on stdout, coloured only on a terminal."""

import logging
import sys

_ROOT = "prime_rl"
_COLORS = {"DEBUG": "\033[2m", "INFO": "\033[32m", "WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31;1m"}


class _Formatter(logging.Formatter):
    def __init__(self, tag: str, color: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {tag}%(message)s", datefmt="%H:%M:%S")
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        name = record.levelname
        padded = f"{name:<7}"
        record.levelname = f"{_COLORS.get(name, '')}{padded}\033[0m" if self._color else padded
        try:
            return super().formatMessage(record)
        finally:
            record.levelname = name


def get(name: str) -> logging.Logger:
    """The logger for a module: `log.get(__name__)`."""
    return logging.getLogger(name if name == _ROOT or name.startswith(_ROOT + ".") else f"{_ROOT}.{name}")


def setup(level: str, process: str) -> None:
    """Send this process's log lines to stdout. Calling it again replaces the earlier set-up.

    A `process` with a rank (`trainer.1`) puts its name before the message: ranks share one log file.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(f"[{process}] " if "." in process else "", color=sys.stdout.isatty()))
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False  # vLLM and others configure the root logger: no line twice
