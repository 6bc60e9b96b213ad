"""The limit of episodes in flight, against a model of a server: it finds what fits, and comes to rest there."""

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.concurrency import LOOKS, PATIENCE, Concurrency, ServerLoad

LOOK_EVERY = 3  # tokens


@dataclass
class Server:
    """`seats` requests at a time, `room` tokens of cache; one token each a tick; the youngest is preempted and begins again when the cache is full.
    At most `intake` contexts are taken in within a tick."""

    seats: int
    room: int
    prompt: int
    intake: int = 10**6
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
        self.landed += sum(sampled >= wanted for wanted, sampled in self.running)
        self.running = [request for request in self.running if request[1] < request[0]]

    def load(self) -> ServerLoad:
        return ServerLoad(len(self.running), len(self.queue), self.used / self.room, self.preempted)


def drive(
    servers: list[Server], control: Concurrency, lengths: tuple[int, int], turns: int, update_every: int = 0
) -> list[int]:
    """The limit after each look, for so many turns of the longest replies. All weights are loaded anew after every `update_every` looks."""
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
@example(seats=14, rows=13, prompt=1, reply=13, start=28)
def test_it_comes_to_rest_where_nothing_waits(seats: int, rows: int, prompt: int, reply: int, start: int) -> None:
    """Contract: under a load that stays what it is the limit rises, is cut, and then stands, but for one more try now and then: no queue, few
    preemptions, and no more than a third below what the server takes at most."""
    server = Server(seats, rows * (prompt + reply), prompt)
    control = Concurrency(start, 96)
    limits = drive([server], control, (reply, reply), turns=99)  # looks go on in step with replies
    before = server.preempted
    rest = drive([server], control, (reply, reply), turns=21)
    # One try: up and back, or up, up again and back where the first step was right.
    assert sum(one != two for one, two in itertools.pairwise(rest)) <= 3, (limits, rest)
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
    assert tried_again <= math.log2(2 * turns / PATIENCE), limits


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


def test_a_ceiling_whose_reason_is_gone_is_lifted() -> None:
    """Contract: once replies are so short that the cache stays half empty, more is tried again; where there are no more seats that is undone."""
    control, server = Concurrency(60, 64), Server(256, 1_600, 8)
    heavy = drive([server], control, (72, 72), turns=40)[-1]
    assert 13 <= heavy <= 25
    assert drive([server], control, (10, 10), turns=300)[-1] == 64
    control, server = Concurrency(8, 64), Server(20, 100_000, 8)
    seats = drive([server], control, (72, 72), turns=40)[-1]
    later = drive([server], control, (10, 10), turns=300)
    assert 16 <= seats <= 20
    assert sorted(later)[len(later) // 2] == seats
    assert seats < max(later) <= 25


def test_a_burst_of_first_prompts_is_no_pressure() -> None:
    """Contract: all prompts come at once at the start and wait for one another; nobody waits later, and the limit only grows."""
    server = Server(256, 100_000, 8, intake=2)
    limits = drive([server], Concurrency(48, 60), (40, 60), turns=40)
    assert limits == sorted(limits)
    assert limits[-1] == 60


@pytest.mark.parametrize("every", [11, 40])
def test_contexts_that_are_computed_again_are_no_pressure(every: int) -> None:
    """Contract: after an update all contexts wait to be computed again, for several looks; the limit only grows."""
    server = Server(256, 100_000, 8, intake=4)
    limits = drive([server], Concurrency(32, 64), (40, 60), turns=60, update_every=every)
    assert limits == sorted(limits)
    assert limits[-1] == 64


def test_an_evaluation_is_no_pressure() -> None:
    """Contract: an evaluation beside training fills the seats and the cache, and preempts; the limit stays, and grows when it is over."""
    control, calm = Concurrency(24, 48), [ServerLoad(24, 0, 0.3, 0)]
    for look in range(3 * LOOKS):
        assert control.look([ServerLoad(64, 80, 0.99, 7 * look)], in_flight=24, landed=24 * look, evaluating=True) == 24
    landed = 24 * 3 * LOOKS
    assert (
        control.look([ServerLoad(24, 30, 0.3, 100)], in_flight=24, landed=landed, evaluating=True) == 24
    )  # its last look
    limits = [
        control.look([ServerLoad(24, 0, 0.3, 100)], in_flight=24, landed=landed + 8 * n) for n in range(2 * LOOKS)
    ]
    assert (min(limits), limits[-1]) == (24, 31), calm


def test_the_limit_falls_by_the_share_that_waits() -> None:
    """Contract: of a hundred episodes ten are at the server, the others use tools; that two of the ten wait is no reason to go down to eight."""
    control = Concurrency(100, 100)
    limits = [control.look([ServerLoad(8, 2, 0.5, 0)], in_flight=100, landed=n) for n in range(2 * LOOKS)]
    assert limits[-1] == 72


def test_a_cache_that_is_nearly_full_is_pressure_before_it_preempts() -> None:
    """Contract: at 95 % the limit falls at once, below that it does not."""
    control = Concurrency(20, 40)
    assert [control.look([ServerLoad(20, 0, cache, 0)], in_flight=20, landed=0) for cache in (0.5, 0.94, 0.96)] == [
        20,
        20,
        18,
    ]


def test_what_was_preempted_before_is_no_pressure() -> None:
    """Contract: counters begin before the run, also those of a server that joins."""
    control = Concurrency(10, 20)
    for n in range(LOOKS):
        assert control.look([ServerLoad(10, 0, 0.3, 500)], in_flight=10, landed=n) == 10
    for n in range(LOOKS):
        assert control.look([ServerLoad(10, 0, 0.3, 500), ServerLoad(10, 0, 0.3, 70)], in_flight=10, landed=n) == 20
    assert control.look([ServerLoad(10, 0, 0.3, 500), ServerLoad(10, 0, 0.3, 71)], in_flight=20, landed=n) == 18


def test_nothing_grows_that_does_not_bind() -> None:
    """Contract: where something else holds the number back (steps that may run ahead), the limit stays; without servers, too."""
    control = Concurrency(16, 64)
    idle = ServerLoad(4, 0, 0.1, 0)
    assert [control.look([idle], in_flight=4, landed=100 * i, updating=False) for i in range(9)] == [16] * 9
    assert control.look([], in_flight=0, landed=10**4, updating=False) == 16
