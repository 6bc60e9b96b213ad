"""Text for the console: functions of metrics rows and of a run directory, and the reader that collects the rows."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from prime_rl.monitor.limits import Limit, LimitWatch, Row, Shares, Steps, limit_of
from prime_rl.monitor.monitor import Tail, metrics_path, read_metrics
from prime_rl.transport.commit import CommitError, list_steps
from prime_rl.transport.lives import read_lives
from prime_rl.transport.weights import version_dir, weights_manifest

LINE_COLUMNS = 120  # of a step's line, with the time before it
_CLOCK_COLUMNS = len("00:00:00 ")
_ETA_STEPS = 10  # the remaining time follows the mean of the last steps
_SUMMARY_STEPS = 5
_KEPT_STEPS = 100  # more than lie between two recovery checkpoints
_EVAL_PREFIX, _EVAL_SUFFIX = "eval/", "/reward/mean"


class Progress:
    """Joins the rows of orchestrator and trainer by step, into one line per step and one per evaluation.

    Args:
        max_steps: How many steps the run makes; None: until it is stopped.
        apart: How many each process makes, by name, where they have no steps in common (a benchmark): each has lines of its own.
    """

    def __init__(self, output_dir: Path, max_steps: int | None, apart: Mapping[str, int] | None = None) -> None:
        self._tails = {name: Tail(metrics_path(output_dir, name)) for name in ("orchestrator", "trainer")}
        # A resumed trainer takes batches that the orchestrator made, and reported, in an earlier life.
        earlier = {
            int(row["step"]): row for row in read_metrics(metrics_path(output_dir, "orchestrator")) if is_step(row)
        }
        self._rows: dict[str, dict[int, Row]] = {"orchestrator": dict(earlier), "trainer": {}}
        self._limits = LimitWatch(output_dir)
        self._max_steps = max_steps
        self._apart = apart or {}
        self._ends: dict[str, list[float]] = {}  # unix times at which steps ended; by process if they are told apart
        self._told: set[int] = set()
        self._output_dir = output_dir
        self._lives = _lives(output_dir)

    @property
    def steps(self) -> int:
        """Different steps that were printed."""
        return len(self._told)

    @property
    def begun(self) -> bool:
        """Whether a step was printed, of each process if they are told apart."""
        return bool(self._told) and self._ends.keys() >= self._apart.keys()

    def lines(self) -> list[str]:
        """What happened since the last call. A step is told once both sides have reported it."""
        told = self._life_lines()
        for name, tail in self._tails.items():
            for row in tail.read():
                told += eval_lines(row)
                if is_step(row) and name in self._apart:
                    told += self._lines_apart(name, int(row["step"]), row)
                elif is_step(row):
                    self._note(name, int(row["step"]), row)
        both = sorted(self._rows["orchestrator"].keys() & self._rows["trainer"].keys())
        for step in both:
            # A trainer that recovers takes the same batch again, and there is a line again: the batch's row is kept for a while.
            sides = self._rows["orchestrator"][step], self._rows["trainer"].pop(step)
            self._rows["orchestrator"].pop(step - _KEPT_STEPS, None)
            told.append(self._step_line(step, *sides))
        return told

    def _life_lines(self) -> list[str]:
        """Where a trainer that was started again, or resumed, goes on from."""
        lives = _lives(self._output_dir)
        new, self._lives = sorted(lives.keys() - self._lives.keys()), lives
        told = []
        for life in new:
            again = sum(step >= lives[life] for step in self._told)
            if life > 0:
                self._ends.clear()  # the time until it was there again is nobody's pace
                told.append(
                    f"trainer goes on from step {lives[life]}" + (f": {again} steps are made again" if again else "")
                )
        return told

    def _note(self, name: str, step: int, row: Row) -> None:
        """What comes late adds to a row that is not told yet."""
        if _is_late(name, row):
            if step in self._rows[name]:
                self._rows[name][step] = {**self._rows[name][step], **row}
        else:
            self._rows[name][step] = row

    def _step_line(self, step: int, orchestrator: Row, trainer: Row) -> str:
        self._told.add(step)
        remaining = self._remaining("", step, self._max_steps, trainer["time"])
        return step_line(
            step, self._max_steps, orchestrator, trainer, remaining, self._limits.look(self._lives.values())
        )

    def _lines_apart(self, name: str, step: int, row: Row) -> list[str]:
        if _is_late(name, row):
            return []
        self._told.add(step)
        last = self._apart[name]
        return [f"{name}: {step_line(step, last, row, row, self._remaining(name, step, last, row['time']))}"]

    def _remaining(self, name: str, step: int, max_steps: int | None, now: float) -> float | None:
        """Seconds to go at the pace of the last steps, after one that ends now. The first step waited for the start-up and tells nothing."""
        ends = self._ends.setdefault(name, [])
        ends.append(now)
        recent = ends[-_ETA_STEPS - 1 :]
        if max_steps is None or len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * (max_steps - step - 1)


def _lives(output_dir: Path) -> dict[int, int]:
    try:
        return read_lives(output_dir)
    except CommitError:  # the trainer says so
        return {}


def _is_late(name: str, row: Row) -> bool:
    """The trainer adds to a step's numbers what it knows late, such as the time to save: that makes no line of its own."""
    return name == "trainer" and "loss/mean" not in row


def is_step(row: Row) -> bool:
    """Whether the row belongs to a training step, rather than holding evaluations alone."""
    return any(not key.startswith(_EVAL_PREFIX) for key in row if key not in ("step", "time"))


def step_line(
    step: int,
    max_steps: int | None,
    orchestrator: Row,
    trainer: Row,
    remaining: float | None = None,
    limit: Limit | None = None,
) -> str:
    """`Step 3 [4/20] | reward 0.312 | …`: the step's number counts from 0, the brackets say how many are done.

    What does not fit into `LINE_COLUMNS` is left to the trainer's log: first the loss, then throughput, entropy and mismatch KL.
    """
    parts = {
        "step": f"Step {step} [{step + 1}/{max_steps}]" if max_steps else f"Step {step} [{step + 1}]",
        "reward": _named("reward", orchestrator.get("reward/mean"), ".4f"),
        "loss": _named("loss", trainer.get("loss/mean"), ".4f"),
        "entropy": _named("entropy", trainer.get("entropy/mean"), ".4f"),
        "mismatch": _named("KL", trainer.get("mismatch_kl/mean"), ".2e"),
        "throughput": _named("", trainer.get("perf/throughput"), ",.0f", " tokens/s"),
        "seconds": _named("", trainer.get("time/step"), ".2f", " s"),
        "limit": "" if limit is None else f"limited by {limit.name}",
        "eta": "" if remaining is None else f"ETA {minutes(remaining)}",
    }
    for dispensable in ("", "loss", "throughput", "entropy", "mismatch"):
        parts.pop(dispensable, None)
        line = " | ".join(filter(None, parts.values()))
        if len(line) <= LINE_COLUMNS - _CLOCK_COLUMNS:
            break
    return line


def limit_line(output_dir: Path) -> str | None:
    """What limits a run, by its last steps; None where too few were made to say."""
    limit = LimitWatch(output_dir).look(_lives(output_dir).values())
    return None if limit is None else str(limit)


def eval_lines(row: Row) -> list[str]:
    """`Eval reverse-text at step 20 | reward 0.5100` for every evaluation in the row."""
    found = [(key.removeprefix(_EVAL_PREFIX).removesuffix(_EVAL_SUFFIX), row[key]) for key in row if is_eval(key)]
    return [f"Eval {name} at step {int(row['step'])} | reward {value:.4f}" for name, value in found]


def is_eval(key: str) -> bool:
    return key.startswith(_EVAL_PREFIX) and key.endswith(_EVAL_SUFFIX)


def summary(output_dir: Path, since: float) -> list[str]:
    """Reward of the run's first steps and of its last, every evaluation's first and last value, where the time went, where the weights are.

    `since`: unix time at which the launcher began: times are of the steps made since, all else is of the whole run.
    """
    rows = read_metrics(metrics_path(output_dir, "orchestrator"))
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    lines = []
    if rewards:
        count = max(1, min(_SUMMARY_STEPS, len(rewards) // 2))  # never the same steps twice, where there are two
        lines.append(
            _change(f"reward, first {count} steps → last {count}", mean(rewards[:count]), mean(rewards[-count:]))
        )
    for key in sorted({key for row in rows for key in row if is_eval(key)}):
        values = [row[key] for row in rows if key in row]
        name = key.removeprefix(_EVAL_PREFIX).removesuffix(_EVAL_SUFFIX)
        if len(values) > 1:
            lines.append(_change(f"eval {name}, first → last", values[0], values[-1]))
        else:
            lines.append(f"eval {name}: {values[0]:.4f}")
    lines += _time_lines(output_dir, since)
    if newest := newest_weights(output_dir):
        lines.append(f"weights  {newest}")
    return lines


def _time_lines(output_dir: Path, since: float) -> list[str]:
    """When the first step began, and how long both sides worked and waited in the steps after it."""
    both = {
        process: [row for row in read_metrics(metrics_path(output_dir, process)) if row["time"] >= since]
        for process in ("orchestrator", "trainer")
    }
    starts = [row["time"] - row["time/step"] for row in both["orchestrator"] if "time/step" in row]
    steps = Steps(most=max(map(len, both.values()), default=0) + 1)
    for process, rows in both.items():
        steps.add(process, rows)
    lines = [f"time, start: {max(starts[0] - since, 0.0):.0f} s"] if starts else []
    if (shares := steps.shares(_lives(output_dir).values())) is not None:
        lines = [*(f"{line}; {_shares_text(shares)}" for line in lines), str(limit_of(shares))]
    return lines


def _shares_text(shares: Shares) -> str:
    return (
        f"trainer: computes {shares.trained:.0%}, waits for batches {shares.waited:.0%}; "
        f"engines: sample {shares.sampled:.0%}, load weights {shares.paused:.0%}, idle {shares.idle:.0%}"
    )


def newest_weights(output_dir: Path) -> Path | None:
    """The newest committed version that has files; version 0 is the base model itself and has none, nor have those that went from memory."""
    root = output_dir / "weights"
    for version in sorted(list_steps(root), reverse=True):
        with suppress(CommitError):  # pruned meanwhile, or damaged
            if version and weights_manifest(version_dir(root, version)).publisher is None:
                return version_dir(root, version)
    return None


def bench_table(output_dir: Path, since: float) -> list[str]:
    """Throughput, MFU, step time and peak memory of both sides. The first step warms up and is left out."""
    lines = [f"{'':<14}{'':<24}{'mean':>12}{'min':>12}{'max':>12}"]
    shown = (
        ("perf/throughput", "throughput (tokens/s)"),
        ("perf/mfu", "MFU (%)"),
        ("time/step", "step time (s)"),
        ("perf/peak_memory", "peak memory (GiB)"),
    )
    for process in ("trainer", "orchestrator"):
        rows = [r for r in read_metrics(metrics_path(output_dir, process)) if r["time"] >= since and is_step(r)]
        measured = rows[1:] or rows
        for key, label in shown:
            if values := [row[key] for row in measured if key in row]:
                cells = "".join(f"{value:>12,.2f}" for value in (mean(values), min(values), max(values)))
                lines.append(f"{process:<14}{label:<24}{cells}")
    return lines


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def minutes(seconds: float) -> str:
    """`75.2` → `1:15`, `3700` → `1:01:40`."""
    whole = math.floor(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _named(name: str, value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{name} {value:{form}}{unit}".strip()


def _change(what: str, before: float, after: float) -> str:
    return f"{what}: {before:.4f} → {after:.4f} ({after - before:+.4f})"
