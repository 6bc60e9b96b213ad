"""The one way to wait: what arrives is returned, what does not is named with its owner, and nothing waits for ever."""

import asyncio
import time

import pytest

from prime_rl.errors import UserError
from prime_rl.wait import WaitTimeout, wait, wait_async, within

LATE = "no weights/step_3 from trainer after 0 s"


def after(looks: int):
    """A look that finds something the n-th time."""
    left = iter(range(looks))
    return lambda: next(left, None) is None and "found"


def test_what_is_there_is_returned_without_a_pause(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it paused"))
    assert wait(lambda: 7, subject="x", owner="y", seconds=0) == 7


def test_it_looks_again_until_it_finds():
    waits = []
    assert wait(after(2), subject="x", owner="y", seconds=30, poll=0.05, on_wait=waits.append) == "found"
    assert len(waits) == 2
    assert waits == sorted(waits)


def test_an_expired_wait_names_subject_owner_and_deadline():
    with pytest.raises(WaitTimeout, match=LATE) as caught:
        wait(lambda: None, subject="weights/step_3", owner="trainer", seconds=0)
    assert (caught.value.subject, caught.value.owner, caught.value.seconds) == ("weights/step_3", "trainer", 0)
    assert isinstance(caught.value, UserError)


def test_a_wait_that_is_asked_to_stop_ends_with_none():
    assert wait(lambda: None, subject="x", owner="y", seconds=30, stop=lambda: True) is None


def test_what_came_before_the_stop_is_kept():
    assert wait(lambda: "found", subject="x", owner="y", seconds=30, stop=lambda: True) == "found"


def test_no_wait_is_busy(monkeypatch):
    """`poll=0` still pauses."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    wait(after(3), subject="x", owner="y", seconds=30, poll=0)
    assert pauses == [0.05] * 3


async def test_the_asynchronous_wait_is_the_same():
    waits = []
    assert await wait_async(after(2), subject="x", owner="y", seconds=30, poll=0.05, on_wait=waits.append) == "found"
    assert len(waits) == 2
    assert await wait_async(lambda: None, subject="x", owner="y", seconds=30, stop=lambda: True) is None
    with pytest.raises(WaitTimeout, match=LATE):
        await wait_async(lambda: None, subject="weights/step_3", owner="trainer", seconds=0)


async def test_an_asynchronous_wait_lets_others_run():
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await wait_async(event.is_set, subject="x", owner="y", seconds=30)


async def test_within_gives_the_result_or_cancels():
    async def seven() -> int:
        return 7

    assert await within(seven(), subject="x", owner="y", seconds=30) == 7
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(WaitTimeout, match=LATE):
        await within(never, subject="weights/step_3", owner="trainer", seconds=0.01)
    assert never.cancelled()


async def test_within_passes_on_what_failed_inside():
    """A TimeoutError of the awaited thing's own is not our deadline."""

    async def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await within(fails(), subject="x", owner="y", seconds=30)
