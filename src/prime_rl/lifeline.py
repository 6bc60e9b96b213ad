"""No orphans: a child is ended with its descendants, and kills its process group once its launcher is gone.

The launcher names itself in the environment of every child, which watches it from then on, however deep it is below; one
that is stopped by a signal dies as soon as it is continued. Standard library only: environment workers import this from
their own virtual environments.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from prime_rl import processes
from prime_rl.processes import ProcessId

ENV = "PRIMERL_LAUNCHER"  # "pid:start time" of the process to watch
_MARK = "PRIMERL_TREE_"
_LOOK_SECONDS = 0.5


def variable() -> dict[str, str]:
    """Return the variable by which children watch this process."""
    itself = processes.me()
    return {ENV: f"{itself.pid}:{itself.started}"}


class Child:
    """A process with all that it starts: in a session of its own, watching this process. What is spawned is spawned here.

    It and all below it have a variable of its own in their environment, by which `reap` finds daemons, too.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], output: int | IO[bytes]) -> None:
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
            env={**env, **variable(), mark: "1"},
            start_new_session=True,  # Ctrl-C reaches only us: we decide who is signalled, and how
        )
        self.pid = self._popen.pid

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

    def reap(self) -> None:
        """SIGKILL it and all that it has started, and wait until they are gone."""
        if not self.running:
            return
        processes.kill_family(self.pid, self._mark)
        try:
            self._popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:  # it hangs in the kernel
            self._popen.returncode = -signal.SIGKILL


def watch() -> None:
    """Child side, first thing in every `main()`: SIGKILL the own process group once the launcher is gone.

    Does nothing without a launcher.
    """
    if value := os.environ.get(ENV):
        pid, _, started = value.partition(":")
        _end_with(ProcessId(int(pid), int(started)), lambda: os.killpg(os.getpgrp(), signal.SIGKILL))


def follow(pid: int) -> bool:
    """SIGKILL this process once process `pid`, one of its ancestors, is gone: an engine must not outlive its server.

    Returns:
        Whether `pid` is followed: not on another host, where the number means something else.
    """
    below = processes.below({pid}, processes.table()) - {pid}
    if (ancestor := processes.identify(pid)) is None or os.getpid() not in below:
        return False
    _end_with(ancestor, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return True


def _end_with(watched: ProcessId, kill: Callable[[], None]) -> None:
    """Call `kill` once `watched` is gone."""

    def await_end() -> None:
        while processes.is_alive(watched):
            time.sleep(_LOOK_SECONDS)  # bounded: a daemon thread, it ends with the process
        print(f"error: the process that started this one (pid {watched.pid}) is gone", file=sys.stderr, flush=True)
        kill()

    threading.Thread(target=await_end, name="lifeline", daemon=True).start()
