"""One life of a worker process: start it in its own group, watch it, end it and what it has started."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prime_rl
from prime_rl.envs import families
from prime_rl.envs.blame import Page
from prime_rl.envs.output import Log, Output
from prime_rl.envs.protocol import EpisodeResult, Heartbeat, Ready
from prime_rl.wait import WaitTimeout, wait_async

TERM_SECONDS = 5.0
DRAIN_SECONDS = 2.0
LAG_SECONDS = 3.0  # a worker that lags so much gets no more episodes until it is heard to go on
QUIET_SECONDS = 10.0  # nor does one that has not been heard of
HANG_GRACE = 10.0  # a worker interrupts what blocks it; this much later that is taken to have failed
_BY_OTHERS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass
class Life:
    """A running worker process and what the pool knows about it. Times are `time.monotonic()`."""

    identity: str
    process: asyncio.subprocess.Process
    output: Output
    page: Path
    hello: bool = False
    ready: Ready | None = None
    tasks: list[str] | None = None
    leaving: bool = False  # gets no more episodes, and ends with its last one
    finished: int = 0  # episodes
    requests: int = 0  # it was ever sent
    resident: int = 0  # bytes of memory, when last looked at
    pending: dict[int, asyncio.Future[EpisodeResult]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    born: float = 0.0  # seconds since the machine was
    heard: float = field(default_factory=time.monotonic)
    beat: Heartbeat | None = None
    # Set when the life is over for a reason other than its exit: a failed load, a broken message.
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def enter(self) -> int:
        """A seat for an episode: the number of its request."""
        self.requests += 1
        self.pending[self.requests] = asyncio.get_running_loop().create_future()
        return self.requests

    @property
    def serves(self) -> bool:
        """Whether it is there for new episodes, or will be as soon as some have ended."""
        return self.tasks is not None and not self.leaving and not self.lost.done() and not self.stuck

    @property
    def stuck(self) -> bool:
        """Blocked by the code of one of its episodes, or stopped."""
        blocked = self.beat is not None and self.beat.lag > LAG_SECONDS
        return blocked or self.silent(time.monotonic(), QUIET_SECONDS)

    def culprit(self) -> int:
        """The request whose code it is in, or was when it died; 0 for none."""
        request = Page.read(self.page)
        return request if request in self.pending else 0

    def silent(self, now: float, beat_timeout: float) -> bool:
        """Dead or stopped, by all that can be heard."""
        return now - self.heard > beat_timeout

    def unhealthy(self, now: float, start_timeout: float, beat_timeout: float, hang_timeout: float) -> str | None:
        """Why this process must be given up, or None. Until its first heartbeat (Python starts, from a slow disk perhaps) `start_timeout` holds."""
        if (self.tasks is not None or self.beat is not None) and self.silent(now, beat_timeout):
            return f"sent no heartbeat for {now - self.heard:.0f} s"
        if self.tasks is None and now - self.started > start_timeout:
            return f"not ready after {start_timeout:.0f} s"
        if self.tasks is not None and self.beat is not None and self.beat.lag > hang_timeout + HANG_GRACE:
            return f"blocked for {self.beat.lag:.0f} s at {self.beat.blocked_at}"
        return None


async def spawn(
    identity: str,
    address: str,
    python: str | None,
    env: dict[str, str],
    *,
    pass_fds: Any,
    log: Log,
    page: Path,
    hang_timeout: float,
) -> Life:
    """Start `python -m prime_rl.envs.worker`. Raises OSError when the interpreter cannot be executed."""
    Page.make(page)
    output, born = Output(log), time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        process = await asyncio.create_subprocess_exec(
            python or sys.executable,
            *("-m", "prime_rl.envs.worker", "--address", address, "--identity", identity),
            *("--page", str(page), "--hang-timeout", str(hang_timeout)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.writer,
            stderr=output.writer,
            env={**env, families.MARK_VAR: mark(page)},
            pass_fds=pass_fds,
            start_new_session=True,
        )
    finally:
        output.begin()
    return Life(identity, process, output, page, born=born)


def mark(page: Path) -> str:
    """What a life's processes bear in their environment: of all pools, at all times, this life alone has this page."""
    return str(page)


async def end(life: Life, deaf: bool = False) -> int:
    """SIGTERM to the whole process group, then SIGKILL to all that the worker has started. Returns how many of these had left its group.

    Within `TERM_SECONDS`, `DRAIN_SECONDS` and a little; then all that it printed is in the log. One that is `deaf`, stopped or blocked, would not
    hear the SIGTERM.
    """
    if not deaf:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(life.process.pid, signal.SIGTERM)
        await _within(TERM_SECONDS, life.process)
    strays = await asyncio.to_thread(families.end_family, life.process.pid, mark(life.page), life.born)
    await _within(TERM_SECONDS, life.process)
    await drained(life)
    life.output.close()
    life.page.unlink(missing_ok=True)
    return strays


async def drained(life: Life) -> None:
    """What a dead worker printed is in the log, or a child of its keeps the pipe open."""
    with contextlib.suppress(WaitTimeout):
        await wait_async(
            lambda: life.output.ended, subject="last words", owner=life.identity, seconds=DRAIN_SECONDS, poll=0.05
        )


async def _within(seconds: float, process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def by_its_own_code(code: int) -> bool:
    """Whether a process that ended so was ended by what it ran, and by nobody outside (the kernel, for want of memory)."""
    return code >= 0 or -code not in _BY_OTHERS


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    return False


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
