"""Metrics of one process: always to `metrics/<process>.jsonl`, and to trackers."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, SupportsFloat

import msgspec
from loguru import logger

from prime_rl.config.shared import WARM_UP, MonitorConfig
from prime_rl.monitor.trackers import Extras, Trackers
from prime_rl.transport.commit import disk_errors

_ROW = msgspec.json.Decoder(dict[str, int | float | bool])  # five times as fast as `json`


class Monitor:
    """One process's metrics. One thread; a distributed trainer creates it on rank 0 only."""

    def __init__(self, output_dir: Path, process: str, config: MonitorConfig, run_config: dict[str, Any]) -> None:
        """`run_config` is shown by trackers only. Raises UserError when one is wanted and cannot start."""
        self._trackers = Trackers(config, output_dir, process, run_config)
        self._file = JsonLines(metrics_path(output_dir, process))
        self._warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, SupportsFloat], extras: Callable[[], Extras] = Extras) -> None:
        """Record numbers of the step that was executed (0-based). Non-finite ones are dropped, with one warning a key.
        `extras` are made for trackers that want them now. Raises UserError if the disk is full."""
        row: dict[str, float] = {}
        for key, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            if math.isfinite(number):
                row[key] = number
            elif key not in self._warned:
                self._warned.add(key)
                logger.warning("{} is {}: left out of the metrics (said once)", key, number)
        self._file.append({"step": step, "time": round(time.time(), 3), **row})
        self._trackers.log(step, row, extras)

    def close(self) -> None:
        """Flush every sink. Trackers upload what they still hold."""
        self._file.close()
        self._trackers.close()


class JsonLines:
    """A file of JSON objects, one a line, that one process appends to. Half a line (of a crash) is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a line, which survives a kill. Raises UserError if the disk is full: then nothing is left of it."""
        line, end = (json.dumps(row) + "\n").encode(), self._file.seek(0, os.SEEK_END)
        with disk_errors(self.path, "the lines before are kept"):
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        """Make the file durable."""
        with disk_errors(self.path, "a power cut may undo the last lines"):
            os.fsync(self._file.fileno())
        self._file.close()


def metrics_path(output_dir: Path, process: str) -> Path:
    return output_dir / "metrics" / f"{process}.jsonl"


class Tail:
    """Reads the lines that were added to a log or metrics file since the last call. The file may not exist yet. One
    that was replaced or cut is read anew."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._offset = path, 0, 0

    def lines(self) -> list[bytes]:
        """The whole lines."""
        try:
            file = self.path.open("rb")
        except OSError:  # it may come, or become readable
            self.start_over(0)
            return []
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self.start_over(stat.st_ino)
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + len(newline)
        return text.splitlines()

    def start_over(self, inode: int) -> None:
        self._inode, self._offset = inode, 0


class MetricsFile(Tail):
    """The rows of a metrics file by step, as it grows: all, or those of about the last `kept` steps. Lines of one step
    are merged key by key and the later one wins, so that a resumed run that repeats a step replaces it, and metrics
    logged apart (evals) stay with their step."""

    def __init__(self, path: Path, kept: int | None = None) -> None:
        super().__init__(path)
        self.rows, self._kept = dict[int, dict[str, float]](), kept

    def start_over(self, inode: int) -> None:
        super().start_over(inode)
        self.rows = {}

    def read(self) -> list[dict[str, float]]:
        """Take in the rows that were added, without those that a crash cut short; return them."""
        added = []
        for line in self.lines():
            with suppress(ValueError):
                row = _ROW.decode(line)
                if "step" in row:
                    step = int(row["step"])
                    self.rows.setdefault(step, {}).update(row)
                    added.append(row)
                    if self._kept is not None:
                        self.rows.pop(step - self._kept, None)
        return added


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One row per step in order of steps; see `MetricsFile`."""
    file = MetricsFile(path)
    file.read()
    return [row for _, row in sorted(file.rows.items())]


# Key, label, factor and decimals of the lines of a benchmark's table; those that a process does not have are left out.
_BENCH_LINES = (
    ("perf/throughput", "tokens/s", 1, 0),
    ("time/step", "step (ms)", 1e3, 1),
    ("time/wait_for_batch", "  waiting for data", 1e3, 1),
    ("time/forward_backward", "  forward and backward", 1e3, 1),
    ("time/optimizer", "  optimizer", 1e3, 1),
    ("perf/mfu", "MFU (%)", 1, 1),
    ("perf/peak_allocated", "peak memory (GiB), in tensors", 1, 2),
    ("perf/peak_memory", "peak memory (GiB), reserved", 1, 2),
)


def bench_table(output_dir: Path, process: str) -> str:
    """Show median, least and most of what a benchmark of this process is run for, after the warm-up."""
    rows = [row for row in read_metrics(metrics_path(output_dir, process)) if "time/step" in row]
    if not rows:
        return f"benchmark of {process}: stopped before a step was measured"
    warm = min(1 if process == "orchestrator" else WARM_UP, len(rows) - 1)
    usual = median(row["time/step"] for row in rows[warm:])
    starting = max(sum(row["time/step"] - usual for row in rows[:warm]), 0.0)
    title = f"benchmark of {process}: {len(rows) - warm} steps after {warm} that warm up"
    lines = [title, f"{'':<40}{'median':>12}{'min':>12}{'max':>12}"]
    for key, label, factor, decimals in _BENCH_LINES:
        if values := [factor * row[key] for row in rows[warm:] if key in row]:
            cells = (f"{value:>12,.{decimals}f}" for value in (median(values), min(values), max(values)))
            lines.append(f"{label:<40}{''.join(cells)}")
    return "\n".join([*lines, f"{'warming up (s), beyond usual steps':<40}{starting:>12,.1f}"])
