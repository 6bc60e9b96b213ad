"""Looking at the servers: what their counters mean, and what becomes of it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from prime_rl.orchestrator.concurrency import Load
from prime_rl.orchestrator.core import Core, Limits, Task
from prime_rl.orchestrator.load import LoadWatch, read_load

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_running{{engine="1"}} 2.0
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:num_requests_waiting_by_reason{{reason="capacity"}} 99.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:kv_cache_usage_perc{{engine="1"}} {cache}
vllm:num_preemptions_total{{engine="0"}} {preempted}
vllm:num_preemptions_created{{engine="0"}} 1.7e9
"""


def text(running: int = 6, waiting: int = 0, cache: float = 0.5, preempted: int = 0) -> str:
    return METRICS.format(running=running, waiting=waiting, cache=cache, preempted=preempted)


def test_counters_are_read_for_all_engines_of_a_server() -> None:
    """Contract: requests and preemptions are summed over a server's engines, the fullest cache counts; another text is refused."""
    assert read_load(text(waiting=3, preempted=4)) == Load(8.0, 3.0, 0.5, 4.0)
    with pytest.raises(ValueError, match="num_requests_running"):
        read_load("<html>")


def make(in_flight: int) -> tuple[LoadWatch, Core[Any], Any]:
    tasks = (Task("env", index, str(index)) for index in range(10**6))
    core: Core[Any] = Core(Limits(4, 2, 100, 100, in_flight, None), tasks)
    fleet: Any = SimpleNamespace(
        serving=[SimpleNamespace(name="http://a"), SimpleNamespace(name="http://b")], loading=None
    )
    return LoadWatch(fleet, core, most=64), core, fleet


async def look(watch: LoadWatch, *texts: str | Exception) -> None:
    answers = iter(texts)

    async def fetch(url: str) -> str:
        assert url in ("http://a/metrics", "http://b/metrics")
        await asyncio.sleep(0)
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    await watch.look(fetch)


async def test_a_queue_lowers_what_may_be_in_flight_and_turns_without_one_raise_it() -> None:
    """Contract: two looks that show a queue lower the core's limit at once; turns without pressure raise it; no answer changes nothing."""
    watch, core, _ = make(16)
    started = [start for _ in range(16) if (start := core.next_start()) is not None]
    assert (len(started), core.next_start()) == (16, None)
    for number in range(18):  # a turn and a little
        core.finish(started[number].episode, None)
        following = core.next_start()
        assert following is not None
        started.append(following)
        await look(watch, text(), text())
    raised = core.limits.max_concurrent
    assert raised == 21
    await look(watch, text(), httpx.ConnectError("gone"))
    await look(watch, text(waiting=9), text())
    assert core.limits.max_concurrent == raised
    await look(watch, text(waiting=9), text())
    assert core.limits.max_concurrent < raised


async def test_preemptions_by_an_update_lower_nothing() -> None:
    """Contract: what an update preempts is not taken for a cache that is too small; other preemptions are."""
    watch, core, fleet = make(16)
    while core.next_start() is not None:
        pass
    await look(watch, text(), text())
    fleet.loading = 1
    await look(watch, text(preempted=8), text(preempted=8))
    fleet.loading = None
    core.serve(1)
    await look(watch, text(preempted=8), text(preempted=16))
    assert core.limits.max_concurrent == 16
    await look(watch, text(preempted=9), text(preempted=16))
    assert core.limits.max_concurrent < 16
