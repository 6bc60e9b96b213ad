"""The lines that `rl` prints: start-up phases, long waits, a line per step, a summary."""

import math
import re
import time
from pathlib import Path
from statistics import fmean

from prime_rl.errors import say
from prime_rl.launcher.rundir import LAUNCHER
from prime_rl.monitor import read_status
from prime_rl.monitor.limits import LimitWatch, Row, limit_of
from prime_rl.monitor.monitor import metrics_path, read_metrics
from prime_rl.monitor.status import ProcessStatus, phase_name
from prime_rl.transport.commit import list_steps, step_dir

_PATIENCE_SECONDS = 30.0  # a shorter wait is normal: no line
_ETA_STEPS = 10  # the remaining time follows the mean of the last steps
_SUMMARY_STEPS = 5
_STEP_METRICS = {
    "reward/mean": "reward {:.4f}",
    "loss/mean": "loss {:.4f}",
    "perf/throughput": "{:,.0f} tokens/s",
    "time/step": "{:.2f} s",
}


class Console:
    """Print what metrics and status files say. `say` and `look` are the supervisor's callbacks."""

    def __init__(self, output_dir: Path, max_steps: int | None, bench: bool = False) -> None:
        """`bench`: trainer and orchestrator have no steps in common."""
        self._output_dir, self._max_steps, self._bench = output_dir, max_steps, bench
        self._began = time.time()
        self._phases: dict[str, str] = {}
        self._waits_shown: set[tuple[str, str, float]] = set()
        self._watch = LimitWatch(output_dir, since=self._began)
        self._watch.read()  # a resumed trainer takes batches that were made, and reported, in an earlier incarnation
        self._updates: dict[int, Row] = {}  # the trainer's rows that have no line yet
        self._step_ends: list[float] = []  # unix times, since
        self._steady = 0.0  # the last process was ready: before, steps waited for its start
        self.steps: set[int] = set()  # that were printed

    def say(self, text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')} {text}")

    def look(self) -> None:
        for name, status in read_status(self._output_dir).items():
            if "." not in name and name != LAUNCHER:  # no rank but the first
                self._show(status)
                self._steady = max(self._steady, status.ready or 0.0)
        for line in [] if self._bench else self.step_lines():
            self.say(line)

    def _show(self, status: ProcessStatus) -> None:
        """Print a new phase until the first step (from then on there is a line a step), and a long wait once."""
        name, wait, now = phase_name(status.phase), status.waiting, time.time()
        if self._phases.get(status.process) != name:
            self._phases[status.process] = name
            if not self.steps and name not in ("starting", "done"):
                self.say(f"{status.process}: {name}")
        if wait is None or now - wait.since < _PATIENCE_SECONDS:
            return
        if (key := (status.process, wait.subject, wait.since)) not in self._waits_shown:
            self._waits_shown.add(key)
            self.say(f"{status.process} waits for {wait} (gives up in {minutes(max(0.0, wait.deadline - now))})")

    def step_lines(self) -> list[str]:
        """Return lines for what happened since the last call. A step has one once both sides have reported it.

        A trainer that recovers trains on the same batches again, and has their lines again.
        """
        lines = []
        for process, row in self._watch.read():
            lines += [
                f"Eval {name} at step {int(row['step'])} | reward {row[key]:.4f}"
                for key in row
                if (name := _eval_name(key))
            ]
            step = int(row["step"])
            # The trainer adds what it knows late, such as the time to save: that makes no line of its own.
            if process == "trainer" and ("loss/mean" in row or step in self._updates):
                self._updates[step] = {**self._updates.get(step, {}), **row}
        batches = self._watch.rows["orchestrator"]
        for step in sorted(self._updates.keys() & batches.keys()):
            if any(not key.startswith("eval/") for key in batches[step].keys() - {"step", "time"}):
                lines.append(self._step_line(step, batches[step], self._updates.pop(step)))
        return lines

    def _step_line(self, step: int, orchestrator: Row, trainer: Row) -> str:
        """`Step 3 [4/20] | reward 0.312 | …`: the number counts from 0, the brackets say how many are done."""
        self.steps.add(step)
        recent = [*self._step_ends[-_ETA_STEPS:], trainer["time"]]
        self._step_ends = [end for end in recent if end >= self._steady]
        row = {**trainer, **{key: orchestrator[key] for key in ("reward/mean",) if key in orchestrator}}
        parts = [f"Step {step} [{step + 1}/{self._max_steps}]" if self._max_steps else f"Step {step} [{step + 1}]"]
        parts += [form.format(row[key]) for key, form in _STEP_METRICS.items() if key in row]
        if (shares := self._watch.shares()) is not None:
            parts.append(f"limited by {limit_of(shares).name}")
        # The first step waited for the start-up: its duration says nothing about the pace.
        if self._max_steps is not None and len(self._step_ends) > 1:
            pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
            parts.append(f"ETA {minutes(pace * (self._max_steps - step - 1))}")
        return " | ".join(parts)

    def summary(self) -> list[str]:
        """Compare the run's first and last rewards and evaluations; say where the time went, and where the weights are.

        Rewards are of the whole run; times of the steps that the last step line judged, too.
        """
        rows = read_metrics(metrics_path(self._output_dir, "orchestrator"))
        rewards, lines = [row["reward/mean"] for row in rows if "reward/mean" in row], []

        def compare(name: str, before: float, after: float) -> None:
            lines.append(f"{name}: {before:.4f} → {after:.4f} ({after - before:+.4f})")

        if rewards:
            count = max(1, min(_SUMMARY_STEPS, len(rewards) // 2))  # never the same steps twice, where there are two
            several = "step" if count == 1 else f"{count} steps"
            compare(f"reward, first {several} → last", fmean(rewards[:count]), fmean(rewards[-count:]))
        for key in sorted({key for row in rows for key in row if _eval_name(key)}):
            values = [row[key] for row in rows if key in row]
            if len(values) > 1:
                compare(f"eval {_eval_name(key)}, first → last", values[0], values[-1])
            else:
                lines.append(f"eval {_eval_name(key)}: {values[0]:.4f}")
        starts = [row["time"] - row["time/step"] for row in rows if row["time"] >= self._began and "time/step" in row]
        if starts:
            lines.append(f"time, start: {max(starts[0] - self._began, 0.0):.0f} s")
        if (shares := self._watch.shares()) is not None:
            trainer = f"trainer: computes {shares.trained:.0%}, waits for batches {shares.waited:.0%}"
            engines = f"engines: sample {shares.sampled:.0%}, load weights {shares.paused:.0%}, idle {shares.idle:.0%}"
            lines += [f"{trainer}; {engines}", str(limit_of(shares))]
        # The base model has no files, nor have versions that went from memory.
        weights = self._output_dir / "weights"
        filed = [version for version in list_steps(weights) if any(step_dir(weights, version).glob("*.safetensors"))]
        return lines + [f"weights  {step_dir(weights, version)}" for version in filed[-1:]]


def _eval_name(key: str) -> str:
    """Return the evaluation whose reward this metric is; "" for other metrics."""
    return key.removeprefix("eval/").removesuffix("/reward/mean") if re.fullmatch("eval/.*/reward/mean", key) else ""


def minutes(seconds: float) -> str:
    """`75.2` → `1:15`, `3700` → `1:01:40`."""
    whole = math.floor(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
