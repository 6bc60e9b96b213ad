"""Identify processes, walk process trees and end whatever was spawned, by /proc (Linux).

Standard library only: environment workers import this from their own virtual environments.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prime_rl.wait import WaitTimeout, wait

DEATH_SECONDS = 30.0  # from SIGKILL to the end
_KILL_ROUNDS = 3  # a process may be born between the look and the kill
_OOM_SCORE = 500  # of 1000
_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessId:
    """A pid with its start time (clock ticks since boot), which tells a reused pid from the old one."""

    pid: int
    started: int


class ProcessInfo(NamedTuple):
    """A line of the process table. `stopped`: by a signal or a debugger."""

    id: ProcessId
    parent: int
    group: int
    stopped: bool


Table = Mapping[int, ProcessInfo]


def read(pid: int) -> ProcessInfo | None:
    """Return the living process with this pid; None when there is none or only its zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold spaces. After it: state, parent, group, …
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    ident = ProcessId(pid, int(fields[19]))
    return ProcessInfo(ident, int(fields[1]), int(fields[2]), fields[0] in "Tt")


def table() -> Table:
    """Return all living processes by pid."""
    pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    return {pid: process for pid in pids if (process := read(pid)) is not None}


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the living process with this pid."""
    process = read(pid)
    return None if process is None else process.id


def me() -> ProcessId:
    """Identify this process."""
    process = identify(os.getpid())
    assert process is not None
    return process


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def below(pids: set[int], processes: Table) -> set[int]:
    """Return these and all below them, in any process group or session."""
    own = pids
    while more := {pid for pid, process in processes.items() if process.parent in own} - own:
        own = own | more
    return own


def kill_family(pid: int, mark: str) -> set[ProcessId]:
    """SIGKILL a process and all that belongs to it; wait, within bounds, until memory, GPUs and ports are free.

    Others belong to it by descent, by process group, or by the variable `mark` ("NAME=value") in their environment: a
    daemon keeps that after its parents are gone. Return what was killed.
    """
    killed: set[ProcessId] = set()
    for _ in range(_KILL_ROUNDS):
        processes = table()
        roots = {each for each, process in processes.items() if pid in (each, process.group) or _is_marked(each, mark)}
        if not (own := below(roots, processes) - {os.getpid()}):
            break
        killed |= {processes[each].id for each in own}
        for each in own:
            send(processes[each].id, signal.SIGKILL)
    with suppress(WaitTimeout):  # one inside the kernel (a disk, a driver) dies when it comes out
        wait(
            lambda: not any(map(is_alive, killed)),
            subject="end of killed processes", owner="the kernel", seconds=DEATH_SECONDS, poll=0.05,
        )  # fmt: skip
    return killed


def _is_marked(pid: int, mark: str) -> bool:
    with suppress(OSError):  # ended meanwhile, or another user's
        return mark.encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signal it unless it is gone."""
    if is_alive(process):
        with suppress(ProcessLookupError, PermissionError):  # it ended since the look
            os.kill(process.pid, number)


def describe_exit(status: int) -> str:
    """Say how a process ended that should not have, in words that follow its name. `status`: negative for a signal."""
    if status >= 0:
        return f"failed with exit status {status}" if status else "ended too early"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """Return the wait before a restart: `first` after one failure, doubled with each further one; 0 after none."""
    return min(longest, first * 2.0 ** (failures - 1)) if failures else 0.0


def offer_to_the_kernel() -> None:
    """When memory runs out, let the kernel end this process and its children before others."""
    with suppress(OSError):
        (_PROC / "self" / "oom_score_adj").write_text(str(_OOM_SCORE))
