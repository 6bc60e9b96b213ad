"""The one way to wait: what arrives is returned, what does not is named with its owner, and nothing waits for ever."""

import asyncio
import time

import pytest

from prime_rl.errors import UserError
from prime_rl.wait import LEAST_POLL_SECONDS, WaitTimeout, wait, wait_async, within

SUBJECT = {"subject": "weights/step_3", "owner": "trainer"}
LATE = "no weights/step_3 from trainer after 0 s"


def after(looks):
    """A look that finds something the n-th time."""
    left = iter(range(looks))
    return lambda: next(left, None) is None and "found"


@pytest.mark.parametrize("kind", ["thread", "event loop"])
def test_it_looks_until_it_finds_or_is_late(kind, monkeypatch):
    def run(until, seconds=30, **options):
        options |= {**SUBJECT, "seconds": seconds}
        return wait(until, **options) if kind == "thread" else asyncio.run(wait_async(until, **options))

    assert run(lambda: 7, seconds=0) == 7
    assert run(after(2)) == "found"
    with pytest.raises(WaitTimeout, match=LATE) as caught:
        run(lambda: None, seconds=0)
    assert isinstance(caught.value, UserError)
    if kind == "thread":  # `poll=0` still pauses; what is there at once does not
        pauses = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        run(after(3), poll=0)
        run(lambda: 7)
        assert pauses == [LEAST_POLL_SECONDS] * 3


async def test_an_asynchronous_wait_lets_others_run():
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await wait_async(event.is_set, **SUBJECT, seconds=30)


async def test_within_returns_the_result_or_cancels():
    """A TimeoutError of the awaited thing's own is not our deadline."""
    assert await within(asyncio.sleep(0, 7), **SUBJECT, seconds=30) == 7
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(WaitTimeout, match=LATE):
        await within(never, **SUBJECT, seconds=0.01)
    assert never.cancelled()
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        await within(failed, **SUBJECT, seconds=30)
