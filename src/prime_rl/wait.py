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


def wait(until: Callable[[], T | None], *, subject: str, owner: str, seconds: float, poll: float = 0.1) -> T:
    """Look again and again until `until` gives something that is neither None nor False, and return that.

    Args:
        until: Looks once.
        subject: What is waited for.
        owner: Who owes it.
        seconds: The deadline, counted from now.
        poll: Seconds between two looks; at least 0.05.

    Raises:
        WaitTimeout: after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (value := until()):
        if time.monotonic() >= deadline:
            raise WaitTimeout(subject, owner, seconds)
        time.sleep(max(poll, LEAST_POLL_SECONDS))
    return value


async def wait_async(
    until: Callable[[], T | None], *, subject: str, owner: str, seconds: float, poll: float = 0.1
) -> T:
    """`wait` in an event loop."""
    deadline = time.monotonic() + seconds
    while not (value := until()):
        if time.monotonic() >= deadline:
            raise WaitTimeout(subject, owner, seconds)
        await asyncio.sleep(max(poll, LEAST_POLL_SECONDS))
    return value


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
