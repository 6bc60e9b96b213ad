"""No orphans: a child is ended with its descendants, and kills its process group once its launcher is gone.

The launcher holds the write end of a pipe and passes the read end to every child. The kernel closes the write end
whatever way the launcher dies, and the children see end of file; those that are stopped by a signal it wakes first.
Standard library only: environment workers import this from their own virtual environments.
"""

import ctypes
import os
import runpy
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Self

from prime_rl import processes

ENV = "PRIMERL_LIFELINE_FD"
_MARK = "PRIMERL_TREE_"
_PR_SET_PDEATHSIG = 1


class Lifeline:
    """Parent side. `Popen(…, pass_fds=line.pass_fds, env={**env, **line.env}, start_new_session=True)`.

    The pipe lives as long as this object: keep a reference for as long as the children shall live.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()  # neither is inherited unless passed
        self.pass_fds: tuple[int, ...] = (self._read_fd,)
        # The inode tells the pipe from an unrelated file that got the same number in a grandchild.
        self.env: dict[str, str] = {ENV: f"{self._read_fd}:{os.fstat(self._read_fd).st_ino}"}

    def close(self) -> None:
        """Cut the line: every process that still watches it is killed together with its group."""
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Child:
    """A process with all that it starts: in a session of its own, under the lifeline. What is spawned is spawned here.

    It and all below it have a variable of its own in their environment, by which `reap` finds daemons, too.

    Attributes:
        survivors: What SIGKILL did not end in time; known once it is reaped.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], lifeline: Lifeline, output: int | IO[bytes]
    ) -> None:
        """Start it; `output` takes its standard output and error.

        Raises:
            OSError: the program cannot be executed.
        """
        mark = f"{_MARK}{os.getpid()}_{time.monotonic_ns()}"
        self._mark = f"{mark}=1"
        self._popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, **lifeline.env, mark: "1"},
            pass_fds=lifeline.pass_fds,
            start_new_session=True,  # Ctrl-C reaches only us: we decide who is signalled, and how
        )
        self.pid = self._popen.pid
        self.survivors: list[processes.ProcessId] = []

    @property
    def running(self) -> bool:
        """Whether it has not been reaped."""
        return self._popen.returncode is None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives. It stays a zombie, with its pid, until `reap`."""
        if not self.running:
            return self._popen.returncode
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def signal(self, number: signal.Signals, group: bool = False) -> None:
        """Signal it, or the whole of its process group, unless it has ended."""
        if self.running:  # perhaps as a zombie, which ignores it
            (os.killpg if group else os.kill)(self.pid, number)

    def reap(self) -> set[processes.ProcessInfo]:
        """SIGKILL it and all that it has started, wait until it is gone, and return what was killed."""
        if not self.running:
            return set()
        killed = processes.kill_family(self.pid, self._mark)
        try:
            self._popen.wait(timeout=processes.DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.returncode = -signal.SIGKILL
        self.survivors = processes.await_death(killed)
        return killed


def watch() -> None:
    """Child side, first thing in every `main()`: SIGKILL the own process group once the launcher is gone.

    Does nothing without a launcher. A grandchild that inherited the variable but not the pipe (torchrun's ranks,
    environment workers) follows its parent instead, which is itself watched.
    """
    value = os.environ.get(ENV)
    if not value:
        return
    fd_text, _, inode_text = value.partition(":")
    has_pipe = fd_text.isdigit() and inode_text.isdigit() and _is_pipe(int(fd_text), int(inode_text))
    watched = int(fd_text) if has_pipe else os.pidfd_open(os.getppid())
    _end_with(watched, lambda: os.killpg(os.getpgrp(), signal.SIGKILL))


def follow(pid: int) -> bool:
    """SIGKILL this process once process `pid`, one of its ancestors, is gone: an engine must not outlive its server.

    Returns:
        Whether `pid` is followed: not on another host, where the number means something else.
    """
    if pid not in ancestors():
        return False
    _end_with(os.pidfd_open(pid), lambda: os.kill(os.getpid(), signal.SIGKILL))
    return True


def ancestors() -> list[int]:
    """Pids from this process's parent up to the first."""
    pids = [os.getppid()]
    while pids[-1] > 1 and (process := processes.read(pids[-1])) is not None:
        pids.append(process.parent)
    return pids


def _end_with(watched: int, kill: Callable[[], None]) -> None:
    """Kill once `watched` is at its end: a pidfd whose process is gone, or a pipe that nobody holds open any more."""

    def await_end() -> None:
        end = select.poll()
        end.register(watched, select.POLLIN)
        end.poll()  # bounded: a daemon thread, it ends with the process
        kill()

    _wake_without_parent()
    threading.Thread(target=await_end, name="lifeline", daemon=True).start()


def _wake_without_parent() -> None:
    """Have the kernel wake this process when its parent dies: one that is stopped by a signal then could not watch.

    Not kill it: then nobody would kill the rest of its group. (For the kernel the parent is the thread that started it; when that ends
    early, waking does no harm.)
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def _is_pipe(fd: int, inode: int) -> bool:
    try:
        info = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISFIFO(info.st_mode) and info.st_ino == inode


def main() -> None:
    """`python -m prime_rl.lifeline -m module args…`: run a module that is not ours (torchrun) under the watch."""
    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        sys.exit("usage: python -m prime_rl.lifeline -m module [args…]")
    watch()
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
