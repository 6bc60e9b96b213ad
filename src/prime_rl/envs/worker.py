"""An environment worker: `python -m prime_rl.envs.worker --address ipc://… --identity …`, started by `pool`.

One event loop runs the episodes; a thread sends heartbeats, so that code which blocks the loop is named and not taken for a dead process. Imports the
standard library, pyzmq and msgpack until it knows which adapter it needs.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

import zmq
import zmq.asyncio

from prime_rl import faults, lifeline, processes
from prime_rl.envs import protocol
from prime_rl.envs.adapter import Adapter, load
from prime_rl.envs.attribution import attribute_steps, attributed, describe
from prime_rl.envs.ids import Broken, LoadError
from prime_rl.envs.protocol import MOST_BYTES, EpisodeResult, Outcome, Setup, decode, encode

HEARTBEAT_SECONDS = 1.0
TICK_SECONDS = 0.2
LAG_SECONDS = 2.0  # below this a heartbeat does not look at where the loop is
MAX_THREADS = 64  # Python's own number is six on two cores: too few where some never end

logger = logging.getLogger("prime_rl.envs.worker")


class _WaitTimer(selectors.DefaultSelector):
    """Adds up the seconds in which the event loop waits for something to do."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begin = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            self.seconds += time.monotonic() - begin


class WorkerServer:
    """Serve one environment to the pool at `address`."""

    def __init__(self, address: str, identity: str, timer: _WaitTimer) -> None:
        self._address, self._identity, self._timer = address, identity, timer
        self._ticked = math.inf  # until the environment is loaded: imports and downloads may block the loop
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._running: WeakValueDictionary[int, asyncio.Task[None]] = WeakValueDictionary()

    async def serve(self, setup: Setup) -> None:
        """Load the environment, and run episodes until SIGTERM or SIGINT, or until the lifeline ends this process."""
        this_task = asyncio.current_task()
        assert this_task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, this_task.cancel)
        self._socket.connect(self._address)
        threading.Thread(target=self._beat, args=(threading.get_ident(),), name="heartbeat", daemon=True).start()
        async with contextlib.AsyncExitStack() as exit_stack:
            try:
                env = await exit_stack.enter_async_context(load(setup))
            except (LoadError, ModuleNotFoundError) as error:
                traceback.print_exc()
                why, python = str(error), sys.executable
                if isinstance(error, ModuleNotFoundError):
                    why = f"environment {setup.env_id!r} needs the module {error.name!r}, which {python} does not have"
                await self._send(protocol.Failed(why))
                await asyncio.Event().wait()  # bounded: the pool ends this process
                return
            # Modules and tasks stay to the end: a full collection over them would block the loop for 0.4 s, every few hundred episodes.
            gc.collect()
            gc.freeze()
            await self._send(protocol.Ready(env.task_ids, env.bounded))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tick())
                await self._receive(env, setup, group)

    async def _receive(self, env: Adapter, setup: Setup, group: asyncio.TaskGroup) -> None:
        while True:
            frame = await self._socket.recv()  # bounded: the next command is the pool's to give; SIGTERM ends it
            match decode(frame):
                case protocol.Run() as run:
                    task = group.create_task(self._episode(env, setup.name, run), context=attributed(run.request))
                    self._running[run.request] = task
                case protocol.Cancel(request=request):
                    if (running := self._running.get(request)) is not None:
                        running.cancel()
                case other:
                    raise RuntimeError(f"unexpected message {other.kind!r}")

    async def _episode(self, env: Adapter, name: str, run: protocol.Run) -> None:
        def failed(outcome: Outcome, message: str) -> EpisodeResult:
            return EpisodeResult(run.episode_id, name, run.task_id, outcome, message)

        broken = ""
        try:
            if env.task_ids[run.task_index : run.task_index + 1] != [run.task_id]:
                raise LookupError(f"task {run.task_index} is another one here: the environment loads others each time")
            async with asyncio.timeout(run.timeout):
                if faults.point(f"run:{name}") == "error":
                    raise RuntimeError("fault injection")
                result = await env.run(run)
        except TimeoutError:
            result = failed(Outcome.TIMEOUT, f"not finished within {run.timeout:.0f} s")
        except asyncio.CancelledError:
            result = failed(Outcome.CANCELLED, "cancelled")
        except Broken as error:
            broken = str(error)
            result = failed(Outcome.ERRORED, broken)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an episode's failure must stay an outcome of that episode
            traceback.print_exc()
            result = failed(Outcome.ERRORED, f"{type(error).__name__}: {error}")
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
        if broken:
            await self._send(protocol.Failed(broken))

    async def _send(self, message: protocol.Message) -> None:
        await self._socket.send(encode(message))  # bounded: the pool reads, or the lifeline ends this process

    async def _tick(self) -> None:
        while True:  # bounded: cancelled at the end of `serve`
            self._ticked = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)

    def _beat(self, main_thread: int) -> None:
        """Send heartbeats, from a thread: sockets are not shared between threads, so it has one of its own."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{self._identity}#heartbeat".encode())
        socket.connect(self._address)
        before = self._counters()
        while True:  # bounded: a daemon thread
            time.sleep(HEARTBEAT_SECONDS)
            now = self._counters()
            wall, computed, waited = (new - old for new, old in zip(now, before, strict=True))
            before = now
            lag = max(0.0, now[0] - self._ticked)
            where = describe(sys._current_frames().get(main_thread)) if lag > LAG_SECONDS else ""
            use = 0.0 if self._ticked == math.inf else min(1.0, max(computed, wall - waited) / wall)
            with contextlib.suppress(zmq.Again):  # the pool does not read: it judges by what it gets
                socket.send(encode(protocol.Heartbeat(lag, where, use)), zmq.NOBLOCK)

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
    parser.add_argument("--setup", type=Path, required=True, help="file with the setup message")
    parser.add_argument("--page", type=Path, required=True, help="file that says whose code runs")
    args = parser.parse_args()
    setup = decode(args.setup.read_bytes())
    assert isinstance(setup, Setup)
    _set_up_logging(setup.log_level)
    timer = _WaitTimer()
    loop = asyncio.SelectorEventLoop(timer)
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="environment"))
    attribute_steps(loop, args.page)

    async def serve() -> None:
        await WorkerServer(args.address, args.identity, timer).serve(setup)

    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(serve())
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
    os.environ.update(LOGURU_LEVEL=level.upper(), LOGURU_DIAGNOSE="0")


if __name__ == "__main__":
    main()
