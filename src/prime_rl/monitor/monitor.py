"""Metrics of one process: always to `metrics/<process>.jsonl`, to W&B when configured."""

import errno
import json
import math
import netrc
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat
from urllib.parse import urlsplit

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.redact import redacted

if TYPE_CHECKING:
    from prime_rl.config.shared import MonitorConfig, WandbConfig


class Monitor:
    """One process's metrics. One thread; a distributed trainer creates it on rank 0 only."""

    def __init__(self, output_dir: Path, process: str, config: "MonitorConfig", run_config: dict[str, Any]) -> None:
        """`run_config` is shown by W&B only. Raises UserError when W&B is wanted and cannot start."""
        self._wandb = None if config.wandb is None else _WandbSink(config, output_dir, process, run_config)
        self._file = JsonlWriter(metrics_path(output_dir, process))

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record numbers of the step that was executed (0-based). Non-finite values are dropped, with one warning a key.

        Raises:
            UserError: the disk is full.
        """
        row = self._file.write(step, metrics)
        if self._wandb is not None:
            self._wandb.log(step, row)

    def close(self) -> None:
        """Flush every sink. W&B uploads what it still holds."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.close()


class JsonlWriter:
    """Appends one flat object a line; a line is one write, so a reader never meets half of one (a crash, or a full disk, can leave one)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._warned: set[str] = set()
        size = os.fstat(self._fd).st_size
        # An earlier incarnation died in its last line: the next one is kept apart from it.
        self._torn = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
        """Append a line; returns the metrics that were finite.

        Raises:
            UserError: the disk is full. What was written of the line stays; the next one begins on its own.
        """
        row = {key: number for key, value in metrics.items() if (number := self._finite(key, value)) is not None}
        with _disk_full(self._path):
            self._append((json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n").encode())
        return row

    def _append(self, line: bytes) -> None:
        """All of it, in as many writes as the system takes."""
        left = b"\n" + line if self._torn else line
        while left:
            left = left[os.write(self._fd, left) :]
            self._torn = bool(left)

    def close(self) -> None:
        os.close(self._fd)

    def _finite(self, key: str, value: SupportsFloat) -> float | None:
        number = value if isinstance(value, int) else float(value)
        if math.isfinite(number):
            return number
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("{} is {}: left out of the metrics (said once)", key, number)
        return None


@contextmanager
def _disk_full(path: Path) -> Iterator[None]:
    """As results tell of it, which are written by rooms above this one."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"disk full while writing {path}: free space and start again") from error


class _WandbSink:
    def __init__(self, config: "MonitorConfig", output_dir: Path, process: str, run_config: dict[str, Any]) -> None:
        import wandb  # takes a second to import: only for those who use it

        settings = config.wandb
        assert settings is not None
        directory = settings.dir if Path(settings.dir).is_absolute() else output_dir / settings.dir
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name,
                id=settings.id,
                resume="allow" if settings.id else None,
                dir=str(directory),
                mode="offline" if settings.offline else None,  # None: $WANDB_MODE, or online
                config=redacted(run_config),
                job_type=process,
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(f"W&B did not start: {error}; {_WAYS_ON}") from error
        # A resumed run repeats steps: with a step metric of our own W&B accepts them (its own counter only grows).
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


_WAYS_ON = "log in with `uv run wandb login`, set WANDB_API_KEY, or write local files only with --wandb.offline (--monitor.wandb.offline of one process)"


def check_wandb(*configs: "WandbConfig | None") -> None:
    """Check that W&B, where one of these uploads to it, has a key. Takes a second; neither its server nor the person at the terminal is asked.

    Raises:
        UserError: there is none, or W&B's own settings are wrong.
    """
    if all(config is None or config.offline for config in configs):
        return
    import wandb

    try:
        settings = wandb.setup().settings
    except ValueError as error:
        raise UserError(f"W&B's settings (WANDB_… variables) are wrong: {' '.join(str(error).split())}") from error
    offline = settings.mode in ("offline", "dryrun", "disabled")  # $WANDB_MODE, or `wandb offline`
    if not (offline or settings.api_key or settings.identity_token_file or _logged_in(settings.base_url)):
        raise UserError(f"W&B has no key: {_WAYS_ON}")


def _logged_in(base_url: str) -> bool:
    """Whether `wandb login` has left a key for this server; its own hosts are each other's aliases."""
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return False
    server = urlsplit(base_url).netloc
    own = server.endswith(("wandb.ai", "coreweave.com"))
    return any(host in ("default", server) or (own and host.endswith("wandb.ai")) for host in hosts)


def metrics_path(output_dir: Path, process: str) -> Path:
    return output_dir / "metrics" / f"{process}.jsonl"


def parse_line(line: str) -> dict[str, float] | None:
    """One metrics line, or None for one that a crash cut short."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


class Tail:
    """Reads the lines that are added to a metrics file, from its present end on. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, float]]:
        """The rows of the whole lines added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [row for line in whole.decode().splitlines() if (row := parse_line(line)) is not None]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One row per step in order of steps. Lines of one step are merged key by key and the later one wins, so that a
    resumed run that repeats a step replaces it, and metrics logged apart (evals) stay with their step."""
    rows: dict[int, dict[str, float]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            if (row := parse_line(line)) is not None:
                rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]
