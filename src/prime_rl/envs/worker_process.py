"""A worker's process: start it in its own group, watch it, end it and what it has started."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import prime_rl
from prime_rl.envs.attribution import PAGE_BYTES
from prime_rl.envs.output import Log, Output
from prime_rl.envs.protocol import EpisodeResult, Heartbeat, Ready
from prime_rl.lifeline import Child, Lifeline
from prime_rl.wait import WaitTimeout, wait_async

TERM_SECONDS = 5.0
DRAIN_SECONDS = 2.0
LAG_SECONDS = 3.0  # a worker that lags so much gets no more episodes until it is heard to go on
QUIET_SECONDS = 10.0  # nor does one that has not been heard of
HANG_GRACE = 10.0  # a worker interrupts what blocks it; this much later that is taken to have failed
_BY_OTHERS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass
class WorkerProcess:
    """A running worker process and what the pool knows about it. Times are `time.monotonic()`."""

    identity: str
    child: Child
    output: Output
    page: Path
    hello: bool = False
    ready: Ready | None = None
    tasks: list[str] | None = None
    leaving: bool = False  # gets no more episodes, and ends with its last one
    finished: int = 0  # episodes
    requests: int = 0  # it was ever sent
    resident: int = 0  # bytes of memory, with what it has started, when last measured
    use: float = 0.0  # of a core, over its last heartbeats
    pending: dict[int, asyncio.Future[EpisodeResult]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    heartbeat: Heartbeat | None = None
    # Set when the process is over for a reason other than its exit: a failed load, a broken message.
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def pid(self) -> int:
        return self.child.pid

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def enter(self) -> int:
        """Take a slot for an episode; returns the number of its request."""
        self.requests += 1
        self.pending[self.requests] = asyncio.get_running_loop().create_future()
        return self.requests

    def hear(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.use = (self.use + heartbeat.use) / 2

    @property
    def serves(self) -> bool:
        """Whether it takes new episodes, or will as soon as some have ended."""
        return self.tasks is not None and not self.leaving and not self.lost.done() and not self.stuck

    @property
    def stuck(self) -> bool:
        """Whether it is blocked by the code of one of its episodes, or stopped."""
        blocked = self.heartbeat is not None and self.heartbeat.lag > LAG_SECONDS
        return blocked or self.silent(time.monotonic(), QUIET_SECONDS)

    def offending_request(self) -> int:
        """The request whose code it is in, or was when it died; 0 for none."""
        request = int.from_bytes(self.page.read_bytes(), "little") if self.page.is_file() else 0
        return request if request in self.pending else 0

    def silent(self, now: float, seconds: float) -> bool:
        """Whether it is dead or stopped, judging by its heartbeats."""
        return now - self.heard > seconds

    def unhealthy(self, now: float, start_timeout: float, heartbeat_timeout: float, hang_timeout: float) -> str | None:
        """Why this process must be ended, or None. Until its first heartbeat (Python may start from a slow disk) `start_timeout` holds."""
        lag = 0.0 if self.heartbeat is None else self.heartbeat.lag
        if (self.tasks is not None or self.heartbeat is not None) and self.silent(now, heartbeat_timeout):
            return f"sent no heartbeat for {now - self.heard:.0f} s"
        if self.tasks is None and now - self.started > start_timeout:
            return f"not ready after {start_timeout:.0f} s"
        if self.tasks is not None and self.heartbeat is not None and lag > hang_timeout + HANG_GRACE:
            return f"blocked for {lag:.0f} s at {self.heartbeat.blocked_at}"
        return None


def spawn(
    identity: str,
    address: str,
    python: str | None,
    env: dict[str, str],
    *,
    lifeline: Lifeline,
    log: Log,
    page: Path,
    hang_timeout: float,
) -> WorkerProcess:
    """Start `python -m prime_rl.envs.worker`. Raises OSError when the interpreter cannot be executed."""
    page.write_bytes(bytes(PAGE_BYTES))
    output = Output(log)
    argv = [
        python or sys.executable,
        *("-m", "prime_rl.envs.worker", "--address", address, "--identity", identity),
        *("--page", str(page), "--hang-timeout", str(hang_timeout)),
    ]
    try:
        child = Child(argv, env, lifeline, output.writer)
    finally:
        output.begin()
    return WorkerProcess(identity, child, output, page)


async def end(process: WorkerProcess, deaf: bool = False) -> int:
    """Send SIGTERM to the whole process group, then SIGKILL to all that the worker has started. Returns how many of these had left its group.

    Takes `TERM_SECONDS`, `DRAIN_SECONDS` and a little at most; then all that it printed is in the log. A process that is `deaf`, stopped or
    blocked, is not sent the SIGTERM.
    """
    if not deaf:
        process.child.signal(signal.SIGTERM, group=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERM_SECONDS):
                await exited(process)
    killed = await asyncio.to_thread(process.child.reap)
    await drained(process)
    process.output.close()
    process.page.unlink(missing_ok=True)
    return sum(each.group != process.pid for each in killed)


async def drained(process: WorkerProcess) -> None:
    """Wait until what a dead worker printed is in the log; not for long, since a child of its may keep the pipe open."""
    with contextlib.suppress(WaitTimeout):
        await wait_async(
            lambda: process.output.ended, subject="last words", owner=process.identity, seconds=DRAIN_SECONDS, poll=0.05
        )


async def exited(process: WorkerProcess) -> int:
    """Wait until the process has ended. Returns its exit status."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)  # readable once it has ended
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()  # bounded: who waits for it watches its heartbeats
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    assert process.child.status is not None
    return process.child.status


def by_its_own_code(code: int) -> bool:
    """Whether a process that ended so was ended by what it ran, and by nobody outside (the kernel, for want of memory)."""
    return code >= 0 or -code not in _BY_OTHERS


_MISSING = re.compile(r"(?:ModuleNotFoundError: )?No module named '?([\w.]+)'?")


def remedy(log: str, python: str | None, env_id: str) -> str:
    """What to do about a worker that could not even import what it needs, by the end of its log; "" where that says nothing."""
    if not (missing := _MISSING.findall(log)):
        return ""
    module, interpreter = missing[-1].partition(".")[0], python or sys.executable
    if python is None:
        return f"{interpreter} has no module {module!r}: install it (`uv add`), or whatever package brings it"
    return (
        f"python = {interpreter!r} has no module {module!r}: install pyzmq, msgpack, what prime-rl needs for {env_id!r}, and the environment itself there "
        f"(`uv pip install --python {interpreter} …`), or use `requirements`, or leave `python` out"
    )


def expose_package(directory: Path) -> Path:
    """A directory that holds prime_rl alone: what another Python environment gets on its path instead of ours."""
    directory.mkdir(exist_ok=True)
    link = directory / "prime_rl"
    if not link.exists():
        link.symlink_to(Path(prime_rl.__file__).parent)
    return directory
