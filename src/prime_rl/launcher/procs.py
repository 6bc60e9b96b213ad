"""Process trees and their memory, read from /proc (Linux)."""

import ctypes
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prime_rl.monitor.process import ProcessId, boot_id, identify, is_alive, is_stopped, stat

__all__ = [
    "MARK",
    "ProcessId",
    "Tree",
    "adopting",
    "boot_id",
    "by_parent",
    "children_of",
    "descendants",
    "identify",
    "is_alive",
    "is_stopped",
    "memory_bytes",
    "orphans",
    "send",
]

Tree = Mapping[int, list[ProcessId]]
MARK = "PRIMERL_PROCESS"  # variable with the name of the process of the run, inherited by whatever it starts
_PR_SET_CHILD_SUBREAPER = 36


def children_of(pid: int) -> list[ProcessId]:
    """The living processes that `pid` itself started."""
    return by_parent().get(pid, [])


def descendants(pid: int, tree: Tree | None = None) -> list[ProcessId]:
    """Every living process below `pid`, in any process group or session. `tree`: from a look that was taken already."""
    children = by_parent() if tree is None else tree
    found: list[ProcessId] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


@contextmanager
def adopting() -> Iterator[None]:
    """Meanwhile processes below this one whose parent dies become its own children, instead of init's: none gets lost."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def orphans(known: Collection[int], mark: str | None = None) -> list[ProcessId]:
    """Children of this process that it did not start itself, and all below them; those that have ended are reaped.

    Args:
        known: Pids of the children that it did start.
        mark: Only those that bear this mark; None: all.
    """
    found: list[ProcessId] = []
    for pid in _adopted(known):
        process = identify(pid)
        if process is None:
            os.waitpid(pid, os.WNOHANG)
        elif mark is None or f"{MARK}={mark}" in _variables(pid):
            found += [process, *descendants(pid)]
    return found


def _adopted(known: Collection[int]) -> list[int]:
    me, found = str(os.getpid()), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in known and (fields := stat(int(entry))) is not None and fields[1] == me:
            found.append(int(entry))
    return found


def _variables(pid: int) -> list[str]:
    """The variables that a process was started with; empty where they cannot be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signal it unless it is gone."""
    if is_alive(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:  # it ended since the look
            return


def memory_bytes(pid: int) -> int:
    """Memory of the tree under `pid`, itself included: shared pages count once (PSS), where the kernel tells."""
    return sum(_pss(each) for each in (pid, *(process.pid for process in descendants(pid))))


def by_parent() -> Tree:
    """The living processes, by the pid of their parent: one look at /proc."""
    children: dict[int, list[ProcessId]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))) is not None and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(ProcessId(int(entry), int(fields[19])))
    return children


def _pss(pid: int) -> int:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
        except OSError:  # ended, or not ours to read
            continue
        for line in lines:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0
