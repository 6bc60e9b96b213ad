"""Which tenant gets the engine, by a simulated one."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.inference.fair_share import TURN_SECONDS, FairShare

NAMES = "abcd"
WEIGHTS, LIMITS = {"a": 2.0, "b": 0.5}, {"c": 0.5, "d": 0.01}
RESIDENT = st.sampled_from([1, 2, math.inf])
EVENTS = st.lists(st.tuples(st.sampled_from(["ask", "end", "hang up"]), st.sampled_from(NAMES), st.integers(0, 99)))


class SharedEngine:
    """Requests are numbers."""

    def __init__(self, most: int, resident: float = math.inf, limits: Mapping[str, float] = LIMITS) -> None:
        self.share, self.now = FairShare[int](most, WEIGHTS, limits, resident), 0.0
        self.names, self.running, self.admitted = list[str](), list[int](), Counter[str]()

    def ask(self, name: str) -> int:
        self.names.append(name)
        self._run(self.share.ask(name, len(self.names) - 1, self.now))
        return len(self.names) - 1

    def leave(self, ticket: int) -> None:
        self.running = [each for each in self.running if each != ticket]
        self._run(self.share.leave(self.names[ticket], ticket, self.now))

    def _run(self, tickets: list[int]) -> None:
        self.running += tickets
        self.admitted.update(self.count(tickets))

    def count(self, tickets: Any) -> Counter[str]:
        return Counter(self.names[ticket] for ticket in tickets)


@settings(max_examples=200)
@given(st.integers(1, 6), RESIDENT, EVENTS)
def test_every_order_of_requests(most: int, resident: float, events: list[tuple[str, str, int]]) -> None:
    """Contract: never more in flight than `most`, a tenant's limit, or of more tenants than are resident; none waits
    where none of these is reached; shares are those of time; each is admitted once, or leaves."""
    engine, waiting, spent = SharedEngine(most, resident), set[int](), Counter[str]()
    limits = {name: max(1, int(LIMITS.get(name, 1) * most)) for name in NAMES}

    def check() -> None:
        waiting.difference_update(engine.running)
        running = engine.count(engine.running)
        assert running == engine.share.in_flight
        assert Counter({name: engine.share.waiting(name) for name in NAMES}) == engine.count(waiting)
        assert running <= Counter(limits)
        assert running.total() <= most
        assert len(running) <= resident
        if running.total() < most and len(running) < resident:
            assert all(running[name] == limits[name] for name in engine.count(waiting))

    for what, name, number in events:
        engine.now += number / 100
        for ticket in engine.running:
            spent[engine.names[ticket]] += number
        if what == "ask":
            waiting.add(engine.ask(name))
        elif what == "end" and engine.running:
            engine.leave(engine.running[number % len(engine.running)])
        elif what == "hang up" and waiting:
            engine.leave(waiting.pop())
        check()
    for name in NAMES if spent.total() else "":  # what was earlier counts for a little less
        assert abs(engine.share.share(name, engine.now) - spent[name] / spent.total()) < 0.1
    while engine.running:
        engine.leave(engine.running[0])
        check()
    assert not waiting


@given(RESIDENT, st.integers(1, 5), st.sampled_from("ad"), st.randoms(use_true_random=False))
def test_nobody_starves(resident: float, most: int, last: str, random: Any) -> None:
    """Contract: who asks waits for a bounded number of the others' requests, however many wait, whichever end first,
    and whoever had the engine alone before."""
    engine = SharedEngine(most, resident, {})
    for _ in range(100):
        engine.leave(engine.ask("a"))
    for name in ("bcd" if last == "a" else "abc") * 40:
        engine.ask(name)
    ticket = engine.ask(last)
    for _ in range(40):
        if ticket not in engine.running:
            engine.now += TURN_SECONDS / 4
            engine.leave(random.choice(engine.running))
    assert ticket in engine.running


def test_weights_and_limits() -> None:
    """Contract: while all wait the engine's requests are shared as the weights say, also where it takes one at a time;
    what is beyond a limit is the others'."""
    for most, limits, parts in ((1, {}, (16, 4, 8, 8)), (36, {}, (16, 4, 8, 8)), (36, {"a": 0.1}, (3, 7, 13, 13))):
        engine = SharedEngine(most, limits=limits)
        for name in NAMES * 1000:
            engine.ask(name)
        for _ in range(900):
            engine.leave(engine.running[0])
        got = engine.share.in_flight if most > 1 else {name: engine.admitted[name] * 36 / 900 for name in NAMES}
        assert all(abs(got[name] - part) <= 1 for name, part in zip(NAMES, parts, strict=True)), got
