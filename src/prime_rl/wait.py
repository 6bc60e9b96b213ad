"""The one way to wait. Each has a subject, an owner that must provide it, and a deadline; its error names all three.

`wait` polls in a thread, `wait_async` polls in an event loop, `within` awaits something that ends by itself, a
`TaskThread` runs tasks and gives their results, and `in_thread` runs one that may never end.
`scripts/check_waits.py` (in CI) refuses waits in `src/` that go around this module without a bound. Standard library
only: environment workers import it.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypeVar

from prime_rl.errors import UserError

T = TypeVar("T")

LEAST_POLL_SECONDS = 0.02  # 50 polls per second: in the shortest steps, 0.4 s, a wait for a file is 2 % too long


class WaitTimeout(UserError):
    """A bounded wait expired; the message says what was waited for and who owed it."""

    def __init__(self, subject: str, owner: str, seconds: float) -> None:
        super().__init__(f"no {subject} from {owner} after {seconds:.0f} s")


def wait(until: Callable[[], T | None], *, subject: str, owner: str, seconds: float, poll: float = 0.1) -> T:
    """Call `until` every `poll` seconds, at least 0.02, until it returns something truthy, and return that.
    Raises WaitTimeout after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := until()):
        if time.monotonic() >= deadline:
            raise WaitTimeout(subject, owner, seconds)
        time.sleep(max(poll, LEAST_POLL_SECONDS))
    return value


async def wait_async(
    until: Callable[[], T | None], *, subject: str, owner: str, seconds: float, poll: float = 0.1
) -> T:
    """Poll as `wait` does, in an event loop."""
    deadline = time.monotonic() + seconds
    while not (value := until()):
        if time.monotonic() >= deadline:
            raise WaitTimeout(subject, owner, seconds)
        await asyncio.sleep(max(poll, LEAST_POLL_SECONDS))
    return value


async def within(awaitable: Awaitable[T], *, subject: str, owner: str, seconds: float) -> T:
    """Await something that ends by itself, at most `seconds`. Raises WaitTimeout if it does not; it is cancelled."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise WaitTimeout(subject, owner, seconds) from None
        raise


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Do `work` in a daemon thread, which the end of the process does not wait for. Return the future result."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class TaskThread:
    """A thread that does one task at a time, after the `initializer`, and the tasks whose results nobody has taken yet.
    `seconds` is the deadline of each, counted from when it is waited for."""

    def __init__(self, name: str, owner: str, seconds: float, initializer: Callable[[], object] | None = None) -> None:
        self.owner, self.seconds = owner, seconds
        self.tasks: list[tuple[str, Future[Any]]] = []  # what each makes, and its result
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initializer)

    def submit(self, subject: str, work: Callable[[], object]) -> None:
        """Have `work` done after the tasks before it."""
        self.tasks.append((subject, self._pool.submit(work)))

    @property
    def idle(self) -> bool:
        """Whether all tasks have ended."""
        return all(task.done() for _, task in self.tasks)

    def results(self, *, wait: bool = True) -> list[Any]:
        """Take the results of the tasks that have ended; with `wait` all of them. Raises WaitTimeout if one is late, or
        the first failed one's exception."""
        for subject, future in self.tasks if wait else ():
            if wait_for_futures([future], timeout=self.seconds).not_done:
                raise WaitTimeout(subject, self.owner, self.seconds)
        results = []
        for task in [task for task in self.tasks if task[1].done()]:
            self.tasks.remove(task)
            results.append(task[1].result(timeout=0))
        return results

    def close(self) -> list[str]:
        """Wait for the tasks that are left, up to the first late one. Return what failed, and why."""
        self._pool.shutdown(wait=False)
        failures = list[str]()
        for subject, future in self.tasks:
            if wait_for_futures([future], timeout=self.seconds).not_done:
                return [*failures, str(WaitTimeout(subject, self.owner, self.seconds))]
            if (error := future.exception(timeout=0)) is not None:
                failures.append(f"{subject}: {str(error) or type(error).__name__}")
        return failures
