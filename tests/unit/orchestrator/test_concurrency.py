"""The limit of episodes in flight: what the configuration allows; the controller against a model of a server: it finds
what fits, and stays there; and how it asks the servers."""

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator import concurrency
from prime_rl.orchestrator.concurrency import (
    LOOKS,
    Concurrency,
    LoadWatch,
    ServerLoad,
    limits,
    most_in_flight,
    read_load,
    slots,
)
from prime_rl.orchestrator.scheduler import Limits, Scheduler
from prime_rl.wait import wait_async
from support.scheduling import endless_tasks

LOOK_EVERY = 3  # tokens


@dataclass
class Server:
    """`seats` requests at a time, `room` tokens of cache; one token each a tick. The youngest is preempted and begins
    again when the cache is full. At most `intake` contexts are taken in within a tick."""

    seats: int
    room: int
    prompt: int
    intake: int = 10**6
    queue: deque[list[int]] = field(default_factory=deque)  # [tokens to sample, sampled]
    running: list[list[int]] = field(default_factory=list)
    preempted: int = 0
    ended: int = 0

    @property
    def used(self) -> int:
        return sum(self.prompt + sampled for _, sampled in self.running)

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.running)

    def admit(self) -> None:
        for _ in range(self.intake):
            if not (self.queue and len(self.running) < self.seats and self.used + self.prompt < self.room):
                break
            self.running.append(self.queue.popleft())

    def update(self) -> None:
        """All contexts are to be computed again."""
        self.preempted += len(self.running)
        self.queue.extendleft(reversed(self.running))
        self.running = []

    def tick(self) -> None:
        self.admit()
        while self.running and self.used + len(self.running) > self.room:
            last = self.running.pop()
            last[1] = 0
            self.queue.appendleft(last)
            self.preempted += 1
        for request in self.running:
            request[1] += 1
        self.ended += sum(sampled >= wanted for wanted, sampled in self.running)
        self.running = [request for request in self.running if request[1] < request[0]]

    def load(self) -> ServerLoad:
        return ServerLoad(len(self.running), len(self.queue), self.used / self.room, self.preempted)


def drive(
    servers: list[Server], control: Concurrency, lengths: tuple[int, int], turns: int, update_every: int = 0
) -> list[int]:
    """The limit after each look, for so many turns of the longest replies.

    All weights are loaded anew after every `update_every` looks.
    """
    rng, limits = random.Random(0), []
    for tick in range(turns * lengths[1]):
        for server in servers:
            server.tick()
        while sum(server.in_flight for server in servers) < control.limit:
            least = min(servers, key=lambda server: server.in_flight)
            least.queue.append([rng.randint(*lengths), 0])
            if least.intake > 1000:
                least.admit()
        updating = bool(update_every) and tick // LOOK_EVERY % update_every == update_every - 1
        if updating and tick % LOOK_EVERY == 0:
            for server in servers:
                server.update()
        if tick % LOOK_EVERY == LOOK_EVERY - 1:
            in_flight, ended = sum(s.in_flight for s in servers), sum(s.ended for s in servers)
            loads = [server.load() for server in servers]
            limits.append(control.look(loads, in_flight=in_flight, ended=ended, updating=updating))
    return limits


@settings(max_examples=60, deadline=None)
@given(
    seats=st.integers(12, 48),
    rows=st.integers(12, 48),  # of the longest sequences fit into the cache
    prompt=st.integers(1, 32),
    reply=st.integers(8, 40),
    start=st.integers(1, 80),
    shortest=st.sampled_from([0.6, 1.0]),
)
def test_it_stays_near_what_a_server_takes(
    seats: int, rows: int, prompt: int, reply: int, start: int, shortest: float
) -> None:
    """Contract: under a load that stays what it is the limit comes near what the server takes at most, and stays there:
    few preemptions, and hardly a queue."""
    server, control = Server(seats, rows * (prompt + reply), prompt), Concurrency(start, 96)
    lengths = (max(1, int(shortest * reply)), reply)
    drive([server], control, lengths, turns=60)
    preempted, ended = server.preempted, server.ended
    limits = drive([server], control, lengths, turns=40)
    assert server.preempted - preempted <= 0.35 * (server.ended - ended), limits
    assert 0.75 * min(seats, rows) - 1 <= min(limits), limits
    assert max(limits) <= 1 + 1.25 * seats, limits


def test_it_follows_what_changes() -> None:
    """Contract: with half of the servers half as much is in flight, with all of them as much as before; once replies are
    so short that the cache stays half empty the limit rises again."""
    control, servers = Concurrency(10, 1000), [Server(16, 10_000, 8) for _ in range(2)]
    both = drive(servers, control, (20, 20), turns=60)[-1]
    assert 20 <= both <= 36
    loads = [server.load() for server in servers]
    for present, expected in ((loads[:1], round(both / 2)), ([], round(both / 2)), (loads, 2 * round(both / 2))):
        assert control.look(present, in_flight=both // 2, ended=10**6) == expected
    control, server = Concurrency(60, 64), Server(256, 1_600, 8)
    assert 13 <= drive([server], control, (72, 72), turns=40)[-1] <= 25
    assert drive([server], control, (10, 10), turns=100)[-1] == 64


@pytest.mark.parametrize(("intake", "every", "start", "most"), [(2, 0, 48, 60), (4, 11, 32, 64), (4, 40, 32, 64)])
def test_contexts_that_wait_to_be_computed_are_no_pressure(intake: int, every: int, start: int, most: int) -> None:
    """Contract: at the start all prompts wait for one another, and after an update, which preempts them, all contexts;
    the limit only grows."""
    server = Server(256, 100_000, 8, intake=intake)
    limits = drive([server], Concurrency(start, most), (40, 60), turns=40, update_every=every)
    assert limits == sorted(limits)
    assert limits[-1] == most


def test_what_is_no_pressure_of_the_limit() -> None:
    """Contract: an evaluation beside training fills the seats and the cache, and preempts; the limit stays, and grows
    when it is over. Of a hundred episodes ten are at the server, the others use tools; that two of the ten wait is no
    reason to go down to eight."""
    control = Concurrency(24, 48)
    for look in range(3 * LOOKS):
        assert control.look([ServerLoad(64, 80, 0.99, 7 * look)], in_flight=24, ended=24 * look, evaluating=True) == 24
    ended, after = 24 * 3 * LOOKS, [ServerLoad(24, 0, 0.3, 100)]
    assert control.look([ServerLoad(24, 30, 0.3, 100)], in_flight=24, ended=ended, evaluating=True) == 24
    limits = [control.look(after, in_flight=24, ended=ended + 8 * n) for n in range(2 * LOOKS)]
    assert (min(limits), limits[-1]) == (24, 27)
    control = Concurrency(100, 100)
    limits = [control.look([ServerLoad(8, 2, 0.5, 0)], in_flight=100, ended=25 * n) for n in range(LOOKS + 1)]
    assert limits[-1] == 72


# -- looking at the servers: what their counters mean, and what becomes of it ------------------------------------------


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
    """Contract: requests and preemptions are summed over a server's engines, the fullest cache counts; another text is
    refused."""
    assert read_load(text(waiting=3, preempted=4)) == ServerLoad(8.0, 3.0, 0.5, 4.0)
    with pytest.raises(ValueError, match="num_requests_running"):
        read_load("<html>")


class Watched:
    """A watch over two servers, with as many episodes in flight as it allows."""

    def __init__(self, batch: int = 16) -> None:
        self.scheduler: Scheduler[Any] = Scheduler(Limits(batch, 2, 100, 100, 2 * batch, None), endless_tasks())
        self.evaluating = False
        self.fleet: Any = SimpleNamespace(ready=[SimpleNamespace(name=f"http://{name}") for name in "ab"], loading=None)
        self.watch = LoadWatch(self.fleet, self.scheduler, most=64, evaluating=lambda: self.evaluating)
        self.running: deque[str] = deque()
        self.start()

    def start(self) -> None:
        self.running.extend(start.episode for start in iter(self.scheduler.next_start, None))

    @property
    def limit(self) -> int:
        return self.scheduler.limits.max_concurrent

    async def look(self, *texts: str | Exception, episodes: int = 0, times: int = 1) -> None:
        """Look at both servers; before each look so many episodes end and others start."""
        for _ in range(times):
            for _ in range(episodes):
                self.scheduler.finish(self.running.popleft(), None)
            self.start()
            answers = dict(zip(("http://a/metrics", "http://b/metrics"), texts, strict=True))

            async def fetch(url: str, answers: Any = answers) -> str:
                await asyncio.sleep(0)
                if isinstance(answer := answers[url], Exception):
                    raise answer
                return answer

            await self.watch.look(fetch)


async def test_a_turn_without_pressure_raises_the_limit_and_a_queue_that_stands_lowers_it() -> None:
    """Contract: it begins with a step's worth; no answer changes nothing, nor does what is there beside an evaluation."""
    watched = Watched()
    assert len(watched.running) == 16
    await watched.look(text(), text(), episodes=1, times=17)  # a turn and a little
    assert watched.limit == 18
    await watched.look(text(waiting=5), httpx.ConnectError("gone"), episodes=1, times=12)
    watched.evaluating = True
    await watched.look(text(waiting=5), text(waiting=5, preempted=3), episodes=1, times=12)
    watched.evaluating = False
    await watched.look(text(waiting=5), text(preempted=9), episodes=1)  # since the last look
    assert watched.limit == 18
    await watched.look(text(waiting=5), text(waiting=4, preempted=9), episodes=1, times=21)
    assert watched.limit < 18


async def test_preemptions_by_an_update_lower_nothing() -> None:
    """Contract: what an update preempts is not taken for a cache that is too small; other preemptions are."""
    watched = Watched()
    await watched.look(text(), text())
    watched.fleet.loading = 1
    await watched.look(text(preempted=8), text(preempted=8))
    watched.fleet.loading = None
    watched.scheduler.serve(1)
    await watched.look(text(preempted=8), text(preempted=16))
    assert watched.limit == 16
    await watched.look(text(preempted=9), text(preempted=16))
    assert watched.limit < 16


async def test_servers_are_asked_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what is before a server, and guards all of its routes, lets these questions through."""
    requests: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text())}\r\n\r\n{text()}".encode())
        await writer.drain()
        writer.close()

    monkeypatch.setattr(concurrency, "LOOK_SECONDS", 0.01)
    server, watched = await asyncio.start_server(answer, "127.0.0.1", 0), Watched()
    watched.fleet.ready = [SimpleNamespace(name=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")]
    looking = asyncio.create_task(watched.watch.run("secret"))
    await wait_async(lambda: requests, subject="question", owner="the watch", seconds=30)
    looking.cancel()
    server.close()
    assert requests[0].startswith("GET /metrics ")
    assert "authorization: bearer secret\r\n" in requests[0].lower()


@pytest.mark.parametrize(("workers", "max_workers", "expected"), [(2, None, 2 * 8 + 4), ("auto", 5, 5 * 8 + 4)])
def test_slots_count_the_workers_that_may_be(
    tmp_path: Path, workers: int | str, max_workers: int | None, expected: int
) -> None:
    """An environment that may grow gets the episodes that make it grow."""
    config = OrchestratorConfig(
        output_dir=tmp_path,
        environments=[
            {"id": "a", "workers": workers, "max_workers": max_workers, "max_concurrent": 8},
            {"id": "b", "workers": 1, "max_concurrent": 4},
        ],
        batch_size=1000, rollouts_per_example=10, async_level=1, max_concurrent=500,
    )  # fmt: skip
    assert slots(config.environments) == most_in_flight(config) == limits(config).max_concurrent == expected
