"""Whose code runs in a worker's loop, and what happens to code that does not give way."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.attribution import SIGNAL, Attribution, Blocked, Page, explain


@pytest.fixture
def page(tmp_path: Path) -> Path:
    Page.make(tmp_path / "page")
    return tmp_path / "page"


@pytest.fixture
def attribution(page: Path) -> Iterator[Attribution]:
    import signal

    before = signal.getsignal(SIGNAL)
    yield Attribution(Page(page))
    signal.signal(SIGNAL, before)


def run(
    attribution: Attribution, main: Callable[[], Coroutine[Any, Any, Any]], overdue: Callable[[int], str] = lambda _: ""
) -> Any:
    async def watched() -> Any:
        attribution.watch(overdue)
        return await main()

    return asyncio.run(watched())


def test_every_step_of_an_episode_bears_its_number(attribution: Attribution, page: Path) -> None:
    """Its own, those of tasks that it makes, and of theirs; between the steps nobody's; the pool's side reads the same."""

    async def inner(seen: list[int]) -> None:
        await asyncio.sleep(0)
        seen.append(Page.read(page))

    async def episode(seen: list[int]) -> None:
        seen.append(attribution.running)
        await asyncio.gather(inner(seen), asyncio.create_task(inner(seen)))
        async with asyncio.TaskGroup() as group:
            group.create_task(inner(seen))
        seen.append(attribution.running)

    async def main() -> None:
        seen: dict[int, list[int]] = {1: [], 2: []}
        tasks = [attribution.start(episode(numbers), request) for request, numbers in seen.items()]
        for _ in range(20):
            assert attribution.running == 0
            await asyncio.sleep(0)
        await asyncio.wait(tasks, timeout=60)
        assert seen == {1: [1] * 5, 2: [2] * 5}

    run(attribution, main)


def test_what_would_end_the_loop_ends_the_task(attribution: Attribution) -> None:
    """sys.exit and KeyboardInterrupt in an episode's tasks are errors of theirs; results, errors and cancellation go through as ever."""

    async def raises(error: BaseException) -> None:
        raise error

    async def episode(error: BaseException) -> None:
        await asyncio.create_task(raises(error))

    async def main() -> None:
        for error in (SystemExit(4), KeyboardInterrupt()):
            with pytest.raises(RuntimeError, match="exit|KeyboardInterrupt"):
                await attribution.start(episode(error), 1)
        with pytest.raises(ValueError, match="as ever"):
            await attribution.start(episode(ValueError("as ever")), 1)
        with pytest.raises(asyncio.CancelledError):
            await attribution.start(episode(asyncio.CancelledError()), 1)
        task = attribution.start(asyncio.sleep(1000), 1)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_SUSPENDED  # as anyio looks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(attribution, main)


def test_code_that_does_not_give_way_is_interrupted(attribution: Attribution) -> None:
    """The exception goes past `except Exception`, names the place, and leaves the loop and others running."""
    main_thread = threading.get_ident()

    async def stubborn() -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # noqa: BLE001
                continue

    async def episode() -> None:
        await asyncio.create_task(stubborn())

    async def main() -> None:
        neighbour = attribution.start(asyncio.sleep(0.1, "fine"), 2)  # type: ignore[arg-type]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                attribution.interrupt(main_thread)

        thread = threading.Thread(target=watch)
        thread.start()
        with pytest.raises(RuntimeError, match=r"for an age at .*test_attribution.py:\d+ in stubborn"):
            await attribution.start(episode(), 1)
        done.set()
        thread.join(timeout=60)
        assert await neighbour == "fine"

    run(attribution, main, lambda request: "an age" if request == 1 else "")


def test_nobody_is_interrupted_whose_time_is_not_over(attribution: Attribution) -> None:
    """A signal that comes too late hits nobody, nor what is no episode's."""
    main_thread = threading.get_ident()

    async def main() -> None:
        import signal

        signal.pthread_kill(main_thread, SIGNAL)
        await asyncio.sleep(0)
        attribution.interrupt(main_thread)
        await asyncio.sleep(0)

    run(attribution, main, lambda request: "an age")


def test_explanations() -> None:
    """In words, whatever it was."""
    assert explain(SystemExit(4)) == "the environment's code called sys.exit(4)"
    assert explain(Blocked("its code …")) == "its code …"
    assert explain(ValueError("x")) == "ValueError: x"
