"""Whose code runs in a worker's loop and threads, and what happens to code that does not give way."""

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs import attribution as attribution_module
from prime_rl.envs.attribution import PAGE_BYTES, SIGNAL, Attribution


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page").write_bytes(bytes(PAGE_BYTES))
    return tmp_path / "page"


@pytest.fixture
def attribution(page: Path) -> Iterator[Attribution]:
    before = signal.getsignal(SIGNAL)
    yield Attribution(page)
    signal.signal(SIGNAL, before)


def run(
    attribution: Attribution, main: Callable[[], Coroutine[Any, Any, Any]], overdue: Callable[[int], str] = lambda _: ""
) -> Any:
    async def watched() -> Any:
        attribution.watch(overdue)
        async with asyncio.timeout(60):
            return await main()

    return asyncio.run(watched())


def stubborn(until: list[bool]) -> str:
    """Block, and catch exceptions."""
    while not until:
        try:
            time.sleep(0.005)
        except Exception:  # noqa: BLE001
            continue
    return "done"


def test_every_step_of_an_episode_bears_its_number(attribution: Attribution, page: Path) -> None:
    """Its own, those of tasks that it makes, and of theirs; between the steps no number; the pool reads the same from the file."""

    async def inner(seen: list[int]) -> None:
        await asyncio.sleep(0)
        seen.append(int.from_bytes(page.read_bytes(), "little"))

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
        await asyncio.gather(*tasks)
        assert seen == {1: [1] * 5, 2: [2] * 5}

    run(attribution, main)


def test_what_would_end_the_loop_ends_the_task(attribution: Attribution) -> None:
    """sys.exit and KeyboardInterrupt in an episode's tasks are its errors; other errors and cancellation pass unchanged."""

    async def raises(error: BaseException) -> None:
        raise error

    async def episode(error: BaseException) -> None:
        await asyncio.create_task(raises(error))

    async def main() -> None:
        for error, wanted, said in (
            (SystemExit(4), RuntimeError, "the environment's code called sys.exit\\(4\\)"),
            (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt"),
            (ValueError("x"), ValueError, "x"),
            (asyncio.CancelledError(), asyncio.CancelledError, None),
        ):
            with pytest.raises(wanted, match=said):
                await attribution.start(episode(error), 1)
        task = attribution.start(asyncio.sleep(1000), 1)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_SUSPENDED  # as anyio looks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(attribution, main)


def test_code_that_does_not_give_way_is_interrupted(attribution: Attribution) -> None:
    """The exception goes past `except Exception`, names the place, and leaves the loop, others, and late signals' victims alone."""
    main_thread = threading.get_ident()

    async def episode() -> None:
        await asyncio.gather(blocks())

    async def blocks() -> None:
        stubborn([])

    async def main() -> None:
        signal.pthread_kill(main_thread, SIGNAL)  # too late: no episode's code runs
        neighbour = attribution.start(asyncio.sleep(0.1, "fine"), 2)  # type: ignore[arg-type]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                attribution.interrupt(main_thread, {1, 2})

        thread = threading.Thread(target=watch)
        thread.start()
        with pytest.raises(RuntimeError, match=r"for an age at .*test_attribution.py:\d+ in stubborn"):
            await attribution.start(episode(), 1)
        done.set()
        thread.join(timeout=60)
        assert await neighbour == "fine"

    run(attribution, main, lambda request: "an age" if request == 1 else "")


def test_threads_of_an_episode_that_has_ended(attribution: Attribution, monkeypatch: pytest.MonkeyPatch) -> None:
    """They alone are interrupted: not threads of episodes that run, nor of no episode."""
    monkeypatch.setattr(attribution_module, "LATE_SECONDS", 0.05)
    release: list[bool] = []

    async def episode(results: list[str]) -> None:
        results.append(await asyncio.to_thread(stubborn, release))

    async def main() -> None:
        kept: list[str] = []
        over, running = attribution.start(episode([]), 1), attribution.start(episode(kept), 2)
        without = asyncio.create_task(asyncio.to_thread(stubborn, release))
        while not over.done():
            attribution.interrupt(threading.get_ident(), {2})
            await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError, match="its episode had ended"):
            await over
        assert not running.done()
        release.append(True)
        await running
        assert (kept, await without) == (["done"], "done")

    run(attribution, main)
