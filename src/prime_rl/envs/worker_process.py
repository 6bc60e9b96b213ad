"""One worker process: start it in its own group with the variables it may have, log what it prints, judge its heartbeats, end it and all it started."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from prime_rl import processes
from prime_rl.envs.attribution import PAGE_BYTES
from prime_rl.envs.protocol import API_KEY_VAR, EpisodeResult, Heartbeat
from prime_rl.lifeline import Child, Lifeline
from prime_rl.redact import is_secret
from prime_rl.wait import WaitTimeout, wait_async

TERM_SECONDS = 5.0
LAG_SECONDS = 3.0  # a worker that lags so much gets no more episodes until it goes on
QUIET_SECONDS = 10.0  # nor does one that was silent for so long
LAST_WORDS_SECONDS = 5.0
HANG_GRACE = 10.0  # a worker interrupts what blocks it; this much later that has failed
TAIL_LINES = 12
_TAIL_BYTES = 16384
MOST_LOG_BYTES = 16 << 20
SENT_BY_OTHERS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


# ---- its log


def note(log: Path, text: str) -> None:
    """Append a line of ours to the log of an environment's workers."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} INFO    prime-rl: {text}\n")


def tail(log: Path) -> str:
    """Return the last lines of a log, indented for printing below a message."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])


def shorten(log: Path) -> None:
    """Keep the second half of a log that has grown beyond `MOST_LOG_BYTES`. Workers go on at its end: they have it open for appending."""
    with contextlib.suppress(OSError):  # the run can do without
        if log.stat().st_size > MOST_LOG_BYTES:
            with log.open("rb") as file:
                file.seek(-MOST_LOG_BYTES // 2, os.SEEK_END)
                kept = file.read(MOST_LOG_BYTES // 2)
            os.truncate(log, 0)
            with log.open("ab") as file:
                file.write(kept)


# ---- its variables


def passed_on(own: Mapping[str, str], promised: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of `own` that a worker gets, and the names of those withheld from it: secrets that are not `promised`."""
    withheld = sorted(name for name, value in own.items() if is_secret(name, value) and name not in promised)
    return {name: value for name, value in own.items() if name not in withheld}, withheld


def worker_variables(passed: Mapping[str, str], *, base_urls: Sequence[str], api_key: str | None) -> dict[str, str]:
    """Return `passed`, and what a worker needs from us: the engine's key, no proxy towards our own servers."""
    local = dict.fromkeys(["127.0.0.1", "localhost", *(urlsplit(url).hostname or "" for url in base_urls)])
    no_proxy = ",".join([passed.get("NO_PROXY", passed.get("no_proxy", "")), *local]).strip(",")
    return {
        **passed,
        **({API_KEY_VAR: api_key} if api_key else {}),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


# ---- the process


class WorkerState(Enum):
    """State of a worker process."""

    STARTING = "starting"  # until it has loaded its environment
    READY = "ready"  # takes episodes
    DRAINING = "draining"  # gets no more episodes, and ends with its last one
    GONE = "gone"  # ended, or about to be killed


class Ending(NamedTuple):
    """How a worker process ended, or why it is to be ended."""

    why: str
    hopeless: bool = False  # by itself, before it was ready: another one can be expected to end the same way
    offending_request: int = 0  # the request in whose code it died
    deaf: bool = False  # it is stopped or blocked, and handles no signal


@dataclass(eq=False)
class Worker:
    """A worker process and what the pool knows about it. Times are `time.monotonic()`."""

    identity: str
    env: str
    child: Child
    page: Path
    state: WorkerState = WorkerState.STARTING
    loaded: bool = False
    finished: int = 0  # episodes
    use: float = 0.0  # of a core, over its last heartbeats
    pending: dict[int, asyncio.Future[EpisodeResult]] = field(default_factory=dict)  # by the request's number
    started: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    heartbeat: Heartbeat | None = None
    ending: Ending | None = None

    @property
    def pid(self) -> int:
        return self.child.pid

    def die(self, why: str) -> None:
        """Have the pool end it."""
        self._end(Ending(why, hopeless=not self.loaded))

    def _end(self, ending: Ending) -> None:
        self.ending = self.ending or ending
        if self.state is not WorkerState.DRAINING:  # one that was to end is not restarted
            self.state = WorkerState.GONE

    @property
    def lag(self) -> float:
        """Seconds for which its event loop has been blocked."""
        return 0.0 if self.heartbeat is None else self.heartbeat.lag

    @property
    def stuck(self) -> bool:
        """Whether it is blocked by the code of one of its episodes, or stopped."""
        return self.lag > LAG_SECONDS or self.silent(QUIET_SECONDS)

    @property
    def serves(self) -> bool:
        """Whether it takes new episodes, or will as soon as some have ended."""
        return self.state is WorkerState.READY and not self.stuck

    def silent(self, seconds: float) -> bool:
        """Whether it has not been heard of for so long."""
        return time.monotonic() - self.heard > seconds

    def offending_request(self) -> int:
        """The request whose code it is in, or was in when it died; 0 for none."""
        request = int.from_bytes(self.page.read_bytes(), "little") if self.page.is_file() else 0
        return request if request in self.pending else 0

    def judge(self, start_timeout: float, heartbeat_timeout: float, hang_timeout: float) -> Ending | None:
        """How it ended, or why it must be ended; None while it is well."""
        if self.ending is not None:
            return self.ending
        status = self.child.status
        if status is not None:
            # The reason of one that could not load comes as a message, which may not have been read yet.
            if status or self.loaded or self.silent(LAST_WORDS_SECONDS):
                # The kernel sends SIGKILL for want of memory, whoever's code runs.
                offending = 0 if -status in SENT_BY_OTHERS else self.offending_request()
                self._end(Ending(processes.describe_exit(status), not self.loaded and status >= 0, offending))
        elif self.state is WorkerState.DRAINING and not self.pending:
            self.die("was not needed any more")
        elif why := self._unhealthy(start_timeout, heartbeat_timeout, hang_timeout):
            current = processes.read(self.pid)
            offending = 0 if current is not None and current.stopped else self.offending_request()
            never_ready = self.state is WorkerState.STARTING and not self.silent(heartbeat_timeout)
            self._end(Ending(why, never_ready, offending, deaf=True))
        return self.ending

    def _unhealthy(self, start_timeout: float, heartbeat_timeout: float, hang_timeout: float) -> str:
        """Until its first heartbeat (Python may start from a slow disk) `start_timeout` holds."""
        starting, now = self.state is WorkerState.STARTING, time.monotonic()
        if (self.heartbeat is not None or not starting) and self.silent(heartbeat_timeout):
            return f"sent no heartbeat for {now - self.heard:.0f} s"
        if starting and now - self.started > start_timeout:
            return f"not ready after {start_timeout:.0f} s"
        if not starting and self.heartbeat is not None and self.lag > hang_timeout + HANG_GRACE:
            return f"blocked for {self.lag:.0f} s at {self.heartbeat.blocked_at}"
        return ""


def spawn(
    identity: str, env: str, address: str, python: str | None, variables: Mapping[str, str], *,
    lifeline: Lifeline, log: Path, page: Path, hang_timeout: float,
) -> Worker:  # fmt: skip
    """Start `python -m prime_rl.envs.worker`. Raises OSError when the interpreter cannot be executed."""
    page.write_bytes(bytes(PAGE_BYTES))
    argv = [
        python or sys.executable,
        *("-m", "prime_rl.envs.worker", "--address", address, "--identity", identity),
        *("--page", str(page), "--hang-timeout", str(hang_timeout)),
    ]
    with log.open("ab") as output:
        return Worker(identity, env, Child(argv, variables, lifeline, output), page)


async def end(worker: Worker, deaf: bool = False) -> int:
    """Send SIGTERM to the process group, then SIGKILL to all that the worker has started. Returns how many of these had left its group.

    Takes `TERM_SECONDS` and a little at most. A process that is `deaf`, stopped or blocked, is not sent the SIGTERM.
    """
    if not deaf:
        worker.child.signal(signal.SIGTERM, group=True)
        with contextlib.suppress(WaitTimeout):
            await wait_async(
                lambda: worker.child.status is not None, subject="end", owner=worker.identity, seconds=TERM_SECONDS
            )
    killed = await asyncio.to_thread(worker.child.reap)
    worker.page.unlink(missing_ok=True)
    return sum(each.group != worker.pid for each in killed)
