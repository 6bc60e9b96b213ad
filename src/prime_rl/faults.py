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

Kind = Literal["kill", "stop", "enospc", "error", "tear", "delay", "drop", "duplicate"]


@dataclass(frozen=True)
class Fault:
    """What happens in one process (trainer, orchestrator, inference, environment) at a point.

    `do`: `kill` (SIGKILL to itself), `stop` (SIGSTOP), `enospc` (the error of a full disk), `error` (a RuntimeError),
    `tear` (the file at hand is cut in half, then SIGKILL), `delay` (sleep); `drop` and `duplicate` are the caller's to
    do.
    """

    point: str  # pattern (`fnmatch`) of its name
    process: str
    do: Kind
    nth: int = 1  # the first match at which it fires (1-based, counted over all incarnations)
    times: int = 1  # so often
    seconds: float = 0.0  # of a delay


_plan: list[tuple[Fault, Path]] = []  # each with the file whose length counts its matches


def arm(process: str) -> None:
    """Read the plan, if there is one, for this process. First thing in every `main()`."""
    if not (value := os.environ.get(ENV)):
        return
    faults = [fault for row in json.loads(Path(value).read_text()) if (fault := Fault(**row)).process == process]
    _plan[:] = [(each, Path(f"{value}.{process}.{number}.seen")) for number, each in enumerate(faults)]
    if _plan:
        print(f"fault injection is on ({ENV}={value})", file=sys.stderr)


def point(name: str, file: Path | None = None) -> Kind | None:
    """Pass the point `name`; `file` is what is being written there, for `tear`. Return `drop` or `duplicate` when
    that is planned here, else None. Raises OSError (ENOSPC) or RuntimeError when that is."""
    for fault, seen in _plan:
        if fnmatchcase(name, fault.point):
            with seen.open("ab", buffering=0) as matches:  # durable and atomic: the next incarnation counts on
                matches.write(b"x")
                count = matches.tell()
            if fault.nth <= count < fault.nth + fault.times:
                return _fire(fault, file)
    return None


def _fire(fault: Fault, file: Path | None) -> Kind | None:
    print(f"fault: {fault.do} at {fault.point}", file=sys.stderr, flush=True)
    if fault.do == "delay":
        time.sleep(fault.seconds)
    elif fault.do == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file) if file else None)
    elif fault.do == "error":
        raise RuntimeError("fault injection")
    elif fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.do in ("kill", "tear"):
        if fault.do == "tear" and file is not None and file.is_file():
            os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        return fault.do
    return None
