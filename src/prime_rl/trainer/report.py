"""What a training run says: status, log lines and metrics, from rank 0 alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prime_rl.monitor import Monitor, Status, log
from prime_rl.trainer.parallel import World

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
    """Status file, metrics file (and W&B) and console lines of rank 0; silent on the others. `history` keeps the
    steps' metrics of a benchmark."""

    def __init__(self, config: "TrainingConfig", process: str, world: World) -> None:
        self.main = world.is_main
        self._bench = config.bench
        self.history: list[Mapping[str, float]] = []
        self._said_wait: str | None = None
        if self.main:
            self._status = Status(config.output_dir, process)
            self._monitor = Monitor(config.output_dir, process, config.monitor, config.model_dump(mode="json"))

    def phase(self, text: str) -> None:
        """A new phase of work."""
        if self.main:
            self._status.phase(text)
            logger.debug(text)

    def text(self, text: str) -> None:
        """Something for people."""
        if self.main:
            logger.info(text)

    def step(self, step: int) -> None:
        """Step `step` begins."""
        if self.main:
            self._status.step(step)

    def waiting(self, subject: str, owner: str, timeout: float, waited: float) -> None:
        """Still waiting, for `waited` seconds so far. The console hears of a long wait once."""
        if not self.main:
            return
        self._status.waiting(subject, owner, timeout)
        if waited > _SAY_WAIT_AFTER_SECONDS and self._said_wait != subject:
            self._said_wait = subject
            logger.info("waiting for %s from %s (at most %.0f s)", subject, owner, timeout)

    def metrics(self, step: int, max_steps: int | None, metrics: Mapping[str, float]) -> None:
        """Record a step's numbers and print its line."""
        if not self.main:
            return
        if self._bench:
            self.history.append(metrics)
        self._monitor.log(step, metrics)
        parts = [f"{label} {metrics[key]:{form}}" for key, label, form in _LINE if key in metrics]
        logger.info("step %s | %s", f"{step}/{max_steps}" if max_steps else step, " | ".join(parts))

    def close(self, outcome: str, text: str) -> None:
        """Last word of the run."""
        if self.main:
            logger.info("%s: %s", outcome, text)
            self._monitor.close()
            self._status.done(outcome)


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
