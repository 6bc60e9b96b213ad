"""Looking at the servers: what their counters mean, and what becomes of it."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from prime_rl.orchestrator.concurrency import LoadWatch, ServerLoad, read_load
from prime_rl.orchestrator.scheduler import Limits, Scheduler, Task
from prime_rl.wait import wait_async

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
    assert read_load(text(waiting=3, preempted=4)) == ServerLoad(8.0, 3.0, 0.5, 4.0)
    with pytest.raises(ValueError, match="num_requests_running"):
        read_load("<html>")


def make(batch: int) -> tuple[LoadWatch, Scheduler[Any], Any]:
    tasks = (Task("env", index, str(index)) for index in range(10**6))
    core: Scheduler[Any] = Scheduler(Limits(batch, 2, 100, 100, 2 * batch, None), tasks)
    fleet: Any = SimpleNamespace(
        serving=[SimpleNamespace(name="http://a"), SimpleNamespace(name="http://b")], loading=None, evaluating=False
    )
    return LoadWatch(fleet, core, most=64, evaluating=lambda: fleet.evaluating), core, fleet


async def look(watch: LoadWatch, *texts: str | Exception) -> None:
    answers = iter(texts)

    async def fetch(url: str) -> str:
        assert url in ("http://a/metrics", "http://b/metrics")
        await asyncio.sleep(0)
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    await watch.look(fetch)


async def land(watch: LoadWatch, core: Scheduler[Any], flying: deque[str], *texts: str | Exception) -> None:
    """An episode ends, another one starts, and both servers are looked at."""
    core.finish(flying.popleft(), None)
    while (start := core.next_start()) is not None:
        flying.append(start.episode)
    await look(watch, *texts)


async def test_a_turn_without_pressure_raises_what_may_be_in_flight_and_a_queue_that_stands_lowers_it() -> None:
    """Contract: it begins with a step's worth; no answer changes nothing, nor does what is there beside an evaluation."""
    watch, core, fleet = make(16)
    flying = deque(start.episode for _ in range(16) if (start := core.next_start()) is not None)
    assert (len(flying), core.next_start()) == (16, None)
    for _ in range(17):  # a turn and a little
        await land(watch, core, flying, text(), text())
    raised = core.limits.max_concurrent
    assert raised == 21
    for _ in range(12):
        await land(watch, core, flying, text(waiting=5), httpx.ConnectError("gone"))
    fleet.evaluating = True
    for _ in range(12):
        await land(watch, core, flying, text(waiting=5), text(waiting=5, preempted=3))
    fleet.evaluating = False
    await land(watch, core, flying, text(waiting=5), text(preempted=9))  # since the last look
    assert core.limits.max_concurrent == raised
    for _ in range(12):
        await land(watch, core, flying, text(waiting=5), text(waiting=4, preempted=9))
    assert core.limits.max_concurrent < raised


async def test_servers_are_asked_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what is before a server, and guards all of its routes, lets these questions through."""
    heard: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode())
        body = text()
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    monkeypatch.setattr("prime_rl.orchestrator.concurrency.LOOK_SECONDS", 0.01)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    watch, _, fleet = make(16)
    fleet.serving = [SimpleNamespace(name=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")]
    looking = asyncio.create_task(watch.run("secret"))
    await wait_async(lambda: heard, subject="question", owner="the watch", seconds=30)
    looking.cancel()
    server.close()
    assert heard[0].startswith("GET /metrics ")
    assert "authorization: bearer secret\r\n" in heard[0].lower()


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
