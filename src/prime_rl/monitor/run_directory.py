"""The one reader of a run directory: of the page, the Python API, the console, `rl doctor` and `rl audit`."""

import difflib
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

_WRITTEN = ("configs", "metrics", "status", "rollouts", "weights", LEDGER)
SIDES = ("orchestrator", "trainer")


@dataclass(frozen=True)
class RunDirectory:
    """A run of `rl`, of `sft` or of a tenant. Each property reads the files anew: the run may be going on.

    `kept`: of how many steps metrics are kept in memory; None: of all.
    """

    directory: Path
    kept: int | None = field(default=None, repr=False)
    _files: dict[Path, MetricsFile] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def exists(self) -> bool:
        """Whether the directory has something that runs write."""
        return any((self.directory / name).exists() for name in _WRITTEN)

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The resolved settings of each process, as its TOML file has them."""
        tables = {}
        for path in sorted(self.directory.glob("configs/*.toml")):
            with suppress(OSError, ValueError):  # half of one
                tables[path.stem] = tomllib.loads(path.read_text(encoding="utf-8"))
        return tables

    @property
    def running(self) -> list[str]:
        """The processes that are running."""
        return sorted(running_processes(self.directory))

    @property
    def statuses(self) -> dict[str, ProcessStatus]:
        """Each process's last word on what it does, or how it ended."""
        return read_status(self.directory)

    def metrics(self, process: str = "trainer") -> pa.Table:
        """Return the metrics of a process, one row a step; `sft` is a trainer. Raises UserError: it has logged none."""
        if not (path := self._file(process).path).is_file():
            names = ", ".join(sorted(path.stem for path in path.parent.glob("*.jsonl"))) or "none yet"
            raise UserError(f"{self.directory} has no metrics of {process} (there: {names})")
        return _table(list(self.rows(process).values()))

    @property
    def evals(self) -> pa.Table:
        """The metrics of evaluations, a row for each version that was evaluated, whose number is `step`."""
        rows = [row for process in ("orchestrator", "eval") for row in self.rows(process).values() if _evals(row)]
        return _table([{key: row[key] for key in ("step", *_evals(row))} for row in rows])

    def read(self, *processes: str) -> list[tuple[str, Row]]:
        """Take in what was added to the metrics of these processes since the last call; return it."""
        return [(process, row) for process in processes for row in self._file(process).read()]

    def rows(self, process: str, read: bool = True) -> dict[int, Row]:
        """Return the metrics of a process by step, in order; without `read` those that were taken in before."""
        if read:
            self.read(process)
        return dict(sorted(self._file(process).rows.items()))

    def _file(self, process: str) -> MetricsFile:
        path = metrics_path(self.directory, process)
        if process == "trainer" and (tuned := path.with_name("sft.jsonl")).exists():
            path = tuned
        return self._files.setdefault(path, MetricsFile(path, self.kept))

    @property
    def last_step(self) -> int:
        """The last step that was made; -1 before there is one. What evaluations of versions log is none."""
        logged = (reversed(self.rows(process).items()) for process in SIDES)
        return max(next((step for step, row in rows if is_of_step(row)), -1) for rows in logged)

    def shares(self, since: float = 0.0) -> Shares | None:
        """Return where the time of the last steps went, of the metrics taken in; None before there are any.
        `since`: unix seconds; steps before count for nothing."""
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
        """The steps whose samples are there."""
        return list_steps(self.directory / "rollouts")

    def absence(self, step: int) -> str:
        """Say why there are no samples of a step."""
        if not (steps := self.steps):
            return "no samples are kept here: none are committed yet, or all were removed"
        why = "is not committed yet" if step > steps[-1] else "was removed"
        return f"step {step} {why}: samples are kept of {len(steps)} steps, {steps[0]} to {steps[-1]}"

    def samples(self, step: int | None = None) -> pa.Table:
        """Return the samples of a step (None: the newest), one a row, with the columns of docs/reference/files.md; once
        the step is trained, `log_ratios` and `entropies`, too. Raises UserError: there are none, or no more."""
        steps = self.steps
        step = steps[-1] if step is None and steps else step or 0
        if step not in steps:
            raise UserError(f"{self.directory}: {self.absence(step)}")
        with user_errors(f"samples of step {step}", CommitError, OSError):
            path = open_batch(step_dir(self.directory / "rollouts", step)).directory / FILE
            with pa.OSFile(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
        stats = read_token_stats(self.directory, step, table["sample_id"])
        for name in STATS:
            table = table.append_column(name, stats[name].cast(pa.list_(pa.float32())))
        return table

    @property
    def weights(self) -> Path:
        """The newest version with files: a directory of a model, or of an adapter; before there is one, the base
        model's. Raises UserError: there is none."""
        for version in reversed(list_steps(self.directory / "weights")):
            with suppress(CommitError):  # removed meanwhile
                manifest = weights_manifest(step_dir(self.directory / "weights", version))
                if manifest.publisher is None:  # else in the trainer's memory alone
                    return manifest.files
        tenants = ", ".join(str(path) for path in sorted(self.directory.glob("tenants/*")))
        raise UserError(
            f"{self.directory} has no weights{f'; those of its tenants are in {tenants}' if tenants else ''}"
        )


def open_run(directory: str | Path) -> RunDirectory:
    """Return the run in a directory. Raises UserError: there is none; it names those nearby."""
    if (run := RunDirectory(Path(directory))).exists:
        return run
    path = run.directory
    what = f"{path} holds no run" if path.exists() else f"there is no directory {path}"
    roots = (path, next(parent for parent in path.absolute().parents if parent.is_dir()), Path())
    near = {one for root in roots for depth in ("*", "*/*") for one in root.glob(depth)}
    by_name = {one.name: str(one) for one in sorted(near) if RunDirectory(one).exists}
    close = difflib.get_close_matches(path.name, by_name, n=3, cutoff=0.3) or sorted(by_name)[:3]
    names = ", ".join(by_name[name] for name in close)
    raise UserError(f"{what}: give the output directory of a run" + (f"; near it: {names}" if names else ""))


def is_of_step(row: Row) -> bool:
    """Return whether a row has more than what evaluations of a version log."""
    return bool(row.keys() - {"step", "time", *_evals(row)})


def _evals(row: Row) -> list[str]:
    return [key for key in row if key.startswith("eval/")]


def _table(rows: Sequence[Mapping[str, float]]) -> pa.Table:
    """Return a column for every key that a row has, null where others have it not; `step` is the first."""
    keys = dict.fromkeys(["step", *(key for row in rows for key in row)])
    return pa.table({key: [row.get(key) for row in rows] for key in keys})
