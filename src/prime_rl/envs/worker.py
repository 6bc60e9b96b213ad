"""An environment worker: `python -m prime_rl.envs.worker ADDRESS IDENTITY SETUP PAGE`, started by `pool`.

The last two are files. One event loop runs the episodes, and says in a page of shared memory that it comes round.
Imports the standard library, pyzmq and msgpack until it knows which adapter it needs.
"""

import asyncio
import contextlib
import contextvars
import faulthandler
import functools
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union
from weakref import WeakValueDictionary

import zmq
import zmq.asyncio

from prime_rl import faults, processes
from prime_rl.envs import protocol
from prime_rl.envs.ids import CLASSIC, Broken, LoadError, check_version, describe, find, kind_of
from prime_rl.envs.protocol import MOST_BYTES, Outcome, Page, Run, Setup, decode, encode
from prime_rl.envs.trial import find_fault
from prime_rl.errors import UserError

if TYPE_CHECKING:
    from prime_rl.envs.conversation import ConversationEnv
    from prime_rl.envs.verifiers_v1 import VerifiersEnv

TICK_SECONDS = 0.2
HANG_SECONDS = 60.0  # for which environment code may block the event loop
MEAN_SECONDS = 1.5  # over which the use of a core is averaged
_request: contextvars.ContextVar[int] = contextvars.ContextVar("request", default=0)  # whose code runs
MAX_THREADS = 64  # Python's own number is six on two cores: too few where some never end

# A loaded environment: its `task_ids` are durable and unique, in its own order; it runs episodes while it is entered.
Adapter = Union["ConversationEnv", "VerifiersEnv"]


def load(setup: Setup) -> Adapter:
    """The environment of a setup, loaded. Raises LoadError, which names it: it is not there, or cannot be used as it is
    set up."""
    check_version(setup.env_id)
    name = f"environment {setup.env_id!r}"
    try:
        return _adapter(setup)(setup)
    except UserError as error:
        raise LoadError(f"{name}: {error}") from error
    except ModuleNotFoundError as error:
        raise LoadError(f"{name} needs the module {error.name!r}, which {sys.executable} does not have") from error
    except Exception as error:
        raise LoadError(f"{name} failed to load: {describe(error)}") from error


def _adapter(setup: Setup) -> Callable[[Setup], Adapter]:
    """What loads environments of this kind, imported. Raises LoadError: there is none here."""
    kind = kind_of(setup.env_id) if setup.adapter == "auto" else setup.adapter
    if kind != "verifiers" and (setup.demonstration or setup.chat_timeout):
        wish = "demonstrated to a teacher" if setup.demonstration else "evaluated on APIs by their chat route"
        raise LoadError(f"tasks of {kind} environments cannot be {wish}")
    if kind == "python":
        from prime_rl.envs.plain import PlainEnv

        return PlainEnv
    if kind == "classic":
        if find_spec("verifiers.legacy") is None:
            raise LoadError(CLASSIC)
        from prime_rl.envs.classic import ClassicEnv

        return ClassicEnv
    installed = metadata.version("verifiers")
    if not installed.startswith("0.4."):
        fault = "not found" if find(setup.env_id) is None else "it is written for verifiers.v1"
        raise LoadError(
            f"{fault}: its Python environment has verifiers {installed}; classic "
            "environments run with verifiers 0.3.1, those of verifiers.v1 with 0.4.0 alone"
        )
    from prime_rl.envs.verifiers_v1 import VerifiersEnv

    return VerifiersEnv


class WorkerLoop(asyncio.SelectorEventLoop):
    """An event loop that shows in the page whose code it runs and how much of a core is used, and does not hang."""

    def __init__(self, page: Page) -> None:
        self._page = page
        super().__init__()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Schedule a callback: a step of a task, above all, which has the context of its episode."""
        request = _request.get() if context is None else context.get(_request, 0)  # bounded: of a context
        if request:
            return super().call_soon(self._attributed, request, callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    def _attributed(self, request: int, callback: Callable[..., object], *args: Any) -> None:
        self._page.request = request
        try:
            callback(*args)
        except SystemExit:  # its task has failed of it; the loop goes on
            traceback.print_exc()
        finally:
            self._page.request = 0

    async def tick(self) -> None:
        """Measure, and end this process with a traceback once the event loop is blocked for `HANG_SECONDS`. Not before
        all is loaded: imports and downloads may block it."""
        while True:  # bounded: cancelled at the end of `serve`
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=2)  # whatever sys.stderr is by now
            before, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_SECONDS)
            passed = time.monotonic() - before
            use = max(time.process_time() - computed, passed - TICK_SECONDS) / passed
            self._page.use += (min(1.0, use) - self._page.use) * min(1.0, passed / MEAN_SECONDS)


class WorkerServer:
    """Serve one environment to the pool at `address`."""

    def __init__(self, address: str, identity: str, loop: WorkerLoop) -> None:
        self._address, self._loop = address, loop
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._running: WeakValueDictionary[int, asyncio.Task[None]] = WeakValueDictionary()

    async def serve(self, setup: Setup) -> None:
        """Load the environment, and run episodes until SIGTERM or SIGINT, or until the orchestrator is gone."""
        this_task = asyncio.current_task()
        assert this_task is not None
        self._socket.connect(self._address)
        gc.disable()  # imports and tasks would take a quarter longer, and stay to the end
        async with contextlib.AsyncExitStack() as exit_stack:
            try:
                env = load(setup)
                for number in (signal.SIGTERM, signal.SIGINT):  # only now: a classic environment takes them for itself
                    self._loop.add_signal_handler(number, this_task.cancel)
                if fault := await find_fault(env, setup):
                    raise LoadError(f"environment {setup.env_id!r}: every task fails, whatever the reply: {fault}")
                await exit_stack.enter_async_context(env)
            except LoadError as error:
                traceback.print_exc()
                failed = encode(protocol.Failed(str(error)))
                await self._socket.send(failed)  # bounded: the pool reads, or ends this process
                await asyncio.Future[None]()  # bounded: the pool ends this process
            gc.collect()
            gc.freeze()  # else a full collection would block the loop for 0.4 s, every few hundred episodes
            gc.enable()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._loop.tick())
                await self._socket.send(encode(protocol.Ready(env.task_ids, env.bounded)))  # bounded: likewise
                await self._receive(env, setup, group)

    async def _receive(self, env: Adapter, setup: Setup, group: asyncio.TaskGroup) -> None:
        while True:
            match decode(await self._socket.recv()):  # bounded: the next command is the pool's; SIGTERM ends it
                case Run() as run:
                    context = contextvars.copy_context()  # tasks that the episode starts inherit it
                    context.run(_request.set, run.request)
                    task = group.create_task(self._episode(env, setup.name, run), context=context)
                    self._running[run.request] = task
                case protocol.Cancel(request=request):
                    if (running := self._running.get(request)) is not None:
                        running.cancel()

    async def _episode(self, env: Adapter, name: str, run: Run) -> None:
        failed, broken, fault = functools.partial(run.failed, name), "", None
        try:
            if env.task_ids[run.task_index : run.task_index + 1] != [run.task_id]:
                raise LookupError(f"task {run.task_index} is another one here: the environment loads others each time")
            async with asyncio.timeout(run.timeout):
                faults.point(f"run:{name}")
                result = await env.run(run)
            fault = faults.point(f"result:{name}")
            if result.ok and run.replays and any(sample.experts is None for sample in result.samples):
                result = failed(Outcome.INVALID, "some of its tokens have no experts that the engine chose")
        except TimeoutError:
            result = failed(Outcome.TIMEOUT, f"not finished within {run.timeout:.0f} s")
        except asyncio.CancelledError:
            result = failed(Outcome.CANCELLED, "cancelled")
        except Broken as error:
            broken = str(error)
            result = failed(Outcome.ERRORED, broken)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it stays an outcome of this episode
            traceback.print_exc()
            result = failed(Outcome.ERRORED, f"{type(error).__name__}: {error}")
        try:  # an environment may have put anything into it
            frame = encode(protocol.Result(run.request, result))
            if len(frame) > MOST_BYTES:
                raise ValueError(f"it has {len(frame) >> 20} MiB, {MOST_BYTES >> 20} are allowed")
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            traceback.print_exc()
            wrong = f"the environment's result cannot be sent: {type(error).__name__}: {error}"
            frame = encode(protocol.Result(run.request, failed(Outcome.INVALID, wrong)))
        for _ in range({"drop": 0, "duplicate": 2}.get(fault or "", 1)):
            await self._socket.send(frame)  # bounded: the pool reads, or this process ends with it
        if broken:
            await self._socket.send(encode(protocol.Failed(broken)))  # bounded: as above


def main() -> None:
    processes.watch()
    faulthandler.enable()  # the last words of one that an extension kills
    with contextlib.suppress(OSError):  # when memory runs out, the kernel ends this process and its children first
        Path("/proc/self/oom_score_adj").write_text("500")
    faults.arm("environment")
    address, identity, setup_file, page_file = sys.argv[1:]
    setup = decode(Path(setup_file).read_bytes())
    assert isinstance(setup, Setup)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Our lines as `monitor.log` writes them into files, to stderr; libraries' warnings alone, unless for debugging.
    level, lines = setup.log_level.upper(), "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    libraries = logging.DEBUG if level == "DEBUG" else logging.WARNING
    logging.basicConfig(level=libraries, format=lines, datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("prime_rl").setLevel(level)
    # For libraries that use loguru, which reads this when it is imported. `diagnose` would show variables' values.
    os.environ.update(LOGURU_LEVEL=level, LOGURU_DIAGNOSE="0")
    loop = WorkerLoop(Page.of(Path(page_file)))
    loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="environment"))
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(WorkerServer(address, identity, loop).serve(setup))
    # All is closed. Taking the interpreter apart would collect verifiers' objects: seconds on a busy machine.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
