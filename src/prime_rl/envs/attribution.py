"""Attribute what blocks or kills a worker's event loop to the episode whose code runs in it, so that only this episode fails for it.

Every step of an episode's tasks writes its request number into a page of memory that is shared with the pool, which reads it when the worker is
dead or silent. Python code that blocks for too long gets an exception from a signal handler, and the loop goes on. An extension that holds the
interpreter's lock receives no signal: then the pool ends the worker. Standard library only.
"""

import asyncio
import contextvars
import mmap
import os
import re
import signal
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# Not one of the named signals: environments use SIGALRM (timers of math checkers) and SIGUSR1 themselves.
SIGNAL = signal.SIGRTMIN + 4
_BYTES = 8
_LIBRARY_FILE = re.compile(rf"<|{re.escape(os.path.dirname(os.__file__))}/(?!.*site-packages)")

_episode: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=0)


def current_request() -> int:
    """The request of the episode that the calling code belongs to, 0 for none."""
    return contextvars.copy_context().get(_episode, 0)


class Page:
    """The request whose code runs, 0 for none: in a file that the pool makes, the worker maps, and that outlives the worker."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self.cell = memoryview(self._map).cast("Q")

    @staticmethod
    def make(path: Path) -> None:
        path.write_bytes(bytes(_BYTES))

    @staticmethod
    def read(path: Path) -> int:
        """The request that was written last, 0 for none."""
        return int.from_bytes(path.read_bytes()[:_BYTES], "little") if path.is_file() else 0


class Blocked(BaseException):
    """Raised in the code that blocks, which an `except Exception` does not keep."""


FATAL = (Blocked, SystemExit, KeyboardInterrupt)
"""What is no `Exception`, and would end the loop, but comes out of an episode's own code."""


def explain(error: BaseException) -> str:
    """What an episode failed of, in words."""
    if isinstance(error, Blocked):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the environment's code called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


class _Steps(Coroutine[Any, Any, Any]):
    """A task's coroutine, each step of it noted. What would end the worker ends the task instead."""

    def __init__(self, inner: Coroutine[Any, Any, Any], request: int, cell: "memoryview[int]") -> None:
        self._inner, self._request, self._cell = inner, request, cell

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._step(self._inner.throw, value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._step(lambda _: self._inner.close(), None)

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        before, self._cell[0] = self._cell[0], self._request
        try:
            return step(value)
        except FATAL as error:
            raise RuntimeError(explain(error)) from error
        finally:
            self._cell[0] = before

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # what looks at a task's coroutine (anyio does) sees the real one


class Attribution:
    """Worker side. `start` an episode's task, and ask what runs."""

    def __init__(self, page: Page) -> None:
        self._cell = page.cell
        self._overdue: Callable[[int], str] = lambda request: ""

    @property
    def running(self) -> int:
        """The request whose code runs, 0 for none. From any thread."""
        return self._cell[0]

    def watch(self, overdue: Callable[[int], str]) -> None:
        """Within the loop's thread, once: note the steps of every task that comes from an episode, and get ready to be interrupted.

        `overdue`: for how long a request's code has had the loop, in words, where that is too long, else "".
        """
        self._overdue = overdue
        asyncio.get_running_loop().set_task_factory(self._make_task)
        signal.signal(SIGNAL, self._interrupted)

    def start(self, episode: Coroutine[Any, Any, None], request: int) -> "asyncio.Task[None]":
        """A task for an episode, under whose name all tasks run that it makes."""
        context = contextvars.copy_context()
        context.run(_episode.set, request)
        return asyncio.create_task(episode, context=context)

    def interrupt(self, thread: int) -> None:
        """From another thread: raise `Blocked` in `thread`, which runs the loop, where its code is overdue."""
        if (request := self.running) and self._overdue(request):
            signal.pthread_kill(thread, SIGNAL)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None, **more: Any
    ) -> "asyncio.Task[Any]":
        request = current_request() if context is None else context.get(_episode, 0)
        steps = _Steps(coro, request, self._cell) if request else coro
        return asyncio.Task(steps, loop=loop, context=context, **more)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        # The step may have ended between the check and the signal.
        if (request := self.running) and (overdue := self._overdue(request)):
            raise Blocked(f"its code blocked the worker's event loop for {overdue} at {describe(frame)}")


def describe(frame: FrameType | None) -> str:
    """`file:line in function` of the innermost code that is not Python's own library, if there is any."""
    own = frame
    while own is not None and _LIBRARY_FILE.match(own.f_code.co_filename):
        own = own.f_back
    shown = own or frame
    return "" if shown is None else f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"
