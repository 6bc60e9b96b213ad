"""Results of an evaluation: the attempts at one environment by one policy, their metrics, and the report of all of them.

evals/<env>/<policy>/settings.json     what the results depend on: another evaluation must have the same settings
evals/<env>/<policy>/results.jsonl     a line an attempt, appended as they finish; the last line of an attempt counts
evals/report.{md,json}                 all environments and policies
"""

import fcntl
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.monitor.monitor import JsonLines
from prime_rl.transport.commit import disk_errors, write_atomically

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig

RESULTS, SETTINGS, LOCK = "results.jsonl", "settings.json", ".lock"
_ROUNDING = 1e-9  # of a reward that is a sum of weighted ones
_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
_KEPT_FIELDS = (
    *("task_id", "outcome", "message", "reward", "rewards", "metrics", "is_truncated", "num_turns"),
    *("input_tokens", "output_tokens", "prompt", "completion"),
)


@dataclass(eq=False)
class EvalResults:
    """The attempts at one environment by one policy, in memory and, after `open`, in a directory.

    Failed attempts say nothing about the policy: they are left out of every mean, and counted. A task without a scored
    attempt is left out as well.

    Attributes:
        policy: `step_<version>`, or `api`.
        task_ids, rollouts_per_example: The attempts that were asked for.
        solved_at: The reward from which an attempt has solved its task.
        seconds: From the start to the last attempt.
        done: Attempts, by task id and number, that need not be made again: of an earlier command the scored ones.
        input_tokens, output_tokens: Of all attempts that were ever made.
    """

    env: str
    policy: str
    version: int
    task_ids: Sequence[str]
    rollouts_per_example: int
    hash: str = ""
    solved_at: float = 1.0
    seconds: float = 0.0
    attempts: dict[tuple[str, int], EpisodeResult] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)
    input_tokens: int = 0
    output_tokens: int = 0
    _file: JsonLines | None = None

    # -- the file ------------------------------------------------------------------------------------------------------

    def open(self, directory: Path, settings: Mapping[str, Any], clean: bool = False) -> None:
        """Go on with the results in `directory`, or begin anew with `clean`. Needs `close`.

        Raises:
            UserError: they were made with other settings, or are damaged.
        """
        if clean and directory.is_dir():
            shutil.rmtree(directory)
        check_settings(directory, settings)
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / SETTINGS).exists():
                write_atomically(directory / SETTINGS, json.dumps(flat(settings), indent=1).encode())
        file = JsonLines(directory / RESULTS)
        for number, line in enumerate(file.path.read_bytes().splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                file.close()
                raise UserError(
                    f"line {number} of {file.path} is damaged: mend it, or make the results anew with --clean"
                ) from error
            self.add(row["attempt"], _result(row))
        self.done = {key for key, result in self.attempts.items() if result.ok}
        self._file = file

    def add(self, number: int, result: EpisodeResult) -> None:
        """Keep attempt `number` at a task. A line that was written survives a kill.

        Raises:
            UserError: the disk is full, or fails.
        """
        if self._file is not None:
            self._file.append(_row(number, result, self.version))
        self.attempts[result.task_id, number] = result
        self.done.add((result.task_id, number))
        self.input_tokens += result.input_tokens
        self.output_tokens += result.output_tokens

    def close(self) -> None:
        """Make the file durable."""
        assert self._file is not None
        self._file.close()

    # -- the numbers ---------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[tuple[str, int]]:
        """All attempts that were asked for; those at one task together, as they share their prompt."""
        return [(task, number) for task in self.task_ids for number in range(self.rollouts_per_example)]

    @property
    def by_task(self) -> list[list[EpisodeResult]]:
        """The attempts that were made, task by task."""
        numbers, made = range(self.rollouts_per_example), self.attempts
        return [[made[task, number] for number in numbers if (task, number) in made] for task in self.task_ids]

    @property
    def scored_by_task(self) -> list[list[EpisodeResult]]:
        """Of the tasks that have any."""
        return [scored for attempts in self.by_task if (scored := [result for result in attempts if result.ok])]

    @property
    def scored(self) -> list[EpisodeResult]:
        return [result for attempts in self.scored_by_task for result in attempts]

    @property
    def failed(self) -> list[EpisodeResult]:
        return [result for attempts in self.by_task for result in attempts if not result.ok]

    @property
    def errors(self) -> Counter[str]:
        """Failed attempts by reason."""
        return Counter(str(result.outcome) for result in self.failed)

    @property
    def complete(self) -> bool:
        """Whether every attempt was made, well or not."""
        return self.attempts.keys() >= set(self.keys)

    @property
    def k(self) -> int:
        """The most attempts at one task."""
        return max(map(len, self.by_task), default=0)

    def metrics(self) -> dict[str, float]:
        """`avg@k` is the mean over tasks of the mean reward of k attempts, `ci95` half the width of its interval."""
        scored, by_task, k, rollouts = self.scored, self.scored_by_task, self.k, sum(map(len, self.by_task))
        metrics = {
            "rollouts": float(rollouts),
            "errors/rate": len(self.failed) / max(rollouts, 1),
            "time": self.seconds,
            "policy_version": float(self.version),
        }
        if not scored:
            return metrics
        task_means = [fmean([result.reward for result in attempts]) for attempts in by_task]
        metrics |= {
            "reward/mean": fmean([result.reward for result in scored]),
            f"avg@{k}": fmean(task_means),
            "is_truncated/mean": fmean([float(result.is_truncated) for result in scored]),
            "num_output_tokens/mean": fmean([float(result.output_tokens) for result in scored]),
        }
        if len(task_means) > 1:
            metrics[f"avg@{k}/ci95"] = interval95(task_means)
        solved = [sum(one.reward >= self.solved_at - _ROUNDING for one in attempts) for attempts in by_task]
        for power in powers(k):
            for name, chance in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
                counts = zip(map(len, by_task), solved, strict=True)
                if values := [chance(made, count, power) for made, count in counts if made >= power]:
                    metrics[f"{name}{power}"] = fmean(values)
        return metrics

    def logged(self) -> dict[str, float]:
        """The metrics by the names that they have in logs: `eval/<env>/…`."""
        return {f"eval/{self.env}/{name}": value for name, value in self.metrics().items()}

    # -- shown to people and programs ------------------------------------------------------------------------------------

    def progress(self) -> str:
        """How far it is: `reward-env 3/8 (reward 0.500, 1 failed)`."""
        keys = [key for key in self.keys if key in self.done]
        rewards = [self.attempts[key].reward for key in keys if self.attempts[key].ok]
        failed = f", {len(keys) - len(rewards)} failed" if len(keys) > len(rewards) else ""
        reward = f"reward {fmean(rewards):.3f}" if rewards else "no reward yet"
        return f"{self.env} {len(keys)}/{len(self.keys)} ({reward}{failed})"

    def average(self) -> str:
        """`avg@2 0.5 ± 0.1`"""
        metrics, name = self.metrics(), f"avg@{self.k}"
        return f"{name} {number(metrics.get(name))} ± {number(metrics.get(f'{name}/ci95'))}"

    def trouble(self, max_error_rate: float) -> str | None:
        """Why the numbers cannot be relied on; None if they can."""
        failed, rollouts = self.failed, sum(map(len, self.by_task))
        if self.scored and len(failed) <= max_error_rate * rollouts:
            return None
        where = f"{self.env} on version {self.version}"
        example = f"; the first one: {failed[0].outcome}: {failed[0].message}" if failed else ""
        if not self.scored:
            return f"no episode of {where} succeeded{example}"
        return f"{len(failed)} of {rollouts} attempts of {where} failed (max_error_rate {max_error_rate:g}){example}"

    def cells(self) -> dict[str, str]:
        """Return its row of the table."""
        metrics, k, tasks = self.metrics(), self.k, len(self.task_ids)
        return {
            "environment": self.env,
            "policy": self.policy,
            "tasks": str(tasks) if self.complete else f"{sum(map(bool, self.by_task))} of {tasks}",
            "k": str(k),
            "avg@k": number(metrics.get(f"avg@{k}")),
            "± 95 %": number(metrics.get(f"avg@{k}/ci95")),
            "errors": str(len(self.failed)),
            "cut": number(metrics.get("is_truncated/mean")),
            "tokens": number(metrics.get("num_output_tokens/mean")),
        }

    def as_json(self) -> dict[str, Any]:
        """Return its entry in `report.json`."""
        return {
            "environment": self.env,
            "policy": self.policy,
            "version": self.version,
            "hash": self.hash,
            "tasks": len(self.task_ids),
            "attempts_per_task": self.k,
            "complete": self.complete,
            "errors": dict(self.errors),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "metrics": self.metrics(),
        }


def _row(attempt: int, result: EpisodeResult, version: int) -> dict[str, Any]:
    row = {name: getattr(result, name) for name in _KEPT_FIELDS}
    for name in ("rewards", "metrics"):  # JSON has no numbers but finite ones
        row[name] = {key: value for key, value in row[name].items() if math.isfinite(value)}
    changed = {"outcome": str(result.outcome), "reward": result.reward if result.ok else None}
    return {"attempt": attempt, "version": version, **row, **changed, "seconds": sum(result.timing.values())}


def _result(row: Mapping[str, Any]) -> EpisodeResult:
    fields = {name: row[name] for name in _KEPT_FIELDS}
    fields |= {"outcome": Outcome(row["outcome"]), "reward": row["reward"] or 0.0, "timing": {"": row["seconds"]}}
    return EpisodeResult("", "", **fields)


# -- settings ----------------------------------------------------------------------------------------------------------


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Keep other evaluations from writing to the directory, and from giving the servers other weights for it.

    Raises:
        UserError: one is running.
    """
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(
            f"another evaluation is writing to {directory}: wait for it, or give another --output-dir"
        ) from error
    finally:
        os.close(file)


def check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError, naming the first setting that differs, if the results in `directory` were made with others."""
    before, now = read_settings(directory), flat(settings)
    if before is None:
        return
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            old, new = (json.dumps(table[key]) if key in table else "nothing" for table in (before, now))
            raise UserError(
                f"{directory} holds results made with {key} = {old}, and now it is {new}: "
                "go back to that, give another --output-dir, or make them anew with --clean"
            )


def read_settings(directory: Path) -> dict[str, Any] | None:
    """Return what the results in `directory` were made with; None where there are none.

    Raises:
        UserError: the file is damaged.
    """
    path = directory / SETTINGS
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): make the results anew with --clean") from error


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by dotted names."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


# -- statistics --------------------------------------------------------------------------------------------------------


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The chance that at least one of k ≤ `attempts` attempts, drawn without replacement, solved the task:
    1 − C(n−c, k) / C(n, k), the unbiased estimate of Chen et al. 2021."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """The chance that all of k ≤ `attempts` attempts, drawn without replacement, solved the task: C(c, k) / C(n, k), as
    in tau-bench (Yao et al. 2024)."""
    return math.comb(solved, k) / math.comb(attempts, k)


def powers(attempts: int) -> list[int]:
    """1, 2, 4, … up to the attempts made."""
    return [1 << power for power in range(attempts.bit_length())]


def interval95(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean over two tasks or more: 1.96 · s / √tasks."""
    return _Z95 * stdev(values) / math.sqrt(len(values))


# -- the report --------------------------------------------------------------------------------------------------------


def write_report(results: Sequence[EvalResults], skipped: Mapping[int, str], config: "EvalConfig") -> str:
    """Write `report.md` and `report.json`, each in place of an earlier one; return the former's text.

    `skipped`: versions that were not evaluated, and why.
    """
    directory = config.output_dir / "evals"
    directory.mkdir(parents=True, exist_ok=True)
    report = {
        "model": config.model.name,
        "solved_at": config.solved_at,
        "results": [each.as_json() for each in results],
        "skipped": {str(version): why for version, why in sorted(skipped.items())},
    }
    write_atomically(directory / "report.json", (json.dumps(report, indent=1) + "\n").encode())
    text = _markdown(results, skipped, config)
    write_atomically(directory / "report.md", text.encode())
    return text


def _markdown(results: Sequence[EvalResults], skipped: Mapping[int, str], config: "EvalConfig") -> str:
    lines = [f"# {config.model.name}", "", *_table(results), ""]
    lines += ["avg@k: mean reward of k attempts, over tasks. ±: 95 % interval over tasks."]
    lines += [f"Solved: reward ≥ {config.solved_at:g}. cut: share of replies without an end."]
    lines += ["Failed attempts are left out of every mean, and counted.", ""]
    if not all(each.complete for each in results):
        lines += ["Tasks: how many were begun, where an evaluation is not complete; its numbers are of those.", ""]
    for each in results:
        passes = [f"{name} {number(value)}" for name, value in each.metrics().items() if name.startswith("pass")]
        if len(passes) > 2:  # of one attempt: the share of tasks solved alone
            lines += [f"{each.env}, {each.policy}: {', '.join(passes)}", ""]
    if any(each.failed for each in results):
        lines += ["## Errors", ""]
        for each in results:
            if each.failed:
                first, counts = each.failed[0], ", ".join(f"{reason} {n}" for reason, n in each.errors.most_common())
                lines.append(f"* {each.env}, {each.policy}: {counts} (the first: {first.task_id}: {first.message})")
        lines.append("")
    if skipped:
        lines += ["## Versions that were not evaluated", ""]
        lines += [f"* {version}: {why}" for version, why in sorted(skipped.items())] + [""]
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Four decimals at most."""
    return "–" if value is None else f"{value:.4f}".rstrip("0").rstrip(".") or "0"


def _table(results: Sequence[EvalResults]) -> list[str]:
    cells = [each.cells() for each in results]
    rows = [list(cells[0]) if cells else [], *(list(row.values()) for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]
