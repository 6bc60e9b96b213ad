"""Orchestrator side of the environment workers: start them, send episodes, survive what they do.

The wire and the pool's callers are here; the workers of each environment are a `WorkerPool`'s. An environment's faults are outcomes of its
episodes, never exceptions here. A dead or hung worker fails the episodes it had with `worker_died` and is started again; one that keeps dying
while its environment finishes no episode ends the pool with a UserError that quotes its log.
"""

import asyncio
import itertools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from loguru import logger

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import worker_process
from prime_rl.envs.output import Log
from prime_rl.envs.protocol import (
    MOST_BYTES,
    MOST_TASKS_BYTES,
    VERSION,
    Cancel,
    EndlessTasks,
    EpisodeResult,
    Heartbeat,
    Hello,
    ListTasks,
    LoadFailed,
    Message,
    Outcome,
    ProtocolError,
    Ready,
    Result,
    Run,
    Setup,
    TaskInfo,
    Tasks,
    decode,
    encode,
)
from prime_rl.envs.variables import check_promised, passed_on, worker_variables
from prime_rl.envs.vetting import vetted
from prime_rl.envs.worker_pool import HEARTBEAT_TIMEOUT, IdleCores, WorkerGone, WorkerPool
from prime_rl.envs.worker_process import WorkerProcess
from prime_rl.errors import UserError
from prime_rl.lifeline import Lifeline
from prime_rl.wait import LEAST_POLL_SECONDS, wait_async

CLOSE_SECONDS = 3 * worker_process.TERM_SECONDS
AUTOSCALE_SECONDS = 1.0
GRACE_SECONDS = 5.0  # a worker enforces the deadline itself; this much later it is taken to be blocked


@dataclass(frozen=True)
class Sampler:
    """Who samples an environment's episodes, where it is not the policy."""

    base_url: str
    model: str
    api_key: str


@dataclass(frozen=True)
class Demonstration:
    """What is shown of a task to who scores its episodes: a field, and the text around it."""

    field: str
    template: str


class EnvPool:
    """Workers for several environments.

    pool = EnvPool(envs, model=…, base_url=…, api_key=…, renderer="auto", output_dir=…)
    await pool.start(timeout=300)                 # UserError when an environment cannot be loaded
    result = await pool.run(env="reverse-text", task_index=0, sampling={…}, policy_version=0,
                            episode_id="…", deadline=time.monotonic() + 300)
    await pool.close()
    """

    def __init__(
        self,
        envs: Sequence[EnvConfig],
        *,
        model: str,
        base_url: str | Sequence[str],
        api_key: str | None,
        renderer: str = "auto",
        output_dir: Path,
        log_level: str = "info",
        hang_timeout: float = 120.0,
        samplers: Mapping[str, Sampler] | None = None,
        demonstrations: Mapping[str, Demonstration] | None = None,
        chat_timeout: float | None = None,
    ) -> None:
        """`model`: hub name or directory, also the name the engine serves; `base_url`: with or without /v1, the first of
        several is asked where `run` names none;
        `hang_timeout`: seconds that environment code may block a worker's event loop before it is interrupted, and if that does not help,
        its worker restarted;
        `samplers`, `demonstrations`: of the environments that have one;
        `chat_timeout`: seconds without a byte of an answer, of an API that is asked by its chat route (None: by tokens)."""
        logs = Path(output_dir) / "logs" / "envs"
        names = [config.name for config in envs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"two environments are named {sorted(twice)[0]!r}: give each a `name` of its own")
        for config in envs:
            check_promised(config.name, config.secrets)
        self._configs = {config.name: config for config in envs}
        self._logs = {name: Log(logs / f"{name.replace('/', '--')}.log") for name in names}
        self._envs: dict[str, WorkerPool] = {}
        self._model = model
        self._base_urls = [_v1(url) for url in ([base_url] if isinstance(base_url, str) else base_url)]
        self._api_key = api_key
        self._samplers, self._demonstrations = samplers or {}, demonstrations or {}
        self._renderer, self._chat_timeout = renderer, chat_timeout
        self._log_level = log_level
        self.hang_timeout = hang_timeout
        self.start_timeout = 0.0
        self._token = secrets.token_urlsafe(16)
        self._pages = itertools.count()
        self._processes: dict[str, WorkerProcess] = {}
        self._pools: dict[str, WorkerPool] = {}  # by the identities of their processes
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self.failure: UserError | None = None
        self._lifeline: Lifeline | None = None
        self._directory: Path | None = None
        self._socket: Any = None
        self.restarts = 0

    async def start(self, timeout: float = 300.0) -> None:
        """Start every worker and wait until all are ready. `timeout` (seconds) also bounds later restarts.

        Raises UserError: not found, failing to import or load, bad arguments, no chat template, not ready in time.
        """
        self.start_timeout = timeout
        self._lifeline = Lifeline()
        self._directory = Path(tempfile.mkdtemp(prefix="prime-envs-"))  # short: socket paths are limited to 107 bytes
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_TASKS_BYTES)
        self._socket.bind(self._address)
        self.start_task(self._receive())
        self.start_task(self._autoscale())
        count = len(self._configs)
        self._envs = {name: WorkerPool(config, self._logs[name], self, count) for name, config in self._configs.items()}
        for pool in self._envs.values():
            pool.start()
        try:
            for pool in self._envs.values():
                await self._await_ready(pool)
                await pool.check_limit()
        except BaseException:
            await self.close()
            raise

    def tasks(self, env: str) -> list[TaskInfo] | EndlessTasks:
        """The tasks of an environment, in its own order."""
        return self._envs[env].tasks

    def arguments(self, env: str) -> list[str]:
        """Names that the `args` of an environment may hold."""
        info = self._envs[env].info
        return info.arguments if info is not None else []

    def renderer(self, env: str) -> str:
        """The renderer that an environment's workers chose."""
        info = self._envs[env].info
        return info.renderer if info is not None else ""

    @property
    def busiest(self) -> float:
        """What the busiest worker uses of a core, over its last heartbeats."""
        return max((process.use for pool in self._envs.values() for process in pool.processes), default=0.0)

    async def run(
        self,
        *,
        env: str,
        task_index: int,
        sampling: dict[str, Any],
        policy_version: int,
        episode_id: str,
        deadline: float,
        server: str | None = None,
    ) -> EpisodeResult:
        """One episode; always returns a result by `deadline` (a `time.monotonic()` value) plus a short grace, and the wait for a worker: while
        others' episodes end, it takes none of this one's time.

        `sampling`: temperature, top_p, top_k, min_p, max_tokens, min_tokens, seed …; None values are left out.
        `server`: the address of the one that samples it, with or without /v1.
        Cancelling the call cancels the episode and its engine requests. Raises UserError once the pool has failed.
        """
        pool = self._envs[env]
        task = pool.tasks[task_index]

        def failed(outcome: Outcome, message: str) -> EpisodeResult:
            return EpisodeResult(episode_id, env, task.task_id, outcome, message)

        timeout = max(0.0, deadline - time.monotonic())
        if (placed := await pool.place(timeout)) is None:
            if pool.any_serves:
                return failed(
                    Outcome.TIMEOUT, f"all workers of {env!r} were full for {timeout:.0f} s, and no episode ended"
                )
            return failed(Outcome.WORKER_DIED, f"no worker of {env!r} became ready before the deadline")
        process, request = placed
        sampler = self._samplers.get(env)
        base_url = _v1(sampler.base_url) if sampler else self._base_urls[0] if server is None else _v1(server)
        try:
            async with asyncio.timeout(timeout + GRACE_SECONDS):
                await self._send(
                    process,
                    Run(request, episode_id, task_index, task.task_id, sampling, policy_version, base_url, timeout),
                )
                # Owed by the worker; its pool fails it when the worker is gone.
                result = await process.pending[request]
            tokens = self._chat_timeout is None
            return vetted(result, episode_id=episode_id, env=env, task_id=task.task_id, tokens=tokens)
        except WorkerGone as gone:
            return failed(gone.outcome, str(gone))
        except TimeoutError:
            await self._send(process, Cancel(request))
            if process.stuck and process.offending_request() != request:
                return failed(Outcome.WORKER_DIED, "its worker is stuck, and not in this episode's code")
            return failed(Outcome.TIMEOUT, f"no answer from the worker {GRACE_SECONDS:.0f} s after the deadline")
        except asyncio.CancelledError:
            await self._send(process, Cancel(request))
            raise
        finally:
            pool.leave(process, request)

    async def close(self) -> None:
        """End every worker (SIGTERM, then SIGKILL) and remove what was created. Bounded; may be called twice."""
        self.fail(UserError("the environment pool was closed"))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        self._tasks.clear()
        if self._endings:
            await asyncio.wait(self._endings, timeout=CLOSE_SECONDS)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # ---- what the worker pools need: see `WorkerHost`

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose failure is the pool's."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.opt(exception=error).error("the environment pool failed")
                self.fail(UserError(f"the environment pool failed: {type(error).__name__}: {error}"))

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def fail(self, error: UserError) -> None:
        """End the pool: every caller, waiting or coming, gets this error."""
        if self.failure is None:
            self.failure = error
            for pool in self._envs.values():
                pool.fail(error)

    def forget(self, process: WorkerProcess) -> None:
        """Ignore what still comes from a process."""
        self._processes.pop(process.identity, None)
        self._pools.pop(process.identity, None)

    def end(self, process: WorkerProcess, deaf: bool) -> "asyncio.Task[None]":
        """See `worker_process.end`. The task is awaited, not cancelled, when the pool is closed."""

        async def end() -> None:
            if strays := await worker_process.end(process, deaf):
                logger.warning(
                    "worker {} had left {} processes outside its group; they are ended", process.identity, strays
                )

        task = asyncio.create_task(end())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def spawn(self, pool: WorkerPool, identity: str) -> WorkerProcess:
        """Start a worker process. Raises OSError."""
        assert self._lifeline is not None
        assert self._directory is not None
        pool.log.begin()
        process = worker_process.spawn(
            identity,
            self._address,
            pool.config.python,
            self._variables(pool),
            lifeline=self._lifeline,
            log=pool.log,
            page=self._directory / f"{next(self._pages)}.page",
            hang_timeout=self.hang_timeout,
        )
        self._pools[identity], self._processes[identity] = pool, process
        return process

    def _setup(self, config: EnvConfig) -> Setup:
        sampler, shown = self._samplers.get(config.name), self._demonstrations.get(config.name)
        return Setup(
            name=config.name,
            env_id=config.id,
            args=config.args,
            model=self._model,
            renderer=self._renderer,
            max_concurrent=config.max_concurrent,
            log_level=self._log_level,
            sampled_by="" if sampler is None else sampler.model,
            demonstration="" if shown is None else shown.field,
            template="" if shown is None else shown.template,
            adapter=config.adapter,
            max_turns=config.max_turns or 0,
            turn_timeout=config.turn_timeout or 0.0,
            overflow=config.overflow,
            trajectories=config.trajectories,
            chat=self._chat_timeout is not None,
            request_timeout=self._chat_timeout or 0.0,
        )

    def _variables(self, pool: WorkerPool) -> dict[str, str]:
        assert self._lifeline is not None
        assert self._directory is not None
        passed, withheld = passed_on(os.environ, pool.config.secrets)
        if withheld and withheld != pool.withheld:
            pool.log.note(f"variables withheld from this environment (`secrets` passes them): {', '.join(withheld)}")
        pool.withheld = withheld
        sampler = self._samplers.get(pool.config.name)
        own_python = pool.config.python is not None
        # Others' servers are reached as the user's proxy has it.
        servers = [] if self._chat_timeout is not None else self._base_urls
        return worker_variables(
            passed,
            token=self._token,
            base_urls=servers if sampler is None else [_v1(sampler.base_url)],
            api_key=self._api_key if sampler is None else sampler.api_key,
            path=worker_process.expose_package(self._directory / "path") if own_python else None,
        )

    # ---- messages

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()  # bounded: owed by no one; `_watch` judges who sends nothing
            identity, frame = frames[0], frames[-1]
            process = self._processes.get(identity.decode(errors="replace").removesuffix("#heartbeat"))
            if process is None or process.lost.done():
                continue  # it has ended
            if len(frame) > (MOST_BYTES if process.tasks is not None else MOST_TASKS_BYTES):
                process.lose(f"sent a message of {len(frame) >> 20} MiB")
                continue
            try:
                message = decode(frame)
            except ProtocolError as error:
                process.lose(f"sent a broken message: {error}")
                continue
            await self._handle(process, message)

    async def _handle(self, process: WorkerProcess, message: Message) -> None:
        process.heard = time.monotonic()
        if isinstance(message, Hello):
            await self._greet(process, message)
        elif isinstance(message, Heartbeat):
            process.hear(message)
            self._pools[process.identity].fill()
        elif not process.hello:
            process.lose(f"sent {message.kind!r} before its hello")
        elif isinstance(message, Result):
            self._take(process, message)
        elif isinstance(message, Ready):
            process.ready = message
            await self._send(process, ListTasks())
        elif isinstance(message, Tasks):
            self._welcome(process, message)
        elif isinstance(message, LoadFailed):
            self._not_loaded(process, message.message)
        else:
            process.lose(f"sent an unexpected {message.kind!r}")

    async def _greet(self, process: WorkerProcess, hello: Hello) -> None:
        config = self._pools[process.identity].config
        if not secrets.compare_digest(hello.token.encode(), self._token.encode()):
            process.lose("sent a wrong token")
        elif hello.version != VERSION:
            self.fail(
                UserError(
                    f"the worker of {config.name!r} speaks protocol {hello.version}, this is "
                    f"{VERSION}: its Python environment holds another prime-rl"
                )
            )
            process.lose("protocol version")
        else:
            process.hello = True
            await self._send(process, self._setup(config))

    def _take(self, process: WorkerProcess, message: Result) -> None:
        if not 0 < message.request <= process.requests:
            process.lose(f"sent a result of request {message.request}, which it never had")
            return
        future = process.pending.get(message.request)
        if future is not None and not future.done():  # else it comes too late, or twice
            self._pools[process.identity].finish(process)
            future.set_result(message.episode)

    def _not_loaded(self, process: WorkerProcess, why: str) -> None:
        pool = self._pools[process.identity]
        if (python := pool.config.python) is not None:
            why += f"; its Python is {python} (`uv pip install --python {python} …`)"
        if pool.info is None:  # it never loaded: no use trying again
            withheld = f"; not passed to it: {', '.join(pool.withheld)} (see its `secrets`)" if pool.withheld else ""
            self.fail(UserError(f"{why} (log: {pool.log.path}){withheld}"))
        process.lose(why)

    def _welcome(self, process: WorkerProcess, message: Tasks) -> None:
        pool = self._pools[process.identity]
        if process.ready is None or process.tasks is not None:
            process.lose("sent tasks that it was not asked for")
            return
        if wrong := [task_id for task_id in message.task_ids if not isinstance(task_id, str)]:
            process.lose(f"named a task {wrong[0]!r}, which is no text")
            return
        process.tasks = message.task_ids
        if pool.info is None:
            pool.info = process.ready
            listed = [TaskInfo(task_id, index) for index, task_id in enumerate(message.task_ids)]
            pool.tasks = EndlessTasks(message.stream) if message.stream else listed
        pool.welcome(process)

    async def _send(self, process: WorkerProcess, message: Message) -> None:
        if process.lost.done() or self._socket is None:
            return
        try:
            frames = [process.identity.encode(), encode(message)]
            await self._socket.send_multipart(frames)  # bounded: it has room for any number (SNDHWM 0)
        except zmq.ZMQError as error:  # ROUTER_MANDATORY: the peer is gone
            process.lose(f"unreachable: {error}")

    # ---- waiting

    async def _autoscale(self) -> None:
        """Give the environments the workers that their load calls for; the one with the fewest takes idle cores first."""
        cores = IdleCores()
        while True:  # bounded: `close` cancels it
            await asyncio.sleep(AUTOSCALE_SECONDS)
            idle = cores.measure()
            for pool in sorted(self._envs.values(), key=lambda pool: len(pool.workers)):
                idle -= pool.scale(idle)

    async def _await_ready(self, pool: WorkerPool) -> None:
        """Wait until all workers of an environment are ready. Raises why they are not, which their pool finds first as a rule."""

        def all_ready() -> bool:
            if self.failure is not None:
                raise self.failure
            return pool.ready

        await wait_async(
            all_ready,
            subject="ready worker",
            owner=f"environment {pool.config.name!r}",
            seconds=self.start_timeout + HEARTBEAT_TIMEOUT,
            poll=LEAST_POLL_SECONDS,
        )

    @property
    def _address(self) -> str:
        assert self._directory is not None
        return f"ipc://{self._directory}/pool"


def _v1(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"
