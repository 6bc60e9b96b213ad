"""Who a process is, beyond its number: read from /proc (Linux). Standard library only."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A pid together with its start time (clock ticks since boot), so that a reused pid is not taken for the old one."""

    pid: int
    started: int


def boot_id() -> str:
    """Of the running kernel: another one means that every process of before is gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """The living process with this pid; None when there is none or only its zombie."""
    fields = stat(pid)
    return None if fields is None or fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def me() -> ProcessId:
    """This process."""
    found = identify(os.getpid())
    assert found is not None
    return found


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def is_stopped(process: ProcessId) -> bool:
    """Whether it lives but was halted (SIGSTOP, or a debugger)."""
    fields = stat(process.pid)
    return fields is not None and int(fields[19]) == process.started and fields[0] in "Tt"


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat after the command's name: state, parent, group, …, start time at 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
