"""Whose code runs in a worker's loop."""

import asyncio
import inspect
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.attribution import Page, attribute_steps, attributed


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page.of(tmp_path / "page")


def start(episode: Coroutine[Any, Any, Any], request: int) -> "asyncio.Task[Any]":
    return asyncio.create_task(episode, context=attributed(request))


async def test_every_step_of_an_episode_bears_its_number(page: Page, tmp_path: Path) -> None:
    """Its own, those of tasks that it makes, and of theirs; between the steps no number; the pool reads it from the file."""
    attribute_steps(asyncio.get_running_loop(), page)

    other_side = Page.of(tmp_path / "page")

    def running() -> int:
        return other_side.request

    async def inner(seen: list[int]) -> None:
        await asyncio.sleep(0)
        seen.append(running())

    async def episode(seen: list[int]) -> None:
        seen.append(running())
        await asyncio.gather(inner(seen), asyncio.create_task(inner(seen)))
        async with asyncio.TaskGroup() as group:
            group.create_task(inner(seen))
        seen.append(running())

    seen: dict[int, list[int]] = {1: [], 2: []}
    tasks = [start(episode(numbers), request) for request, numbers in seen.items()]
    for _ in range(20):
        assert running() == 0
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert seen == {1: [1] * 5, 2: [2] * 5}


async def test_what_would_end_the_loop_ends_the_task(page: Page) -> None:
    """sys.exit in an episode's tasks is its error; other errors and cancellation pass unchanged, and anyio sees a coroutine."""
    attribute_steps(asyncio.get_running_loop(), page)

    async def raises(error: BaseException) -> None:
        raise error

    async def episode(error: BaseException) -> None:
        await asyncio.create_task(raises(error))

    for error, wanted in ((SystemExit(4), RuntimeError), (ValueError("x"), ValueError)):
        with pytest.raises(wanted, match="sys.exit\\(4\\)|x"):
            await start(episode(error), 1)
    task = start(asyncio.sleep(1000), 1)
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_SUSPENDED  # type: ignore[arg-type]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
