"""An environment worker: `python -m prime_rl.envs.worker --address ipc://… --identity …`, started by `pool`.

One event loop runs the episodes; a thread sends heartbeats, so that code which blocks the loop is seen and named,
not taken for a dead process. Imports the standard library, pyzmq and msgpack until it knows which adapter it needs.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import logging
import math
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from prime_rl import faults, lifeline, processes
from prime_rl.envs.adapter import Adapter, load
from prime_rl.envs.attribution import FATAL, Attribution, Page, describe, explain
from prime_rl.envs.ids import LoadError
from prime_rl.envs.protocol import (
    MOST_BYTES,
    TOKEN_VAR,
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
    Ready,
    Result,
    Run,
    Setup,
    Tasks,
    decode,
    encode,
)
from prime_rl.envs.threads import Threads

HEARTBEAT_SECONDS = 1.0
TICK_SECONDS = 0.2
LAG_SECONDS = 2.0  # below this a heartbeat does not look at where the loop is
SETUP_SECONDS = 60.0
CLOSE_SECONDS = 3.0
LATE_SECONDS = 2.0  # that an episode may block the loop beyond its deadline

logger = logging.getLogger("prime_rl.envs.worker")


class _WaitTimer(selectors.DefaultSelector):
    """Measures for how long the event loop has waited for something to do."""

    def __init__(self) -> None:
        super().__init__()
        self._waited, self._since = 0.0, math.inf  # since when it waits now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._since = begin = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            self._since = math.inf
            self._waited += time.monotonic() - begin

    @property
    def seconds(self) -> float:
        """Seconds waited so far. From any thread."""
        return self._waited + max(0.0, time.monotonic() - self._since)


class WorkerServer:
    def __init__(
        self, address: str, identity: str, token: str, attribution: Attribution, hang_timeout: float, timer: _WaitTimer
    ) -> None:
        self._address = address
        self._timer = timer
        self._attribution, self._hang_timeout = attribution, hang_timeout
        self._identity = identity
        self._token = token
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._ticked = time.monotonic()
        self._loaded = False  # until then the loop is blocked by imports and downloads, and rightly so
        self._stop = asyncio.Event()
        self._stopped = threading.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._deadlines: dict[int, float] = {}
        self._threads = Threads()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._socket.connect(self._address)
        main_thread = threading.get_ident()
        threading.Thread(target=self._beat, args=(main_thread,), name="heartbeat", daemon=True).start()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._send(Hello(VERSION, self._token, os.getpid()))
            async with asyncio.timeout(SETUP_SECONDS):
                setup = decode(await self._socket.recv())
            if not isinstance(setup, Setup):
                raise RuntimeError(f"expected a setup message, got {setup.kind}")
            await self._load_and_run(setup)
        finally:
            self._stopped.set()
            ticker.cancel()
            self._socket.close()

    async def _load_and_run(self, setup: Setup) -> None:
        _set_up_logging(setup.log_level)
        exit_stack = contextlib.AsyncExitStack()
        # verifiers and its dependencies take seconds to import: only after the hello.
        try:
            env = await exit_stack.enter_async_context(load(setup))
        except (LoadError, ModuleNotFoundError) as error:
            traceback.print_exc()
            await self._send(LoadFailed(_not_loaded(setup, error)))
            return
        self._attribution.watch(self._overdue)
        asyncio.get_running_loop().set_default_executor(self._threads)
        # Modules and tasks stay to the end: a full collection over them would block the loop for 0.4 s, every few hundred episodes.
        gc.collect()
        gc.freeze()
        async with exit_stack:
            self._ticked = time.monotonic()
            self._loaded = True
            slots = asyncio.Semaphore(setup.max_concurrent)
            await self._send(Ready(env.renderer, env.arguments))
            stop = asyncio.create_task(self._stop.wait())
            receive = asyncio.create_task(self._receive(env, setup.name, slots))
            # The lifeline ends this process when the pool is gone.
            either = {stop, receive}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)  # bounded: `stop` is SIGTERM
            for task in (stop, receive, *self._running.values()):
                task.cancel()
            await asyncio.wait({receive, *self._running.values()}, timeout=CLOSE_SECONDS)
            if not receive.cancelled() and receive.exception() is not None:
                raise RuntimeError("the command loop failed") from receive.exception()

    async def _receive(self, env: Adapter, name: str, slots: asyncio.Semaphore) -> None:
        while True:
            frame = await self._socket.recv()  # bounded: the next command is the pool's to give; SIGTERM ends it
            match decode(frame):
                case Run() as run:
                    self._begin(run, self._episode(env, name, run, slots))
                case Cancel(request=request):
                    if request in self._running:
                        self._running[request].cancel()
                case ListTasks():
                    await self._send(Tasks(env.task_ids, env.stream))
                case other:
                    raise RuntimeError(f"unexpected message {other.kind!r}")

    def _begin(self, run: Run, episode: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:  # also one that was cancelled before it began
            self._running.pop(run.request, None)
            self._deadlines.pop(run.request, None)

        self._deadlines[run.request] = time.monotonic() + run.timeout
        self._running[run.request] = self._attribution.start(episode, run.request)
        self._running[run.request].add_done_callback(ended)

    async def _episode(self, env: Adapter, name: str, run: Run, slots: asyncio.Semaphore) -> None:
        def failed(outcome: Outcome, message: str) -> EpisodeResult:
            return EpisodeResult(run.episode_id, name, run.task_id, outcome, message)

        if env.stream:
            known = [EndlessTasks(env.stream)[run.task_index].task_id]
        else:
            known = env.task_ids[run.task_index : run.task_index + 1]
        if known != [run.task_id]:
            message = f"task {run.task_index} is not {run.task_id!r} here: the environment loads other tasks each time"
            result = failed(Outcome.ERRORED, message)
        else:
            try:
                async with asyncio.timeout(run.timeout), slots:
                    if faults.point(f"run:{name}") == "error":
                        raise RuntimeError("fault injection")
                    result = await env.run(
                        run.task_index, run.sampling, run.policy_version, run.episode_id, run.base_url
                    )
            except TimeoutError:
                result = failed(Outcome.TIMEOUT, f"not finished within {run.timeout:.0f} s")
            except asyncio.CancelledError:
                result = failed(Outcome.CANCELLED, "cancelled")
            except (*FATAL, Exception) as error:  # noqa: BLE001 - an episode's failure must stay an outcome of that episode
                traceback.print_exc()
                result = failed(Outcome.ERRORED, explain(error))
        fault = faults.point(f"result:{name}")
        if fault == "error":
            result = failed(Outcome.ERRORED, "fault injection")
        for _ in range({"drop": 0, "duplicate": 2}.get(fault or "", 1)):
            await self._socket.send(
                _frame(run, name, result)
            )  # bounded: the pool reads, or the lifeline ends this process

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))  # bounded: the pool reads, or the lifeline ends this process

    def _overdue(self, request: int) -> str:
        """See `Attribution.watch`."""
        now = time.monotonic()
        lag = now - self._ticked
        late = min(lag, now - self._deadlines.get(request, now)) > LATE_SECONDS
        return f"{lag:.0f} s" if lag > self._hang_timeout or late else ""

    async def _tick(self) -> None:
        while True:  # bounded: cancelled at the end of `serve`
            self._ticked = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)

    def _beat(self, main_thread: int) -> None:
        """Thread: sockets are not shared between threads, so heartbeats have their own."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._identity}#heartbeat".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        before = self._counters()
        while not self._stopped.wait(HEARTBEAT_SECONDS):  # bounded: a daemon thread; `serve` sets it at its end
            now = self._counters()
            wall, computed, waited = (new - old for new, old in zip(now, before, strict=True))
            before = now
            use = min(1.0, max(computed, wall - waited) / wall)
            lag = time.monotonic() - self._ticked if self._loaded else 0.0
            where = describe(sys._current_frames().get(main_thread)) if lag > LAG_SECONDS else ""
            if self._loaded:
                self._attribution.interrupt(main_thread)
                self._threads.interrupt(lambda request: request not in self._running)
            try:
                socket.send(encode(Heartbeat(lag, where, use if self._loaded else 0.0)), zmq.NOBLOCK)
            except zmq.Again:  # the pool does not read: it will judge by what it gets
                continue
        socket.close()

    def _counters(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of processor time of all threads, and of the event loop's waits."""
        return time.monotonic(), time.process_time(), self._timer.seconds


def _frame(run: Run, name: str, result: EpisodeResult) -> bytes:
    """What is sent of a result: an environment may have put anything into it."""
    fault = ""
    try:
        frame = encode(Result(run.request, result))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        traceback.print_exc()
        fault = f"cannot be sent: {type(error).__name__}: {error}"
    else:
        if len(frame) <= MOST_BYTES:
            return frame
        fault = f"is of {len(frame) >> 20} MiB, {MOST_BYTES >> 20} are allowed"
    message = f"the environment's result {fault}"
    return encode(Result(run.request, EpisodeResult(run.episode_id, name, run.task_id, Outcome.INVALID, message)))


def _not_loaded(setup: Setup, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"environment {setup.env_id!r} needs the module {error.name!r}, which {sys.executable} does not have"
    return str(error)


def main() -> None:
    lifeline.watch()
    faulthandler.enable()  # the last words of one that an extension kills
    processes.offer_to_the_kernel()
    faults.arm("environment")
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--page", type=Path, required=True, help="file that says whose code runs")
    parser.add_argument("--hang-timeout", type=float, required=True, help="seconds that code may block the event loop")
    args = parser.parse_args()
    token = os.environ.pop(TOKEN_VAR, "")  # not for the programs that an environment starts
    timer = _WaitTimer()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(timer)) as runner:
        runner.run(_serve(args, token, timer))
    zmq.asyncio.Context.instance().term()  # the last message leaves: waits for as long as the socket lingers, a second
    # All is closed. Taking the interpreter apart would collect verifiers' whole object graph: seconds on a busy machine.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _set_up_logging(level: str) -> None:
    """Lines as `monitor.log` writes them into files, to stderr. Of libraries, unless for debugging, what is a warning at least."""
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        level=own if level == "debug" else max(own, logging.WARNING),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    logging.getLogger("prime_rl").setLevel(own)
    # For libraries that use loguru, which reads this when it is imported. `diagnose` would show the values of variables.
    lines = {
        "FORMAT": "{time:YYYY-MM-DD HH:mm:ss} {level: <7} {name}: {message}",
        "LEVEL": level.upper(),
        "DIAGNOSE": "0",
    }
    os.environ.update({f"LOGURU_{name}": value for name, value in lines.items()})


async def _serve(args: argparse.Namespace, token: str, timer: _WaitTimer) -> None:
    await WorkerServer(
        args.address, args.identity, token, Attribution(Page(args.page)), args.hang_timeout, timer
    ).serve()


if __name__ == "__main__":
    main()
