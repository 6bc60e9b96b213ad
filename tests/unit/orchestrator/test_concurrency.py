"""The limit of episodes in flight, against a model of a server: it finds what fits, and comes to rest there."""

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.concurrency import LIGHT_TURNS, Concurrency, Load

LOOK_EVERY = 3  # tokens


@dataclass
class Server:
    """`seats` requests at a time, `room` tokens of cache; one token each a tick; the youngest is preempted and begins again when the cache is full."""

    seats: int
    room: int
    prompt: int
    queue: deque[list[int]] = field(default_factory=deque)  # [tokens to sample, sampled]
    running: list[list[int]] = field(default_factory=list)
    preempted: int = 0
    landed: int = 0

    @property
    def used(self) -> int:
        return sum(self.prompt + sampled for _, sampled in self.running)

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.running)

    def admit(self) -> None:
        while self.queue and len(self.running) < self.seats and self.used + self.prompt < self.room:
            self.running.append(self.queue.popleft())

    def tick(self) -> None:
        self.admit()
        while self.running and self.used + len(self.running) > self.room:
            last = self.running.pop()
            last[1] = 0
            self.queue.appendleft(last)
            self.preempted += 1
        for request in self.running:
            request[1] += 1
        self.landed += sum(sampled >= wanted for wanted, sampled in self.running)
        self.running = [request for request in self.running if request[1] < request[0]]

    def load(self) -> Load:
        return Load(len(self.running), len(self.queue), self.used / self.room, self.preempted)


def drive(
    servers: list[Server], control: Concurrency, lengths: tuple[int, int], turns: int, update_every: int = 0
) -> list[int]:
    """The limit after each look, for so many turns of the longest replies."""
    rng, limits, tick = random.Random(0), [], 0
    for tick in range(turns * lengths[1]):
        for server in servers:
            server.tick()
        while sum(server.in_flight for server in servers) < control.limit:
            least = min(servers, key=lambda server: server.in_flight)
            least.queue.append([rng.randint(*lengths), 0])
            least.admit()
        updating = bool(update_every) and tick // LOOK_EVERY % update_every == 0
        if updating and tick % LOOK_EVERY == 0:
            for server in servers:
                server.preempted += len(server.running)
        if tick % LOOK_EVERY == LOOK_EVERY - 1:
            flight, landed = sum(s.in_flight for s in servers), sum(s.landed for s in servers)
            loads = [server.load() for server in servers]
            limits.append(control.look(loads, in_flight=flight, landed=landed, updating=updating))
    return limits


WORLDS = {
    "seats": st.integers(4, 48),
    "rows": st.integers(4, 48),  # of the longest sequences fit into the cache
    "prompt": st.integers(1, 32),
    "reply": st.integers(8, 40),
    "start": st.integers(1, 80),
}


@settings(max_examples=60, deadline=None)
@given(**WORLDS)
def test_it_comes_to_rest_where_nothing_waits(seats: int, rows: int, prompt: int, reply: int, start: int) -> None:
    """Contract: under a load that stays what it is the limit rises, is cut, and then stands, but for one more try now and then: no queue, few
    preemptions, and no more than a third below what the server takes at most."""
    server = Server(seats, rows * (prompt + reply), prompt)
    control = Concurrency(start, 96)
    limits = drive([server], control, (reply, reply), turns=100)
    before = server.preempted
    rest = drive([server], control, (reply, reply), turns=20)
    assert sum(one != two for one, two in itertools.pairwise(rest)) <= 2, (limits, rest)
    assert server.preempted - before <= max(rest)
    usual = sorted(rest)[len(rest) // 2]
    assert 0.66 * min(seats, rows, 96) - 1 <= usual <= 1 + 1.05 * seats, (limits, rest)


@settings(max_examples=60, deadline=None)
@given(**WORLDS)
def test_it_never_thrashes(seats: int, rows: int, prompt: int, reply: int, start: int) -> None:
    """Contract: also where replies differ in length, a limit that was cut is reached again ever more seldom: as often as the logarithm of the
    number of turns, not as that number."""
    server, turns = Server(seats, rows * (prompt + reply), prompt), 300
    limits = drive([server], Concurrency(start, 96), (max(1, int(0.6 * reply)), reply), turns)
    too_much, tried_again = 97, 0
    for before, now in itertools.pairwise(limits):
        if now < before:
            too_much = min(too_much, before)
        elif before < too_much <= now:
            too_much, tried_again = 97, tried_again + 1
    assert tried_again <= math.log2(2 * turns / LIGHT_TURNS), limits


def test_an_update_is_no_pressure() -> None:
    """Contract: loading weights preempts all that runs; the limit does not fall for it."""
    quiet = drive([Server(64, 10_000, 8)], Concurrency(16, 48), (20, 20), turns=40, update_every=7)
    assert quiet == sorted(quiet)
    assert quiet[-1] == 48


def test_servers_that_come_and_go_bring_their_share() -> None:
    """Contract: with half of the servers half as much is in flight, with all of them as much as before."""
    control = Concurrency(10, 1000)
    servers = [Server(16, 10_000, 8) for _ in range(2)]
    both = drive(servers, control, (20, 20), turns=60)[-1]
    assert 20 <= both <= 32
    loads = [server.load() for server in servers]
    assert control.look(loads[:1], in_flight=both, landed=10**6, updating=False) == round(both / 2)
    assert control.look(loads, in_flight=both // 2, landed=10**6, updating=False) == 2 * round(both / 2)


def test_a_lighter_load_lifts_the_ceiling_of_a_full_cache() -> None:
    """Contract: once replies are so short that the cache stays half empty, more is tried again; a ceiling of seats stays."""
    control, server = Concurrency(8, 64), Server(256, 1_600, 8)
    heavy = drive([server], control, (72, 72), turns=40)[-1]
    assert heavy <= 25
    assert drive([server], control, (10, 10), turns=300)[-1] == 64
    control, server = Concurrency(8, 64), Server(20, 100_000, 8)
    seats = drive([server], control, (72, 72), turns=40)[-1]
    assert drive([server], control, (10, 10), turns=300)[-1] == seats <= 20


def test_nothing_grows_that_does_not_bind() -> None:
    """Contract: where something else holds the number back (steps that may run ahead), the limit stays; without servers, too."""
    control = Concurrency(16, 64)
    idle = Load(4, 0, 0.1, 0)
    assert [control.look([idle], in_flight=4, landed=100 * i, updating=False) for i in range(9)] == [16] * 9
    assert control.look([], in_flight=0, landed=10**4, updating=False) == 16
