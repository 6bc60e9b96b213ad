"""What a training run says: status from every rank, log lines and metrics from rank 0 alone."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from prime_rl.config import write_toml
from prime_rl.errors import UserError
from prime_rl.monitor import Monitor, Status, log
from prime_rl.monitor.status import status_path
from prime_rl.trainer.parallel import World
from prime_rl.transport.commit import disk_errors

if TYPE_CHECKING:
    from prime_rl.config.trainer import TrainingConfig

logger = log.get(__name__)

_SAY_WAIT_AFTER_SECONDS = 10.0

# Key, label and format of the console line, in this order.
_LINE = (
    ("loss/mean", "loss", ".4f"),
    ("entropy/mean", "entropy", ".4f"),
    ("mismatch_kl/mean", "mismatch KL", ".2e"),
    ("optim/grad_norm", "grad norm", ".3g"),
    ("optim/lr", "lr", ".2e"),
    ("perf/throughput", "tokens/s", ",.0f"),
    ("perf/mfu", "MFU %", ".1f"),
    ("perf/peak_memory", "GiB", ".1f"),
    ("time/step", "s", ".2f"),
)
_BENCH = ("perf/throughput", "perf/mfu", "time/step", "time/forward_backward", "perf/peak_memory")

BENCH_STEPS = 4


class Report:
    """Status file of every rank; metrics file (and W&B) and console lines of rank 0. `history` keeps a benchmark's metrics.

    A run directory that has a status already is not touched before `open`: who is refused leaves no trace in an earlier run. A restart by the
    launcher (`recover`) says at once that it lives. As a context it says how the run failed.
    """

    def __init__(self, config: "TrainingConfig", process: str, world: World, *, recover: bool = False) -> None:
        self.config, self.process, self.rank, self.ranks = config, process, world.rank, world.size
        self.main = world.is_main
        self.history: list[Mapping[str, float]] = []
        self._name = process if self.main else f"{process}.{world.rank}"
        self._status: Status | None = None
        self._monitor: Monitor | None = None
        self._said_wait: str | None = None
        if recover or not status_path(config.output_dir, self._name).exists():
            self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            if isinstance(error, UserError | OSError):
                self._status.done(f"failed: {error}")
            self._status.close()

    def open(self, given: "TrainingConfig") -> None:
        """The run is not refused: from here on it may leave its own traces, first of all its config as it was `given`."""
        self._begin()
        if self.main:
            write_toml(given, given.output_dir / "configs" / f"{self.process}.toml")
            for path in status_path(self.config.output_dir, self.process).parent.glob(f"{self.process}.*.json"):
                rank = path.name.split(".")[1]
                if rank.isdigit() and int(rank) >= self.ranks:
                    path.unlink(missing_ok=True)  # of an earlier life with more ranks

    def _begin(self) -> None:
        config = self.config
        self._status = self._status or Status(config.output_dir, self._name)
        if self.main and self._monitor is None:
            self._monitor = Monitor(config.output_dir, self.process, config.monitor, config.model_dump(mode="json"))

    def phase(self, text: str) -> None:
        """A new phase of work."""
        if self._status is not None:
            self._status.phase(text)
        if self.main:
            logger.debug(text)

    def text(self, text: str) -> None:
        """Something for people."""
        if self.main:
            logger.info(text)

    def ready(self) -> None:
        """The loop begins: what fails from here on is worth starting again."""
        assert self._status is not None
        self._status.ready()

    def step(self, step: int) -> None:
        """Step `step` begins."""
        assert self._status is not None
        self._status.step(step)

    def waiting(self, subject: str, owner: str, timeout: float, waited: float) -> None:
        """Still waiting, for `waited` seconds so far. The console hears of a long wait once."""
        assert self._status is not None
        self._status.waiting(subject, owner, timeout)
        if self.main and waited > _SAY_WAIT_AFTER_SECONDS and self._said_wait != subject:
            self._said_wait = subject
            logger.info("waiting for %s from %s (at most %.0f s)", subject, owner, timeout)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's numbers and print its line.

        Raises:
            UserError: the disk is full.
        """
        self.more_metrics(step, metrics)
        if self.main:
            if self.config.bench:
                self.history.append(metrics)
            last = self.config.max_steps
            parts = [f"{label} {metrics[key]:{form}}" for key, label, form in _LINE if key in metrics]
            logger.info("step %s | %s", f"{step}/{last}" if last else step, " | ".join(parts))

    def more_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers of a step that were not known yet when its line was printed."""
        if self._monitor is not None:
            with disk_errors(self.config.output_dir / "metrics"):
                self._monitor.log(step, metrics)

    def close(self, outcome: str, text: str) -> None:
        """Last word of the run."""
        assert self._status is not None
        if self._monitor is not None:
            logger.info("%s: %s", outcome, text)
            self._monitor.close()
        self._status.done(outcome)


def saving(started: float, ended: float, tokens: int) -> dict[str, float]:
    """What saving, which ends now, adds to the row of a step of `tokens` tokens that went from `started` to `ended` (performance counter)."""
    now = time.perf_counter()
    return {"time/save_ckpt": now - ended, "time/step": now - started, "perf/throughput": tokens / (now - started)}


def bench_table(history: Sequence[Mapping[str, float]]) -> str:
    """Mean, least and most of what a benchmark is run for. The first step, which warms up and compiles, is left out."""
    measured = history[1:] or history
    rows = [f"{'':<24}{'mean':>12}{'min':>12}{'max':>12}   ({len(measured)} steps)"]
    for key in _BENCH:
        values = [metrics[key] for metrics in measured if key in metrics]
        if values:
            mean = sum(values) / len(values)
            rows.append(f"{key:<24}{mean:>12,.2f}{min(values):>12,.2f}{max(values):>12,.2f}")
    return "benchmark\n" + "\n".join(rows)
