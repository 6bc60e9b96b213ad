"""Which processes belong to a worker, how much memory they hold, and their end, also of those that have left its process group.

Read from /proc. A process is a worker's by descent, by process group, or by the mark in the environment that it was started with: a daemon keeps
that when its parents are gone.
"""

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

MARK_VAR = "PRIMERL_ENV_WORKER"
_OOM_SCORE = 500  # of 1000
_ROUNDS = 3  # a process may be born between the look and the kill
_PROC = Path("/proc")
_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A line of the process table."""

    parent: int
    group: int
    resident: int  # bytes
    zombie: bool
    born: float  # seconds since the machine was


def table() -> dict[int, Process]:
    """All processes by their number."""
    found = {}
    for name in os.listdir(_PROC):
        if name.isdigit() and (process := _read(int(name))) is not None:
            found[int(name)] = process
    return found


def _read(pid: int) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:  # it has just ended
        return None
    fields = text.rpartition(")")[2].split()
    return Process(int(fields[1]), int(fields[2]), int(fields[21]) * _PAGE, fields[0] in "ZX", int(fields[19]) / _TICKS)


def family(processes: Mapping[int, Process], worker: int) -> set[int]:
    """A worker, its descendants, its process group and their descendants, of those that live."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    todo = [pid for pid, process in processes.items() if pid == worker or process.group == worker]
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return {pid for pid in found if not processes[pid].zombie}


def resident(processes: Mapping[int, Process], worker: int) -> int:
    """Bytes of memory that a worker and what it has started hold; shared pages count in each."""
    return sum(processes[pid].resident for pid in family(processes, worker))


def resident_alone(pid: int) -> int:
    """Bytes of memory that one process holds; 0 if it has ended."""
    process = _read(pid)
    return 0 if process is None else process.resident


def marked(mark: str, pids: Iterable[int]) -> set[int]:
    """Those that bear a mark in the environment they were started with."""
    wanted = f"{MARK_VAR}={mark}".encode()
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def end_family(worker: int, mark: str, born: float) -> int:
    """SIGKILL to a worker and all that is its, wherever it has gone. Returns how many had left the worker's process group.

    `born`: when it was started, in seconds since the machine was: what is older is not looked at for a mark.
    """
    strays = set()
    for _ in range(_ROUNDS):
        processes = table()
        own = family(processes, worker)
        others = [pid for pid, one in processes.items() if not one.zombie and one.born >= born - 1 and pid not in own]
        found = (own | marked(mark, others)) - {os.getpid()}
        if not found:
            break
        strays |= {pid for pid in found if processes[pid].group != worker}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return len(strays)


def offer_to_the_kernel() -> None:
    """Worker side: when memory runs out, let the kernel end this process and its children before the orchestrator or a trainer."""
    with contextlib.suppress(OSError):
        (_PROC / "self" / "oom_score_adj").write_text(str(_OOM_SCORE))
