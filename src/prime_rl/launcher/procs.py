"""Process trees and their memory, read from /proc (Linux)."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A pid together with its start time (clock ticks since boot), so that a reused pid is not taken for the old one."""

    pid: int
    started: int


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """The living process with this pid; None when there is none or only its zombie."""
    stat = _stat(pid)
    return None if stat is None or stat[0] == "Z" else ProcessId(pid, int(stat[19]))


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


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
        if entry.isdigit() and (stat := _stat(int(entry))) is not None and stat[0] != "Z":
            children.setdefault(int(stat[1]), []).append(ProcessId(int(entry), int(stat[19])))
    return children


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat after the command's name: state, parent, group, …, start time at 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


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
