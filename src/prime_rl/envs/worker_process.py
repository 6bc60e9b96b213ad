"""One worker process: the variables it may have, how it is doing, and its end."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl import processes
from prime_rl.envs.attribution import Page
from prime_rl.envs.protocol import API_KEY_VAR, EpisodeResult, Run
from prime_rl.lifeline import Child
from prime_rl.redact import is_secret
from prime_rl.wait import WaitTimeout, wait_async

TERM_SECONDS = 5.0
LAG_SECONDS = 3.0  # a worker whose event loop is blocked for so long gets no more episodes until it goes on
_TAIL_LINES, _TAIL_BYTES = 12, 16384


def passed_on(own: Mapping[str, str], promised: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of `own` that a worker gets, and the names of those withheld from it: secrets that are not `promised`."""
    withheld = sorted(name for name, value in own.items() if is_secret(name, value) and name not in promised)
    return {name: value for name, value in own.items() if name not in withheld}, withheld


def worker_variables(passed: Mapping[str, str], *, base_urls: Sequence[str], api_key: str | None) -> dict[str, str]:
    """Return `passed`, and what a worker needs from us: the engine's key, no proxy towards our own servers."""
    local = dict.fromkeys(["127.0.0.1", "localhost", *(urlsplit(url).hostname or "" for url in base_urls)])
    no_proxy = ",".join([passed.get("NO_PROXY", passed.get("no_proxy", "")), *local]).strip(",")
    own = {"NO_PROXY": no_proxy, "no_proxy": no_proxy, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**passed, **({API_KEY_VAR: api_key} if api_key else {}), **own}


def tail(log: Path) -> str:
    """Return the last lines of a log, indented for printing below a message."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])


@dataclass(eq=False)
class Request:
    """An episode that waits for a slot, or has one."""

    order: Run
    slot: "asyncio.Future[Worker]"
    result: asyncio.Future[EpisodeResult]


class WorkerState(Enum):
    """State of a worker process."""

    STARTING = "starting"  # until it has loaded its environment
    READY = "ready"  # takes episodes
    DRAINING = "draining"  # gets no more episodes, and ends with its last one


@dataclass(eq=False)
class Worker:
    """A worker process and what the pool knows about it. Times are `time.monotonic()`."""

    identity: str
    env: str
    page: Page
    child: Child
    state: WorkerState = WorkerState.STARTING
    pending: dict[int, Request] = field(default_factory=dict)  # by their numbers
    started: float = field(default_factory=time.monotonic)
    use: float = 0.0  # of a core, of late
    measured: tuple[float, float] = (0.0, 0.0)  # the page's `ticked` and `busy` of then
    ending: str = ""  # how it ended, or why it is to be ended
    offending_request: int = 0  # in whose code it died or hangs

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def lag(self) -> float:
        """Seconds for which it has been blocked by the code of one of its episodes, or stopped."""
        return time.monotonic() - self.page.ticked if self.state is not WorkerState.STARTING else 0.0

    @property
    def free(self) -> bool:
        """Whether it may get another episode, as far as its slots go."""
        return self.state is WorkerState.READY and not self.ending and self.lag < LAG_SECONDS

    def measure(self) -> None:
        """Note how much of a core it used since the last time; one that does not answer uses all of it."""
        (then, before), (now, busy) = self.measured, (self.page.ticked, self.page.busy)
        if now > then:
            self.use, self.measured = (self.use + min(1.0, (busy - before) / (now - then))) / 2, (now, busy)
        elif self.lag > 1.0:
            self.use = 1.0

    def die(self, why: str, by_its_code: bool = False) -> None:
        """Have the pool end it."""
        if not self.ending:
            self.ending = why
            self.offending_request = self.page.request if by_its_code else 0

    def judge(self, start_timeout: float, hang_timeout: float) -> str:
        """How it ended, or why it must be ended; empty while it is well."""
        status = self.child.status
        if status is not None:
            # Others send these; the kernel sends SIGKILL for want of memory, whoever's code runs.
            others = -status in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            self.die(processes.describe_exit(status), not others)
        elif self.state is WorkerState.DRAINING and not self.pending:
            self.die("was not needed any more")
        elif self.state is WorkerState.STARTING and time.monotonic() - self.started > start_timeout:
            self.die(f"not ready after {start_timeout:.0f} s")
        elif self.lag > hang_timeout:
            self.die(f"was blocked for {self.lag:.0f} s: its log says where", by_its_code=True)
        return self.ending

    async def end(self) -> None:
        """Send SIGTERM to the process group, then SIGKILL to all that the worker has started. Takes little more than `TERM_SECONDS`.

        One that is blocked gets SIGABRT, on which it writes to its log where it is.
        """
        blocked = self.lag > LAG_SECONDS
        self.child.signal(signal.SIGABRT if blocked else signal.SIGTERM, group=not blocked)
        with contextlib.suppress(WaitTimeout):
            await wait_async(
                lambda: self.child.status is not None, subject="end", owner=self.identity, seconds=TERM_SECONDS
            )
        await asyncio.to_thread(self.child.reap)
