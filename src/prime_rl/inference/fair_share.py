"""Which tenant's request gets the engine next: a state machine without clock or waits; times are passed in."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Generic, TypeVar

TURN_SECONDS = 10.0  # least time that a tenant's adapter stays resident while another tenant waits
MEMORY_SECONDS = 300.0  # time constant of the exponential average of a share

T = TypeVar("T")


class FairShare(Generic[T]):
    """Requests in flight by tenant, at most `most` together, and those that wait, named by tickets.

    Admits the tenant with the lowest in_flight / weight; ties go to the fewest weighted admissions. (The trainer's
    micro-batches have costs that are known, and no number in flight: `trainer.shared_training.FairQueue`.)

    Args:
        limits: Largest share of `most` by tenant.
        resident: Most tenants in flight at a time. One that waits takes the place of another after its turn.
    """

    def __init__(
        self, most: int, weights: Mapping[str, float], limits: Mapping[str, float], resident: float = math.inf
    ) -> None:
        self._most, self._weights, self._resident = most, weights, resident
        self._limits = {name: max(1, int(limit * most)) for name, limit in limits.items()}
        self.in_flight: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[T]] = defaultdict(deque)
        self._since: dict[str, float] = {}  # when each tenant in flight was first admitted
        # Weighted admissions by tenant, and those of the tenant admitted last, with which newcomers start.
        self._passes, self._pass = dict[str, float](), 0.0
        # Request-seconds in flight by tenant, exponentially averaged, until `_now`.
        self._used, self._now = defaultdict[str, float](float), 0.0

    def ask(self, name: str, ticket: T, now: float) -> list[T]:
        """Have a request wait; return the tickets of those admitted now."""
        if not self._waiting[name] and not self.in_flight[name]:
            self._passes[name] = max(self._passes.get(name, 0.0), self._pass)
        self._waiting[name].append(ticket)
        return self._admit(now)

    def leave(self, name: str, ticket: T, now: float) -> list[T]:
        """End a request, in flight or waiting; return as `ask`."""
        if ticket in self._waiting[name]:
            self._waiting[name].remove(ticket)
        else:
            self._advance(now)
            self.in_flight[name] -= 1
        return self._admit(now)

    def waiting(self, name: str) -> int:
        return len(self._waiting[name])

    def share(self, name: str, now: float) -> float:
        """The tenant's part of all requests in flight, over the last minutes."""
        self._advance(now)
        return self._used[name] / (sum(self._used.values()) or 1.0)

    def _admit(self, now: float) -> list[T]:
        self._advance(now)
        admitted = []
        while self.in_flight.total() < self._most and (name := self._next(now)) is not None:
            if not self.in_flight[name]:
                self._since[name] = now
            self.in_flight[name] += 1
            self._pass = self._passes[name]
            self._passes[name] += 1 / self._weights.get(name, 1.0)
            admitted.append(self._waiting[name].popleft())
        return admitted

    def _next(self, now: float) -> str | None:
        inside = {name for name, count in self.in_flight.items() if count}
        waiting = [name for name, tickets in self._waiting.items() if tickets]
        if len(inside) >= self._resident:
            outside = sum(name not in inside for name in waiting)
            past = sorted((since, name) for name in inside if now - (since := self._since[name]) >= TURN_SECONDS)
            inside -= {name for _, name in past[:outside]}
            waiting = [name for name in waiting if name in inside]
        admissible = [name for name in waiting if self.in_flight[name] < self._limits.get(name, self._most)]
        return min(admissible, key=self._order, default=None)

    def _order(self, name: str) -> tuple[float, float]:
        return self.in_flight[name] / self._weights.get(name, 1.0), self._passes[name]

    def _advance(self, now: float) -> None:
        seconds, self._now = max(now - self._now, 0.0), now
        for name in self._used.keys() | self.in_flight.keys():
            self._used[name] = self._used[name] * math.exp(-seconds / MEMORY_SECONDS) + self.in_flight[name] * seconds
