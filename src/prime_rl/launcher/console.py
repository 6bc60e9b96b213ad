"""What `rl` prints: start-up phases, long waits, a line a step, a summary; on a terminal, rows of what goes on now."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

from prime_rl.config.inference import SERVER
from prime_rl.evals.results import REPORT
from prime_rl.launcher.rundir import LAUNCHER
from prime_rl.monitor.limits import KEPT, Limit, Row, limit_of
from prime_rl.monitor.monitor import Tail
from prime_rl.monitor.run_directory import SIDES, RunDirectory, is_of_step
from prime_rl.monitor.status import HEARTBEAT_SECONDS, ProcessStatus, phase_name
from prime_rl.monitor.terminal import LiveRegion, Spans, minutes, progress, remaining, sparkline
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
_SILENT_SECONDS = 5 * HEARTBEAT_SECONDS
_SPARK_STEPS = 60
_ERRORS_SHOWN = 0.005  # share of a step's episodes that failed
_IN_ROWS = ("limited by", "ETA")  # parts of a step's line that rows say as well
_WARNING = re.compile(r"starting it again|goes on without|\(gives up in")  # in a line of the launcher
_LOGGED = re.compile(rb"\S+ (\S+) (?:WARNING|ERROR|CRITICAL) +(.*)")


class Console:
    """Print what metrics and status files say. `say` and `look` are the supervisor's callbacks. Leaving `region`
    removes the rows."""

    def __init__(
        self, output_dir: Path, max_steps: int | None, bench: bool = False, logs: Mapping[str, Path] | None = None
    ) -> None:
        """`bench`: trainer and orchestrator have no steps in common. `logs`: of the processes that rows are about."""
        self._output_dir, self._max_steps, self._bench = output_dir, max_steps, bench
        self._logs, self.region = {name: Tail(path) for name, path in (logs or {}).items()}, LiveRegion()
        for log in self._logs.values():
            log.lines()  # of earlier incarnations
        self._warning: Spans = ()
        self._limit: Limit | None = None
        self._began = time.time()
        self._phases: dict[str, str] = {}
        self._waits_shown: set[tuple[str, str, float]] = set()
        self._run = RunDirectory(output_dir, KEPT)
        # A resumed trainer takes batches that were made, and reported, in an earlier incarnation.
        self._run.read(*SIDES)
        self._updates: dict[int, Row] = {}  # the trainer's rows that have no line yet
        self._step_ends: list[float] = []  # unix times, since
        self._all_ready_at = 0.0  # the last process was ready: before, steps waited for its start
        self.steps: set[int] = set()  # that were printed

    def say(self, text: str) -> None:
        style = "red" if text.startswith("error: ") else "yellow" if _WARNING.search(text) else ""
        if style:
            self._warning = [(f"{time.strftime('%H:%M:%S')} {text}", style)]
        self.region.say(f"{time.strftime('%H:%M:%S')} {text}", style)

    def look(self) -> None:
        statuses = self._run.statuses
        for name, status in statuses.items():
            if "." not in name and name.partition("-")[0] != LAUNCHER:  # no rank but the first
                self._show(status)
                self._all_ready_at = max(self._all_ready_at, status.ready or 0.0)
        for line in [] if self._bench else self.step_lines():
            self.say(line)
        self.region.draw(lambda: self.rows(statuses))

    def rows(self, statuses: Mapping[str, ProcessStatus]) -> Iterator[Spans]:
        """Say how far the run is, what each process is doing, what limits the run, and the last warning."""
        now, trainer = time.time(), statuses.get("trainer")
        if trainer is not None and trainer.step is not None:
            done = trainer.step + (trainer.step in self.steps)
            left = remaining(self._step_ends, self._max_steps - done, now) if self._max_steps else None
            yield progress(done, self._max_steps, "steps", left)
        batches = self._run.rows("orchestrator", read=False).values()
        if rewards := [row["reward/mean"] for row in batches if "reward/mean" in row]:
            yield [_label("reward"), (f"{rewards[-1]:.4f} ", "bold"), (sparkline(rewards[-_SPARK_STEPS:]), "cyan")]
        # Servers that do the same share a row.
        states = Counter((name.partition("-")[0], *state_of(statuses.get(name), now)) for name in self._logs)
        for (name, doing, style), count in states.items():
            yield [_label(name if count == 1 else f"{name} ×{count}"), ("● ", style), (doing, "")]
        if self._limit is not None:
            yield [_label("limited by"), (self._limit.name, "bold"), (f" ({self._limit.reason})", "dim")]
        for name, log in self._logs.items():
            for logged in filter(None, map(_LOGGED.match, log.lines())):
                if not name.startswith(SERVER):  # vLLM logs many harmless warnings
                    self._warning = [(f"{logged[1].decode()} {name}: {logged[2].decode(errors='replace')}", "yellow")]
        if self._warning:
            yield [_label("warning"), *self._warning]

    def _show(self, status: ProcessStatus) -> None:
        """Print a new phase until the first step (from then on there is a line a step) where no row says it, and a long
        wait once."""
        name, wait, now = phase_name(status.phase), status.waiting, time.time()
        if self._phases.get(status.process) != name:
            self._phases[status.process] = name
            if not self.steps and self.region.live is None and name not in ("starting", "done"):
                self.say(f"{status.process}: {name}")
        key = wait and (status.process, wait.subject, wait.since)
        if wait and key and now - wait.since >= _PATIENCE_SECONDS and key not in self._waits_shown:
            self._waits_shown.add(key)
            self.say(f"{status.process} waits for {wait} (gives up in {minutes(max(0.0, wait.deadline - now))})")

    def step_lines(self) -> list[str]:
        """Return lines for what happened since the last call. A step has one once both sides have reported it.

        A trainer that recovers trains on the same batches again, and has their lines again.
        """
        lines = []
        for process, row in self._run.read(*SIDES):
            lines += [
                f"Eval {name} at step {int(row['step'])} | reward {row[key]:.4f}{_errors(row, f'eval/{name}/')}"
                for key in row
                if (name := _eval_name(key))
            ]
            step = int(row["step"])
            # The trainer adds what it knows late, such as the time to save: that makes no line of its own.
            if process == "trainer" and ("loss/mean" in row or step in self._updates):
                self._updates[step] = {**self._updates.get(step, {}), **row}
        batches = self._run.rows("orchestrator", read=False)
        for step in sorted(self._updates.keys() & batches.keys()):
            if is_of_step(batches[step]):
                lines.append(self._step_line(step, batches[step], self._updates.pop(step)))
        return lines

    def _step_line(self, step: int, orchestrator: Row, trainer: Row) -> str:
        """`Step 3 [4/20] | reward 0.312 | …`: the number counts from 0, brackets say how many are done."""
        self.steps.add(step)
        recent = [*self._step_ends[-_ETA_STEPS:], trainer["time"]]
        self._step_ends = [end for end in recent if end >= self._all_ready_at]
        row = {**trainer, **{key: orchestrator[key] for key in ("reward/mean",) if key in orchestrator}}
        parts = [f"Step {step} [{step + 1}/{self._max_steps}]" if self._max_steps else f"Step {step} [{step + 1}]"]
        parts[0] += _errors(orchestrator)
        parts += [form.format(row[key]) for key, form in _STEP_METRICS.items() if key in row]
        if (shares := self._run.shares(self._began)) is not None:
            self._limit = limit_of(shares)
            parts.append(f"limited by {self._limit.name}")
        # The first step waited for the start-up: its duration says nothing about the pace.
        left = remaining(self._step_ends, (self._max_steps or 0) - step - 1, trainer["time"])
        if self._max_steps is not None and left is not None:
            parts.append(f"ETA {minutes(left)}")
        return " | ".join(part for part in parts if self.region.live is None or not part.startswith(_IN_ROWS))

    def summary(self) -> list[str]:
        """Compare the run's first and last rewards and evaluations; say where the time went, and where the weights are.

        Rewards are of the whole run; times of the steps that the last step line judged, too.
        """
        rows = RunDirectory(self._output_dir).rows("orchestrator").values()
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
        if any(_errors(row) for row in rows):
            log = self._output_dir / "logs" / "orchestrator.log"
            lines.append(f"episodes failed and are in no reward: {log} says why, `rl audit` how many")
        starts = [row["time"] - row["time/step"] for row in rows if row["time"] >= self._began and "time/step" in row]
        if starts:
            lines.append(f"startup: {max(starts[0] - self._began, 0.0):.0f} s")
        if (shares := self._run.shares(self._began)) is not None:
            lines += [str(shares), str(limit_of(shares))]
        # The base model has no files, nor have versions that went from memory.
        weights = self._output_dir / "weights"
        filed = [version for version in list_steps(weights) if any(step_dir(weights, version).glob("*.safetensors"))]
        lines += [f"weights  {step_dir(weights, version)}" for version in filed[-1:]]
        report = self._output_dir / "evals" / REPORT
        return [*lines, *([f"report   {report}"] if report.exists() else [])]


def _eval_name(key: str) -> str:
    """Return the evaluation whose reward this metric is; "" for other metrics."""
    return key.removeprefix("eval/").removesuffix("/reward/mean") if re.fullmatch("eval/.*/reward/mean", key) else ""


def _errors(row: Row, of: str = "") -> str:
    """Return the part of a line that says how many episodes failed; "" where hardly any did."""
    rate = row.get(f"{of}errors/rate", 0.0)
    return f" | errors {rate:.0%}" if rate >= _ERRORS_SHOWN else ""


def state_of(status: ProcessStatus | None, now: float) -> tuple[str, str]:
    """Return what a process is doing, and its colour: green works, yellow starts or waits, red has failed."""
    if status is None:
        return "starting", "yellow"
    if status.outcome is not None:
        return status.outcome, "red" if status.outcome.startswith("failed") else "dim"
    if (silent := now - status.heartbeat) > _SILENT_SECONDS:
        return f"no sign of life for {silent:.0f} s", "red"
    if status.waiting is not None and now - status.waiting.since >= 1.0:
        return f"waits for {status.waiting}", "yellow"
    return (status.doing, "green") if status.ready else (f"{status.doing}, for {now - status.since:.0f} s", "yellow")


def _label(name: str) -> tuple[str, str]:
    return f"{name:<14}", "dim"
