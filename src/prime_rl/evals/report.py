"""How evaluations are shown: progress, a table on the console, `report.md` for people and `report.json` for programs."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loguru import logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.evals.metrics import EvalReport
from prime_rl.evals.targets import Target
from prime_rl.transport.commit import write_atomically

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig

LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal
_LOG_WIDTH = 140


@dataclass(frozen=True)
class Entry:
    """One environment at one target. `spent`: tokens of prompts and replies, of all attempts that were ever made; `complete`: whether all of those
    that were asked for were."""

    target: Target
    report: EvalReport
    spent: tuple[int, int]
    complete: bool

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        metrics, prefix, k = self.report.metrics(), f"eval/{self.report.env}", self.report.attempts_per_task
        tasks = len(self.report.results)
        last = max((1 << k.bit_length()) >> 1, 1)  # the largest power of two
        return {
            "environment": self.report.env,
            "policy": self.target.name,
            "tasks": str(tasks) if self.complete else f"{sum(map(bool, self.report.results))} of {tasks}",
            "k": str(k),
            "avg@k": number(metrics.get(f"{prefix}/avg@{k}")),
            "± 95 %": number(metrics.get(f"{prefix}/avg@{k}/ci95")),
            **({f"pass@{last}": number(metrics.get(f"{prefix}/pass@{last}"))} if last > 1 else {}),
            **({f"pass^{last}": number(metrics.get(f"{prefix}/pass^{last}"))} if last > 1 else {}),
            "errors": str(self.report.errors.total()),
            "cut": number(metrics.get(f"{prefix}/is_truncated/mean")),
            "tokens": number(metrics.get(f"{prefix}/num_output_tokens/mean")),
        }

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        prefix = f"eval/{self.report.env}/"
        return {
            "environment": self.report.env,
            "policy": self.target.name,
            "version": self.target.version,
            "hash": self.target.hash,
            "tasks": len(self.report.results),
            "attempts_per_task": self.report.attempts_per_task,
            "complete": self.complete,
            "errors": dict(self.report.errors),
            "input_tokens": self.spent[0],
            "output_tokens": self.spent[1],
            "metrics": {key.removeprefix(prefix): value for key, value in self.report.metrics().items()},
        }


def write_report(entries: Sequence[Entry], skipped: Mapping[int, str], config: "EvalConfig", directory: Path) -> None:
    """Write `report.md` and `report.json`, each in place of an earlier one."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {
        "model": config.model.name,
        "solved_at": config.solved_at,
        "results": [entry.as_json() for entry in entries],
        "skipped": {str(version): why for version, why in sorted(skipped.items())},
    }
    write_atomically(directory / "report.json", (json.dumps(found, indent=1) + "\n").encode())
    write_atomically(directory / "report.md", markdown(entries, skipped, config).encode())


def markdown(entries: Sequence[Entry], skipped: Mapping[int, str], config: "EvalConfig") -> str:
    """The report for people."""
    lines = [f"# {config.model.name}", ""]
    rows = [entry.cells() for entry in entries]
    columns = _columns(rows)
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(row.get(column, '') for column in columns)} |" for row in rows]
    lines += ["", f"avg@k: mean reward of k attempts, over tasks. ±: 95 % interval over tasks. Solved: reward ≥ {config.solved_at:g}. cut: share of replies without an end."]  # fmt: skip
    lines += ["Failed attempts are left out of every mean, and counted.", ""]
    if any(not entry.complete for entry in entries):
        lines += [
            "Tasks: of those that are not complete yet, how many were begun; their numbers are of what there is.",
            "",
        ]
    for entry in entries:
        lines += _passes(entry)
    if failed := [entry for entry in entries if entry.report.errors]:
        lines += ["## Errors", ""]
        lines += [f"* {entry.report.env}, {entry.target.name}: {_reasons(entry.report)}" for entry in failed] + [""]
    if skipped:
        lines += ["## Versions that were not evaluated", ""]
        lines += [f"* {version}: {why}" for version, why in sorted(skipped.items())] + [""]
    return "\n".join(lines)


def print_table(entries: Sequence[Entry], config: "EvalConfig") -> None:
    """The report on the console."""
    rows = [entry.cells() for entry in entries]
    table = Table(title=config.model.name, title_justify="left", box=None, pad_edge=False)
    for column in _columns(rows):
        named = column in ("environment", "policy")
        table.add_column(column, justify="left" if named else "right", no_wrap=named)
    for row in rows:
        table.add_row(*(row.get(column, "") for column in _columns(rows)))
    # A log file has no width: rich would cut the columns to 80.
    Console(width=None if sys.stdout.isatty() else _LOG_WIDTH).print(table)


def number(value: float | None) -> str:
    """Four decimals at most."""
    return "–" if value is None else f"{value:.4f}".rstrip("0").rstrip(".") or "0"


def _columns(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Of all rows, in the order of the first that has them; what is summed up comes last."""
    names = dict.fromkeys(column for row in rows for column in row)
    first = [name for name in names if not name.startswith("pass")]
    place = first.index("errors") if "errors" in first else len(first)
    return [*first[:place], *(name for name in names if name.startswith("pass")), *first[place:]]


def _passes(entry: Entry) -> list[str]:
    prefix = f"eval/{entry.report.env}/pass"
    found = {key.removeprefix(f"eval/{entry.report.env}/"): value for key, value in entry.report.metrics().items() if key.startswith(prefix)}  # fmt: skip
    if len(found) <= 2:  # of one attempt: the share of tasks solved alone
        return []
    listed = ", ".join(f"{name} {number(value)}" for name, value in found.items())
    return [f"{entry.report.env}, {entry.target.name}: {listed}", ""]


def _reasons(report: EvalReport) -> str:
    counted = [f"{reason} {count}" for reason, count in report.errors.most_common()]
    first = next(result for attempts in report.results for result in attempts if not result.ok)
    return f"{', '.join(counted)} (the first: {first.task_id}: {first.message})"


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
