"""Orchestrator side of the environment workers: start them, send episodes, survive what they do.

An environment's faults are outcomes of its episodes, never exceptions here. A dead or hung worker fails the episodes
it had with `worker_died` and is started again with backoff; one that keeps dying without finishing a single episode
ends the pool with a UserError that quotes its log.
"""

import asyncio
import itertools
import logging
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

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import process
from prime_rl.envs.process import Life
from prime_rl.envs.protocol import (
    VERSION,
    Cancel,
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
from prime_rl.errors import UserError
from prime_rl.lifeline import Lifeline
from prime_rl.wait import LEAST_POLL_SECONDS, WaitTimeout, wait_async

logger = logging.getLogger("prime_rl.envs")

WATCH_SECONDS = 0.5
BEAT_TIMEOUT = 30.0
BACKOFF_SECONDS = (0.0, 1.0, 2.0, 5.0, 15.0)
MAX_DEATHS = 5  # in a row, of one worker, without one finished episode
LAST_WORDS_SECONDS = 5.0
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


class _Env:
    """An environment and its workers. `lives[i]` is None while worker i is down."""

    def __init__(self, config: EnvConfig, log: Path) -> None:
        self.config = config
        self.log = log
        self.lives: list[Life | None] = [None] * config.workers
        self.tasks: list[TaskInfo] = []
        self.info: Ready | None = None
        self.withheld: list[str] = []  # names of variables that its workers do not get

    def free_life(self) -> Life | None:
        """The ready worker with the fewest episodes."""
        ready = [life for life in self.lives if life is not None and life.tasks is not None and not life.lost.done()]
        return min(ready, key=lambda life: len(life.pending), default=None)


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
        `hang_timeout`: seconds that environment code may block a worker's event loop before it is restarted;
        `samplers`, `demonstrations`: of the environments that have one;
        `chat_timeout`: seconds without a byte of an answer, of an API that is asked by its chat route (None: by tokens)."""
        logs = Path(output_dir) / "logs" / "envs"
        names = [config.name for config in envs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"two environments are named {sorted(twice)[0]!r}: give each a `name` of its own")
        for config in envs:
            check_promised(config.name, config.secrets)
        self._configs = {config.name: config for config in envs}
        self._logs = {name: logs / f"{name.replace('/', '--')}.log" for name in names}
        self._envs: dict[str, _Env] = {}
        self._model = model
        self._base_urls = [_v1(url) for url in ([base_url] if isinstance(base_url, str) else base_url)]
        self._api_key = api_key
        self._samplers, self._demonstrations = samplers or {}, demonstrations or {}
        self._renderer, self._chat_timeout = renderer, chat_timeout
        self._log_level = log_level
        self._hang_timeout = hang_timeout
        self._start_timeout = 0.0
        self._token = secrets.token_urlsafe(16)
        self._requests = itertools.count(1)
        self._lives: dict[str, Life] = {}
        self._setups: dict[str, Setup] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: UserError | None = None
        self._lifeline: Lifeline | None = None
        self._directory: Path | None = None
        self._socket: Any = None
        self.restarts = 0

    async def start(self, timeout: float = 300.0) -> None:
        """Start every worker and wait until all are ready. `timeout` (seconds) also bounds later restarts.

        Raises UserError: not found, failing to import or load, bad arguments, no chat template, not ready in time.
        """
        self._start_timeout = timeout
        self._lifeline = Lifeline()
        self._directory = Path(tempfile.mkdtemp(prefix="prime-envs-"))  # short: socket paths are limited to 107 bytes
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self._address)
        self._start_task(self._receive())
        self._envs = {name: _Env(config, self._logs[name]) for name, config in self._configs.items()}
        for env in self._envs.values():
            for seat in range(env.config.workers):
                self._start_task(self._supervise(env, seat))
        try:
            for env in self._envs.values():
                await self._await_ready(env)
        except BaseException:
            await self.close()
            raise

    def tasks(self, env: str) -> list[TaskInfo]:
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
        """One episode; always returns a result by `deadline` (a `time.monotonic()` value) plus a short grace.

        `sampling`: temperature, top_p, top_k, min_p, max_tokens, min_tokens, seed …; None values are left out.
        `server`: the address of the one that samples it, with or without /v1.
        Cancelling the call cancels the episode and its engine requests. Raises UserError once the pool has failed.
        """
        state = self._envs[env]
        task = state.tasks[task_index]

        def failed(outcome: Outcome, message: str) -> EpisodeResult:
            return EpisodeResult(episode_id, env, task.task_id, outcome, message)

        life = await self._free_life(state, deadline)
        if life is None:
            return failed(Outcome.WORKER_DIED, f"no worker of {env!r} became ready before the deadline")
        sampler = self._samplers.get(env)
        base_url = _v1(sampler.base_url) if sampler else self._base_urls[0] if server is None else _v1(server)
        request = next(self._requests)
        future: asyncio.Future[EpisodeResult] = asyncio.get_running_loop().create_future()
        life.pending[request] = future
        timeout = max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(timeout + GRACE_SECONDS):
                await self._send(
                    life,
                    Run(request, episode_id, task_index, task.task_id, sampling, policy_version, base_url, timeout),
                )
                # Owed by the worker; `_supervise` fails it when the worker is gone.
                return await future
        except _WorkerGone as gone:
            return failed(Outcome.WORKER_DIED, str(gone))
        except TimeoutError:
            await self._send(life, Cancel(request))
            return failed(Outcome.TIMEOUT, f"no answer from the worker {GRACE_SECONDS:.0f} s after the deadline")
        except asyncio.CancelledError:
            await self._send(life, Cancel(request))
            raise
        finally:
            life.pending.pop(request, None)

    async def close(self) -> None:
        """End every worker (SIGTERM, then SIGKILL) and remove what was created. Bounded; may be called twice."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3 * process.TERM_SECONDS)
        self._tasks.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    # ---- supervision

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that the pool cannot do without: should it fail, the pool fails, and says so."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("the environment pool failed", exc_info=error)
                self._fail(UserError(f"the environment pool failed: {type(error).__name__}: {error}"))

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

    async def _supervise(self, env: _Env, seat: int) -> None:
        """Keep worker `seat` of `env` alive: start, watch, fail its episodes when it is gone, start again."""
        deaths = 0
        for generation in itertools.count():  # bounded: `close` cancels it; MAX_DEATHS in a row end it
            identity = f"{env.config.name}/{seat}/{generation}"
            try:
                life = await self._spawn(env, identity)
            except OSError as error:
                self._fail(UserError(f"cannot start a worker of {env.config.name!r}: {error}"))
                return
            env.lives[seat] = life
            why, hopeless = "the pool was closed", False
            try:
                why, hopeless = await self._watch(life)
            finally:
                env.lives[seat] = None
                self._forget(life, why)
                await process.end(life.process)
            if self._failure is not None:
                return
            deaths = 1 if life.finished else deaths + 1
            if (hopeless and generation == 0) or deaths >= MAX_DEATHS:
                times = (
                    f" {deaths} times in a row without finishing an episode" if deaths > 1 else " before it was ready"
                )
                log = process.tail(env.log)
                self._fail(UserError(f"worker of environment {env.config.name!r} died{times}: {why}\n{log}"))
                return
            logger.warning("worker %s: %s; starting it again (log: %s)", identity, why, env.log)
            self.restarts += 1
            await asyncio.sleep(BACKOFF_SECONDS[min(deaths, len(BACKOFF_SECONDS)) - 1])

    async def _watch(self, life: Life) -> tuple[str, bool]:
        """Why the life is over, and whether another one can be expected to end the same way: it ended by itself before it was ready."""
        exited = asyncio.create_task(life.process.wait())
        try:
            while True:  # bounded: by the life of the process; one that is stuck is `unhealthy`
                before = time.monotonic()
                either: set[asyncio.Future[Any]] = {exited, life.lost}
                await asyncio.wait(either, timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if life.lost.done():
                    return life.lost.result(), life.ready is None
                if exited.done():
                    if life.ready is None and exited.result() == 0:  # it has said why, and we may not have read it yet
                        await asyncio.wait({life.lost}, timeout=LAST_WORDS_SECONDS)
                        if life.lost.done():
                            continue
                    return process.describe_exit(exited.result()), life.ready is None and exited.result() >= 0
                now = time.monotonic()
                if now - before > 4 * WATCH_SECONDS:
                    life.heard = now  # it was we who did not listen
                elif why := life.unhealthy(now, self._start_timeout, BEAT_TIMEOUT, self._hang_timeout):
                    return why, not life.silent(now, BEAT_TIMEOUT) and life.tasks is None
        finally:
            exited.cancel()

    async def _spawn(self, env: _Env, identity: str) -> Life:
        config = env.config
        sampler, shown = self._samplers.get(config.name), self._demonstrations.get(config.name)
        self._setups[identity] = Setup(
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
        assert self._lifeline is not None
        variables = self._variables(env)
        life = await process.spawn(identity, self._address, config.python, variables, self._lifeline.pass_fds, env.log)
        self._lives[identity] = life
        return life

    def _variables(self, env: _Env) -> dict[str, str]:
        assert self._lifeline is not None
        assert self._directory is not None
        passed, withheld = passed_on(os.environ, env.config.secrets)
        if withheld and withheld != env.withheld:
            process.note(
                env.log, f"variables withheld from this environment (`secrets` passes them): {', '.join(withheld)}"
            )
        env.withheld = withheld
        sampler = self._samplers.get(env.config.name)
        own_python = env.config.python is not None
        servers = (
            [] if self._chat_timeout is not None else self._base_urls
        )  # others' are reached as the user's proxy has it
        return worker_variables(
            passed,
            lifeline=self._lifeline.env,
            token=self._token,
            base_urls=servers if sampler is None else [_v1(sampler.base_url)],
            api_key=self._api_key if sampler is None else sampler.api_key,
            path=process.expose_package(self._directory / "path") if own_python else None,
        )

    def _forget(self, life: Life, why: str) -> None:
        self._lives.pop(life.identity, None)
        self._setups.pop(life.identity, None)
        life.lose(why)
        for future in life.pending.values():
            if not future.done():
                future.set_exception(_WorkerGone(why))

    def _fail(self, error: UserError) -> None:
        """The pool cannot go on: every caller, waiting or coming, gets this error."""
        if self._failure is None:
            self._failure = error

    # ---- messages

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()  # bounded: owed by no one; `_watch` judges who sends nothing
            identity, frame = frames[0], frames[-1]
            life = self._lives.get(identity.decode(errors="replace").removesuffix("#heartbeat"))
            if life is None:
                continue  # of a life that is over
            try:
                message = decode(frame)
            except ProtocolError as error:
                life.lose(f"sent a broken message: {error}")
                continue
            await self._handle(life, message)

    async def _handle(self, life: Life, message: Message) -> None:
        life.heard = time.monotonic()
        if isinstance(message, Hello):
            await self._greet(life, message)
        elif isinstance(message, Heartbeat):
            life.beat = message
        elif not life.hello:
            life.lose(f"sent {message.kind!r} before its hello")
        elif isinstance(message, Result):
            future = life.pending.get(message.request)
            if future is not None and not future.done():  # else it comes too late, or twice
                life.finished += 1
                future.set_result(message.episode)
        elif isinstance(message, Ready):
            life.ready = message
            await self._send(life, ListTasks())
        elif isinstance(message, Tasks):
            self._welcome(life, message)
        elif isinstance(message, LoadFailed):
            env = self._envs[self._setups[life.identity].name]
            if env.info is None:  # it never loaded: no use trying again
                withheld = f"; not passed to it: {', '.join(env.withheld)} (see its `secrets`)" if env.withheld else ""
                self._fail(UserError(f"{message.message} (log: {env.log}){withheld}"))
            life.lose(message.message)
        else:
            life.lose(f"sent an unexpected {message.kind!r}")

    async def _greet(self, life: Life, hello: Hello) -> None:
        if not secrets.compare_digest(hello.token, self._token):
            life.lose("sent a wrong token")
        elif hello.version != VERSION:
            self._fail(
                UserError(
                    f"the worker of {self._setups[life.identity].name!r} speaks protocol {hello.version}, this is "
                    f"{VERSION}: its Python environment holds another prime-rl"
                )
            )
            life.lose("protocol version")
        else:
            life.hello = True
            await self._send(life, self._setups[life.identity])

    def _welcome(self, life: Life, message: Tasks) -> None:
        env = self._envs[self._setups[life.identity].name]
        life.tasks = message.task_ids
        if env.info is None:
            env.info = life.ready
            env.tasks = [TaskInfo(task_id, index) for index, task_id in enumerate(message.task_ids)]

    async def _send(self, life: Life, message: Message) -> None:
        if life.lost.done() or self._socket is None:
            return
        try:
            frames = [life.identity.encode(), encode(message)]
            await self._socket.send_multipart(frames)  # bounded: it has room for any number (SNDHWM 0)
        except zmq.ZMQError as error:  # ROUTER_MANDATORY: the peer is gone
            life.lose(f"unreachable: {error}")

    # ---- waiting

    async def _await_ready(self, env: _Env) -> None:
        """All workers of `env` are ready, or the reason why not, which `_watch` finds first as a rule."""

        def all_ready() -> bool:
            self._raise_failure()
            return all(life is not None and life.tasks is not None for life in env.lives)

        await wait_async(
            all_ready,
            subject="ready worker",
            owner=f"environment {env.config.name!r}",
            seconds=self._start_timeout + BEAT_TIMEOUT,
            poll=LEAST_POLL_SECONDS,
        )

    async def _free_life(self, env: _Env, deadline: float) -> Life | None:
        """A worker for an episode, None when there is none by the deadline (a `time.monotonic()` value)."""

        def free() -> Life | None:
            self._raise_failure()
            return env.free_life()

        owner = f"environment {env.config.name!r}"
        seconds = deadline - time.monotonic()
        try:
            return await wait_async(free, subject="free worker", owner=owner, seconds=seconds, poll=LEAST_POLL_SECONDS)
        except WaitTimeout:
            return None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def _address(self) -> str:
        assert self._directory is not None
        return f"ipc://{self._directory}/pool"


def _v1(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"


class _WorkerGone(Exception):
    """The worker that ran the episode is dead or was given up."""
