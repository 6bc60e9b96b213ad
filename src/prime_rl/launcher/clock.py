"""The launcher's own time, and how often it may start a process again. Pure but for the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

_MOST_SECONDS_A_LOOK = 2.5  # a longer gap was the launcher's own: a laptop that slept, a SIGSTOP, a starved machine
_WINDOW_SECONDS = 3600.0
_MOST_BACKOFF_SECONDS = 60.0


class LoopClock:
    """Seconds in which the launcher was looking. While it did not look nobody is blamed for having given no sign."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self.now = 0.0

    def tick(self) -> bool:
        """Call it at every look. Returns whether the launcher had been away for longer than a look takes."""
        last, self._last = self._last, self._monotonic()
        self.now += min(self._last - last, _MOST_SECONDS_A_LOOK)
        return self._last - last > _MOST_SECONDS_A_LOOK


@dataclass(frozen=True)
class Policy:
    """When a process counts as stalled, and how often it is started again. Times in seconds.

    Args:
        max_restarts: Of one process within an hour, and of one process while the run gets no further; 0: the first failure ends the run.
        backoff: Before the first of them; doubled with each further one, up to a minute.
        heartbeat_timeout: Without a sign of life.
        stall_timeout: Without progress, while it waits for nobody.
    """

    max_restarts: int = 0
    backoff: float = 1.0
    heartbeat_timeout: float = 60.0
    stall_timeout: float = 1800.0


@dataclass(frozen=True)
class Grant:
    """Leave to start a process again, the `number`-th time within the hour, in `seconds`."""

    number: int
    seconds: float


class Refusal(Enum):
    """Which limit is reached, in words that follow `was started again 3 times`."""

    HOUR = "within an hour"
    STANDSTILL = "without the run getting any further"


Marks = tuple[int, ...]  # how far the run is, in independent counts: its newest batch, its newest version


class Budget:
    """What is left of `max_restarts`, for each process by itself.

    It limits the restarts of an hour and, however far apart they are, those since the run last got beyond where it had ever been: a fault that
    comes back at the same place is not mended by going there again.
    """

    def __init__(self, policy: Policy, furthest: Marks = ()) -> None:
        self._policy = policy
        self._furthest = furthest
        self._times: dict[str, list[float]] = {}
        self._in_vain: dict[str, int] = {}

    def ask(self, process: str, now: float, reached: Marks = ()) -> Grant | Refusal:
        """Leave for one more, which then counts, or the limit that stands against it.

        Args:
            now: Seconds of the launcher's clock.
            reached: How far the run is; the counts are always the same and in the same order.
        """
        self._note(reached)
        recent = [then for then in self._times.get(process, []) if now - then < _WINDOW_SECONDS]
        self._times[process] = recent
        if len(recent) >= self._policy.max_restarts:
            return Refusal.HOUR
        if self._in_vain.get(process, 0) >= self._policy.max_restarts:
            return Refusal.STANDSTILL
        self._in_vain[process] = self._in_vain.get(process, 0) + 1
        recent.append(now)
        return Grant(len(recent), min(_MOST_BACKOFF_SECONDS, self._policy.backoff * 2 ** (len(recent) - 1)))

    def _note(self, reached: Marks) -> None:
        """A step that is repeated after a recovery is no progress: only what lies beyond the furthest counts."""
        furthest = self._furthest or reached
        if any(mark > before for mark, before in zip(reached, furthest, strict=bool(reached))):
            self._in_vain.clear()
        self._furthest = tuple(map(max, reached, furthest)) if reached else furthest
