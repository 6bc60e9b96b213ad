"""How many episodes to keep in flight, where nobody says: as many as the servers take without a queue or a preemption.

The rule. All is judged over *turns*: as many landings as episodes may be in flight, so that contexts have had the time to grow as long as they
become, and a few looks at least.

* A turn without pressure in which the limit was reached lets it grow by a quarter, but only as far as the cache, as full as it was at most, stays
  below its mark, and never above the *ceiling*.
* Pressure ends a turn at once: a preemption that no update explains, a cache that is nearly full, a queue that stands. The limit falls to a little
  less than the share of it that was served, by half at most, and that is the ceiling from then on.
* A queue stands if it is there at every look until as many episodes have landed as waited in it when it was longest, while the limit was reached:
  by then those have had their turn. A burst (the first prompts of all, contexts that are computed again after an update, a group that starts) is
  taken in before that, however slow the server is.
* After three turns in a row at its ceiling, with room in the cache for more, the limit is tried a quarter higher. If that is too much it goes back to where it was at once, and twice as many
  turns pass before the next try; if not, there is no ceiling any more.
* While an evaluation keeps the servers busy, too, nothing is judged, nor while what is in flight beyond a new limit ends.

So under a load that stays what it is the limit comes to rest where it fits, and the number of tries grows with the logarithm of time at most; what
was cut for a reason that is gone is back after about as many turns as have gone by at the latest. `tests/unit/orchestrator/test_concurrency.py` shows
it on a model of a server. Pure: no clock, no network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROWTH = 1.25
CUT = 0.9  # of what was served when it was too much
LEAST_KEPT = 0.5  # of the limit, whatever was served
FULL = 0.95  # share of the cache in use from which on the next token may preempt
MARK = 0.85  # growth stops short of it
PATIENCE = 3  # turns at a ceiling, with room in the cache for more, before the first try
LOOKS = 4  # of a turn, and of a queue, at least: fewer could miss the moment at which the cache is fullest, or the queue empty
QUEUE = 0.05  # of what runs: as much waits for the engine's next step where many come and go
REACHED = 0.95  # of the limit in flight: the limit holds the number back, not the steps that may run ahead


@dataclass(frozen=True)
class Load:
    """A server as its /metrics describe it: requests that run and that wait, share of the cache in use, preemptions ever."""

    running: float
    waiting: float
    cache: float
    preempted: float


@dataclass
class _Queue:
    """One that was there at every look since it was seen first."""

    waited: float = 0.0  # at most
    landed: int = 0  # before that
    looks: int = 0

    def note(self, waiting: float, landed: int) -> None:
        self.looks += 1
        if waiting > self.waited:
            self.waited, self.landed = waiting, landed

    def stands(self, landed: int) -> bool:
        return self.looks >= LOOKS and landed - self.landed >= self.waited


class Concurrency:
    """The limit, and what it was learned from.

    Args:
        start: The first limit.
        most: The limit is never above it.
    """

    def __init__(self, start: int, most: int) -> None:
        self.limit = min(start, most)
        self._most = most
        self._ceiling = most
        self._stood: int | None = None  # the limit of the last turn without pressure, if it was raised then
        self._trying = False  # the limit is above its ceiling, for a try
        self._patience = PATIENCE
        self._light = 0  # turns in a row at the ceiling in which there was room for more
        self._raised = False  # a try went well, and nothing was too much since
        self._servers = 0
        self._preempted = 0.0
        self._queue: _Queue | None = None
        self._turn_ends = self._looks = self._reached = 0
        self._fullest = self._ran = 0.0  # at most, in this turn

    def look(
        self, loads: Sequence[Load], *, in_flight: int, landed: int, updating: bool = False, evaluating: bool = False
    ) -> int:
        """Take in one look at all servers that are given work; gives the limit.

        Args:
            in_flight: Episodes now.
            landed: Episodes that have ended so far, ever.
            updating: Weights are, or were since the last look, being loaded: that preempts what runs, and is no pressure.
            evaluating: Episodes that are not counted in `in_flight` are, or were since the last look, at the servers.
        """
        if not loads:
            return self.limit
        if len(loads) != self._servers:
            self._rescale(len(loads), landed)
        preempted = sum(load.preempted for load in loads)
        lost = preempted > self._preempted and not updating  # of servers that were started again it is less
        self._preempted = preempted
        if evaluating or in_flight > self.limit:
            self._queue = None
            if not evaluating:
                self._begin_turn(landed)
            return self.limit
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        reached, cache = in_flight >= REACHED * self.limit, max(load.cache for load in loads)
        self._fullest, self._ran = max(self._fullest, cache), max(self._ran, running)
        self._looks, self._reached = self._looks + 1, self._reached + reached
        self._note_queue(waiting if reached and waiting > 1 + QUEUE * running else 0.0, landed)
        if lost or cache >= FULL or (self._queue is not None and self._queue.stands(landed)):
            self._cut(in_flight * min(1.0, self._ran / max(running + waiting, 1.0)), landed)
        elif landed >= self._turn_ends and self._looks >= LOOKS and self._queue is None:
            self._end_calm_turn(landed)
        return self.limit

    def _note_queue(self, waiting: float, landed: int) -> None:
        if not waiting:
            self._queue = None
            return
        self._queue = self._queue or _Queue()
        self._queue.note(waiting, landed)

    def _cut(self, served: float, landed: int) -> None:
        """`served`: of the episodes in flight."""
        if self._raised or self._trying:
            self._patience *= 2
        fallen = max(1, int(LEAST_KEPT * self.limit), min(int(CUT * served), self.limit - 1))
        self.limit = fallen if self._stood is None else self._stood
        self._ceiling, self._light = self.limit, 0
        self._stood, self._trying, self._raised = None, False, False
        self._begin_turn(landed)

    def _end_calm_turn(self, landed: int) -> None:
        if 2 * self._reached >= self._looks:
            if self._trying:
                self._ceiling, self._trying, self._raised = self._most, False, True
            room = MARK / self._fullest if self._fullest else GROWTH
            wanted = int(self.limit * min(GROWTH, room)) + (1 if room >= GROWTH else 0)
            wanted = max(self.limit, min(wanted, self._most))
            self._light = self._light + 1 if wanted > self._ceiling <= self.limit else 0
            if self._light >= self._patience:
                self._trying, self._light = True, 0
            else:
                wanted = min(wanted, self._ceiling)
            self._stood = self.limit if wanted > self.limit else None
            self.limit = wanted
        self._begin_turn(landed)

    def _rescale(self, servers: int, landed: int) -> None:
        """Servers have come or gone: each takes what it took."""
        self._stood, self._trying = None, False
        if self._servers:
            share = servers / self._servers
            self.limit = max(1, min(self._most, round(self.limit * share)))
            self._ceiling = max(self.limit, min(self._most, round(self._ceiling * share)))
        self._servers, self._preempted, self._queue = servers, float("inf"), None  # the counters are of others
        self._begin_turn(landed)

    def _begin_turn(self, landed: int) -> None:
        self._turn_ends = landed + self.limit
        self._looks = self._reached = 0
        self._fullest, self._ran, self._queue = 0.0, 0.0, None  # evidence is of one turn
