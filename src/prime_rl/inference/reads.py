"""Reads of files that may hang: nothing ends a thread that waits for a network mount that is gone. It is left behind."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from prime_rl.inference.allowed_roots import Rejected

STALL_SECONDS = 45.0  # without progress; shorter than a weight change waits for another one
MOST_ABANDONED = 16  # threads at a time
TURN_SECONDS = 1e-4  # for which the engine, or the event loop, keeps the interpreter from another thread

T = TypeVar("T")
GoOn = Callable[[], None]

_abandoned: set[threading.Thread] = set()


async def read(function: Callable[[GoOn], T], subject: Path | str) -> T:
    """The result of `function(go_on)`, from a daemon thread: one that hangs keeps neither its caller nor the end of the process.

    Args:
        function: It calls `go_on` between two blocks of a long read; the call raises once the thread was left behind.

    Raises:
        Rejected: there was no progress for `STALL_SECONDS`, or too many earlier reads hang (503).
        Exception: what `function` raises.
    """
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    if len(_abandoned) >= MOST_ABANDONED:
        raise Rejected(503, f"{subject} is not read: {len(_abandoned)} earlier reads still hang in the file system")
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    progress = time.monotonic()

    def go_on() -> None:
        nonlocal progress
        if thread in _abandoned:
            raise TimeoutError(f"{subject}: nobody waits for it any more")
        progress = time.monotonic()

    def run() -> None:
        try:
            with short_turns():
                future.set_result(function(go_on))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)

    thread = threading.Thread(target=run, name="read", daemon=True)
    thread.start()
    result = asyncio.wrap_future(future)
    try:
        while not result.done():  # bounded: by the progress of the thread
            left = progress + STALL_SECONDS - time.monotonic()
            if left <= 0:
                raise Rejected(503, f"{subject} could not be read: no progress for {STALL_SECONDS:.0f} s")
            await asyncio.wait({result}, timeout=left)
        return result.result()
    finally:
        if not result.done():
            _abandoned.add(thread)
            result.cancel()


@contextmanager
def short_turns() -> Iterator[None]:
    """Switch threads sooner: a thread waits 5 ms for the interpreter by default, which is longer than a block takes.

    Of two that overlap, the first sets and restores the interval.
    """
    before = sys.getswitchinterval()
    if before <= TURN_SECONDS:
        yield
        return
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
