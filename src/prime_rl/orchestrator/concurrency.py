"""How many episodes to keep in flight, where nobody says: as many as the servers take without a queue or a preemption.

The rule. All is judged over *turns*: as many landings as episodes may be in flight, so that contexts have had the time to grow as long as they
become, and a few looks at least. A turn under *pressure* (a queue, a cache that is nearly full, a preemption that no update explains) ends at once: the limit
falls to a little less than what ran, and that is the *ceiling* from then on. A turn without pressure in which the limit was what held the number
back lets it grow by a quarter, but only as far as the cache, as full as it was at most, stays below its mark, and never above the ceiling. A
ceiling that a full cache has set is lifted after three turns in a row in which the cache was half empty (replies have become shorter), and after
twice as many each time that this was a mistake; one that a queue for seats has set stays, since seats do not become more. What is in flight beyond a
new limit ends by itself; until then nothing is judged.

So under a load that stays what it is the limit is cut until it fits and comes to rest, and the number of cuts grows with the logarithm of time at most:
`tests/unit/orchestrator/test_concurrency.py` proves it on a model of a server. Pure: no clock, no network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH = 1.25
CUT = 0.9  # of what ran when it was too much
FULL = 0.95  # share of the cache in use from which on the next token may preempt
MARK = 0.85  # growth stops short of it
LIGHT, LIGHT_TURNS = 0.5, 3  # so many turns below it, at first: the load is another one
LOOKS = 4  # of a turn, at least: fewer could miss the moment at which the cache is fullest
QUEUE = 0.05  # of what runs: as much waits for the engine's next step where many come and go
BINDING = 0.95  # of the limit in flight: the limit holds the number back, not the steps that may run ahead


@dataclass(frozen=True)
class Load:
    """A server as its /metrics describe it: requests that run and that wait, share of the cache in use, preemptions ever."""

    running: float
    waiting: float
    cache: float
    preempted: float


class Concurrency:
    """The limit, and what it was learned from.

    Args:
        start: The first limit.
        most: What the workers run at once; the limit is never above it.
    """

    def __init__(self, start: int, most: int) -> None:
        self.limit = min(start, most)
        self._most = most
        self._ceiling = most
        self._by_cache = False  # the ceiling's reason
        self._servers = 0
        self._preempted = 0.0
        self._queued = False
        self._patience = LIGHT_TURNS
        self._lifted = False
        self._turn_ends = self._looks = self._light = 0
        self._fullest = self._ran = 0.0  # at most, in this turn

    def look(self, loads: Sequence[Load], *, in_flight: int, landed: int, updating: bool) -> int:
        """Take in one look at all servers that are given work; gives the limit.

        Args:
            in_flight: Episodes now.
            landed: Episodes that have ended so far, ever.
            updating: Weights are, or were since the last look, being loaded: that preempts what runs, and is no pressure.
        """
        if not loads:
            return self.limit
        if len(loads) != self._servers:
            self._rescale(len(loads), landed)
        preempted = sum(load.preempted for load in loads)
        waiting = sum(load.waiting for load in loads)
        cache = max(load.cache for load in loads)
        disturbed = updating or preempted < self._preempted  # a server that was started again counts from 0
        lost = preempted > self._preempted and not disturbed
        running = sum(load.running for load in loads)
        waits = waiting > 1 + QUEUE * running and not updating
        queued, self._queued, self._preempted = waits and self._queued, waits, preempted  # two looks make a queue
        self._fullest, self._ran = max(self._fullest, cache), max(self._ran, running)
        self._looks += 1
        if in_flight > self.limit:
            self._begin_turn(landed)
        elif lost or queued or cache >= FULL:
            self._cut(landed, by_cache=lost or self._fullest >= MARK)
        elif landed >= self._turn_ends and self._looks >= LOOKS:
            self._grow(in_flight, landed)
        return self.limit

    def _cut(self, landed: int, by_cache: bool) -> None:
        self.limit = max(1, min(int(CUT * self._ran), self.limit - 1))
        if self._lifted:
            self._patience, self._lifted = 2 * self._patience, False
        self._ceiling, self._by_cache, self._light = self.limit, by_cache, 0
        self._begin_turn(landed)

    def _grow(self, in_flight: int, landed: int) -> None:
        self._light = self._light + 1 if self._fullest < LIGHT else 0
        if self._by_cache and self._light >= self._patience and self._ceiling < self._most:
            self._ceiling, self._lifted, self._light = self._most, True, 0
        if in_flight >= BINDING * self.limit:
            room = MARK / self._fullest if self._fullest else GROWTH
            wanted = int(self.limit * min(GROWTH, room)) + (1 if room >= GROWTH else 0)
            self.limit = max(self.limit, min(wanted, self._ceiling, self._most))
        self._begin_turn(landed)

    def _rescale(self, servers: int, landed: int) -> None:
        """Servers have come or gone: each takes what it took."""
        if self._servers:
            share = servers / self._servers
            self.limit = max(1, min(self._most, round(self.limit * share)))
            self._ceiling = max(self.limit, min(self._most, round(self._ceiling * share)))
        self._servers = servers
        self._begin_turn(landed)

    def _begin_turn(self, landed: int) -> None:
        self._turn_ends, self._looks = landed + self.limit, 0
        self._fullest, self._ran, self._queued = 0.0, 0.0, False  # evidence is of one turn
