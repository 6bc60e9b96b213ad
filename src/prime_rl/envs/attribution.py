"""Note whose code runs, so that a worker that dies or hangs fails the episode at fault, and the others are run again.

Every step of an episode's tasks writes its request number into a page of memory, a file that the pool reads when the
worker is dead or silent. Standard library only.
"""

import asyncio
import contextvars
import mmap
import os
import re
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

PAGE_BYTES = 8
_LIBRARY_FILE = re.compile(rf"<|{re.escape(os.path.dirname(os.__file__))}/(?!.*site-packages)")
_request: contextvars.ContextVar[int] = contextvars.ContextVar("request", default=0)


def attributed(request: int) -> contextvars.Context:
    """A context for the task of an episode; tasks that it starts inherit it."""
    context = contextvars.copy_context()
    context.run(_request.set, request)
    return context


def attribute_steps(loop: asyncio.AbstractEventLoop, page: Path) -> None:
    """Have each step of attributed tasks write its request into the page."""
    with page.open("r+b") as file:
        running = memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)).cast("Q")

    def make_task(loop: Any, coro: Any, context: contextvars.Context | None = None, **more: Any) -> "asyncio.Task[Any]":
        request = (contextvars.copy_context() if context is None else context).get(_request, 0)
        return asyncio.Task(_Steps(coro, request, running) if request else coro, loop=loop, context=context, **more)

    loop.set_task_factory(make_task)


class _Steps(Coroutine[Any, Any, Any]):
    """The steps of a task's coroutine. What would end the event loop fails the task."""

    def __init__(self, inner: Coroutine[Any, Any, Any], request: int, page: "memoryview[int]") -> None:
        self._inner, self._request, self._page = inner, request, page

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._step(self._inner.throw, value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._inner.close()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        before, self._page[0] = self._page[0], self._request
        try:
            return step(value)
        except SystemExit as error:
            raise RuntimeError(f"the environment's code called sys.exit({error.code!r})") from error
        finally:
            self._page[0] = before

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio looks at a task's coroutine: show it the real one


def describe(frame: FrameType | None) -> str:
    """`file:line in function` of the innermost code outside Python's own library, if there is any."""
    own = frame
    while own is not None and _LIBRARY_FILE.match(own.f_code.co_filename):
        own = own.f_back
    shown = own or frame
    return "" if shown is None else f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"
