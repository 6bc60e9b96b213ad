"""The one way to wait: what arrives is returned, what does not is named with its owner, and nothing waits for ever."""

import asyncio
import time
from collections.abc import Callable

import pytest

from prime_rl.errors import UserError
from prime_rl.wait import WaitTimeout, wait, wait_async, within

LATE = "no weights/step_3 from trainer after 0 s"


def after(looks: int) -> Callable[[], object]:
    """A look that finds something the n-th time."""
    left = iter(range(looks))
    return lambda: next(left, None) is None and "found"


def run(until: Callable[[], object], kind: str, **options: object) -> object:
    options = {"subject": "weights/step_3", "owner": "trainer", "seconds": 30, **options}
    if kind == "thread":
        return wait(until, **options)
    return asyncio.run(wait_async(until, **options))


@pytest.mark.parametrize("kind", ["thread", "event loop"])
def test_it_looks_until_it_finds_or_is_stopped_or_late(kind: str) -> None:
    waits: list[float] = []
    assert run(lambda: 7, kind, seconds=0) == 7
    assert run(after(2), kind, poll=0.05, on_wait=waits.append) == "found"
    assert len(waits) == 2
    assert waits == sorted(waits)
    assert run(lambda: None, kind, stop=lambda: True) is None
    assert run(lambda: "found", kind, stop=lambda: True) == "found"
    with pytest.raises(WaitTimeout, match=LATE) as caught:
        run(lambda: None, kind, seconds=0)
    assert (caught.value.subject, caught.value.owner, caught.value.seconds) == ("weights/step_3", "trainer", 0)
    assert isinstance(caught.value, UserError)


def test_no_wait_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll=0` still pauses; what is there at once does not."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    run(after(3), "thread", poll=0)
    assert pauses == [0.05] * 3
    run(lambda: 7, "thread")
    assert pauses == [0.05] * 3


async def test_an_asynchronous_wait_lets_others_run() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await wait_async(event.is_set, subject="x", owner="y", seconds=30)


async def test_within_returns_the_result_or_cancels() -> None:
    """A TimeoutError of the awaited thing's own is not our deadline."""
    assert await within(asyncio.sleep(0, 7), subject="x", owner="y", seconds=30) == 7
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(WaitTimeout, match=LATE):
        await within(never, subject="weights/step_3", owner="trainer", seconds=0.01)
    assert never.cancelled()

    async def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await within(fails(), subject="x", owner="y", seconds=30)
