"""The workers of one environment: kept alive, as many as its load needs, replaced when they are due; and the episodes that wait for a slot.

`workers_wanted` and `why_replace` decide how many and when; `worker_process` is one process of one of them. An environment's faults are outcomes of its episodes: a
worker that dies fails those that it had and is started again with backoff. Only one that keeps dying while nothing gets done ends the pool.
"""

import asyncio
import itertools
import math
import os
import time
from collections import OrderedDict
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from loguru import logger

from prime_rl import processes
from prime_rl.config.shared import EnvConfig
from prime_rl.envs import worker_process
from prime_rl.envs.output import Log
from prime_rl.envs.protocol import EndlessTasks, Outcome, Ready, TaskInfo
from prime_rl.envs.worker_process import WorkerProcess
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes

WATCH_SECONDS = 0.5
MEMORY_SECONDS = 2.0
IDLE_SECONDS = 60.0  # for which fewer workers must have sufficed before some end: load comes back with every step
HEARTBEAT_TIMEOUT = 30.0
BACKOFF_SECONDS = 1.0  # before the second restart in a row of a worker that finished nothing
MAX_BACKOFF_SECONDS = 15.0
MAX_DEATHS = 5  # in a row, of one worker, without one finished episode of its environment
LAST_WORDS_SECONDS = 5.0
_WORKERS, _CORES_A_WORKER = 4, 4  # at least: so many where there are so many cores for each
HIGH, LOW, TARGET = 0.7, 0.35, 0.5  # cores that the mean worker uses: above, more are started; below, some end; aim

_PROC, _QUOTA = Path("/proc"), Path("/sys/fs/cgroup/cpu.max")


class WorkerGone(Exception):
    """The worker that ran the episode is dead or was ended; `outcome` tells whether the episode was at fault."""

    def __init__(self, message: str, outcome: Outcome = Outcome.WORKER_DIED) -> None:
        super().__init__(message)
        self.outcome = outcome


class WorkerHost(Protocol):
    """What a worker pool needs of `EnvPool`, which is common to all environments."""

    start_timeout: float
    hang_timeout: float
    restarts: int

    async def spawn(self, pool: "WorkerPool", identity: str) -> WorkerProcess:
        """Start a worker process. Raises OSError."""

    def forget(self, process: WorkerProcess) -> None:
        """Ignore what still comes from a process."""

    def end(self, process: WorkerProcess, deaf: bool) -> "asyncio.Task[None]":
        """See `worker_process.end`. The task is awaited, not cancelled, when the pool is closed."""

    def fail(self, error: UserError) -> None:
        """End the pool with this error."""

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose failure is the pool's."""

    @property
    def failure(self) -> UserError | None:
        """The error that ended the pool."""


@dataclass
class Worker:
    """One of an environment's workers, through all the processes that it has after one another."""

    number: int
    process: WorkerProcess | None = None
    extra: bool = False  # started later, and not started again should it not become ready
    replaces: "Worker | None" = None  # the worker that ends once this one is ready
    leaving: bool = False

    @property
    def ready(self) -> bool:
        return self.process is not None and self.process.tasks is not None


@dataclass(frozen=True)
class Ending:
    """How a worker process ended."""

    why: str
    hopeless: bool = False  # by itself, before it was ready: another one can be expected to end the same way
    offending_request: int = 0  # the request in whose code it died
    done: bool = False  # as was wanted
    not_started: bool = False
    deaf: bool = False  # it is stopped or blocked, and hears no signal
    useful: bool = False  # it had finished an episode


class WorkerPool:
    """An environment's workers and the episodes that wait for a slot."""

    def __init__(self, config: EnvConfig, log: Log, host: WorkerHost, environments: int = 1) -> None:
        self.config = config
        self.log = log
        self.tasks: list[TaskInfo] | EndlessTasks = []
        self.info: Ready | None = None
        self.withheld: list[str] = []  # names of variables that its workers do not get
        self.workers: list[Worker] = []
        self.recycled = 0  # workers
        self._host = host
        self._bounds = Bounds(config.max_concurrent, *worker_range(config.workers, config.max_workers, environments))
        self._numbers = itertools.count()
        self._waiting: OrderedDict[asyncio.Future[tuple[WorkerProcess, int]], None] = OrderedDict()
        self._finished = 0  # episodes, of all workers
        self._left = 0  # slots that were taken, and are not any more
        self._setbacks = 0  # extra workers in a row that did not become ready
        self._no_extra_before = 0.0
        self._idle_since = time.monotonic()
        self._wanted_since = 0  # most workers that were wanted at a time since then

    def start(self) -> None:
        """Start the first worker, or all where their number is given. `scale` adds the others once it is known how large one is."""
        for _ in range(1 if self.config.workers == "auto" else self._bounds.least):
            self._open(Worker(next(self._numbers)))
        if self.config.recycle_mib is not None:
            self._host.start_task(self._keep_measuring())

    @property
    def processes(self) -> list[WorkerProcess]:
        """Those that are up."""
        return [worker.process for worker in self.workers if worker.process is not None]

    @property
    def ready(self) -> bool:
        """Whether all workers are."""
        return all(worker.ready for worker in self.workers)

    # ---- episodes

    async def place(self, seconds: float) -> tuple[WorkerProcess, int] | None:
        """Wait for a slot. Returns the worker and the request's number there; None when for so many seconds no episode has left one.

        Slots are given in the order in which they were asked for. Raises UserError once the pool has failed.
        """
        if self._host.failure is not None:
            raise self._host.failure
        if not self._waiting and (process := self._least_busy()) is not None:
            return process, process.enter()
        waiter: asyncio.Future[tuple[WorkerProcess, int]] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        self._grow(0)
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
                self.leave(*waiter.result())  # a slot was found in the very moment in which the wait ended

    def leave(self, process: WorkerProcess, request: int) -> None:
        """Free the slot of a request."""
        if (future := process.pending.pop(request, None)) is not None:
            future.cancel()
        self._left += 1
        self.fill()

    def finish(self, process: WorkerProcess) -> None:
        """Count an episode that has a result."""
        process.finished += 1
        self._finished += 1

    def fill(self) -> None:
        """Give free slots to waiting episodes."""
        while self._waiting and (process := self._least_busy()) is not None:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_result((process, process.enter()))
        if self._waiting:
            self._grow(0)

    def fail(self, error: UserError) -> None:
        """End every wait for a slot."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()

    def _least_busy(self) -> WorkerProcess | None:
        """The worker with the fewest episodes, of those with a free slot."""
        free = [process for process in self.processes if process.serves and len(process.pending) < self._bounds.slots]
        return min(free, key=lambda process: len(process.pending), default=None)

    @property
    def any_serves(self) -> bool:
        """Whether a worker takes episodes, be its slots free or not."""
        return any(process.serves for process in self.processes)

    # ---- how many

    def scale(self, idle_cores: float) -> int:
        """Start the workers that the load calls for, or end those that it has not called for lately. Returns how many were started."""
        started = self._grow(int(idle_cores))
        now, workers = time.monotonic(), self._staying_workers()
        wanted = self._wanted(workers, 0)
        self._wanted_since = max(self._wanted_since, wanted)
        if wanted < len(workers) and now - self._idle_since > IDLE_SECONDS:
            self._retire(workers, len(workers) - self._wanted_since)
            wanted = len(workers)
        if wanted >= len(workers):
            self._idle_since, self._wanted_since = now, 0
        return started

    def _staying_workers(self) -> list[Worker]:
        """All but those that are to end, and the successors that are to replace one."""
        return [worker for worker in self.workers if not worker.leaving and worker.replaces is None]

    def _wanted(self, workers: list[Worker], free: int) -> int:
        up = [worker.process for worker in workers if worker.process is not None and worker.ready]
        episodes = sum(len(process.pending) for process in up) + len(self._waiting)
        load = Load(len(workers), len(workers) - len(up), sum(process.use for process in up), episodes)
        return workers_wanted(load, self._bounds, free)

    def _grow(self, free: int) -> int:
        if self.info is None or time.monotonic() < self._no_extra_before:
            return 0
        workers = self._staying_workers()
        missing = self._wanted(workers, free) - len(workers)
        if missing <= 0:
            return 0
        starting = sum(not worker.ready for worker in workers)
        alive = [each for process in self.processes if (each := processes.read(process.pid)) is not None]
        largest = max((process.resident for process in alive), default=0)
        # Growth leaves half of the available memory alone.
        missing = max(0, min(missing, cores() - starting, available_bytes() // (2 * max(largest, 1)) - starting))
        for _ in range(missing):
            worker = Worker(next(self._numbers), extra=True)
            logger.info("environment {}: starting worker {} for the load", self.config.name, worker.number)
            self._open(worker)
        return missing

    def _retire(self, workers: list[Worker], count: int) -> None:
        """Let the workers with the fewest episodes end, once their last one has."""
        replaced = [worker.replaces for worker in self.workers]
        able = [(worker, worker.process) for worker in workers if worker.process is not None and worker.ready]
        able = [(worker, process) for worker, process in able if worker not in replaced]
        for worker, process in sorted(able, key=lambda pair: len(pair[1].pending))[:count]:
            worker.leaving = process.leaving = True
            logger.info("environment {}: worker {} is not needed any more", self.config.name, worker.number)

    def _open(self, worker: Worker) -> None:
        self.workers.append(worker)
        self._host.start_task(self._keep(worker))

    def _replace(self, worker: Worker, process: WorkerProcess) -> None:
        """Start a successor where one is due; they start one at a time."""
        config = self.config
        why = why_replace(process.finished, process.resident, config.recycle_episodes, config.recycle_mib)
        busy = worker.leaving or any(other.replaces is not None for other in self.workers)
        if why is None or not process.finished or busy or time.monotonic() < self._no_extra_before:
            return
        successor = Worker(next(self._numbers), extra=True, replaces=worker)
        logger.info("worker {} {}: worker {} is to replace it", process.identity, why, successor.number)
        self._open(successor)

    def welcome(self, process: WorkerProcess) -> None:
        """Let a worker that has become ready take episodes, and the one that it replaces end."""
        worker = next(worker for worker in self.workers if worker.process is process)
        self._setbacks, worker.extra = 0, False
        if (old := worker.replaces) is not None:
            worker.replaces, old.leaving = None, True
            self.recycled += 1
            if old.process is not None:
                old.process.leaving = True
                logger.info(
                    "worker {} is replaced by {} and ends with its last {} episodes (replaced so far: {})",
                    old.process.identity, process.identity, len(old.process.pending), self.recycled,
                )  # fmt: skip
        self.fill()

    # ---- supervision

    async def _keep(self, worker: Worker) -> None:
        """Keep a worker up: start a process, watch it, fail its episodes when it is gone, start again."""
        deaths, useless, seen = 0, 0, 0
        try:
            for incarnation in itertools.count():  # bounded: `close` cancels it; MAX_DEATHS in a row end it
                identity = f"{self.config.name}/{worker.number}/{incarnation}"
                ending = await self._run_process(worker, identity)
                if self._host.failure is not None or ending.done or self._dispensable(worker, identity, ending):
                    return
                useless = 1 if ending.useful else useless + 1
                deaths, seen = 1 if self._finished > seen else deaths + 1, self._finished
                if (ending.hopeless and self.info is None) or deaths >= MAX_DEATHS:
                    self._host.fail(UserError(self._why_failed(ending, deaths)))
                    return
                logger.warning("worker {}: {}; starting it again (log: {})", identity, ending.why, self.log.path)
                self._host.restarts += 1
                await asyncio.sleep(processes.backoff_seconds(useless - 1, BACKOFF_SECONDS, MAX_BACKOFF_SECONDS))
        finally:
            self.workers.remove(worker)

    async def _run_process(self, worker: Worker, identity: str) -> Ending:
        try:
            process = await self._host.spawn(self, identity)
        except OSError as error:
            return Ending(f"cannot be started: {error}", hopeless=True, not_started=True)
        worker.process = process
        ending = Ending("the pool was closed")
        try:
            ending = replace(await self._watch(worker, process), useful=process.finished > 0)
            return ending
        finally:
            worker.process = None
            self._fail_episodes(process, ending)
            await asyncio.shield(self._host.end(process, ending.deaf))

    def _dispensable(self, worker: Worker, identity: str, ending: Ending) -> bool:
        """Whether a worker is not started again: it was to end anyway, or the environment can do without."""
        if worker.leaving:
            return True
        for successor in self.workers:
            if successor.replaces is worker:  # it takes its place at once
                successor.replaces, successor.extra = None, False
                return True
        if not worker.extra:
            return False
        self._setbacks += 1
        pause = 4 * processes.backoff_seconds(self._setbacks, BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        self._no_extra_before = time.monotonic() + pause
        logger.warning(
            "worker {}, {}, did not become ready: {}; the others go on, and another one is tried in {:.0f} s at the earliest (log: {})",
            identity, "a successor" if worker.replaces else "one more for the load", ending.why, pause, self.log.path,
        )  # fmt: skip
        return True

    def _why_failed(self, ending: Ending, deaths: int) -> str:
        name, tail = self.config.name, self.log.tail()
        times = (
            f"died {deaths} times in a row without finishing an episode" if deaths > 1 else "died before it was ready"
        )
        lines = [f"worker of environment {name!r} {times}: {ending.why}"]
        if ending.not_started:
            lines = [f"cannot start a worker of {name!r}: {ending.why.removeprefix('cannot be started: ')}"]
        if ending.hopeless and self.info is not None:
            lines.append("it could be loaded when the run started: was its package removed or changed since?")
        if ending.hopeless and (remedy := worker_process.remedy(tail, self.config.python, self.config.id)):
            lines.append(remedy)
        return "\n".join([*lines, tail])

    async def _watch(self, worker: Worker, process: WorkerProcess) -> Ending:
        """Wait for the end of a process. Returns how it ended."""
        exited = asyncio.create_task(worker_process.exited(process))
        try:
            while True:  # bounded: by the end of the process; one that is stuck is `unhealthy`
                before = time.monotonic()
                either: set[asyncio.Future[Any]] = {exited, process.lost}
                await asyncio.wait(either, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if process.lost.done():
                    return Ending(process.lost.result(), process.ready is None)
                if exited.done():
                    return await self._exited(process, exited.result())
                if process.leaving and not process.pending:
                    return Ending("it was not needed any more", done=True)
                now = time.monotonic()
                if now - before > 4 * WATCH_SECONDS:
                    process.heard = now  # it was we who did not listen
                elif why := process.unhealthy(
                    now, self._host.start_timeout, HEARTBEAT_TIMEOUT, self._host.hang_timeout
                ):
                    current = processes.read(process.pid)
                    offending = 0 if current and current.stopped else process.offending_request()
                    never_ready = not process.silent(now, HEARTBEAT_TIMEOUT) and process.tasks is None
                    return Ending(why, never_ready, offending, deaf=True)
                self._replace(worker, process)
        finally:
            exited.cancel()

    async def _exited(self, process: WorkerProcess, code: int) -> Ending:
        if process.ready is None and code == 0:  # it has said why, and we may not have read it yet
            await asyncio.wait({process.lost}, timeout=LAST_WORDS_SECONDS)
            if process.lost.done():
                return Ending(process.lost.result(), True)
        offending = process.offending_request() if worker_process.by_its_own_code(code) else 0
        if process.ready is None:
            await worker_process.drained(process)
        return Ending(processes.describe_exit(code), process.ready is None and code >= 0, offending)

    def _fail_episodes(self, process: WorkerProcess, ending: Ending) -> None:
        """Fail the offending episode for good, if one is known, and the others as ones that are worth another attempt."""
        self._host.forget(process)
        process.lose(ending.why)
        for request, future in process.pending.items():
            if future.done():
                continue
            if request == ending.offending_request:
                future.set_exception(WorkerGone(f"in this episode's code its worker {ending.why}", Outcome.ERRORED))
            else:
                future.set_exception(WorkerGone(ending.why))

    async def measure(self) -> None:
        """Measure the memory of the workers and of what they have started; shared pages count in each process."""
        table = await asyncio.to_thread(processes.table)
        for process in self.processes:
            process.resident = sum(table[pid].resident for pid in processes.family(process.pid, table))

    async def _keep_measuring(self) -> None:
        while True:  # bounded: `close` cancels it
            await asyncio.sleep(MEMORY_SECONDS)
            await self.measure()

    async def check_limit(self) -> None:
        """Check `recycle_mib` before the first episode.

        Raises:
            UserError: a fresh worker holds more memory than one is replaced at: each would be replaced at once.
        """
        if (limit := self.config.recycle_mib) is None:
            return
        await self.measure()
        if (most := max((process.resident >> 20 for process in self.processes), default=0)) >= limit:
            raise UserError(
                f"environment {self.config.name!r}: a fresh worker holds {most} MiB already, so recycle_mib {limit} would replace each at once: "
                "set it well above that"
            )


# ---- how many workers, and when one is replaced: pure decisions, and what they are made on


@dataclass(frozen=True)
class Load:
    """An environment's workers at one moment, without those that are to end and the successors that replace one."""

    workers: int  # ready or starting
    starting: int
    use: float  # cores: the sum over the ready ones of the part of the last seconds in which each one's event loop or threads were busy
    episodes: int  # in flight, and waiting for a slot


@dataclass(frozen=True)
class Bounds:
    """What an environment may have."""

    slots: int  # episodes that one worker runs at a time
    least: int
    most: int


def workers_wanted(load: Load, bounds: Bounds, free: int) -> int:
    """How many workers the load calls for.

    Enough slots for all episodes; and where the workers are busy, more of them, so that each is about half busy. A worker that is
    always busy says only that one is too few: one round of growth at most doubles their number, and waits for those that are starting.

    Args:
        free: Workers that there is room for on idle cores. Slots are given without: waiting for an engine takes no core.
    """
    ready = load.workers - load.starting
    wanted = load.workers
    if load.starting:
        pass
    elif load.use > HIGH * ready:
        wanted = ready + min(math.ceil(load.use / TARGET) - ready, free)
    elif load.use < LOW * (ready - 1):
        wanted = math.ceil(load.use / TARGET)
    return min(max(wanted, -(-load.episodes // bounds.slots), bounds.least), bounds.most)


def worker_range(workers: int | Literal["auto"], max_workers: int | None, environments: int = 1) -> tuple[int, int]:
    """The least and the most workers that an environment has, by its settings.

    Episodes of a batch start together and often end together: one worker would take them one after the other, though it is idle between. A host with
    cores to spare soon has several.
    """
    if workers != "auto":
        return workers, workers
    most = max_workers or cores()
    return min(most, max(1, min(_WORKERS, cores() // _CORES_A_WORKER) // environments)), most


def why_replace(finished: int, resident: int, episodes: int | None, mib: int | None) -> str | None:
    """Why a worker is to be replaced, None while it is not.

    Args:
        finished: Episodes that it has finished.
        resident: Bytes of memory of the worker and what it has started.
        episodes, mib: The limits, where there are any.
    """
    if episodes is not None and finished >= episodes:
        return f"has finished {finished} episodes (recycle_episodes {episodes})"
    if mib is not None and resident > mib << 20:
        return f"holds {resident >> 20} MiB (recycle_mib {mib})"
    return None


def cores() -> int:
    """Processor cores that this process and its children may use."""
    available = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
        quota, period = _QUOTA.read_text().split()
        available = min(available, max(1, int(quota) // int(period)))
    return available


class IdleCores:
    """How many of our cores were idle lately, whoever used the others. Measures from call to call, and averages over the last few."""

    def __init__(self) -> None:
        self._names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._before = self._counters()
        self._idle = 0.0

    def measure(self) -> float:
        before, self._before = self._before, self._counters()
        idle, total = (now - then for now, then in zip(self._before, before, strict=True))
        # A sandbox's kernel may count nothing: then nothing speaks against its cores but that workers do not get busier.
        now = len(self._names) * idle / total if total else float(len(self._names))
        self._idle = (self._idle + min(now, cores())) / 2
        return self._idle

    def _counters(self) -> tuple[int, int]:
        """Idle time, and time, of all our cores together."""
        idle = total = 0
        for line in (_PROC / "stat").read_text().splitlines():
            name, *counts = line.split()
            if name in self._names:
                times = [int(count) for count in counts[:8]]  # the others are part of these
                idle, total = idle + times[3] + times[4], total + sum(times)
        return idle, total
