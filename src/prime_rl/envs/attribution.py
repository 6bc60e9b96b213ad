"""What a worker and the pool share in memory: whose code runs, and how the worker's event loop is doing.

Every step of an episode's tasks writes its request number into the page, so that a worker that dies or hangs fails the
episode at fault, and the others are run again. Standard library only.
"""

import asyncio
import contextvars
import ctypes
import mmap
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import TracebackType
from typing import Any

_request: contextvars.ContextVar[int] = contextvars.ContextVar("request", default=0)


class Page(ctypes.Structure):
    """A file that both sides map. The worker writes, the pool reads, also when the worker is dead or hangs."""

    _fields_ = [
        ("request", ctypes.c_uint64),  # the one whose code runs in the event loop, 0 for none
        ("ticked", ctypes.c_double),  # when the event loop last came round, by `time.monotonic()`; 0 until it is ready
        ("busy", ctypes.c_double),  # seconds in which the process computed or its event loop was blocked
    ]

    @classmethod
    def of(cls, path: Path) -> "Page":
        """Map a file, which is made if there is none."""
        with path.open("a+b") as file:
            file.truncate(ctypes.sizeof(cls))
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))


def attributed(request: int) -> contextvars.Context:
    """A context for the task of an episode; tasks that it starts inherit it."""
    context = contextvars.copy_context()
    context.run(_request.set, request)
    return context


def attribute_steps(loop: asyncio.AbstractEventLoop, page: Page) -> None:
    """Have each step of attributed tasks write its request into the page."""

    def make_task(loop: Any, coro: Any, context: contextvars.Context | None = None, **more: Any) -> "asyncio.Task[Any]":
        request = (contextvars.copy_context() if context is None else context).get(_request, 0)
        return asyncio.Task(_Steps(coro, request, page) if request else coro, loop=loop, context=context, **more)

    loop.set_task_factory(make_task)


class _Steps(Coroutine[Any, Any, Any]):
    """The steps of a task's coroutine. What would end the event loop fails the task."""

    def __init__(self, inner: Coroutine[Any, Any, Any], request: int, page: Page) -> None:
        self._inner, self._request, self._page = inner, request, page

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._step(self._inner.throw, value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._inner.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        before, self._page.request = self._page.request, self._request
        try:
            return step(value)
        except SystemExit as error:
            raise RuntimeError(f"the environment's code called sys.exit({error.code!r})") from error
        finally:
            self._page.request = before

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio looks at a task's coroutine: show it the real one
