"""Metrics of one process: always to `metrics/<process>.jsonl`, to W&B when configured."""

import json
import math
import netrc
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, SupportsFloat
from urllib.parse import urlsplit

import msgspec
from loguru import logger

from prime_rl.config.shared import WARM_UP, MonitorConfig, WandbConfig
from prime_rl.errors import UserError
from prime_rl.redact import redacted
from prime_rl.transport.commit import disk_errors

_ROW = msgspec.json.Decoder(dict[str, int | float | bool])  # five times as fast as `json`
_WAYS_ON = (
    "log in with `uv run wandb login`, set WANDB_API_KEY, or write local files only with --wandb.offline "
    "(--monitor.wandb.offline of one process)"
)


class Monitor:
    """One process's metrics. One thread; a distributed trainer creates it on rank 0 only."""

    def __init__(self, output_dir: Path, process: str, config: MonitorConfig, run_config: dict[str, Any]) -> None:
        """`run_config` is shown by W&B only. Raises UserError when W&B is wanted and cannot start."""
        self._wandb = None if config.wandb is None else _wandb_run(config.wandb, output_dir, process, run_config)
        self._file = JsonLines(metrics_path(output_dir, process))
        self._warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record numbers of the step that was executed (0-based). Non-finite ones are dropped, with one warning a key.
        Raises UserError if the disk is full."""
        row: dict[str, float] = {}
        for key, value in metrics.items():
            number = value if isinstance(value, int) else float(value)
            if math.isfinite(number):
                row[key] = number
            elif key not in self._warned:
                self._warned.add(key)
                logger.warning("{} is {}: left out of the metrics (said once)", key, number)
        self._file.append({"step": step, "time": round(time.time(), 3), **row})
        if self._wandb is not None:
            self._wandb.log({"step": step, **row})

    def close(self) -> None:
        """Flush every sink. W&B uploads what it still holds."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


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


def _wandb_run(settings: WandbConfig, output_dir: Path, process: str, run_config: dict[str, Any]) -> Any:
    import wandb  # takes a second to import: only for those who use it

    directory = output_dir / settings.dir  # or `settings.dir`, if that is absolute
    directory.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=settings.project,
            name=settings.name,
            id=settings.id,
            resume="allow" if settings.id else None,
            reinit="create_new",  # a process may have several, one a tenant
            dir=str(directory),
            mode="offline" if settings.offline else None,  # None: $WANDB_MODE, or online
            config=redacted(run_config),
            job_type=process,
            settings=wandb.Settings(console="off"),
        )
    except (wandb.errors.Error, ValueError) as error:  # ValueError: wrong WANDB_… variables
        raise UserError(f"W&B did not start: {error}; {_WAYS_ON}") from error
    # A resumed run repeats steps: with a step metric of our own W&B accepts them (its own counter only grows).
    run.define_metric("*", step_metric="step")
    return run


def check_wandb(*configs: WandbConfig | None) -> None:
    """Raise UserError where one of these uploads to W&B, which has no key: of a variable, or of `wandb login`."""
    if all(config is None or config.offline for config in configs):
        return
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    try:
        logins = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        logins = {}
    if not any("wandb" in host or host == own for host in logins):
        raise UserError(f"W&B has no key: {_WAYS_ON}")


def metrics_path(output_dir: Path, process: str) -> Path:
    return output_dir / "metrics" / f"{process}.jsonl"


class Tail:
    """Reads the lines that were added to a log or metrics file since the last call, with `skip` since now. The file may
    not exist yet."""

    def __init__(self, path: Path, skip: bool = False) -> None:
        self._path, self._offset = path, path.stat().st_size if skip and path.exists() else 0

    def lines(self) -> list[bytes]:
        """The whole lines."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:  # the run was started over
                self._offset = 0
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + len(newline)
        return text.splitlines()

    def read(self) -> list[dict[str, float]]:
        """The rows of metrics, without those that a crash cut short."""
        rows = []
        for line in self.lines():
            with suppress(ValueError):
                row = _ROW.decode(line)
                if "step" in row:
                    rows.append(row)
        return rows


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One row per step in order of steps. Lines of one step are merged key by key and the later one wins, so that a
    resumed run that repeats a step replaces it, and metrics logged apart (evals) stay with their step."""
    rows: dict[int, dict[str, float]] = {}
    for row in Tail(path).read():
        rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


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
