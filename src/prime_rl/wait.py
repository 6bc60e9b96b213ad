"""The one way to wait. Every wait has a subject, an owner who owes it, and a deadline; one that expires says all three.

`wait` polls in a thread, `wait_async` polls in an event loop, `within` awaits something that ends by itself.
`scripts/check_waits.py` (in CI) refuses waits in `src/` that go around this module without a bound. Standard library
only: environment workers import it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prime_rl.errors import UserError

T = TypeVar("T")

LEAST_POLL_SECONDS = 0.05  # 20 looks a second are enough for anything that waits for a file


class WaitTimeout(UserError):
    """A bounded wait expired; the message says what was waited for and who owed it."""

    def __init__(self, subject: str, owner: str, seconds: float) -> None:
        super().__init__(f"no {subject} from {owner} after {seconds:.0f} s")
        self.subject, self.owner, self.seconds = subject, owner, seconds


OnWait = Callable[[float], None]


def wait(
    until: Callable[[], T | None],
    *,
    subject: str,
    owner: str,
    seconds: float,
    poll: float = 0.1,
    on_wait: OnWait | None = None,
    stop: Callable[[], bool] | None = None,
) -> T | None:
    """Look again and again until `until` gives something that is neither None nor False.

    Args:
        until: Looks once.
        subject: What is waited for.
        owner: Who owes it.
        seconds: The deadline, counted from now.
        poll: Seconds between two looks; at least 0.05.
        on_wait: Called before each pause with the seconds waited so far.
        stop: Asked before each pause; when it returns true the wait ends with None.

    Returns:
        What `until` gave, or None when `stop` asked to end.

    Raises:
        WaitTimeout: after `seconds`.
    """
    start = time.monotonic()
    while not (value := until()):
        if not _may_pause(start, subject, owner, seconds, on_wait, stop):
            return None
        time.sleep(max(poll, LEAST_POLL_SECONDS))
    return value


async def wait_async(
    until: Callable[[], T | None],
    *,
    subject: str,
    owner: str,
    seconds: float,
    poll: float = 0.1,
    on_wait: OnWait | None = None,
    stop: Callable[[], bool] | None = None,
) -> T | None:
    """`wait` in an event loop: the same arguments, result and errors."""
    start = time.monotonic()
    while not (value := until()):
        if not _may_pause(start, subject, owner, seconds, on_wait, stop):
            return None
        await asyncio.sleep(max(poll, LEAST_POLL_SECONDS))
    return value


def _may_pause(
    start: float, subject: str, owner: str, seconds: float, on_wait: OnWait | None, stop: Callable[[], bool] | None
) -> bool:
    """Between two looks: whether to go on waiting. Raises WaitTimeout after the deadline."""
    waited = time.monotonic() - start
    if stop is not None and stop():
        return False
    if waited >= seconds:
        raise WaitTimeout(subject, owner, seconds)
    if on_wait is not None:
        on_wait(waited)
    return True


async def within(awaitable: Awaitable[T], *, subject: str, owner: str, seconds: float) -> T:
    """Await something that ends by itself, at most `seconds`.

    Raises:
        WaitTimeout: it did not; it has been cancelled.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise WaitTimeout(subject, owner, seconds) from None
        raise
