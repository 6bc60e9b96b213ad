"""What a worker and the pool share in memory: whose code runs, and how the worker's event loop is doing.

Every step of an episode's tasks writes its request number into the page, so that a worker that dies or hangs fails the
episode at fault, and the others are run again. Standard library only.
"""

import asyncio
import contextvars
import ctypes
import mmap
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
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
        return asyncio.Task(_run(coro, request, page) if request else coro, loop=loop, context=context, **more)

    loop.set_task_factory(make_task)


async def _run(coro: Coroutine[Any, Any, Any], request: int, page: Page) -> Any:
    return await _steps(coro, request, page)


@types.coroutine
def _steps(coro: Coroutine[Any, Any, Any], request: int, page: Page) -> Generator[Any, Any, Any]:
    """Run a task's coroutine step by step. What would end the event loop fails the task."""
    step: Callable[[Any], Any] = coro.send
    value: Any = None
    while True:
        before, page.request = page.request, request
        try:
            awaited = step(value)
        except StopIteration as done:
            return done.value
        except SystemExit as error:
            raise RuntimeError(f"the environment's code called sys.exit({error.code!r})") from error
        finally:
            page.request = before
        try:
            step, value = coro.send, (yield awaited)
        except BaseException as error:  # noqa: BLE001 - the coroutine's own, cancellation above all
            step, value = coro.throw, error
