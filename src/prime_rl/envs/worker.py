"""An environment worker: `python -m prime_rl.envs.worker --address ipc://… --identity …`, started by `pool`.

One event loop runs the episodes; a thread sends heartbeats, so that code which blocks the loop is named and not taken for a dead process. Imports the
standard library, pyzmq and msgpack until it knows which adapter it needs.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import functools
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
from pathlib import Path

import zmq
import zmq.asyncio

from prime_rl import faults, lifeline, processes
from prime_rl.envs import protocol
from prime_rl.envs.adapter import Adapter, load
from prime_rl.envs.attribution import FATAL, Attribution, describe, explain
from prime_rl.envs.ids import Broken, LoadError
from prime_rl.envs.protocol import MOST_BYTES, EpisodeResult, Outcome, Setup, decode, encode

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
    """Serve one environment to the pool at `address`."""

    def __init__(
        self, address: str, identity: str, attribution: Attribution, hang_timeout: float, timer: _WaitTimer
    ) -> None:
        self._address, self._identity = address, identity
        self._attribution, self._hang_timeout, self._timer = attribution, hang_timeout, timer
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._ticked = time.monotonic()
        self._loaded = False  # until then imports and downloads may block the loop
        self._stop = asyncio.Event()
        self.broken = False  # by an episode: another worker is to take over
        self._stopped = threading.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._deadlines: dict[int, float] = {}

    async def serve(self) -> None:
        """Say hello, load the environment, and run episodes until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._socket.connect(self._address)
        threading.Thread(target=self._beat, args=(threading.get_ident(),), name="heartbeat", daemon=True).start()
        ticker = asyncio.create_task(self._tick())
        try:
            await self._send(protocol.Hello(protocol.VERSION))
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
        async with contextlib.AsyncExitStack() as exit_stack:
            try:  # verifiers and its dependencies take seconds to import: only after the hello
                env = await exit_stack.enter_async_context(load(setup))
            except (LoadError, ModuleNotFoundError) as error:
                traceback.print_exc()
                why, python = str(error), sys.executable
                if isinstance(error, ModuleNotFoundError):
                    why = f"environment {setup.env_id!r} needs the module {error.name!r}, which {python} does not have"
                await self._send(protocol.LoadFailed(why))
                return
            self._attribution.watch(self._overdue)
            # Modules and tasks stay to the end: a full collection over them would block the loop for 0.4 s, every few hundred episodes.
            gc.collect()
            gc.freeze()
            self._ticked, self._loaded = time.monotonic(), True
            await self._send(protocol.Ready(env.task_ids, env.bounded))
            stop = asyncio.create_task(self._stop.wait())
            receive = asyncio.create_task(self._receive(env, setup))
            either = {stop, receive}
            # The lifeline ends this process when the pool is gone.
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)  # bounded: `stop` is SIGTERM
            for task in (stop, receive, *self._running.values()):
                task.cancel()
            await asyncio.wait({receive, *self._running.values()}, timeout=CLOSE_SECONDS)
            if not receive.cancelled() and receive.exception() is not None:
                raise RuntimeError("the command loop failed") from receive.exception()

    async def _receive(self, env: Adapter, setup: Setup) -> None:
        slots = asyncio.Semaphore(setup.max_concurrent)  # bounded: by the deadlines of the episodes that hold it
        while True:
            frame = await self._socket.recv()  # bounded: the next command is the pool's to give; SIGTERM ends it
            match decode(frame):
                case protocol.Run() as run:
                    self._deadlines[run.request] = time.monotonic() + run.timeout
                    task = self._attribution.start(self._episode(env, setup.name, run, slots), run.request)
                    self._running[run.request] = task
                    task.add_done_callback(functools.partial(self._forget, run.request))
                case protocol.Cancel(request=request):
                    if request in self._running:
                        self._running[request].cancel()
                case other:
                    raise RuntimeError(f"unexpected message {other.kind!r}")

    def _forget(self, request: int, _: asyncio.Task[None]) -> None:
        del self._running[request], self._deadlines[request]

    async def _episode(self, env: Adapter, name: str, run: protocol.Run, slots: asyncio.Semaphore) -> None:
        def failed(outcome: Outcome, message: str) -> EpisodeResult:
            return EpisodeResult(run.episode_id, name, run.task_id, outcome, message)

        try:
            if env.task_ids[run.task_index : run.task_index + 1] != [run.task_id]:
                message = (
                    f"task {run.task_index} is not {run.task_id!r} here: the environment loads other tasks each time"
                )
                result = failed(Outcome.ERRORED, message)
            else:
                async with asyncio.timeout(run.timeout), slots:
                    if faults.point(f"run:{name}") == "error":
                        raise RuntimeError("fault injection")
                    result = await env.run(run)
        except TimeoutError:
            result = failed(Outcome.TIMEOUT, f"not finished within {run.timeout:.0f} s")
        except asyncio.CancelledError:
            if self.broken:
                return  # the pool has the episode run again when this worker is gone
            result = failed(Outcome.CANCELLED, "cancelled")
        except Broken as error:
            self.broken = True
            result = failed(Outcome.ERRORED, str(error))
        except (*FATAL, Exception) as error:  # noqa: BLE001 - an episode's failure must stay an outcome of that episode
            traceback.print_exc()
            result = failed(Outcome.ERRORED, explain(error))
        fault = faults.point(f"result:{name}")
        if fault == "error":
            result = failed(Outcome.ERRORED, "fault injection")
        try:  # an environment may have put anything into it
            frame = encode(protocol.Result(run.request, result))
            wrong = f"is of {len(frame) >> 20} MiB, {MOST_BYTES >> 20} are allowed" if len(frame) > MOST_BYTES else ""
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            traceback.print_exc()
            wrong = f"cannot be sent: {type(error).__name__}: {error}"
        if wrong:
            frame = encode(protocol.Result(run.request, failed(Outcome.INVALID, f"the environment's result {wrong}")))
        for _ in range({"drop": 0, "duplicate": 2}.get(fault or "", 1)):
            await self._socket.send(frame)  # bounded: the pool reads, or the lifeline ends this process
        if self.broken:
            self._stop.set()

    async def _send(self, message: protocol.Message) -> None:
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
        """Send heartbeats, from a thread: sockets are not shared between threads, so it has one of its own."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._identity}#heartbeat".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        before = self._counters()
        while not self._stopped.wait(HEARTBEAT_SECONDS):  # bounded: a daemon thread; `serve` sets it at its end
            now = self._counters()
            wall, computed, waited = (new - old for new, old in zip(now, before, strict=True))
            before = now
            heartbeat = protocol.Heartbeat(0.0, "", 0.0)
            if self._loaded:
                lag = time.monotonic() - self._ticked
                where = describe(sys._current_frames().get(main_thread)) if lag > LAG_SECONDS else ""
                heartbeat = protocol.Heartbeat(lag, where, min(1.0, max(computed, wall - waited) / wall))
                self._attribution.interrupt(main_thread, self._running)
            with contextlib.suppress(zmq.Again):  # the pool does not read: it judges by what it gets
                socket.send(encode(heartbeat), zmq.NOBLOCK)
        socket.close()

    def _counters(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of processor time of all threads, and of the event loop's waits."""
        return time.monotonic(), time.process_time(), self._timer.seconds


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
    timer, attribution = _WaitTimer(), Attribution(args.page)

    async def serve() -> bool:
        server = WorkerServer(args.address, args.identity, attribution, args.hang_timeout, timer)
        await server.serve()
        return server.broken

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(timer)) as runner:
        broken = runner.run(serve())
    zmq.asyncio.Context.instance().term()  # the last message leaves: waits for as long as the socket lingers, a second
    # All is closed. Taking the interpreter apart would collect verifiers' whole object graph: seconds on a busy machine.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(int(broken))


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


if __name__ == "__main__":
    main()
