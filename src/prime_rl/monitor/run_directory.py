"""Read a run directory, for `rl view`, the Python API, the console, `rl doctor` and `rl audit`."""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from prime_rl.errors import UserError, user_errors
from prime_rl.monitor.limits import Limit, Row, Shares, limit_of, recent_shares
from prime_rl.monitor.monitor import MetricsFile, metrics_path
from prime_rl.monitor.status import ProcessStatus, read_status
from prime_rl.transport.commit import CommitError, list_steps, step_dir
from prime_rl.transport.incarnations import read_incarnations
from prime_rl.transport.rollouts import FILE, open_batch
from prime_rl.transport.settings import LEDGER, running_processes
from prime_rl.transport.token_stats import STATS, read_token_stats
from prime_rl.transport.weights import weights_manifest

_RUN_ENTRIES = ("configs", "metrics", "status", "rollouts", "weights", LEDGER)
SIDES = ("orchestrator", "trainer")


@dataclass(frozen=True)
class RunDirectory:
    """A run of `rl`, of `sft` or of a tenant. Properties read the files at every access, as the run may be running.
    `kept_steps`: the number of newest steps whose metrics are kept in memory (None: all)."""

    directory: Path
    kept_steps: int | None = field(default=None, repr=False)
    _files: dict[Path, MetricsFile] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def exists(self) -> bool:
        """Whether the directory has a file or directory that a run writes."""
        return any(os.path.exists(self.directory / name) for name in _RUN_ENTRIES)  # not one of somebody else

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The resolved settings of each process, as its TOML file has them."""
        tables = {}
        for path in sorted(self.directory.glob("configs/*.toml")):
            with suppress(OSError, ValueError):  # it is being written
                tables[path.stem] = tomllib.loads(path.read_text(encoding="utf-8"))
        return tables

    @property
    def running(self) -> list[str]:
        """The processes that are running."""
        return sorted(running_processes(self.directory))

    @property
    def statuses(self) -> dict[str, ProcessStatus]:
        """The last status that each process wrote: what it is doing, or how it ended."""
        return read_status(self.directory)

    def metrics(self, process: str = "trainer") -> pa.Table:
        """Return the metrics of a process, one row a step; "trainer" includes `sft`. Raises UserError: it has none."""
        if not (path := self._file(process).path).is_file():
            names = ", ".join(sorted(path.stem for path in path.parent.glob("*.jsonl"))) or "none yet"
            raise UserError(f"{self.directory} has no metrics of {process} (there: {names})")
        return _table(list(self.rows(process).values()))

    @property
    def evals(self) -> pa.Table:
        """The metrics of evaluations, one row for each version that was evaluated; `step` is the version."""
        rows = [row for process in ("orchestrator", "eval") for row in self.rows(process).values() if _eval_keys(row)]
        return _table([{key: row[key] for key in ("step", *_eval_keys(row))} for row in rows])

    def read(self, *processes: str) -> list[tuple[str, Row]]:
        """Read the metrics that these processes have logged since the last call; return them with their process."""
        return [(process, row) for process in processes for row in self._file(process).read()]

    def rows(self, process: str, read: bool = True) -> dict[int, Row]:
        """Return the metrics of a process by step, in order. Without `read`, only those that were read before."""
        if read:
            self.read(process)
        return dict(sorted(self._file(process).rows.items()))

    def _file(self, process: str) -> MetricsFile:
        path = metrics_path(self.directory, process)
        if process == "trainer" and (sft_path := path.with_name("sft.jsonl")).exists():
            path = sft_path
        return self._files.setdefault(path, MetricsFile(path, self.kept_steps))

    @property
    def last_step(self) -> int:
        """The last step with metrics other than those of evaluations; -1 before there is one."""
        return max((step for side in SIDES for step, row in self.rows(side).items() if is_of_step(row)), default=-1)

    def shares(self, since: float = 0.0) -> Shares | None:
        """Return where the time of the last steps after `since` (unix time) went, by the metrics read; None: none."""
        starts: set[int] = set()
        with suppress(CommitError):  # the trainer reports it
            starts.update(read_incarnations(self.directory).values())
        orchestrator, trainer = (self.rows(side, read=False) for side in SIDES)
        return recent_shares(orchestrator, trainer, starts, since)

    def limit(self) -> Limit | None:
        """Return what limits the run now; None where too few steps were made to say."""
        self.read(*SIDES)
        return None if (shares := self.shares()) is None else limit_of(shares)

    @property
    def steps(self) -> list[int]:
        """The steps that have samples."""
        return list_steps(self.directory / "rollouts")

    def missing_reason(self, step: int) -> str:
        """Return why a step has no samples, as a message."""
        if not (steps := self.steps):
            return "no samples are kept here: none are committed yet, or all were removed"
        if step < 0 or step > steps[-1]:
            return f"step {step} has no samples: the last committed step is {steps[-1]}"
        return f"step {step} was removed: samples are kept of {len(steps)} steps, {steps[0]} to {steps[-1]}"

    def samples(self, step: int | None = None) -> pa.Table:
        """Return the samples that a step trains on (None: the newest), one a row, with the columns of
        docs/reference/files.md; those that a filter left out are in the metric `reward/mean` alone. `log_ratios` and
        `entropies` are null until the trainer has written them. Raises UserError: it has none."""
        steps = self.steps
        step = steps[-1] if step is None and steps else step or 0
        if step not in steps:
            raise UserError(f"{self.directory}: {self.missing_reason(step)}")
        with user_errors(f"samples of step {step}", OSError):
            path = open_batch(step_dir(self.directory / "rollouts", step)).directory / FILE
            with pa.OSFile(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
        stats = read_token_stats(self.directory, step, table["sample_id"])
        for name in STATS:
            table = table.append_column(name, stats[name].cast(pa.list_(pa.float32())))
        return table

    @property
    def weights(self) -> Path:
        """The directory of the newest version that has files: a model or an adapter; of version 0, the base model.
        Raises UserError: there is none, or the manifest of a newer version is damaged."""
        for version in reversed(list_steps(self.directory / "weights")):
            try:
                manifest = weights_manifest(path := step_dir(self.directory / "weights", version))
            except CommitError:
                if path.exists():
                    raise
                continue  # it was removed after it was listed
            if manifest.publisher is None:  # else it is only in the trainer's memory
                return manifest.files
        tenants = ", ".join(str(path) for path in sorted(self.directory.glob("tenants/*")))
        hint = f"; those of its tenants are in {tenants}" if tenants else ""
        raise UserError(f"{self.directory} has no weights{hint}")


def open_run(directory: str | Path) -> RunDirectory:
    """Return the run in a directory. Raises UserError: there is none; the message names runs nearby."""
    if (run := RunDirectory(Path(directory))).exists:
        return run
    path = run.directory
    what = f"{path} holds no run" if os.path.exists(path) else f"there is no directory {path}"
    roots = (path, next(parent for parent in path.absolute().parents if os.path.isdir(parent)), Path())
    near = {candidate for root in roots for depth in ("*", "*/*") for candidate in root.glob(depth)}
    by_name = {candidate.name: str(candidate) for candidate in sorted(near) if RunDirectory(candidate).exists}
    close = difflib.get_close_matches(path.name, by_name, n=3, cutoff=0.3) or sorted(by_name)[:3]
    names = ", ".join(by_name[name] for name in close)
    raise UserError(f"{what}: give the output directory of a run" + (f"; near it: {names}" if names else ""))


def is_of_step(row: Row) -> bool:
    """Return whether a row has metrics other than those of evaluations."""
    return any(key not in ("step", "time") and not key.startswith("eval/") for key in row)


def _eval_keys(row: Row) -> list[str]:
    return [key for key in row if key.startswith("eval/")]


def _table(rows: Sequence[Mapping[str, float]]) -> pa.Table:
    """Return a table with a column for every key of any row, null in rows without it; `step` comes first."""
    keys = dict.fromkeys(["step", *(key for row in rows for key in row)])
    return pa.table({key: [row.get(key) for row in rows] for key in keys})
