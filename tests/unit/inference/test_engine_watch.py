"""The engine's pulse: an answer is progress, silence is none, a death ends the process, a stop does not look like one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from prime_rl.inference import engine_watch
from prime_rl.inference.engine_watch import watch_engine
from prime_rl.monitor.status import Status, read_status


class FakeEngine:
    """Answers while `alive` is set; `errored` as vLLM's client has it: true after a death and after a stop."""

    def __init__(self) -> None:
        self.errored = False
        self.asked = 0
        self.alive = asyncio.Event()
        self.alive.set()

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked += 1
        await self.alive.wait()
        if self.errored:
            raise RuntimeError("the engine is dead")
        return [None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(engine_watch, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(engine_watch, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr("prime_rl.monitor.status._MIN_INTERVAL_SECONDS", 0.0)


@asynccontextmanager
async def beating(
    directory: Path, ended: Callable[[], None] = lambda: None, on_stop: Callable[[], None] = lambda: None
) -> AsyncIterator[FakeEngine]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    engine, status = FakeEngine(), Status(directory, "inference")
    task = asyncio.create_task(watch_engine(engine, status, on_stop, ended))
    try:
        yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        status.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def progress(directory: Path) -> float:
    return read_status(directory)["inference"].progress


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_answers_are_progress_and_silence_is_not(tmp_path: Path) -> None:
    """Contract: progress goes on while the engine answers, and stands still while it does not, with one question open."""
    async with beating(tmp_path) as engine:
        await until(lambda: engine.asked > 1)
        engine.alive.clear()
        asked = engine.asked
        await until(lambda: engine.asked == asked + 1)
        before = progress(tmp_path)
        await asyncio.sleep(0.2)
        assert (engine.asked, progress(tmp_path)) == (asked + 1, before)
        engine.alive.set()
        await until(lambda: progress(tmp_path) > before)


@pytest.mark.parametrize("seen", ["with a question open", "between two", "by vLLM first"])
async def test_a_death_ends_the_process(tmp_path: Path, seen: str) -> None:
    """Contract: an engine that died is an outcome of this process, which ends; also where vLLM ends the event loop before the next look."""
    ended: list[bool] = []
    async with beating(tmp_path, lambda: ended.append(True)) as engine:
        if seen == "with a question open":
            engine.alive.clear()
        await until(lambda: engine.asked > 0)
        engine.errored = True
        if seen != "by vLLM first":
            await until(lambda: bool(ended))
    assert ended
    assert read_status(tmp_path)["inference"].outcome == "failed: the engine died"


async def test_a_stop_is_no_death(tmp_path: Path) -> None:
    """Contract: a stop asked for by a signal, which vLLM handles in its event loop, makes the client errored, but is no death."""
    stopped = asyncio.Event()
    ended: list[bool] = []
    asked: list[bool] = []
    async with beating(tmp_path, lambda: ended.append(True), lambda: asked.append(True)) as engine:
        # As vLLM does: a handler of the loop, added after the plugin was started.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await until(lambda: engine.asked > 1)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await stopped.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        engine.errored = True
        await asyncio.sleep(0.1)
    assert (ended, asked) == ([], [True]), "however often it is asked"
