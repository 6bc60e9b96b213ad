"""How far an evaluation is: bars on a terminal, else a line now and then."""

import sys
import time
from types import TracebackType
from typing import Self

from loguru import logger
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from prime_rl.envs.protocol import EpisodeResult

LINE_SECONDS = 30.0


class Bars:
    """A bar, or a part of a line, for each environment.

    Args:
        title: Which target is evaluated.
        totals: Attempts of each environment.
    """

    def __init__(self, title: str, totals: dict[str, int]) -> None:
        self._title, self._totals = title, totals
        self._counts = {env: _Count() for env in totals}
        self._bars: dict[str, TaskID] = {}
        self._said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[score]}"), TimeRemainingColumn())  # fmt: skip
        self._progress = Progress(*columns) if sys.stdout.isatty() else None

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            for env, total in self._totals.items():
                self._bars[env] = self._progress.add_task(f"{self._title} {env}", total=total, score="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def done(self) -> int:
        """Attempts of all environments together."""
        return sum(count.done for count in self._counts.values())

    def add(self, env: str, result: EpisodeResult) -> None:
        """One more attempt is there."""
        count = self._counts[env]
        count.take(result)
        if self._progress is not None:
            self._progress.update(self._bars[env], completed=count.done, score=str(count))
        elif time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            each = (f"{env} {count.done}/{self._totals[env]} ({count})" for env, count in self._counts.items())
            logger.info("{}: {}", self._title, ", ".join(each))


class _Count:
    def __init__(self) -> None:
        self.done = self.scored = 0
        self.reward = 0.0

    def take(self, result: EpisodeResult) -> None:
        self.done += 1
        self.scored += result.ok
        self.reward += result.reward if result.ok else 0.0

    def __str__(self) -> str:
        errors = f", {self.done - self.scored} failed" if self.done > self.scored else ""
        return (f"reward {self.reward / self.scored:.3f}" if self.scored else "no reward yet") + errors
