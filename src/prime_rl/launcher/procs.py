"""Process trees and their memory, read from /proc (Linux)."""

import os
import signal
from pathlib import Path

from prime_rl.monitor.process import ProcessId, boot_id, identify, is_alive, is_stopped, stat

__all__ = [
    "ProcessId",
    "boot_id",
    "children_of",
    "descendants",
    "identify",
    "is_alive",
    "is_stopped",
    "memory_bytes",
    "send",
]


def children_of(pid: int) -> list[ProcessId]:
    """The living processes that `pid` itself started."""
    return _by_parent().get(pid, [])


def descendants(pid: int) -> list[ProcessId]:
    """Every living process below `pid`, in any process group or session."""
    children = _by_parent()
    found: list[ProcessId] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


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


def _by_parent() -> dict[int, list[ProcessId]]:
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
