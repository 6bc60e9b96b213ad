"""The workers of one environment: kept alive, as many as its load needs, replaced when they have grown old; and the episodes that wait for one.

`staffing` decides how many and when; `process` is one life of one of them. An environment's faults are outcomes of its episodes: a worker that
dies fails those that it had and is started again with backoff. Only one that keeps dying while nothing gets done ends the pool.
"""

import asyncio
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from loguru import logger

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import families, process
from prime_rl.envs.output import Log
from prime_rl.envs.process import Life
from prime_rl.envs.protocol import EndlessTasks, Outcome, Ready, TaskInfo
from prime_rl.envs.staffing import Staff, to_start, why_replace
from prime_rl.errors import UserError

WATCH_SECONDS = 0.5
MEMORY_SECONDS = 2.0
BEAT_TIMEOUT = 30.0
BACKOFF_SECONDS = (0.0, 1.0, 2.0, 5.0, 15.0)
MAX_DEATHS = 5  # in a row, of one worker, without one finished episode of its environment
LAST_WORDS_SECONDS = 5.0


class WorkerGone(Exception):
    """The worker that ran the episode is dead or was given up; `outcome` tells whether the episode was at fault."""

    def __init__(self, message: str, outcome: Outcome = Outcome.WORKER_DIED) -> None:
        super().__init__(message)
        self.outcome = outcome


class Employer(Protocol):
    """What a crew needs of the pool."""

    start_timeout: float
    hang_timeout: float
    restarts: int

    async def hire(self, crew: "Crew", identity: str) -> Life:
        """A new worker process. Raises OSError."""

    def forget(self, life: Life) -> None:
        """It is over."""

    def end(self, life: Life, deaf: bool) -> "asyncio.Task[None]":
        """See `process.end`. The task is not cancelled when the pool is closed, but awaited."""

    def fail(self, error: UserError) -> None:
        """The pool cannot go on."""

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that the pool cannot do without."""

    @property
    def failure(self) -> UserError | None:
        """Why the pool cannot go on."""


@dataclass
class Seat:
    """One of an environment's workers through all its lives."""

    number: int
    life: Life | None = None
    extra: bool = False  # it came later, and is given up should it not become ready
    replaces: "Seat | None" = None  # the seat that ends once this one is ready
    leaving: bool = False

    @property
    def ready(self) -> bool:
        return self.life is not None and self.life.tasks is not None


@dataclass(frozen=True)
class Ending:
    """How a life ended."""

    why: str
    hopeless: bool = False  # by itself, before it was ready: another one can be expected to end the same way
    culprit: int = 0  # the request whose code it died of
    done: bool = False  # as was wanted
    unborn: bool = False  # there was no process
    deaf: bool = False  # it is stopped or blocked, and hears no signal
    useful: bool = False  # it had finished an episode


class Crew:
    """An environment's workers and the episodes that wait for one."""

    def __init__(self, config: EnvConfig, log: Log, pool: Employer) -> None:
        self.config = config
        self.log = log
        self.tasks: list[TaskInfo] | EndlessTasks = []
        self.info: Ready | None = None
        self.withheld: list[str] = []  # names of variables that its workers do not get
        self.seats: list[Seat] = []
        self.recycled = 0  # workers
        self._pool = pool
        self._most = config.max_workers or config.workers
        self._numbers = itertools.count()
        self._waiting: OrderedDict[asyncio.Future[tuple[Life, int]], None] = OrderedDict()
        self._finished = 0  # episodes, of all workers
        self._left = 0  # seats that were taken, and are not any more
        self._setbacks = 0  # extra workers in a row that did not become ready
        self._no_extra_before = 0.0

    def start(self) -> None:
        """Start the workers that there are at least."""
        for _ in range(self.config.workers):
            self._open(Seat(next(self._numbers)))
        if self.config.recycle_mib is not None:
            self._pool.start_task(self._keep_measuring())

    @property
    def lives(self) -> list[Life]:
        """The workers that are up."""
        return [seat.life for seat in self.seats if seat.life is not None]

    @property
    def ready(self) -> bool:
        """Whether all of them are."""
        return all(seat.ready for seat in self.seats)

    # ---- episodes

    async def place(self, seconds: float) -> tuple[Life, int] | None:
        """A worker with room, and the request's number there; None when for so many seconds there was none, and nobody left one.

        Those who wait are served in the order in which they came. Raises UserError once the pool has failed.
        """
        if self._pool.failure is not None:
            raise self._pool.failure
        if not self._waiting and (life := self._roomy()) is not None:
            return life, life.enter()
        waiter: asyncio.Future[tuple[Life, int]] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        self._grow()
        placed = False
        try:
            left = -1
            while (
                not waiter.done() and left != self._left
            ):  # bounded: by the episodes that came before, each of which leaves in its time
                left = self._left
                await asyncio.wait({waiter}, timeout=seconds)
            if not waiter.done():
                return None
            placed = True
            return waiter.result()
        finally:
            self._waiting.pop(waiter, None)
            if not placed and waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave(*waiter.result())  # it was found in the very moment in which the wait ended

    def leave(self, life: Life, request: int) -> None:
        """The episode of a request has ended, one way or another."""
        if (future := life.pending.pop(request, None)) is not None:
            future.cancel()
        self._left += 1
        self.fill()

    def finish(self, life: Life) -> None:
        """One of a worker's episodes has a result."""
        life.finished += 1
        self._finished += 1

    def fill(self) -> None:
        """Give waiting episodes the room that there is."""
        while self._waiting and (life := self._roomy()) is not None:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_result((life, life.enter()))
        self._grow()

    def fail(self, error: UserError) -> None:
        """The pool has failed: nobody waits any longer."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()

    def _roomy(self) -> Life | None:
        """The worker with the fewest episodes, of those with room for one more."""
        lives = [life for life in self.lives if life.serves and len(life.pending) < self.config.max_concurrent]
        return min(lives, key=lambda life: len(life.pending), default=None)

    @property
    def someone_serves(self) -> bool:
        """Whether a worker takes episodes, be it with room or full."""
        return any(life.serves for life in self.lives)

    # ---- how many

    def _grow(self) -> None:
        if not self._waiting or self.info is None or time.monotonic() < self._no_extra_before:
            return
        staff = [seat for seat in self.seats if not seat.leaving and seat.replaces is None]
        starting = sum(not seat.ready for seat in staff)
        now = Staff(len(staff), starting, len(self._waiting))
        for _ in range(to_start(now, self.config.max_concurrent, self._most, os.cpu_count() or 1)):
            seat = Seat(next(self._numbers), extra=True)
            logger.info("environment {}: all workers are full, starting worker {}", self.config.name, seat.number)
            self._open(seat)

    def _open(self, seat: Seat) -> None:
        self.seats.append(seat)
        self._pool.start_task(self._keep(seat))

    def _replace(self, seat: Seat, life: Life) -> None:
        """Start a successor where one is due; they start one at a time."""
        config = self.config
        why = why_replace(life.finished, life.resident, config.recycle_episodes, config.recycle_mib)
        busy = seat.leaving or any(other.replaces is not None for other in self.seats)
        if why is None or not life.finished or busy or time.monotonic() < self._no_extra_before:
            return
        successor = Seat(next(self._numbers), extra=True, replaces=seat)
        logger.info("worker {} {}: worker {} is to replace it", life.identity, why, successor.number)
        self._open(successor)

    def welcome(self, life: Life) -> None:
        """A worker has become ready."""
        seat = next(seat for seat in self.seats if seat.life is life)
        self._setbacks, seat.extra = 0, False
        if (old := seat.replaces) is not None:
            seat.replaces, old.leaving = None, True
            self.recycled += 1
            if old.life is not None:
                old.life.leaving = True
                logger.info(
                    "worker {} is replaced by {} and ends with its last {} episodes (replaced so far: {})",
                    old.life.identity, life.identity, len(old.life.pending), self.recycled,
                )  # fmt: skip
        self.fill()

    # ---- supervision

    async def _keep(self, seat: Seat) -> None:
        """Keep a seat filled: start a worker, watch it, fail its episodes when it is gone, start again."""
        deaths, useless, seen = 0, 0, 0
        try:
            for generation in itertools.count():  # bounded: `close` cancels it; MAX_DEATHS in a row end it
                identity = f"{self.config.name}/{seat.number}/{generation}"
                ending = await self._one_life(seat, identity)
                if self._pool.failure is not None or ending.done or self._given_up(seat, identity, ending):
                    return
                useless = 1 if ending.useful else useless + 1
                deaths, seen = 1 if self._finished > seen else deaths + 1, self._finished
                if (ending.hopeless and self.info is None) or deaths >= MAX_DEATHS:
                    self._pool.fail(UserError(self._obituary(ending, deaths)))
                    return
                logger.warning("worker {}: {}; starting it again (log: {})", identity, ending.why, self.log.path)
                self._pool.restarts += 1
                await asyncio.sleep(BACKOFF_SECONDS[min(useless, len(BACKOFF_SECONDS)) - 1])
        finally:
            self.seats.remove(seat)

    async def _one_life(self, seat: Seat, identity: str) -> Ending:
        try:
            life = await self._pool.hire(self, identity)
        except OSError as error:
            return Ending(f"cannot be started: {error}", hopeless=True, unborn=True)
        seat.life = life
        ending = Ending("the pool was closed")
        try:
            ending = replace(await self._watch(seat, life), useful=life.finished > 0)
            return ending
        finally:
            seat.life = None
            self._dismiss(life, ending)
            await asyncio.shield(self._pool.end(life, ending.deaf))

    def _given_up(self, seat: Seat, identity: str, ending: Ending) -> bool:
        """Whether a seat is closed with the death of its worker: it was to end anyway, or the environment can do without."""
        if seat.leaving:
            return True
        for successor in self.seats:
            if successor.replaces is seat:  # it takes its place at once
                successor.replaces, successor.extra = None, False
                return True
        if not seat.extra:
            return False
        self._setbacks += 1
        pause = 4 * BACKOFF_SECONDS[min(self._setbacks, len(BACKOFF_SECONDS) - 1)]
        self._no_extra_before = time.monotonic() + pause
        logger.warning(
            "worker {}, {}, did not become ready: {}; the others go on, and another one is tried in {:.0f} s at the earliest (log: {})",
            identity, "a successor" if seat.replaces else "one more for the load", ending.why, pause, self.log.path,
        )  # fmt: skip
        return True

    def _obituary(self, ending: Ending, deaths: int) -> str:
        name, tail = self.config.name, self.log.tail()
        times = (
            f"died {deaths} times in a row without finishing an episode" if deaths > 1 else "died before it was ready"
        )
        lines = [f"worker of environment {name!r} {times}: {ending.why}"]
        if ending.unborn:
            lines = [f"cannot start a worker of {name!r}: {ending.why.removeprefix('cannot be started: ')}"]
        if ending.hopeless and self.info is not None:
            lines.append("it could be loaded when the run started: was its package removed or changed since?")
        if ending.hopeless and (remedy := process.remedy(tail, self.config.python, self.config.id)):
            lines.append(remedy)
        return "\n".join([*lines, tail])

    async def _watch(self, seat: Seat, life: Life) -> Ending:
        """How the life ended."""
        exited = asyncio.create_task(life.process.wait())
        try:
            while True:  # bounded: by the life of the process; one that is stuck is `unhealthy`
                before = time.monotonic()
                either: set[asyncio.Future[Any]] = {exited, life.lost}
                await asyncio.wait(either, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if life.lost.done():
                    return Ending(life.lost.result(), life.ready is None)
                if exited.done():
                    return await self._exited(life, exited.result())
                if life.leaving and not life.pending:
                    return Ending("it was replaced", done=True)
                now = time.monotonic()
                if now - before > 4 * WATCH_SECONDS:
                    life.heard = now  # it was we who did not listen
                elif why := life.unhealthy(now, self._pool.start_timeout, BEAT_TIMEOUT, self._pool.hang_timeout):
                    culprit = 0 if process.stopped(life.process.pid) else life.culprit()
                    never_ready = not life.silent(now, BEAT_TIMEOUT) and life.tasks is None
                    return Ending(why, never_ready, culprit, deaf=True)
                self._replace(seat, life)
                self._grow()
        finally:
            exited.cancel()

    async def _exited(self, life: Life, code: int) -> Ending:
        if life.ready is None and code == 0:  # it has said why, and we may not have read it yet
            await asyncio.wait({life.lost}, timeout=LAST_WORDS_SECONDS)
            if life.lost.done():
                return Ending(life.lost.result(), True)
        own = process.by_its_own_code(code)
        if life.ready is None:
            await process.drained(life)
        return Ending(process.describe_exit(code), life.ready is None and code >= 0, life.culprit() if own else 0)

    def _dismiss(self, life: Life, ending: Ending) -> None:
        """Fail what it had: the episode it died of for good, if one is known, the others as ones that are worth another attempt."""
        self._pool.forget(life)
        life.lose(ending.why)
        for request, future in life.pending.items():
            if future.done():
                continue
            if request == ending.culprit:
                future.set_exception(WorkerGone(f"in this episode's code its worker {ending.why}", Outcome.ERRORED))
            else:
                future.set_exception(WorkerGone(ending.why))

    async def measure(self) -> None:
        """Look at the workers' memory."""
        processes = await asyncio.to_thread(families.table)
        for life in self.lives:
            life.resident = families.resident(processes, life.process.pid)

    async def _keep_measuring(self) -> None:
        while True:  # bounded: `close` cancels it
            await asyncio.sleep(MEMORY_SECONDS)
            await self.measure()

    async def check_limit(self) -> None:
        """Before the first episode.

        Raises:
            UserError: a fresh worker holds more memory than one is replaced at: each would be replaced at once.
        """
        if (limit := self.config.recycle_mib) is None:
            return
        await self.measure()
        if (most := max((life.resident >> 20 for life in self.lives), default=0)) >= limit:
            raise UserError(
                f"environment {self.config.name!r}: a fresh worker holds {most} MiB already, so recycle_mib {limit} would replace each at once: "
                "set it well above that"
            )
