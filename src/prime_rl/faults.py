"""Named fault points: where a test makes this process die, stall, lose a disk or tear a file.

A point stands at every durable boundary and is named `boundary:subject`, for instance `rename:weights/step_3`. Without
a plan a point costs one comparison. With `PRIMERL_FAULTS=plan.json` the faults of that plan fire, each a stated number
of times over all incarnations of all processes (a file beside the plan counts). Standard library only: environment
workers import this from their own virtual environments.
"""

import errno
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

ENV = "PRIMERL_FAULTS"

Kind = Literal["kill", "stop", "enospc", "tear", "delay", "drop", "duplicate", "error"]


@dataclass(frozen=True)
class Fault:
    """What happens at a point.

    Args:
        point: Pattern (`fnmatch`) of the point's name.
        process: The process it happens in: trainer, orchestrator, inference, environment.
        do: `kill` (SIGKILL to itself), `stop` (SIGSTOP), `enospc` (the error of a full disk), `tear` (the file at hand
            is cut in half, then SIGKILL), `delay` (sleep); `drop`, `duplicate` and `error` are the caller's to do.
        nth: It fires from the nth match on (1-based, counted over all incarnations).
        times: How often it fires.
        seconds: Length of a delay.
    """

    point: str
    process: str
    do: Kind
    nth: int = 1
    times: int = 1
    seconds: float = 0.0


_process = ""
_plan: list[Fault] = []
_path: Path | None = None


def arm(process: str) -> None:
    """Name this process and read the plan, if there is one. First thing in every `main()`."""
    global _process, _plan, _path
    value = os.environ.get(ENV)
    if not value:
        return
    _path = Path(value)
    _process = process
    _plan = [fault for row in json.loads(_path.read_text()) if (fault := Fault(**row)).process == process]
    if _plan:
        print(f"fault injection is on ({ENV}={value})", file=sys.stderr)


def point(name: str, file: Path | None = None) -> Kind | None:
    """Pass the point `name`; `file` is what is being written there, for `tear`.

    Returns:
        `drop`, `duplicate` or `error` when that is planned here, else None.

    Raises:
        OSError: ENOSPC, when that is planned here.
    """
    if not _plan:
        return None
    for number, fault in enumerate(_plan):
        if fnmatchcase(name, fault.point) and _due(number, fault):
            return _fire(fault, file)
    return None


def _due(number: int, fault: Fault) -> bool:
    """Count this match, durably and atomically: the next incarnation must know that it happened."""
    assert _path is not None
    seen = _path.with_name(f"{_path.stem}.{_process}.{number}.seen")
    descriptor = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, b"x")
        count = os.lseek(descriptor, 0, os.SEEK_CUR)
    finally:
        os.close(descriptor)
    return fault.nth <= count < fault.nth + fault.times


def _fire(fault: Fault, file: Path | None) -> Kind | None:
    print(f"fault: {fault.do} at {fault.point}", file=sys.stderr, flush=True)
    if fault.do == "delay":
        time.sleep(fault.seconds)
        return None
    if fault.do == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file) if file else None)
    if fault.do == "tear" and file is not None and file.is_file():
        os.truncate(file, file.stat().st_size // 2)
    if fault.do in ("kill", "tear"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    return fault.do
