"""Results of an evaluation: attempts at one environment by one policy, their metrics, and the report of all of them.

evals/<env>/<policy>/settings.json     what the results depend on: another evaluation must have the same settings
evals/<env>/<policy>/results.jsonl     a line an attempt, appended as they finish; the last line of an attempt counts
evals/report.json                      all environments and policies
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.monitor.monitor import JsonLines
from prime_rl.transport.commit import write_atomically

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.config.shared import SamplingConfig

RESULTS, SETTINGS, REPORT = "results.jsonl", "settings.json", "report.json"
_ROUNDING = 1e-9  # of a reward that is a sum of weighted ones
_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
_KEPT_FIELDS = (
    *("task_id", "message", "rewards", "metrics", "is_truncated", "num_turns"),
    *("input_tokens", "output_tokens", "prompt", "completion"),
)

Attempt = tuple[str, int]
"""One attempt at one task: the task's id and the attempt's number."""


@dataclass(frozen=True)
class EvalPlan:
    """What to run for one environment: `env` names it in metrics, `worker` in the pool. `chat`: by an API's route."""

    env: str
    worker: str
    sampling: "SamplingConfig"
    num_examples: int
    rollouts_per_example: int
    seq_len: int
    chat: bool = False


@dataclass(eq=False)
class EvalResults:
    """The attempts at one environment by one policy, in memory and, after `open`, in a directory.

    Failed attempts say nothing about the policy: they are left out of every mean, and counted. A task without a scored
    attempt is left out as well.
    """

    plan: EvalPlan
    tasks: Sequence[str]  # their ids
    version: int
    policy: str = ""  # `step_<version>`, or `api`
    hash: str = ""
    solved_at: float = 1.0  # the reward from which an attempt has solved its task
    seconds: float = 0.0  # from the start to the last attempt
    # What `results.jsonl` says, of an earlier command of the scored ones; `reward` is None where it failed.
    rows: dict[Attempt, dict[str, Any]] = field(default_factory=dict)
    input_tokens: int = 0  # of all attempts that were ever made
    output_tokens: int = 0
    _file: JsonLines | None = None

    def open(self, directory: Path, settings: Mapping[str, Any], clean: bool = False, replace: bool = False) -> None:
        """Go on with the results in `directory`, or begin anew with `clean`. Needs `close`.
        Raises UserError: they were made with other settings, or are damaged.

        Args:
            settings: What the results depend on; `weights` is the hash of the policy.
            replace: Begin anew as well where the results are of other weights.
        """
        path, settings = directory / SETTINGS, flat(settings)
        before = json.loads(path.read_bytes()) if path.exists() else settings
        if clean or (replace and before["weights"] != settings["weights"]):
            shutil.rmtree(directory, ignore_errors=True)
            before = settings
        for key in sorted(before.keys() | settings.keys()):
            old, new = (json.dumps(table.get(key)) for table in (before, settings))
            if old != new:
                raise UserError(
                    f"{directory} holds results made with {key} = {old}, and now it is {new}: "
                    "go back to that, give another --output-dir, or make them anew with --clean"
                )
        self._file = JsonLines(directory / RESULTS)
        write_atomically(path, json.dumps(settings, indent=1).encode())
        for number, line in enumerate(self._file.path.read_bytes().splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError) as error:
                self.close()
                where = f"line {number} of {directory / RESULTS}"
                raise UserError(f"{where} is damaged: mend it, or make the results anew with --clean") from error
        self.rows = {attempt: row for attempt, row in self.rows.items() if row["reward"] is not None}

    def add(self, number: int, result: EpisodeResult) -> None:
        """Keep attempt `number` at a task. A written line survives a kill.
        Raises UserError: the disk is full, or fails."""
        row: dict[str, Any] = {"attempt": number, "version": self.version, "outcome": str(result.outcome)}
        row |= {name: getattr(result, name) for name in _KEPT_FIELDS}
        for name in ("rewards", "metrics"):  # JSON has no numbers but finite ones
            row[name] = {key: value for key, value in row[name].items() if math.isfinite(value)}
        row |= {"reward": result.reward if result.ok else None, "seconds": sum(result.timing.values())}
        if self._file is not None:
            self._file.append(row)
        self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        self.rows[row["task_id"], row["attempt"]] = row
        self.input_tokens += row["input_tokens"]
        self.output_tokens += row["output_tokens"]

    def close(self) -> None:
        """Make the file durable, if one is open."""
        if self._file is not None:
            self._file.close()
        self._file = None

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts that were asked for; those at one task together, as they share their prompt."""
        return [(task_id, number) for task_id in self.tasks for number in range(self.plan.rollouts_per_example)]

    @property
    def made(self) -> list[dict[str, Any]]:
        """Rows of those that were made, well or not."""
        return [self.rows[attempt] for attempt in self.attempts if attempt in self.rows]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.made if row["reward"] is None]

    @property
    def complete(self) -> bool:
        """Whether every attempt was made, well or not."""
        return len(self.made) == len(self.attempts)

    @property
    def k(self) -> int:
        """The most attempts at one task."""
        return max(Counter(row["task_id"] for row in self.made).values(), default=0)

    def metrics(self) -> dict[str, float]:
        """`avg@k` is the mean over tasks of the mean reward of k attempts, `ci95` half the width of its interval."""
        made, k = self.made, self.k
        scored = [row for row in made if row["reward"] is not None]
        metrics = {
            "rollouts": float(len(made)),
            "errors/rate": 1 - len(scored) / len(made) if made else 0.0,
            "time": self.seconds,
            "policy_version": float(self.version),
        }
        if not scored:
            return metrics
        by_task: dict[str, list[float]] = {}
        for row in scored:
            by_task.setdefault(row["task_id"], []).append(row["reward"])
        task_means = [fmean(rewards) for rewards in by_task.values()]
        metrics |= {
            "reward/mean": fmean(row["reward"] for row in scored),
            f"avg@{k}": fmean(task_means),
            "is_truncated/mean": fmean(row["is_truncated"] for row in scored),
            "num_output_tokens/mean": fmean(row["output_tokens"] for row in scored),
        }
        if len(task_means) > 1:  # 1.96 · s / √tasks
            metrics[f"avg@{k}/ci95"] = _Z95 * stdev(task_means) / math.sqrt(len(task_means))
        least = self.solved_at - _ROUNDING
        solved = [(len(rewards), sum(reward >= least for reward in rewards)) for rewards in by_task.values()]
        for power in (1 << bits for bits in range(k.bit_length())):  # 1, 2, 4, … up to the attempts made
            if shares := [pass_at_k(n, c, power) for n, c in solved if n >= power]:
                metrics[f"pass@{power}"] = fmean(shares)
        return metrics

    def logged(self) -> dict[str, float]:
        """The metrics by the names that they have in logs: `eval/<env>/…`."""
        return {f"eval/{self.plan.env}/{name}": value for name, value in self.metrics().items()}

    def line(self) -> str:
        """How far it is, and how well it went: `env 3/8: avg@2 0.5, 1 failed`."""
        name = f"avg@{self.k}"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return (
            f"{self.plan.env} {len(self.made)}/{len(self.attempts)}: {name} {_number(self.metrics().get(name))}{failed}"
        )

    def trouble(self, max_error_rate: float) -> str | None:
        """Why the numbers cannot be relied on; None if they can."""
        made, failed = len(self.made), self.failed
        if len(failed) < made and len(failed) <= max_error_rate * made:
            return None
        example = f"; the first one: {failed[0]['outcome']}: {failed[0]['message']}" if failed else ""
        count = f"{len(failed)} of {made} attempts of {self.plan.env} on version {self.version} failed"
        return f"{count} (max_error_rate {max_error_rate:g}){example}"

    def summary(self) -> dict[str, Any]:
        return {
            "environment": self.plan.env,
            "policy": self.policy,
            "version": self.version,
            "hash": self.hash,
            "tasks": len(self.tasks),
            "attempts_per_task": self.k,
            "complete": self.complete,
            "errors": dict(Counter(row["outcome"] for row in self.failed)),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "metrics": self.metrics(),
        }


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The chance that at least one of k ≤ `attempts` attempts, drawn without replacement, solved the task:
    1 − C(n−c, k) / C(n, k), the unbiased estimate of Chen et al. 2021."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, by dotted keys."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


def write_report(results: Sequence[EvalResults], skipped: Mapping[int, str], config: "EvalConfig") -> Path:
    """Write `report.json`, and keep what an earlier command has reported of other environments and policies. `skipped`
    are the versions that were not evaluated, and why."""
    path = config.output_dir / "evals" / REPORT
    earlier = json.loads(path.read_bytes())["results"] if path.exists() and not config.clean else []
    entries = {(one["environment"], one["policy"]): one for one in [*earlier, *(each.summary() for each in results)]}
    report = {
        "model": config.model.name,
        "solved_at": config.solved_at,
        "results": sorted(entries.values(), key=lambda entry: entry["version"]),
        "skipped": {str(version): why for version, why in sorted(skipped.items())},
    }
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())
    return path


def report_table(path: Path) -> str:
    """Return a report for people: a table, and the versions that were not evaluated."""
    report = json.loads(path.read_bytes())
    rows = [("environment", "policy", "tasks", "k", "avg@k", "± 95 %", "errors", "cut", "tokens")]
    for each in report["results"]:
        k, metrics, errors = each["attempts_per_task"], each["metrics"], sum(each["errors"].values())
        names = (f"avg@{k}", f"avg@{k}/ci95", "is_truncated/mean", "num_output_tokens/mean")
        average, interval, cut, tokens = (_number(metrics.get(name)) for name in names)
        tasks = f"{each['tasks']}" + ("" if each.get("complete", True) else " (incomplete)")
        rows.append((each["environment"], each["policy"], tasks, f"{k}", average, interval, f"{errors}", cut, tokens))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"version {version}: {why}" for version, why in report["skipped"].items())])


def _number(value: float | None) -> str:
    """Four decimals at most."""
    return "–" if value is None else f"{value:.4f}".rstrip("0").rstrip(".") or "0"
