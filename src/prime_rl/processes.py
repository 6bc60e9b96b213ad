"""Processes, by /proc (Linux): whose they are, and that none is left over.

A child is ended with all that it has started. It kills its process group once its launcher has gone: the launcher is
named in the environment of every child, which watches it from then on, however deep it is below. One that is stopped by
a signal cannot; if it is the launcher's own child the kernel continues it then, else it dies as soon as it is
continued. Standard library only: environment workers import this from their own virtual environments.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from prime_rl.wait import WaitTimeout, wait

DEATH_SECONDS = 30.0  # from SIGKILL to the end
ECHO_SECONDS = 2.0  # within which SIGINT and SIGTERM are one request to stop: SLURM and wrappers send to each process
ENV = "PRIMERL_LAUNCHER"  # "pid:start time" of the process to watch
_MARK = "PRIMERL_TREE_"
_LOOK_SECONDS = 0.5
_KILL_ROUNDS = 3  # a process may be born between the look and the kill
_PR_SET_PDEATHSIG = 1  # of prctl: the signal to be sent by the kernel once the thread that started this process is gone
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
    with suppress(OSError):
        return _look_up(pid)
    return None


def _look_up(pid: int) -> ProcessInfo | None:
    """As `read`. Raises OSError where there is none, or no file descriptor is free to look."""
    text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    # The name, in brackets, may hold spaces. After it: state, parent, group, …
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    ident = ProcessId(pid, int(fields[19]))
    return ProcessInfo(ident, int(fields[1]), int(fields[2]), fields[0] in "Tt")


def table() -> Table:
    pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    return {pid: process for pid in pids if (process := read(pid)) is not None}


def this_host() -> str:
    """Name this host and its boot: pids mean something to processes of the same alone."""
    return f"{socket.gethostname()}/{(_PROC / 'sys/kernel/random/boot_id').read_text()[:8]}"


def identify(pid: int) -> ProcessId | None:
    process = read(pid)
    return None if process is None else process.id


def me() -> ProcessId:
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
    return min(longest, first * 2.0 ** min(failures - 1, 99)) if failures else 0.0  # a float holds no 2 ** 1024


def variable() -> dict[str, str]:
    """Return the variable by which children watch this process."""
    itself = me()
    return {ENV: f"{itself.pid}:{itself.started}"}


class Child:
    """A process with all that it starts, in a session of its own, watching this process. The only way to spawn one. It
    and all below it have a variable of its own in their environment, by which `reap` finds daemons, too."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], output: int | IO[bytes]) -> None:
        """Start it; `output` takes its standard output and error. Raises OSError: the program cannot be executed."""
        mark = f"{_MARK}{os.getpid()}_{time.monotonic_ns()}"
        self._mark = f"{mark}=1"
        self._popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, **variable(), mark: "1"},
            start_new_session=True,  # Ctrl-C reaches only us: we decide who is signalled, and how
        )
        self.pid = self._popen.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. It stays a zombie, with its pid, until `reap`."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def signal(self, number: signal.Signals, group: bool = False) -> None:
        """Signal it, or the whole of its process group, unless it has ended."""
        if self._popen.returncode is None:  # perhaps as a zombie, which ignores it
            with suppress(ProcessLookupError):  # another thread reaps it
                (os.killpg if group else os.kill)(self.pid, number)

    def reap(self) -> None:
        """SIGKILL it and all that it has started, and wait until they are gone."""
        if self._popen.returncode is not None:
            return
        kill_family(self.pid, self._mark)
        self.signal(signal.SIGKILL, group=True)  # where no file descriptor was free to look
        try:
            self._popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:  # it hangs in the kernel
            self._popen.returncode = -signal.SIGKILL


def watch() -> None:
    """Child side, first thing in every `main()`: SIGKILL the own process group once the launcher is gone. Does nothing
    without a launcher."""
    if value := os.environ.get(ENV):
        pid, _, started = value.partition(":")
        if os.getppid() == int(pid):
            # Not SIGKILL: it has to live on for a moment, to end its group.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))
        _end_with(ProcessId(int(pid), int(started)), lambda: os.killpg(os.getpgrp(), signal.SIGKILL))


def follow(pid: int) -> bool:
    """SIGKILL this process once process `pid`, one of its ancestors, is gone: an engine must not outlive its server.
    Return whether it is followed: not on another host, where the number means something else."""
    processes = table()
    if pid not in processes or os.getpid() not in below({pid}, processes) - {pid}:
        return False
    _end_with(processes[pid].id, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return True


def _end_with(watched: ProcessId, kill: Callable[[], None]) -> None:
    def is_gone() -> bool:
        try:
            process = _look_up(watched.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # no file descriptor is free
            return False
        return process is None or process.id != watched

    def await_end() -> None:
        while not is_gone():
            time.sleep(_LOOK_SECONDS)  # bounded: a daemon thread, it ends with the process
        print(f"error: the process that started this one (pid {watched.pid}) is gone", file=sys.stderr, flush=True)
        kill()

    threading.Thread(target=await_end, name="lifeline", daemon=True).start()
