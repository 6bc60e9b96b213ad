"""The worker processes of all environments and their slots: started, scaled, watched, replaced, started again.

An environment's faults are outcomes of its episodes, never exceptions here. A worker that dies or hangs fails the episodes it had with
`worker_died` and is started again with backoff; one that keeps dying while its environment finishes no episode ends the pool with a UserError that
quotes its log. `workers_wanted` decides how many workers an environment has, `why_replace` when one is replaced.
"""

import asyncio
import itertools
import math
import os
import secrets
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio
from loguru import logger

import prime_rl
from prime_rl import processes
from prime_rl.config.shared import EnvConfig
from prime_rl.envs import worker_process
from prime_rl.envs.protocol import (
    MOST_BYTES,
    MOST_TASKS_BYTES,
    VERSION,
    EndlessTasks,
    Heartbeat,
    Hello,
    ListTasks,
    LoadFailed,
    Message,
    Outcome,
    ProtocolError,
    Ready,
    Result,
    Setup,
    TaskInfo,
    Tasks,
    decode,
    encode,
)
from prime_rl.envs.worker_process import Log, Worker, WorkerState
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.lifeline import Lifeline
from prime_rl.wait import LEAST_POLL_SECONDS, wait_async

WATCH_SECONDS = 0.5
AUTOSCALE_SECONDS = 1.0
MEMORY_SECONDS = 2.0
IDLE_SECONDS = 60.0  # for which fewer workers must have sufficed before some end: load comes back with every step
HEARTBEAT_TIMEOUT = 30.0
BACKOFF_SECONDS = 1.0  # before the second restart in a row of a worker that finished nothing
MAX_BACKOFF_SECONDS = 15.0
MAX_DEATHS = 5  # in a row, of one worker, without one finished episode of its environment
LAST_WORDS_SECONDS = 5.0
CLOSE_SECONDS = 3 * worker_process.TERM_SECONDS
HIGH, LOW, TARGET = 0.7, 0.35, 0.5  # cores that the mean worker uses: above, more are started; below, some end; aim
_WORKERS, _CORES_A_WORKER = 4, 4  # `auto` begins with so many where there are so many cores for each

Slot = tuple[Worker, int]  # and the number of the request there


class WorkerGone(Exception):
    """The worker that ran the episode is dead or was ended; `outcome` says whether the episode was at fault."""

    def __init__(self, message: str, outcome: Outcome = Outcome.WORKER_DIED) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class Ending:
    """How a worker process ended."""

    why: str
    hopeless: bool = False  # by itself, before it was ready: another one can be expected to end the same way
    offending_request: int = 0  # the request in whose code it died
    deaf: bool = False  # it is stopped or blocked, and handles no signal


@dataclass(eq=False)
class WorkerSet:
    """The workers of one environment, and the episodes that wait for a slot."""

    config: EnvConfig
    setup: Setup
    variables: Mapping[str, str]
    withheld: Sequence[str]  # names of variables that its workers do not get
    log: Log
    least: int
    most: int
    tasks: list[TaskInfo] | EndlessTasks = field(default_factory=list)
    info: Ready | None = None  # of the first worker that was ready
    kept: int = 0  # workers with a process, or about to get one
    extras: int = 0  # of these, started for the load or as a successor, and not ready yet
    recycled: int = 0  # workers that were replaced
    finished: int = 0  # episodes, of all workers
    departures: int = 0  # slots that were taken, and are not any more
    setbacks: int = 0  # extra workers in a row that did not become ready
    no_extra_before: float = 0.0
    idle_since: float = field(default_factory=time.monotonic)
    wanted_since: int = 0  # most workers that were wanted at a time since then
    numbers: Iterator[int] = field(default_factory=itertools.count)
    waiting: OrderedDict[asyncio.Future[Slot], None] = field(default_factory=OrderedDict)


class WorkerPool:
    """Worker processes of several environments, and the wire to them.

    Attributes:
        workers: All processes that are up, by their identities: `environment/number/incarnation`.
        sets: The same, and what else belongs to an environment, by its name.
        restarts: How many processes were started in the place of a dead one.
    """

    def __init__(self, sets: Sequence[WorkerSet], token: str, hang_timeout: float) -> None:
        """`hang_timeout`: seconds that environment code may block a worker's loop before it is interrupted, and if that fails, its worker killed."""
        self.sets = {each.config.name: each for each in sets}
        self.workers: dict[str, Worker] = {}
        self.restarts = 0
        self._token, self._hang_timeout, self._start_timeout = token, hang_timeout, 0.0
        self._pages = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        self._failure: UserError | None = None
        self._exit_stack = ExitStack()

    async def start(self, timeout: float = 300.0) -> None:
        """Start the workers and wait until all are ready. `timeout` (seconds) also bounds later restarts.

        Raises:
            UserError: not found, failing to import or load, bad arguments, no chat template, not ready in time.
        """
        self._start_timeout = timeout
        self._lifeline = self._exit_stack.enter_context(Lifeline())
        self._directory = Path(tempfile.mkdtemp(prefix="prime-envs-"))  # short: socket paths are limited to 107 bytes
        self._exit_stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._address = f"ipc://{self._directory}/pool"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._exit_stack.callback(self._socket.close)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1), (zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.MAXMSGSIZE, MOST_TASKS_BYTES)
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._socket.bind(self._address)
        for each in self.sets.values():
            each.log.write(b"")
            if each.withheld:
                names = ", ".join(each.withheld)
                each.log.note(f"variables withheld from this environment (`secrets` passes them): {names}")
            for _ in range(1 if each.config.workers == "auto" else each.least):  # `_autoscale` adds the others
                self._open(each)
        for work in (self._receive(), self._autoscale(), self._keep_measuring()):
            self._start_task(work)
        try:
            for each in self.sets.values():
                await self._await_ready(each)
            await self._check_limits()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every worker (SIGTERM, then SIGKILL) and remove what was created. Bounded; may be called twice."""
        self._fail(UserError("the environment pool was closed"))
        for task in self._tasks:
            task.cancel()
        for tasks in (self._tasks, self._kills):
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        self._exit_stack.close()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose failure is the pool's."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.opt(exception=error).error("the environment pool failed")
                self._fail(UserError(f"the environment pool failed: {type(error).__name__}: {error}"))

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _fail(self, error: UserError) -> None:
        """End the pool: every caller, waiting or coming, gets this error."""
        if self._failure is None:
            self._failure = error
            for waiter in [waiter for each in self.sets.values() for waiter in each.waiting]:
                if not waiter.done():
                    waiter.set_exception(error)

    async def _await_ready(self, own: WorkerSet) -> None:
        def all_ready() -> bool:
            if self._failure is not None:
                raise self._failure
            return len(self._ready(own)) == own.kept

        await wait_async(
            all_ready, subject="ready worker", owner=f"environment {own.config.name!r}", poll=LEAST_POLL_SECONDS,
            seconds=self._start_timeout + HEARTBEAT_TIMEOUT,
        )  # fmt: skip

    def of(self, own: WorkerSet) -> list[Worker]:
        """The workers of an environment that are up."""
        return [worker for worker in self.workers.values() if worker.env == own.config.name]

    def _ready(self, own: WorkerSet) -> list[Worker]:
        return [worker for worker in self.of(own) if worker.state is WorkerState.READY]

    # ---- slots

    async def place(self, own: WorkerSet, seconds: float) -> Slot | None:
        """Wait for a slot; they are given in the order in which they were asked for. None when for so many seconds no episode has left one.

        Raises:
            UserError: the pool has failed.
        """
        if self._failure is not None:
            raise self._failure
        if not own.waiting and (worker := self._least_busy(own)) is not None:
            return worker, worker.enter()
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        own.waiting[waiter] = None
        self._grow(own, 0)
        placed = False
        try:
            left = -1
            while (
                not waiter.done() and left != own.departures
            ):  # bounded: episodes that came before leave in their time
                left = own.departures
                await asyncio.wait({waiter}, timeout=seconds)
            if not waiter.done():
                return None
            placed = True
            return waiter.result()
        finally:
            own.waiting.pop(waiter, None)
            if not placed and waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave(*waiter.result())  # a slot became free at the very moment at which the wait ended

    def leave(self, worker: Worker, request: int) -> None:
        """Free the slot of a request."""
        if (future := worker.pending.pop(request, None)) is not None:
            future.cancel()
        own = self.sets[worker.env]
        own.departures += 1
        self._fill(own)

    def _fill(self, own: WorkerSet) -> None:
        """Give free slots to waiting episodes."""
        while own.waiting and (worker := self._least_busy(own)) is not None:
            waiter, _ = own.waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_result((worker, worker.enter()))
        if own.waiting:
            self._grow(own, 0)

    def _least_busy(self, own: WorkerSet) -> Worker | None:
        free = [each for each in self.of(own) if each.serves and len(each.pending) < own.config.max_concurrent]
        return min(free, key=lambda worker: len(worker.pending), default=None)

    # ---- how many

    async def _autoscale(self) -> None:
        """Give environments the workers that their load calls for; the one with the fewest takes idle cores first. End those not needed lately."""
        cores = IdleCores()
        while True:  # bounded: `close` cancels it
            await asyncio.sleep(AUTOSCALE_SECONDS)
            idle = cores.measure()
            for own in sorted(self.sets.values(), key=lambda own: own.kept):
                idle -= self._grow(own, int(idle))
                staying, wanted, now = self._staying(own), self._wanted(own, 0), time.monotonic()
                own.wanted_since = max(own.wanted_since, wanted)
                if wanted >= staying or len(self._ready(own)) < staying:
                    own.idle_since, own.wanted_since = now, 0
                elif now - own.idle_since > IDLE_SECONDS:
                    for worker in sorted(self._ready(own), key=lambda each: len(each.pending))[
                        : staying - own.wanted_since
                    ]:
                        worker.state = WorkerState.DRAINING
                        logger.info("environment {}: worker {} is not needed any more", worker.env, worker.identity)
                    own.idle_since, own.wanted_since = now, 0

    def _staying(self, own: WorkerSet) -> int:
        return own.kept - sum(worker.state is WorkerState.DRAINING for worker in self.of(own))

    def _wanted(self, own: WorkerSet, free: int) -> int:
        ready, staying = self._ready(own), self._staying(own)
        return workers_wanted(
            workers=staying, starting=staying - len(ready), use=sum(worker.use for worker in ready),
            episodes=sum(len(worker.pending) for worker in ready) + len(own.waiting),
            slots=own.config.max_concurrent, least=own.least, most=own.most, free=free,
        )  # fmt: skip

    def _grow(self, own: WorkerSet, free: int) -> int:
        """Start the workers that the load calls for. Returns how many."""
        missing = self._wanted(own, free) - self._staying(own)
        if own.info is None or missing <= 0 or time.monotonic() < own.no_extra_before:
            return 0
        starting = self._staying(own) - len(self._ready(own))
        alive = [each for worker in self.of(own) if (each := processes.read(worker.pid)) is not None]
        largest = max((process.resident for process in alive), default=1)
        # Growth leaves half of the available memory alone.
        missing = max(0, min(missing, cores() - starting, available_bytes() // (2 * largest) - starting))
        for _ in range(missing):
            logger.info("environment {}: starting one more worker for the load", own.config.name)
            self._open(own, extra=True)
        return missing

    def _open(self, own: WorkerSet, extra: bool = False) -> None:
        own.kept += 1
        own.extras += extra
        self._start_task(self._keep(own, extra))

    # ---- growing old

    def _why_replace(self, worker: Worker) -> str | None:
        config = self.sets[worker.env].config
        return why_replace(worker.finished, worker.resident, config.recycle_episodes, config.recycle_mib)

    def _replace(self, worker: Worker) -> None:
        """Start a successor for a worker that is due; they start one at a time, and it serves until then."""
        own = self.sets[worker.env]
        if worker.state is not WorkerState.READY or not worker.finished or (why := self._why_replace(worker)) is None:
            return
        if not own.extras and time.monotonic() >= own.no_extra_before:
            logger.info("worker {} {}: starting another one to replace it", worker.identity, why)
            self._open(own, extra=True)

    def _welcome(self, worker: Worker) -> None:
        """Let a worker that has become ready take episodes, and one end that is due."""
        own = self.sets[worker.env]
        due = [each for each in self._ready(own) if each.finished and self._why_replace(each)] if worker.extra else []
        own.extras -= worker.extra
        own.setbacks, worker.extra, worker.state = 0, False, WorkerState.READY
        for old in due[:1]:
            old.state = WorkerState.DRAINING
            own.recycled += 1
            logger.info(
                "worker {} is replaced by {} and ends with its last {} episodes (replaced so far: {})",
                old.identity, worker.identity, len(old.pending), own.recycled,
            )  # fmt: skip
        self._fill(own)

    async def _keep_measuring(self) -> None:
        while any(own.config.recycle_mib for own in self.sets.values()):  # bounded: `close` cancels it
            await asyncio.sleep(MEMORY_SECONDS)
            await self._measure()

    async def _measure(self) -> None:
        """Measure the memory of the workers and of what they have started; shared pages count in each process."""
        table = await asyncio.to_thread(processes.table)
        for worker in self.workers.values():
            worker.resident = sum(table[pid].resident for pid in processes.family(worker.pid, table))

    async def _check_limits(self) -> None:
        """Raises UserError: a fresh worker holds more memory than one is replaced at: each would be replaced at once."""
        await self._measure()
        for worker in self.workers.values():
            limit, used = self.sets[worker.env].config.recycle_mib, worker.resident >> 20
            if limit is not None and used >= limit:
                raise UserError(
                    f"environment {worker.env!r}: a fresh worker holds {used} MiB already, so recycle_mib {limit} would replace each at once: "
                    "set it well above that"
                )

    # ---- supervision

    async def _keep(self, own: WorkerSet, extra: bool) -> None:
        """Keep a worker up: start a process, watch it, fail its episodes when it is gone, start again."""
        number, deaths, useless, seen = next(own.numbers), 0, 0, 0
        try:
            for incarnation in itertools.count():  # bounded: `close` cancels it; MAX_DEATHS in a row end it
                identity, finished = f"{own.config.name}/{number}/{incarnation}", 0
                try:
                    worker = self._spawn(own, identity, extra)
                except OSError as error:
                    ending = Ending(f"cannot be started: {error}", hopeless=True)
                else:
                    try:
                        ending, drained = await self._supervise(worker)
                    finally:
                        extra, finished = worker.extra, worker.finished
                    if drained:
                        return
                if self._failure is not None:
                    return
                if extra:
                    self._postpone(own, identity, ending)
                    return
                useless = 1 if finished else useless + 1
                deaths, seen = 1 if own.finished > seen else deaths + 1, own.finished
                if (ending.hopeless and own.info is None) or deaths >= MAX_DEATHS:
                    self._fail(UserError(_why_failed(own, ending, deaths)))
                    return
                logger.warning("worker {}: {}; starting it again (log: {})", identity, ending.why, own.log.path)
                self.restarts += 1
                await asyncio.sleep(processes.backoff_seconds(useless - 1, BACKOFF_SECONDS, MAX_BACKOFF_SECONDS))
        finally:
            own.kept -= 1
            own.extras -= extra

    def _postpone(self, own: WorkerSet, identity: str, ending: Ending) -> None:
        """Start no further worker for a while: the environment can do without one that did not become ready."""
        own.setbacks += 1
        pause = 4 * processes.backoff_seconds(own.setbacks, BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
        own.no_extra_before = time.monotonic() + pause
        logger.warning(
            "worker {}, one more for the load or a successor, did not become ready: {}; the others go on, and another one is tried in {:.0f} s at the "
            "earliest (log: {})", identity, ending.why, pause, own.log.path,
        )  # fmt: skip

    def _spawn(self, own: WorkerSet, identity: str, extra: bool) -> Worker:
        """Start a process. Raises OSError."""
        variables, python = own.variables, own.config.python
        if python is not None:  # it finds prime_rl, and nothing else of ours
            (self._directory / "path").mkdir(exist_ok=True)
            with suppress(FileExistsError):
                (self._directory / "path" / "prime_rl").symlink_to(Path(prime_rl.__file__).parent)
            variables = {**variables, "PYTHONPATH": str(self._directory / "path")}
        self.workers[identity] = worker = worker_process.spawn(
            identity, own.config.name, extra, self._address, python, variables, lifeline=self._lifeline, log=own.log,
            page=self._directory / f"{next(self._pages)}.page", hang_timeout=self._hang_timeout,
        )  # fmt: skip
        return worker

    async def _supervise(self, worker: Worker) -> tuple[Ending, bool]:
        """Watch a process to its end, and end all it has started. Returns how it ended, and whether it was to end."""
        ending = Ending("the pool was closed")
        try:
            ending = await self._watch(worker)
            return ending, worker.state is WorkerState.DRAINING
        finally:
            del self.workers[worker.identity]
            worker.die(ending.why)
            for request, future in worker.pending.items():
                if request == ending.offending_request and not future.done():
                    why = f"in this episode's code its worker {ending.why}"
                    future.set_exception(WorkerGone(why, Outcome.ERRORED))
                elif not future.done():
                    future.set_exception(WorkerGone(ending.why))
            # Awaited by `close`, which cancels this task, but not the kill.
            kill = asyncio.create_task(self._kill(worker, ending.deaf))
            self._kills.add(kill)
            kill.add_done_callback(self._kills.discard)
            await asyncio.wait({kill}, timeout=CLOSE_SECONDS + processes.DEATH_SECONDS)

    async def _kill(self, worker: Worker, deaf: bool) -> None:
        if strays := await worker_process.end(worker, deaf):
            logger.warning("worker {} had left {} processes outside its group; they are ended", worker.identity, strays)

    async def _watch(self, worker: Worker) -> Ending:
        """Wait for the end of a process."""
        exited = asyncio.create_task(worker_process.exited(worker))
        try:
            while True:  # bounded: by the end of the process; one that is stuck is `unhealthy`
                before = time.monotonic()
                either: set[asyncio.Future[Any]] = {exited, worker.death}
                await asyncio.wait(either, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if exited.done() and worker.info is None and exited.result() == 0:
                    await asyncio.wait(
                        {worker.death}, timeout=LAST_WORDS_SECONDS
                    )  # its reason may not have been read yet
                if worker.death.done():
                    return Ending(worker.death.result(), worker.info is None)
                if exited.done():
                    return await self._exited(worker, exited.result())
                if worker.state is WorkerState.DRAINING and not worker.pending:
                    return Ending("it was not needed any more")
                if time.monotonic() - before > 4 * WATCH_SECONDS:
                    worker.heard = time.monotonic()  # it was we who did not listen
                elif why := worker.unhealthy(self._start_timeout, HEARTBEAT_TIMEOUT, self._hang_timeout):
                    current = processes.read(worker.pid)
                    offending = 0 if current and current.stopped else worker.offending_request()
                    never_ready = worker.state is WorkerState.STARTING and not worker.silent(HEARTBEAT_TIMEOUT)
                    return Ending(why, never_ready, offending, deaf=True)
                self._replace(worker)
        finally:
            exited.cancel()

    async def _exited(self, worker: Worker, status: int) -> Ending:
        offending = worker.offending_request() if worker_process.by_its_own_code(status) else 0
        if worker.info is None:
            await worker_process.output_ended(worker)
        return Ending(processes.describe_exit(status), worker.info is None and status >= 0, offending)

    # ---- messages

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()  # bounded: owed by no one; `_watch` judges who sends nothing
            identity, frame = frames[0], frames[-1]
            worker = self.workers.get(identity.decode(errors="replace").removesuffix("#heartbeat"))
            if worker is None or worker.death.done():
                continue
            if len(frame) > (MOST_TASKS_BYTES if worker.state is WorkerState.STARTING else MOST_BYTES):
                worker.die(f"sent a message of {len(frame) >> 20} MiB")
                continue
            try:
                message = decode(frame)
            except ProtocolError as error:
                worker.die(f"sent a broken message: {error}")
                continue
            worker.heard = time.monotonic()
            await self._handle(self.sets[worker.env], worker, message)

    async def _handle(self, own: WorkerSet, worker: Worker, message: Message) -> None:
        match message:
            case Heartbeat():
                worker.heartbeat, worker.use = message, (worker.use + message.use) / 2
                self._fill(own)
            case Hello() if not secrets.compare_digest(message.token.encode(), self._token.encode()):
                worker.die("sent a wrong token")
            case Hello() if message.version != VERSION:
                spoken = f"speaks protocol {message.version}, this is {VERSION}"
                self._fail(
                    UserError(f"the worker of {worker.env!r} {spoken}: its Python environment holds another prime-rl")
                )
                worker.die("protocol version")
            case Hello():
                worker.greeted = True
                await self._send(worker, own.setup)
            case _ if not worker.greeted:
                worker.die(f"sent {message.kind!r} before its hello")
            case Result() if not 0 < message.request <= worker.requests:
                worker.die(f"sent a result of request {message.request}, which it never had")
            case Result():
                future = worker.pending.get(message.request)
                if future is not None and not future.done():  # else it comes too late, or twice
                    worker.finished += 1
                    own.finished += 1
                    future.set_result(message.episode)
            case Ready():
                worker.info = message
                await self._send(worker, ListTasks())
            case Tasks():
                self._take_tasks(own, worker, message)
            case LoadFailed():
                self._not_loaded(own, worker, message.message)
            case _:
                worker.die(f"sent an unexpected {message.kind!r}")

    def _take_tasks(self, own: WorkerSet, worker: Worker, message: Tasks) -> None:
        if worker.info is None or worker.state is not WorkerState.STARTING:
            worker.die("sent tasks that it was not asked for")
        elif wrong := [task_id for task_id in message.task_ids if not isinstance(task_id, str)]:
            worker.die(f"named a task {wrong[0]!r}, which is no text")
        else:
            if own.info is None:
                own.info = worker.info
                listed = [TaskInfo(task_id, index) for index, task_id in enumerate(message.task_ids)]
                own.tasks = EndlessTasks(message.stream) if message.stream else listed
            self._welcome(worker)

    def _not_loaded(self, own: WorkerSet, worker: Worker, why: str) -> None:
        if (python := own.config.python) is not None:
            why += f"; its Python is {python} (`uv pip install --python {python} …`)"
        if own.info is None:  # it never loaded: no use trying again
            withheld = f"; not passed to it: {', '.join(own.withheld)} (see its `secrets`)" if own.withheld else ""
            self._fail(UserError(f"{why} (log: {own.log.path}){withheld}"))
        worker.die(why)

    async def _send(self, worker: Worker, message: Message) -> None:
        if worker.death.done():
            return
        try:
            frames = [worker.identity.encode(), encode(message)]
            await self._socket.send_multipart(frames)  # bounded: it has room for any number (SNDHWM 0)
        except zmq.ZMQError as error:  # ROUTER_MANDATORY: the peer is gone
            worker.die(f"unreachable: {error}")


def _why_failed(own: WorkerSet, ending: Ending, deaths: int) -> str:
    name, python, tail = own.config.name, own.config.python, own.log.tail()
    times = f"died {deaths} times in a row without finishing an episode" if deaths > 1 else "died before it was ready"
    lines = [f"worker of environment {name!r} {times}: {ending.why}"]
    if ending.why.startswith("cannot be started: "):
        lines = [f"cannot start a worker of {name!r}: {ending.why.removeprefix('cannot be started: ')}"]
    if ending.hopeless and own.info is not None:
        lines.append("it could be loaded when the run started: was its package removed or changed since?")
    if ending.hopeless and (remedy := worker_process.remedy(tail, python, own.config.id)):
        lines.append(remedy)
    return "\n".join([*lines, tail])


# ---- how many workers, and when one is replaced


def workers_wanted(
    *, workers: int, starting: int, use: float, episodes: int, slots: int, least: int, most: int, free: int
) -> int:
    """Decide how many workers an environment should have.

    Enough slots for all episodes; and where the workers are busy, more of them, so that each is about half busy. A worker that is
    always busy says only that one is too few: one round of growth at most doubles their number, and waits for those that are starting.

    Args:
        workers: Ready or starting.
        starting: Of these.
        use: Cores: the sum over the ready ones of the part of the last seconds in which each one's event loop or threads were busy.
        episodes: In flight, and waiting for a slot.
        slots: Episodes that one worker runs at a time.
        least, most: Bounds of the result.
        free: Workers that there is room for on idle cores. Slots are given without: waiting for an engine takes no core.
    """
    ready, wanted = workers - starting, workers
    if not starting and use > HIGH * ready:
        wanted = ready + min(math.ceil(use / TARGET) - ready, free)
    elif not starting and use < LOW * (ready - 1):
        wanted = math.ceil(use / TARGET)
    return min(max(wanted, -(-episodes // slots), least), most)


def worker_range(workers: int | Literal["auto"], max_workers: int | None, environments: int = 1) -> tuple[int, int]:
    """Return the least and the most workers that an environment has, by its settings.

    Episodes of a batch start together and often end together: one worker would take them one after the other, though it is idle between. A host with
    cores to spare soon has several.
    """
    if workers != "auto":
        return workers, workers
    most = max_workers or cores()
    return min(most, max(1, min(_WORKERS, cores() // _CORES_A_WORKER) // environments)), most


def why_replace(finished: int, resident: int, episodes: int | None, mib: int | None) -> str | None:
    """Say why a worker that has finished so many episodes and holds so many bytes is to be replaced; None while it is not."""
    if episodes is not None and finished >= episodes:
        return f"has finished {finished} episodes (recycle_episodes {episodes})"
    if mib is not None and resident > mib << 20:
        return f"holds {resident >> 20} MiB (recycle_mib {mib})"
    return None


def cores() -> int:
    """Count the processor cores that this process and its children may use."""
    available = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
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
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        times = [
            [int(count) for count in row[1:9]] for row in rows if row[0] in self._names
        ]  # later ones are part of these
        return sum(row[3] + row[4] for row in times), sum(map(sum, times))
