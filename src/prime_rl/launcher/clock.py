"""The launcher's own time, and how often it may start a process again. Pure but for the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass

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
        max_restarts: Of one process within an hour; 0: the first failure ends the run.
        backoff: Before the first of them; doubled with each further one.
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


class Budget:
    """What is left of `max_restarts`, for each process by itself."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._times: dict[str, list[float]] = {}

    def ask(self, process: str, now: float) -> Grant | None:
        """Leave for one more, which then counts; None when the hour's number is used up."""
        recent = [then for then in self._times.get(process, []) if now - then < _WINDOW_SECONDS]
        self._times[process] = recent
        if len(recent) >= self._policy.max_restarts:
            return None
        recent.append(now)
        return Grant(len(recent), min(_MOST_BACKOFF_SECONDS, self._policy.backoff * 2 ** (len(recent) - 1)))
