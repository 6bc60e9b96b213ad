"""One life of one process of the run: how it is started, how it is known to have ended, and how nothing is left of it."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from prime_rl.config import RLConfig, child_env
from prime_rl.launcher.plan import Process
from prime_rl.launcher.procs import (
    MARK,
    ProcessId,
    Tree,
    by_parent,
    children_of,
    descendants,
    identify,
    is_alive,
    is_stopped,
    orphans,
    send,
)
from prime_rl.lifeline import Lifeline
from prime_rl.wait import WaitTimeout, wait

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 1 << 16
_DEATH_SECONDS = 30.0  # from SIGKILL to the end: a process inside the kernel (a disk, a driver) dies when it comes out
_DEATH_POLL_SECONDS = 0.05
_RANK = re.compile(r"\s*rank\s*: (\d+)")
_KILLED = re.compile(r"\s*exitcode\s*: -(\d+)")
_ERROR_LINE = re.compile(r"(\w+: )?error: ")  # `error: …`, or `trainer: error: …` of a bad configuration


class Child:
    """A running process and what it has started."""

    def __init__(self, spec: Process, popen: "subprocess.Popen[bytes]", log_start: int, began: float) -> None:
        self.spec = spec
        self.popen = popen
        self.log_start = log_start  # bytes that earlier lives had written
        self.began = began
        self._below: set[ProcessId] = set()  # seen below it so far: torchrun's ranks leave its group and its session

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def running(self) -> bool:
        """Whether its end has not been taken note of."""
        return self.popen.returncode is None

    def exited(self) -> bool:
        """Whether it has ended. It stays a zombie until `reap`, so that its group's number cannot be reused."""
        if self.popen.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def look_below(self, tree: Tree | None = None) -> list[ProcessId]:
        """The living processes below it. Call it now and then: what it has seen is found again when it is to die."""
        tree = by_parent() if tree is None else tree
        below = descendants(self.popen.pid, tree)
        alive = {process for children in tree.values() for process in children}
        self._below = (self._below & alive) | set(below)
        return below

    def halted(self, tree: Tree) -> list[ProcessId]:
        """Those of its processes that a signal has stopped. Of a process that watches over its own workers, itself alone."""
        below = self.look_below(tree)
        watched = below if self.spec.service or self.spec.drain_children else []
        itself = identify(self.popen.pid)
        return [process for process in (*([itself] if itself else []), *watched) if is_stopped(process)]

    def interrupt(self) -> None:
        """Ask it to finish: SIGINT to itself, or to torchrun's ranks, whose agent would kill them soon after."""
        itself = identify(self.popen.pid)
        ranks = children_of(self.popen.pid) if self.spec.drain_children else []
        for process in ranks or ([] if itself is None else [itself]):
            send(process, signal.SIGINT)

    def kill(self, known: Sequence[int]) -> list[ProcessId]:
        """SIGKILL to it, its group, everything it has started. `known`: pids of all children of this launcher.

        Returns:
            What was told to die, itself included; it may take a moment.
        """
        itself = identify(self.popen.pid)
        self.look_below()
        if self.popen.returncode is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        for process in (doomed := self._below | set(orphans(known, self.spec.name))):
            send(process, signal.SIGKILL)
        return [*doomed, *([] if itself is None else [itself])]

    def reap(self, known: Sequence[int]) -> int:
        """Make an end of it and of all that is left of it: environment workers, engine cores, ranks.

        Returns:
            Its exit status, negative for a signal. SIGKILL's for one that does not even die of it.
        """
        status: int | None = self.popen.returncode
        if status is None:
            self.kill(known)
            try:
                return self.popen.wait(timeout=_DEATH_SECONDS)
            except subprocess.TimeoutExpired:
                self.popen.returncode = status = -signal.SIGKILL
        return status


def spawn(spec: Process, options: Sequence[str], lifeline: Lifeline, environ: Mapping[str, str], began: float) -> Child:
    """Start it with `options` behind its arguments; what it prints is added to its log."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab") as log:
        log_start = log.tell()
        popen = subprocess.Popen(
            [*spec.argv, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Children read complete files: a setting meant for `rl` may name nothing in theirs.
            env={**child_env(environ, RLConfig), **spec.env, **lifeline.env, MARK: spec.name},
            pass_fds=lifeline.pass_fds,
            start_new_session=True,  # Ctrl-C reaches only us: we decide who is told, and how
        )
    return Child(spec, popen, log_start, began)


def await_death(doomed: Sequence[ProcessId]) -> list[ProcessId]:
    """Wait, within bounds, until killed processes are gone: they hold memory, GPUs and ports. Returns those that are not."""
    try:
        wait(
            lambda: not any(is_alive(process) for process in doomed),
            subject="end of killed processes", owner="the kernel", seconds=_DEATH_SECONDS, poll=_DEATH_POLL_SECONDS,
        )  # fmt: skip
    except WaitTimeout:
        return [process for process in doomed if is_alive(process)]
    return []


def ending(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return "ended too early" if status == 0 else f"failed with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def last_words(log: Path, start: int = 0) -> list[str]:
    """The last `error:` line at the end of a log, or which of its ranks was killed, else the last lines. `start`: bytes that earlier incarnations wrote."""
    lines = _tail(log, start)
    return error_lines(lines)[-1:] or killed_rank(lines) or lines[-LOG_TAIL_LINES:]


def interrupted(child: Child) -> bool:
    """Whether it ended because a rank was told to stop before it could hear that itself, while it was importing."""
    return any(line.endswith("SIGINT") for line in killed_rank(_tail(child.spec.log, child.log_start)))


def killed_rank(lines: Sequence[str]) -> list[str]:
    """The first rank that a signal killed, in a line, as torchrun's last report in a log has it; nothing where there is none."""
    cause = max((number for number, line in enumerate(lines) if line.startswith("Root Cause")), default=len(lines))
    rank = next(filter(None, map(_RANK.match, lines[cause:])), None)
    code = next(filter(None, map(_KILLED.match, lines[cause:])), None)
    if rank is None or code is None:
        return []
    return [f"rank {rank[1]} was killed by {signal.Signals(int(code[1])).name}"]


def user_error(log: Path, start: int = 0) -> str | None:
    """The last `error:` line at the end of a log: what the user has to correct."""
    return next(iter(error_lines(_tail(log, start))[-1:]), None)


def error_lines(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if _ERROR_LINE.match(line)]


def _tail(log: Path, start: int) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LOG_TAIL_BYTES))
        lines = (line.rstrip() for line in file.read().decode(errors="replace").splitlines())
        return [line for line in lines if line.strip(" =-")]  # no rulers
