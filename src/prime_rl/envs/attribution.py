"""Attribute a blocked event loop, a busy thread or a dead worker to its episode, so that only this episode fails.

Every step of an episode's tasks writes its request number into a page of memory that the pool reads when the worker is dead or silent. Python code
that blocks for too long gets an exception: in the loop's thread from a signal handler, in threads once their episode has ended. An extension that
holds the interpreter's lock gets none: the pool kills its worker. Standard library only.
"""

import asyncio
import contextvars
import ctypes
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Container, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# Not one of the named signals: environments use SIGALRM (timers of math checkers) and SIGUSR1 themselves.
SIGNAL = signal.SIGRTMIN + 4
PAGE_BYTES = 8
MAX_THREADS = 64  # Python's own number is six on two cores: too few to lose some
LATE_SECONDS = 10.0  # that a thread may work on after its episode
_LIBRARY_FILE = re.compile(rf"<|{re.escape(os.path.dirname(os.__file__))}/(?!.*site-packages)")

_episode: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=0)


class Blocked(BaseException):
    """Raised in code that blocks; `except Exception` does not catch it."""


FATAL = (Blocked, SystemExit, KeyboardInterrupt)  # not an `Exception`, would end the loop, but comes from an episode


def explain(error: BaseException) -> str:
    """Describe what an episode failed of."""
    if isinstance(error, Blocked):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the environment's code called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


class _Steps(Coroutine[Any, Any, Any]):
    """A task's coroutine that writes its request into the page for each step, and turns FATAL errors into the task's own."""

    def __init__(self, inner: Coroutine[Any, Any, Any], request: int, page: "memoryview[int]") -> None:
        self._inner, self._request, self._page = inner, request, page

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._step(self._inner.throw, value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._step(lambda _: self._inner.close(), None)

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        before, self._page[0] = self._page[0], self._request
        try:
            return step(value)
        except FATAL as error:
            raise RuntimeError(explain(error)) from error
        finally:
            self._page[0] = before

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio looks at a task's coroutine: show it the real one


class Attribution(ThreadPoolExecutor):
    """Worker side: the loop's task factory and default executor. `start` an episode; `running` is the request whose code runs."""

    def __init__(self, page: Path) -> None:
        super().__init__(MAX_THREADS, thread_name_prefix="environment")
        with page.open("r+b") as file:
            self._page = memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)).cast("Q")
        self._overdue: Callable[[int], str] = lambda request: ""
        self._jobs: dict[int, tuple[int, list[float]]] = {}  # thread -> request, when first seen after its episode

    @property
    def running(self) -> int:
        """The request whose code runs in the loop, 0 for none. Any thread may ask."""
        return self._page[0]

    def watch(self, overdue: Callable[[int], str]) -> None:
        """Install everything, once, in the loop's thread. `overdue`: how long a request has blocked the loop, if too long, else ""."""
        self._overdue, loop = overdue, asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        loop.set_default_executor(self)
        signal.signal(SIGNAL, self._interrupted)

    def start(self, episode: Coroutine[Any, Any, None], request: int) -> "asyncio.Task[None]":
        """Run an episode; tasks and threads that it starts are attributed to it."""
        context = contextvars.copy_context()
        context.run(_episode.set, request)
        return asyncio.create_task(episode, context=context)

    def interrupt(self, loop_thread: int, running: Container[int]) -> None:
        """Raise `Blocked` in overdue code of the loop, and in threads whose episode is not `running` any more. From another thread."""
        if (request := self.running) and self._overdue(request):
            signal.pthread_kill(loop_thread, SIGNAL)
        for thread, job in list(self._jobs.items()):
            (request, since), now = job, time.monotonic()
            if request and request not in running:
                if not since:
                    since.append(now)
                elif now - since[0] > LATE_SECONDS and self._jobs.get(thread) is job:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Blocked))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See `Executor.submit`."""
        return super().submit(self._work, contextvars.copy_context().get(_episode, 0), fn, *args, **kwargs)

    def _work(self, request: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._jobs[threading.get_ident()] = request, []
        try:
            return fn(*args, **kwargs)
        except Blocked as error:
            raise TimeoutError("its episode had ended") from error
        finally:
            self._jobs.pop(threading.get_ident(), None)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None, **more: Any
    ) -> "asyncio.Task[Any]":
        request = (contextvars.copy_context() if context is None else context).get(_episode, 0)
        return asyncio.Task(_Steps(coro, request, self._page) if request else coro, loop=loop, context=context, **more)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if (request := self.running) and (overdue := self._overdue(request)):
            raise Blocked(f"its code blocked the worker's event loop for {overdue} at {describe(frame)}")


def describe(frame: FrameType | None) -> str:
    """`file:line in function` of the innermost code outside Python's own library, if there is any."""
    own = frame
    while own is not None and _LIBRARY_FILE.match(own.f_code.co_filename):
        own = own.f_back
    shown = own or frame
    return "" if shown is None else f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"
