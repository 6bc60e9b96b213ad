"""What a training run reports: status of every rank, log lines and metrics of rank 0; and how it is asked to stop."""

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from prime_rl.config import write_toml
from prime_rl.config.trainer import TrainingConfig
from prime_rl.errors import UserError
from prime_rl.monitor import Extras, Monitor, Status, log
from prime_rl.monitor.status import status_path
from prime_rl.monitor.terminal import LiveRegion
from prime_rl.processes import ECHO_SECONDS
from prime_rl.trainer.lm_head import MAXIMA
from prime_rl.trainer.parallel import Moment, ToHost, World, now, seconds
from prime_rl.transport.commit import disk_errors, list_steps, step_dir
from prime_rl.transport.weights import weights_manifest


def stop_signal() -> Callable[[], bool]:
    """Listen to SIGINT and SIGTERM from now on; return what says whether one has come."""
    received: list[float] = []
    clear = b"\r\x1b[K" if os.isatty(2) else b""  # the row of a `LiveRegion`

    def receive(number: int, frame: FrameType | None) -> None:
        if received and time.monotonic() - received[0] < ECHO_SECONDS:
            return
        if received:
            os.write(2, clear)
            os._exit(130)
        received.append(time.monotonic())
        # Not by the logger, which this signal may have interrupted.
        os.write(2, clear + b"asked to stop: finishing the current step (again: stop now)\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)
    return lambda: bool(received)


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


class Report:
    """Status file of every rank; metrics file (and W&B) and console lines of rank 0. A run directory that has a status
    already is not touched before `open`: who is refused leaves no trace in an earlier run. A restart by the launcher
    (`recover`) reports at once that it is alive. `tenant`: its name, where the process and its log are shared."""

    def __init__(
        self,
        config: TrainingConfig,
        process: str,
        world: World,
        *,
        recover: bool = False,
        tenant: str = "",
    ) -> None:
        self.config, self.process, self.ranks = config, process, world.size
        self._tenant, self.main = tenant, world.is_main
        self._name = process if self.main else f"{process}.{world.rank}"
        self._status: Status | None = None
        self._monitor: Monitor | None = None
        self._region = LiveRegion()
        if recover or not status_path(config.output_dir, self._name).exists():
            self._begin()

    def end(self, _: object, error: BaseException | None, __: object) -> None:
        """For an exit stack: say how the run failed, if it did."""
        self._region.close()
        if self._status is not None:
            if isinstance(error, UserError | OSError):
                self._status.done(f"failed: {error}")
            self._status.close()
        if self._tenant and self._monitor is not None:  # else it ends with the process
            self._monitor.close()

    def open(self) -> None:
        """The run is not refused: from here on it may write its own files, first of all its config."""
        self._begin()
        if self.main:
            write_toml(self.config, self.config.output_dir / "configs" / f"{self.process}.toml")
            for path in status_path(self.config.output_dir, self.process).parent.glob(f"{self.process}.*.json"):
                rank = path.name.split(".")[1]
                if rank.isdigit() and int(rank) >= self.ranks:
                    path.unlink(missing_ok=True)  # of an earlier incarnation with more ranks

    def _begin(self) -> None:
        config = self.config
        if not self._tenant:
            log.setup(config.log.level, self._name, config.output_dir)
        self._status = self._status or Status(config.output_dir, self._name)
        if self.main and self._monitor is None:
            try:
                self._monitor = Monitor(config.output_dir, self.process, config.monitor, config.model_dump(mode="json"))
            except UserError as error:  # as of W&B
                self._status.done(f"failed: {error}")
                raise

    def phase(self, text: str) -> None:
        if self._status is not None:
            self._status.phase(text)
        if self.main and not self._tenant:
            logger.debug(text)

    def text(self, text: str) -> None:
        if self.main:
            logger.info("{}{}", self._tenant and f"{self._tenant}: ", text)

    @property
    def status(self) -> Status:
        """The status file of this rank, once it may be written."""
        assert self._status is not None
        return self._status

    def metrics(self, step: int, metrics: Mapping[str, float], extras: Callable[[], Extras]) -> None:
        """Record a step's numbers and print its line. Raises UserError if the disk is full."""
        self.more_metrics(step, metrics, extras)
        if self.main:
            last = self.config.max_steps
            parts = [f"{label} {metrics[key]:{form}}" for key, label, form in _LINE if key in metrics]
            self.text(f"step {step}{f'/{last}' if last else ''} | {' | '.join(parts)}")
            if not self._tenant:
                self._region.draw_progress(step + 1, last, "steps", lambda: f", loss {metrics['loss/mean']:.4f}")

    def more_metrics(self, step: int, metrics: Mapping[str, float], extras: Callable[[], Extras] = Extras) -> None:
        """Record numbers of a step that were not known yet when its line was printed."""
        if self._monitor is not None:
            with disk_errors(self.config.output_dir / "metrics"):
                self._monitor.log(step, metrics, extras)

    def close(self, outcome: str, text: str) -> None:
        self._region.close()
        if self._monitor is not None:
            self.text(f"{outcome}: {text}")
            self._monitor.close()
            self._monitor = None
        self.status.done(outcome)


Named = Callable[[list[float]], Mapping[str, float]]  # a step's metrics by name, from its sums


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of step `step`, some of which are still on the device."""

    step: int
    sums: ToHost  # metric sums on their way to the host, then the gradient norm
    moments: tuple[Moment, Moment, Moment]  # when the device began, had the gradients, and had changed the weights
    named: Named
    known: Mapping[str, float]  # the metrics that the host knows already
    tokens: int  # of all ranks
    ideal: float | None  # seconds that the step's FLOP would take at the ranks' peak (None: not known)
    extras: Callable[[], Extras]

    def read(self) -> tuple[list[float], float]:
        """The sums over all ranks, and the gradient norm. The one place of a step where the host waits for the device;
        any thread may. Raises UserError if the norm is not finite: what the step made must not be saved."""
        *values, norm = self.sums.read().tolist()
        if not math.isfinite(norm):
            raise UserError(f"step {self.step}: the gradient norm is {norm}: nothing of this step is committed")
        return values, norm


def sum_on_device(world: World, sums: Tensor, norm: Tensor) -> ToHost:
    """Put the ranks' metric sums together and send them, then the gradient norm, to the host."""
    if world.size > 1:
        dist.all_reduce(sums[:-MAXIMA])
        dist.all_reduce(sums[-MAXIMA:], dist.ReduceOp.MAX)
    return ToHost(torch.cat([sums.double(), norm.double().reshape(1)]))


class MetricRows:
    """Rows of metrics, each written once its step is done, of which `written` is the last. Every rank keeps them.

    Reading at once would let a GPU run dry: a step's row is written by `flush` while the next step is under way, before
    anything is saved that is ahead of the row, and before a wait. A step's time runs from the end of the one before
    (the first's from `begin`) to its own end, so that waits count.
    """

    def __init__(self, report: Report, device: torch.device) -> None:
        self._report, self._device = report, device
        self._row: StepMetrics | None = None
        self._ended = now(device)  # of the step whose row was written last
        self.written = -1

    def end(self, _: object, error: BaseException | None, __: object) -> None:
        """For an exit stack: write what is left when a run fails."""
        if isinstance(error, UserError):
            self.flush()

    def begin(self) -> None:
        """The first step has what it needs: what came before it is start-up."""
        self._ended = now(self._device)

    def recorded(self, step: int, weights: Path | None, *, durable: bool = False) -> bool:
        """Whether `step` has its row and its version under `weights`, with `durable` in files. Any thread may ask. No
        saved state is ahead of either. `weights` is None where no versions are made."""
        if self.written < step or weights is None or max(list_steps(weights), default=0) <= step:
            return self.written >= step and weights is None
        return not durable or weights_manifest(step_dir(weights, step + 1)).publisher is None

    def put(self, row: StepMetrics) -> None:
        """A step is under way. Its row is written later, on a CPU at once: there the step is done."""
        assert self._row is None, "a step's row is written before the next step ends"
        self._row = row
        if self._device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Write the row that is left, if there is one, as soon as its step is done. Raises UserError if that step's
        gradients are not finite, or the disk is full."""
        if self._row is None:
            return
        row, self._row = self._row, None
        values, norm = row.read()
        begun, graded, updated = row.moments
        elapsed, self._ended = seconds(self._ended, updated), updated
        self._report.metrics(
            row.step,
            {
                **row.named(values),
                "optim/grad_norm": norm,
                "time/step": elapsed,
                "perf/throughput": row.tokens / elapsed,
                **({} if row.ideal is None else {"perf/mfu": 100 * row.ideal / seconds(begun, updated)}),
                "time/forward_backward": seconds(begun, graded),
                "time/optimizer": seconds(graded, updated),
                **row.known,
            },
            row.extras,
        )
        self.written = row.step
