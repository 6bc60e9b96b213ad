"""`--bench`: a few steps on fake data, and a table of how fast they were."""

import warnings
from collections.abc import Mapping, Sequence
from statistics import median
from types import TracebackType
from typing import Self

import torch

from prime_rl.config.shared import WARM_UP
from prime_rl.trainer import perf
from prime_rl.trainer.parallel import World

# What fits into a CPU's memory nearly everywhere.
SMALL_RL = "trainer --bench --model.name assets/tiny-reverse --seq-len 256 --data.fake.batch-size 16 --data.fake.micro-batch-size 4"
SMALL_SFT = "sft --bench --model.name assets/tiny-reverse --data.seq-len 256 --data.batch-size 8"

# Key, label, factor and decimals of the table's lines, in this order; those that are not there are left out.
_LINES = (
    ("perf/throughput", "tokens/s", 1, 0),
    ("time/step", "step (ms)", 1e3, 1),
    ("time/wait_for_batch", "  waiting for data", 1e3, 1),
    ("time/forward_backward", "  forward and backward", 1e3, 1),
    ("time/optimizer", "  optimizer", 1e3, 1),
    ("perf/mfu", "MFU (%), as causal attention needs it", 1, 1),
    ("perf/peer_mfu", "MFU (%), as PRIME-RL counts", 1, 1),
    ("perf/peak_allocated", "peak memory (GiB), in tensors", 1, 2),
    ("perf/peak_memory", "peak memory (GiB), reserved", 1, 2),
    ("perf/host_syncs", "host syncs a step", 1, 0),
)


class HostSyncs:
    """Counts how often the host waits for a GPU, as far as torch notices (`set_sync_debug_mode`). Slows the host down a little: for benchmarks."""

    def __init__(self, device: torch.device, *, count: bool) -> None:
        self._counts = count and device.type == "cuda"
        self._catch = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] = []

    def __enter__(self) -> Self:
        if self._counts:
            self._caught = self._catch.__enter__() or []
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._counts:
            torch.cuda.set_sync_debug_mode("default")
            self._catch.__exit__(kind, error, trace)

    def take(self) -> dict[str, float]:
        """How many there were since the last call, as a metric. Reading a step's outcome is one more, which torch does not notice."""
        if not self._counts:
            return {}
        noticed = sum("synchronizing CUDA operation" in str(warning.message) for warning in self._caught)
        self._caught.clear()
        return {"perf/host_syncs": noticed + 1}


def bench_table(history: Sequence[Mapping[str, float]], world: World, peer_flops: float) -> str:
    """Median, least and most of what a benchmark is run for, after the warm-up.

    Args:
        peer_flops: PRIME-RL's count of a token's FLOP (`perf.peer_flops`).
    """
    if not history:
        return "benchmark: stopped before a step was measured"
    warm = min(WARM_UP, len(history) - 1)
    measured = history[warm:]
    usual = median(row["time/step"] for row in measured)
    compiling = max(sum(row["time/step"] - usual for row in history[:warm]), 0.0)
    if (ideal := perf.ideal_seconds(peer_flops, world)) is not None:
        measured = [{**row, "perf/peer_mfu": 100 * ideal * row["perf/throughput"]} for row in measured]
    lines = [f"{'':<40}{'median':>12}{'min':>12}{'max':>12}"]
    for key, label, factor, decimals in _LINES:
        values = [factor * row[key] for row in measured if key in row]
        if values:
            cells = (f"{value:>12,.{decimals}f}" for value in (median(values), min(values), max(values)))
            lines.append(f"{label:<40}{''.join(cells)}")
    lines.append(f"{'compiling (s), beyond usual steps':<40}{compiling:>12,.1f}")
    title = f"benchmark: {len(measured)} steps after {warm} that warm up, {world.size} × {world.device.type}"
    return "\n".join([title, *lines])
