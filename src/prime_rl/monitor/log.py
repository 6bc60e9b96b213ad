"""Set up loguru for every process: lines, also those of `logging`, go to stdout and to `logs/NAME.log`.

Call sites: `from loguru import logger`.
"""

import json
import logging
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from loguru import logger

_ENV = "PRIMERL_LOG"  # arguments of `setup`, for the processes that vLLM starts
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_sinks = [0]  # 0: loguru's own
_file: TextIO | None = None


def setup(level: str, process: str, output_dir: Path | str | None = None) -> None:
    """Send this process's lines to stdout and to `logs/NAME.log` below `output_dir`; a later call replaces this one.

    If stdout is that file already (as for processes that `rl` starts), it is not written twice. A rank above 0
    (`trainer.1`) has a file of its own, and its name before each message. No `output_dir`: stdout only, until the
    process is accepted: the log may be that of a run that refuses it.
    """
    global _file
    root = None if output_dir is None else str(Path(output_dir).resolve())
    os.environ[_ENV] = json.dumps([level, process, root])
    while _sinks:
        logger.remove(_sinks.pop())
    _file = None
    terminal = sys.stdout.isatty()
    _add(sys.stdout, level, process, "HH:mm:ss" if terminal else "YYYY-MM-DD HH:mm:ss", terminal)
    if root is not None and (file := _open(Path(root) / "logs", process)) is not None:
        _file = file
        _add(file, level, process, "YYYY-MM-DD HH:mm:ss", False)
    sys.excepthook = lambda kind, error, trace: logger.opt(exception=error).critical("crashed")
    threading.excepthook = lambda crash: logger.opt(exception=crash.exc_value).critical("a thread crashed")
    logging.basicConfig(handlers=[_Intercept()])
    logging.captureWarnings(True)
    for library in ("transformers", "datasets", "huggingface_hub"):  # each has a handler of its own once it is imported
        logging.getLogger(library).handlers.clear()
        logging.getLogger(library).propagate = True


def fail(error: Exception, status: int = 1) -> NoReturn:
    """End the process with the error in one line, on stderr and in the log file."""
    for stream in filter(None, (sys.stderr, _file)):
        print(f"error: {error}", file=stream)
    sys.exit(status)


def handler() -> logging.Handler:
    """Return the handler that `inference/logging.json` names, for each of vLLM's processes. The first call in a process
    repeats its parent's `setup`."""
    if 0 in _sinks:
        setup(*json.loads(os.environ[_ENV]))
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    return _Intercept()


class _Intercept(logging.Handler):
    """Passes the records of `logging` on to loguru, with the name of their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{record.name}: {record.getMessage().rstrip()}"
        except Exception:  # noqa: BLE001  a library's template and arguments do not fit, or its text is unwritable
            self.handleError(record)
            return
        level = record.levelname if record.levelname in _LEVELS else record.levelno
        logger.opt(exception=record.exc_info).log(level, "{}", text)


def _add(stream: TextIO, level: str, process: str, time: str, terminal: bool) -> None:
    tag = f"[{process}] " if "." in process else ""
    template = f"{{time:{time}}} <level>{{level: <7}}</level> {tag}{{message}}"
    color = terminal and not os.environ.get("NO_COLOR")
    # `print` looks stdout up: while rows stay below the lines (`LiveRegion`), these go above them.
    sink = partial(print, end="", flush=True) if terminal else stream
    # `diagnose` would show the values of variables, keys among them.
    _sinks.append(
        logger.add(sink, level=level.upper(), format=template, colorize=color, backtrace=False, diagnose=False)
    )


def _open(logs: Path, process: str) -> TextIO | None:
    """Open the log file, unless it, or that of the first rank, is stdout. Warn and return None if that fails."""
    path, first = logs / f"{process}.log", logs / f"{process.partition('.')[0]}.log"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if first.exists() and os.path.samestat(first.stat(), os.fstat(1)):
            return None
        return path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logger.warning("{} cannot be written ({}): logging to stdout only", path, error.strerror)
        return None
