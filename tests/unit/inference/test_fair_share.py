"""Which tenant gets the engine: every order of requests, by a simulated engine."""

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.inference.fair_share import TURN_SECONDS, FairShare

NAMES = "abcd"
WEIGHTS, LIMITS = {"a": 2.0, "b": 0.5}, {"c": 0.5, "d": 0.01}


class Shared:
    """An engine whose requests are numbers."""

    def __init__(self, most: int, resident: float = float("inf"), limits: Any = LIMITS) -> None:
        self.share = FairShare[int](most, WEIGHTS, limits, resident)
        self.owner: dict[int, str] = {}
        self.running: list[int] = []
        self.admitted: Counter[str] = Counter()
        self.now = 0.0

    def ask(self, name: str) -> int:
        ticket = len(self.owner)
        self.owner[ticket] = name
        self._run(self.share.ask(name, ticket, self.now))
        return ticket

    def leave(self, ticket: int) -> None:
        if ticket in self.running:
            self.running.remove(ticket)
        self._run(self.share.leave(self.owner[ticket], ticket, self.now))

    def _run(self, tickets: list[int]) -> None:
        self.running += tickets
        self.admitted.update(self.owner[ticket] for ticket in tickets)


@given(
    st.integers(1, 6),
    st.sampled_from([1, 2, float("inf")]),
    st.lists(
        st.tuples(st.sampled_from(["ask", "end", "hang up"]), st.sampled_from(NAMES), st.integers(0, 99)), max_size=80
    ),
)
def test_every_order_of_requests(most: int, resident: float, events: list[tuple[str, str, int]]) -> None:
    """Contract: each is admitted once, or leaves; never more than `most`, a tenant's limit or the resident tenants;
    none waits where none of these bounds is reached; shares are those of time; in the end all are admitted."""
    engine, waiting = Shared(most, resident), set[int]()
    spent = Counter[str]()

    def check() -> None:
        waiting.difference_update(engine.running)
        by_name = Counter(engine.owner[ticket] for ticket in engine.running)
        limits = {name: max(1, int(LIMITS.get(name, 1) * most)) for name in NAMES}
        assert by_name == engine.share.in_flight
        assert by_name.total() <= most
        assert len(by_name) <= resident
        assert all(count <= limits[name] for name, count in by_name.items())
        counts = Counter({name: engine.share.waiting(name) for name in NAMES})
        assert counts == Counter(engine.owner[ticket] for ticket in waiting)
        if by_name.total() < most and len(by_name) < resident:
            assert all(by_name[engine.owner[ticket]] == limits[engine.owner[ticket]] for ticket in waiting)

    for what, name, number in events:
        engine.now += number / 10
        spent.update({engine.owner[ticket]: number for ticket in engine.running})
        if what == "ask":
            waiting.add(engine.ask(name))
        elif what == "end" and engine.running:
            engine.leave(engine.running[number % len(engine.running)])
        elif what == "hang up" and waiting:
            ticket = sorted(waiting)[number % len(waiting)]
            waiting.remove(ticket)
            engine.leave(ticket)
        check()
    if spent.total() and engine.now < 10:  # what was long ago counts for less
        for name in NAMES:
            assert abs(engine.share.share(name, engine.now) - spent[name] / spent.total()) < 0.05
    while engine.running:
        engine.leave(engine.running[0])
        check()
    assert not waiting


@given(st.sampled_from([1, 2, float("inf")]), st.integers(1, 5), st.randoms(use_true_random=False))
def test_nobody_starves(resident: float, most: int, random: Any) -> None:
    """Contract: a tenant that asks waits for a bounded number of the others' requests, however many of these wait and
    in whatever order requests end."""
    engine = Shared(most, resident, {})
    for _ in range(40):
        for name in "abc":
            engine.ask(name)
    first = engine.ask("d")
    for _ in range(40):
        if first in engine.running:
            break
        engine.now += TURN_SECONDS / 4
        engine.leave(random.choice(engine.running))
    assert first in engine.running


def test_weights_and_limits() -> None:
    """Contract: while all wait the engine's requests are shared as the weights say, also where it takes one at a time;
    what is beyond a limit is the others'."""
    for most in (1, 36):
        engine = Shared(most, limits={})
        for name in NAMES * 1000:
            engine.ask(name)
        for _ in range(900):
            engine.leave(engine.running[0])
        parts = engine.share.in_flight if most > 1 else {name: engine.admitted[name] * 36 / 900 for name in NAMES}
        assert all(abs(parts[name] - part) <= 1 for name, part in zip(NAMES, (16, 4, 8, 8), strict=True)), parts
    engine = Shared(36, limits={"a": 0.1})
    for name in NAMES * 100:
        engine.ask(name)
    for _ in range(100):
        engine.leave(engine.running[0])
    assert engine.share.in_flight == Counter(a=3, b=7, c=13, d=13)
