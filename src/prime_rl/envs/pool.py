"""Episodes on environment workers: the processes of all environments and their slots.

An environment's faults are outcomes of its episodes, never exceptions here. A worker that dies or hangs fails its
episodes with `worker_died`, the one in whose code it did so as `errored`, and is started again; an environment whose
workers keep dying before they have an episode fails the pool with a UserError that quotes its log. `_adjust` alone
starts and drains workers: as many as the load of an environment calls for.
"""

import asyncio
import itertools
import math
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio
from loguru import logger

import prime_rl
from prime_rl import processes
from prime_rl.config.orchestrator import OPSD
from prime_rl.config.shared import EnvConfig, api_root
from prime_rl.envs import protocol
from prime_rl.envs.protocol import API_KEY_VAR, EpisodeResult, Outcome, Page, ProtocolError, Run
from prime_rl.errors import UserError
from prime_rl.redact import passed_on
from prime_rl.wait import WaitTimeout, wait_async, within

WATCH_SECONDS = 0.1
ADJUST_SECONDS = 1.0
IDLE_SECONDS = 60.0  # fewer workers must suffice for so long before some are drained: every step brings load
GRACE_SECONDS = 60.0  # a worker enforces an episode's deadline itself; one that is later than this is replaced
BACKOFF_SECONDS = 1.0  # before another worker takes the place of one without episodes; doubled with each in a row
MAX_BACKOFF_SECONDS = 5.0
MAX_DEATHS = 5  # in a row, for each worker of an environment, of workers without episodes
TERM_SECONDS = 5.0
CLOSE_SECONDS = 3 * TERM_SECONDS + processes.DEATH_SECONDS
MEAN_USE = 0.6  # of a core, that workers should have at most
_TAIL_LINES = 12  # of a log, in an error
# No episode sends these; the kernel sends SIGKILL for want of memory, whoever's code runs.
_SIGNALS_OF_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(eq=False)
class Request:
    """An episode that waits for a slot, or has one."""

    message: Run
    result: asyncio.Future[EpisodeResult]
    worker: "Worker | None" = None  # in whose slot it is
    deadline: float = math.inf  # there, by `time.monotonic()`


@dataclass(eq=False)
class Worker:
    identity: str
    env: str
    page: Page
    child: processes.Child
    ready_by: float  # by `time.monotonic()`
    ready: bool = False  # it has loaded its environment
    draining: bool = False  # it gets no more episodes, and ends with its last one
    pending: dict[int, Request] = field(default_factory=dict)  # by their numbers
    ending: str = ""  # how it ended, or why it is to be ended

    def exit_reason(self) -> str:
        """Return how the worker ended, or why it must be ended; "" while neither is so."""
        if self.ending:
            return self.ending
        if (status := self.child.status) is not None:
            return processes.describe_exit(status)
        if not self.ready and time.monotonic() > self.ready_by:
            return "was not ready in time"
        oldest = next(iter(self.pending.values()), None)
        if oldest is not None and time.monotonic() > oldest.deadline:  # stopped, or what it cancelled does not end
            return f"gave no result {GRACE_SECONDS:.0f} s after an episode's deadline"
        return "was not needed any more" if self.draining and not self.pending else ""


@dataclass(eq=False)
class WorkerSet:
    """The workers of one environment, and the episodes that wait for a slot."""

    config: EnvConfig
    setup: protocol.Setup
    variables: Mapping[str, str]
    log: Path
    tasks: list[str] = field(default_factory=list)  # their ids; none until a worker has loaded it
    deaths: int = 0  # of workers without episodes, since an episode was finished
    idle_since: float = field(default_factory=time.monotonic)  # since when fewer workers suffice
    waiting: dict[int, Request] = field(default_factory=dict)  # by their numbers, in the order in which they asked


@dataclass(frozen=True)
class Sampler:
    """What samples an environment's episodes, where it is not the policy."""

    base_url: str
    model: str
    api_key: str


class EnvPool:
    """Workers for several environments, and the episodes that they run. Environments that differ in their names alone
    share workers."""

    def __init__(
        self,
        envs: Sequence[EnvConfig],
        *,
        model: str,
        base_url: str,
        api_key: str | None,
        renderer: str = "auto",
        output_dir: Path,
        log_level: str = "info",
        samplers: Mapping[str, Sampler] | None = None,
        demonstrations: Mapping[str, OPSD] | None = None,
        chat_timeout: float | None = None,
    ) -> None:
        """`model`: hub name or directory, also the name under which the engine serves it. `base_url`: of the server
        that is asked where `run` names none. `chat_timeout`: seconds without a byte of an answer, of an API that is
        asked by its chat route (None: by tokens). Raises UserError: a variable in `secrets` is not set."""
        self._base_url = base_url
        self._samplers = samplers or {}
        self.sets: dict[str, WorkerSet] = {}  # of each environment, by its name; those that are alike share one
        alike: dict[str, WorkerSet] = {}  # a training environment that is evaluated as well is loaded once
        for config in envs:
            for name in config.secrets:
                if name not in os.environ:
                    raise UserError(
                        f"environment {config.name!r} is to get the variable {name} (its `secrets`), which is not set"
                    )
            sampler, shown = self._samplers.get(config.name), (demonstrations or {}).get(config.name)
            variables, _ = passed_on(os.environ, config.secrets)
            direct = f"{variables.get('NO_PROXY', variables.get('no_proxy', ''))},127.0.0.1,localhost".strip(",")
            variables |= {"NO_PROXY": direct, "no_proxy": direct}  # tool servers, above all
            if key := sampler.api_key if sampler else api_key:
                variables[API_KEY_VAR] = key
            setup = protocol.Setup(
                name=config.name,
                env_id=config.id,
                args=config.args,
                model=model,
                renderer=renderer,
                log_level=log_level,
                sampled_by=sampler.model if sampler else "",
                demonstration=shown.demonstration if shown else "",
                template=shown.template if shown else "",
                adapter=config.adapter,
                max_turns=config.max_turns or 0,
                trajectories=config.trajectories,
                chat_timeout=chat_timeout or 0.0,
            )
            log = Path(output_dir) / "logs" / "envs" / f"{config.name.replace('/', '--')}.log"
            workers = config.workers, config.max_workers, config.max_concurrent, config.python
            settings = repr((replace(setup, name=""), variables, workers))
            self.sets[config.name] = alike.setdefault(settings, WorkerSet(config, setup, variables, log))
        self._all_sets = list(alike.values())
        self.workers: dict[str, Worker] = {}  # all that are up, by their identities: `environment/number`
        self.restarts = 0  # how many processes died and were replaced
        self._start_timeout = 0.0
        self._numbers = itertools.count(1)  # of workers and requests
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: UserError | None = None
        self._exit_stack = ExitStack()

    async def start(self, timeout: float = 300.0) -> None:
        """Start the workers and wait until one of each environment is ready; `timeout` (s) bounds later starts, too.
        Raises UserError: not found, failing to import or load, bad arguments, no chat template, not ready in time."""
        self._start_timeout = timeout
        # Short: socket paths are limited to 107 bytes.
        directory = tempfile.TemporaryDirectory(prefix="prime-envs-", ignore_cleanup_errors=True)
        self._directory = Path(self._exit_stack.enter_context(directory))
        # What a Python of its own finds of ours: prime_rl, and nothing else.
        (self._directory / "path").mkdir()
        (self._directory / "path" / "prime_rl").symlink_to(Path(prime_rl.__file__).parent)
        self._address = f"ipc://{self._directory}/pool"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._exit_stack.callback(self._socket.close)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self._address)
        for each in self._all_sets:
            each.log.parent.mkdir(parents=True, exist_ok=True)
            self._adjust(each)
        self._create_task(self._receive())
        self._create_task(self._keep_adjusting())
        try:
            for worker_set in self._all_sets:
                name = f"environment {worker_set.config.name!r}"
                await wait_async(partial(self._loaded, worker_set), subject="ready worker", owner=name, seconds=timeout)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every worker (SIGTERM, then SIGKILL) and remove what was created. Bounded; may be called twice."""
        self._fail(UserError("the environment pool was closed"))
        for worker in self.workers.values():
            worker.ending = worker.ending or "the pool was closed"
        try:
            await wait_async(lambda: not self.workers, subject="end", owner="the workers", seconds=CLOSE_SECONDS)
        except WaitTimeout as error:  # the run has ended all the same: they watch this process
            logger.warning("environment workers {}: {}", ", ".join(sorted(self.workers)), error)
        except asyncio.CancelledError:  # nobody waits for them any more
            while self.workers:
                self.workers.popitem()[1].child.reap()
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._exit_stack.close()

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose failure is the pool's: nobody may keep waiting for it."""
        self._tasks.append(asyncio.create_task(work))
        self._tasks[-1].add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.opt(exception=error).error("the environment pool failed")
            self._fail(UserError(f"the environment pool failed: {type(error).__name__}: {error}"))

    def _fail(self, error: UserError) -> None:
        """Stop the pool: every caller, waiting or coming, gets this error."""
        if self._failure is None:
            self._failure = error
            for each in self._all_sets:
                for request in each.waiting.values():
                    if not request.result.done():
                        request.result.set_exception(error)

    def _loaded(self, worker_set: WorkerSet) -> bool:
        """Whether some worker has loaded it. Raises UserError: the pool has failed."""
        if self._failure is not None:
            raise self._failure
        return bool(worker_set.tasks)

    def of(self, worker_set: WorkerSet) -> list[Worker]:
        """The workers of an environment that are up."""
        return [worker for worker in self.workers.values() if worker.env == worker_set.config.name]

    def _ready(self, worker_set: WorkerSet) -> list[Worker]:
        return [worker for worker in self.of(worker_set) if worker.ready and not worker.draining and not worker.ending]

    def tasks(self, env: str) -> list[str]:
        """The ids of an environment's tasks, in its own order: that of `task_index`."""
        return self.sets[env].tasks

    @property
    def busiest(self) -> float:
        """Fraction of a core that the busiest worker uses, a moving average of what its shared `Page` says."""
        return max((worker.page.use for worker in self.workers.values()), default=0.0)

    async def run(
        self,
        *,
        env: str,
        task_index: int,
        sampling: dict[str, Any],
        policy_version: int,
        episode_id: str,
        timeout: float,
        server: str | None = None,
    ) -> EpisodeResult:
        """Run one episode. Cancelling the call cancels the episode and its engine requests. `timeout`: seconds from
        when the episode gets a slot; the result comes `GRACE_SECONDS` later at most. `sampling`: all that the server is
        sent: temperature, top_p, top_k, min_p, max_tokens, min_tokens, seed … Raises UserError: the pool has failed."""
        worker_set, number = self.sets[env], next(self._numbers)
        self._loaded(worker_set)
        task_id, sampler = worker_set.tasks[task_index], self._samplers.get(env)
        base_url = f"{api_root(sampler.base_url if sampler else server or self._base_url)}/v1"
        message = Run(number, episode_id, task_index, task_id, sampling, policy_version, base_url, timeout)
        result = asyncio.get_running_loop().create_future()
        request = worker_set.waiting[number] = Request(message, result)
        # Those before it end in their time, even on a single worker, which may have to be started again.
        turns = 2 + len(worker_set.waiting) // worker_set.config.max_concurrent
        seconds = self._start_timeout + turns * (timeout + GRACE_SECONDS)
        try:
            self._fill(worker_set)
            answer = await within(result, subject="result", owner=f"environment {env!r}", seconds=seconds)
            return replace(answer, env=env)
        except WaitTimeout as error:
            return message.failed(env, Outcome.WORKER_DIED, str(error))
        finally:
            worker_set.waiting.pop(number, None)
            if request.worker is not None and request.worker.pending.pop(number, None) is not None:
                self._send(request.worker, protocol.Cancel(number))
            self._fill(worker_set)

    def _fill(self, worker_set: WorkerSet) -> None:
        """Give free slots to waiting episodes, in the order in which they asked."""
        while worker_set.waiting:
            worker = min(self._ready(worker_set), key=lambda worker: len(worker.pending), default=None)
            if worker is None or len(worker.pending) >= worker_set.config.max_concurrent:
                return
            number = next(iter(worker_set.waiting))
            request = worker_set.waiting.pop(number)
            if request.result.done():  # cancelled, and about to say so
                continue
            worker.pending[number] = request
            request.worker, request.deadline = worker, time.monotonic() + request.message.timeout + GRACE_SECONDS
            self._send(worker, request.message)

    async def _keep_adjusting(self) -> None:
        while True:  # bounded: `close` cancels it
            await asyncio.sleep(ADJUST_SECONDS)
            # The environment with the fewest workers takes free cores first.
            for worker_set in sorted(self._all_sets, key=lambda each: len(self.of(each))):
                self._adjust(worker_set)

    def _adjust(self, worker_set: WorkerSet) -> None:
        """Follow the load, then start and drain workers until there are as many as there should be."""
        if self._failure is not None:
            return
        now, ready = time.monotonic(), self._ready(worker_set)
        # One that is to end counts until `_supervise` lets another take its place.
        staying = sum(not worker.draining for worker in self.of(worker_set))
        wanted = 1  # which shows whether it can be loaded, before others start
        if worker_set.tasks:
            config = worker_set.config
            min_workers, max_workers = worker_range(config.workers, config.max_workers, len(self.sets))
            wanted = workers_wanted(
                workers=staying,
                starting=staying - len(ready),
                use=sum(worker.page.use for worker in ready),
                episodes=sum(len(worker.pending) for worker in ready) + len(worker_set.waiting),
                slots=config.max_concurrent,
                min_workers=min_workers,
                max_workers=max_workers,
                free=max(0, cores() - len(self.workers)),
            )
        if wanted >= staying:
            worker_set.idle_since = now
        elif now - worker_set.idle_since > IDLE_SECONDS:
            worker_set.idle_since = now
            ready.sort(key=lambda worker: len(worker.pending))
            for worker in ready[: staying - max(wanted, staying // 2)]:
                worker.draining = True
                logger.info("worker {} is not needed any more: it ends after its last episode", worker.identity)
        for _ in range(wanted - staying):
            self._start_worker(worker_set)

    def _start_worker(self, worker_set: WorkerSet) -> None:
        """Start a process, `python -m prime_rl.envs.worker`, and its supervisor."""
        number, variables = next(self._numbers), worker_set.variables
        identity, files = f"{worker_set.config.name}/{number}", self._directory / str(number)
        setup, page = files.with_suffix(".setup"), files.with_suffix(".page")
        if worker_set.config.python is not None:
            variables = {**variables, "PYTHONPATH": str(self._directory / "path")}
        command = [worker_set.config.python or sys.executable, "-u", "-m", "prime_rl.envs.worker"]
        command += [self._address, identity, str(setup), str(page)]
        try:
            setup.write_bytes(protocol.encode(worker_set.setup))
            with worker_set.log.open("ab") as output:
                child, ready_by = processes.Child(command, variables, output), time.monotonic() + self._start_timeout
                worker = Worker(identity, worker_set.config.name, Page.of(page), child, ready_by)
        except OSError as error:
            self._fail(UserError(f"a worker of environment {worker_set.config.name!r} cannot be started: {error}"))
        else:
            self.workers[identity] = worker
            self._create_task(self._supervise(worker_set, worker))

    async def _supervise(self, worker_set: WorkerSet, worker: Worker) -> None:
        """Watch a process to its end, fail its episodes, end all it has started, and replace it."""
        while not (why := worker.exit_reason()):
            await asyncio.sleep(WATCH_SECONDS)  # bounded: a stuck process has an exit reason, too
        status, worker.ending = worker.child.status, why
        offending_request = 0 if status is None or -status in _SIGNALS_OF_OTHERS else worker.page.request
        if not worker.draining and not worker.pending:
            worker_set.deaths += 1  # else its episodes fail, and are counted as such: it can load
        log = worker_set.log
        for number, request in worker.pending.items():
            outcome, message = Outcome.WORKER_DIED, why
            if number == offending_request:
                outcome, message = Outcome.ERRORED, f"in this episode's code its worker {why} (log: {log})"
            if not request.result.done():
                request.result.set_result(request.message.failed(worker.env, outcome, message))
        worker.pending.clear()
        worker.child.signal(signal.SIGTERM, group=True)
        with suppress(WaitTimeout):
            await wait_async(
                lambda: worker.child.status is not None, subject="end", owner=worker.identity, seconds=TERM_SECONDS
            )
        await asyncio.to_thread(worker.child.reap)  # with all that it has started
        if not worker.draining and self._failure is None:
            if worker_set.deaths >= MAX_DEATHS * len(self.of(worker_set)):
                died = f"died {worker_set.deaths} times in a row without having had an episode: {why}"
                with log.open(errors="replace") as file:
                    end = "".join(f"  | {line}" for line in deque(file, _TAIL_LINES)).rstrip()
                self._fail(UserError(f"workers of environment {worker.env!r} {died}\n{end}"))
            else:
                self.restarts += 1
                logger.warning("worker {}: {}; starting it again (log: {})", worker.identity, why, log)
                await asyncio.sleep(processes.backoff_seconds(worker_set.deaths, BACKOFF_SECONDS, MAX_BACKOFF_SECONDS))
        del self.workers[worker.identity]
        self._adjust(worker_set)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()  # bounded: owed by no one; `exit_reason` finds late workers
            worker = self.workers.get(frames[0].decode(errors="replace"))
            if worker is not None and not worker.ending:
                try:
                    self._handle(self.sets[worker.env], worker, protocol.decode(frames[-1]))
                except ProtocolError as error:
                    worker.ending = f"sent a broken message: {error}"

    def _handle(self, worker_set: WorkerSet, worker: Worker, message: protocol.Message) -> None:
        match message:
            case protocol.Result():
                request = worker.pending.pop(message.request, None)
                if request is not None and not request.result.done():  # else it comes too late, or twice
                    worker_set.deaths = 0
                    request.result.set_result(message.episode)
            case protocol.Ready():
                worker.ready = True
                if not worker_set.tasks:
                    task_ids = message.task_ids
                    worker_set.tasks = task_ids if message.bounded else protocol.FirstTasks(task_ids)
                self._fill(worker_set)
                self._adjust(worker_set)
            case protocol.Failed(message=why):
                if not worker_set.tasks:  # it never loaded: no use trying again
                    names = ", ".join(passed_on(os.environ, worker_set.config.secrets)[1])
                    withheld = f"; not passed to it: {names} (see its `secrets`)" if names else ""
                    self._fail(UserError(f"{why} (log: {worker_set.log}){withheld}"))
                worker.ending = why
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _send(self, worker: Worker, message: protocol.Message) -> None:
        if not worker.ending:
            frames = [worker.identity.encode(), protocol.encode(message)]
            self._socket.send_multipart(frames)  # bounded: done at once, there is room for any number (SNDHWM 0)


def workers_wanted(
    *, workers: int, starting: int, use: float, episodes: int, slots: int, min_workers: int, max_workers: int, free: int
) -> int:
    """Decide how many workers an environment should have: slots for all episodes, and none busier than `MEAN_USE`.

    Saturated workers give only a lower bound on demand, so growth waits for starting ones.

    Args:
        workers: Ready or starting.
        use: Cores: the sum over the ready ones of the part of the last seconds in which each was busy.
        free: Cores without a worker of any environment. Extra workers for slots ignore this limit, as waiting uses no
            CPU.
    """
    busy = workers if starting else min(math.ceil(use / MEAN_USE), workers + free)
    return min(max(busy, -(-episodes // slots), min_workers), max_workers)


def worker_range(workers: int | Literal["auto"], max_workers: int | None, environments: int = 1) -> tuple[int, int]:
    """Return the minimum and maximum number of workers of an environment, by its settings."""
    if workers != "auto":
        return workers, workers
    # Episodes of a batch often end together: one worker, idle between, would take them one after the other. So `auto`
    # begins with one for every four cores, and four at most.
    max_workers = max_workers or cores()
    return min(max_workers, max(1, min(4, cores() // 4) // environments)), max_workers


def cores() -> int:
    """Count the processor cores that this process and its children may use."""
    available = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such control group, or no limit ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        available = min(available, max(1, int(quota) // int(period)))
    return available
