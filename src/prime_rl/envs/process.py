"""One life of a worker process: start it in its own group, watch it, end it, quote its log."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import prime_rl
from prime_rl.envs.protocol import EpisodeResult, Heartbeat, Ready

TERM_SECONDS = 5.0
TAIL_LINES = 12


@dataclass
class Life:
    """A running worker process and what the pool knows about it. Times are `time.monotonic()`."""

    identity: str
    process: asyncio.subprocess.Process
    hello: bool = False
    ready: Ready | None = None
    tasks: list[str] | None = None
    finished: int = 0  # episodes
    pending: dict[int, asyncio.Future[EpisodeResult]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    beat: Heartbeat | None = None
    # Set when the life is over for a reason other than its exit: a failed load, a broken message.
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def silent(self, now: float, beat_timeout: float) -> bool:
        """Dead or stopped, by all that can be heard."""
        return now - self.heard > beat_timeout

    def unhealthy(self, now: float, start_timeout: float, beat_timeout: float, hang_timeout: float) -> str | None:
        """Why this process must be given up, or None."""
        if self.silent(now, beat_timeout):
            return f"sent no heartbeat for {now - self.heard:.0f} s"
        if self.tasks is None and now - self.started > start_timeout:
            return f"not ready after {start_timeout:.0f} s"
        if self.tasks is not None and self.beat is not None and self.beat.lag > hang_timeout:
            return f"blocked for {self.beat.lag:.0f} s at {self.beat.blocked_at}"
        return None


async def spawn(identity: str, address: str, python: str | None, env: dict[str, str], pass_fds: Any, log: Path) -> Life:
    """Start `python -m prime_rl.envs.worker`. Raises OSError when the interpreter cannot be executed."""
    with _open_log(log) as output:
        process = await asyncio.create_subprocess_exec(
            python or sys.executable,
            *("-m", "prime_rl.envs.worker", "--address", address, "--identity", identity),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    return Life(identity, process)


def _open_log(log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def note(log: Path, text: str) -> None:
    """Put a line of ours into a worker's log."""
    with _open_log(log) as output:
        output.write(f"prime-rl: {text}\n".encode())


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL, to the whole process group. Returns within `TERM_SECONDS` and a little."""
    _signal(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TERM_SECONDS):
            await process.wait()
    _signal(process.pid, signal.SIGKILL)  # also what the worker started and left behind in its group
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TERM_SECONDS):
            await process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented for printing below a message."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        text = file.read().decode(errors="replace")
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])


def expose_package(directory: Path) -> Path:
    """A directory that holds prime_rl alone: what another Python environment gets on its path instead of ours."""
    directory.mkdir(exist_ok=True)
    link = directory / "prime_rl"
    if not link.exists():
        link.symlink_to(Path(prime_rl.__file__).parent)
    return directory
