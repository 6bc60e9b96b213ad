"""Read one run directory: one method per query of the page."""

import difflib
import json
import math
import re
import sqlite3
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from prime_rl.errors import UserError, one_line
from prime_rl.launcher import doctor, rundir
from prime_rl.launcher.supervise import log_tail
from prime_rl.monitor import read_status
from prime_rl.monitor.monitor import metrics_path
from prime_rl.orchestrator.audit import audit
from prime_rl.orchestrator.ledger import open_copy
from prime_rl.transport.commit import CommitError, list_steps, step_dir
from prime_rl.transport.settings import LEDGER
from prime_rl.view.reading import PAGE, ROUNDING, Decoder, StepSamples, absence, find_decoder
from prime_rl.view.series import MetricColumns

PROCESSES = ("trainer", "orchestrator", "inference", "eval")
QUERIES = (
    "summary", "series", "steps", "samples", "sample", "doctor", "events", "ledger", "episodes", "evals", "config",
)  # fmt: skip
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (WARNING|ERROR|CRITICAL) +(.*)")
_MOST_EVENTS, _MOST_POINTS = 300, 5000
_DOCTOR_SECONDS = 5.0
_OUTCOME = "coalesce(CASE WHEN reason = 'filtered' AND detail <> '' THEN 'filtered: ' || detail END, reason, e.state)"
_EPISODE = "e.id, env, task_id, e.state, reason, detail, e.step, first, last, tokens, reward"
_EPISODES = "FROM episodes e JOIN groups g ON g.number = group_number WHERE"
_TERMS = {"env": "env = ?", "outcome": f"? IN ({_OUTCOME}, reason)", "step": "e.step = ?"}
_TERMS |= {"low": f"reward >= ? - {ROUNDING}", "high": f"reward <= ? + {ROUNDING}"}

Params = Mapping[str, str]  # the parameters of a request


class RunFiles:
    """One run directory. Methods raise UserError, or an exception that `answer` converts."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._columns = {process: MetricColumns(metrics_path(path, process)) for process in PROCESSES}
        self._cache: dict[str, tuple[object, Any]] = {}
        self._lock = threading.Lock()  # bounded: held while one report is made from files

    def summary(self, params: Params) -> dict[str, Any]:
        """Return what the page asks for every few seconds. `pulse` changes when the run's files do."""
        self._read_metrics()
        tables, report = self._tables(), self.doctor({})
        settings = (
            tables.get("orchestrator") or _table(tables.get("rl", {}), "orchestrator") or tables.get("trainer", {})
        )
        envs = listed if isinstance(listed := settings.get("environments"), list) else []
        files = [*(columns.path for columns in self._columns.values()), self.path / LEDGER]
        return {
            "name": self.name,
            "path": str(self.path),
            "state": report["state"],
            "sentence": report["sentence"],
            "pulse": sum(map(_stamp, [*files, self.path / "rollouts", self.path / "evals" / "report.json"])),
            "last_step": max(columns.last_step() for columns in self._columns.values()),
            "keys": [f"{process}:{key}" for process, columns in self._columns.items() for key in columns.names()],
            "envs": _plain([env.get("name") or env.get("id") for env in envs if isinstance(env, dict)]),
        }

    def series(self, params: Params) -> dict[str, Any]:
        """Return the curves of `keys`, each `process:metric`, with "|" between them."""
        points = min(max(_number(params, "points", 600), 10), _MOST_POINTS)
        low, high = (float(params.get(name) or sign * 1e18) for name, sign in (("low", -1), ("high", 1)))
        curves: dict[str, Any] = {}
        self._read_metrics()
        for key in params.get("keys", "").split("|"):
            process, _, metric = key.partition(":")
            if process in self._columns:
                curves[key] = self._columns[process].curve(metric, points, low, high)
        return curves

    def _read_metrics(self) -> None:
        if (tuned := metrics_path(self.path, "sft")).exists():  # its curves are overlaid with those of trainers
            self._columns["trainer"].path = tuned
        for columns in self._columns.values():
            columns.read()

    def steps(self, params: Params) -> dict[str, Any]:
        """Return which steps have samples."""
        steps = list_steps(self.path / "rollouts")
        return {"steps": steps, "note": absence(self.path, steps[-1] + 1 if steps else 0)}

    def samples(self, params: Params) -> dict[str, Any]:
        """Return a page of the samples of `step`, from `offset` on; see `StepSamples.rows`."""
        batch, decoder = StepSamples(self.path, _number(params, "step")), self._decoder()
        rows, offset = batch.rows(params, decoder), max(_number(params, "offset"), 0)
        return {
            "total": len(rows),
            "of": len(batch["env"]),
            "envs": sorted({*batch["env"]}),
            "rows": batch.lines(rows[offset : offset + PAGE], decoder),
            "size": PAGE,
        }

    def sample(self, params: Params) -> dict[str, Any]:
        """Return the sample at `row` of `step`, or the first one of the episode `id`."""
        batch, row = StepSamples(self.path, _number(params, "step")), _number(params, "row")
        if name := params.get("id"):
            row = next((row for row, one in enumerate(batch["sample_id"]) if one.startswith(f"{name}.")), -1)
            if row < 0:
                raise UserError(f"step {params.get('step')} has no sample of episode {name}: nothing of it is trained")
        return batch.sample(row, self._decoder())

    def doctor(self, params: Params) -> dict[str, Any]:
        """Return what `rl doctor` says. It depends on time and processes: files of a killed run change no more."""
        state, sentence, text = self._cached("doctor", time.time() // _DOCTOR_SECONDS, lambda: doctor.report(self.path))
        return {"state": state.value, "sentence": sentence, "text": text}

    def events(self, params: Params) -> list[dict[str, Any]]:
        """Return starts, ends, checkpoints, and warnings and errors at the ends of the logs: the newest, by time."""
        rows = sorted(self._events(), key=lambda row: float(row[0]))[-_MOST_EVENTS:]
        return [dict(zip(("time", "process", "kind", "text"), row, strict=True)) for row in rows]

    def _events(self) -> Iterator[tuple[float, str, str, str]]:
        for path in (self.path / "incarnations").glob("*.json"):
            kind, step = "start" if path.stem == "0" else "restart", _read_json(path).get("step", "?")
            yield path.stat().st_mtime, "trainer", kind, f"starts at step {step} (incarnation {path.stem})"
        end_times: dict[str, float] = {}
        for name, status in read_status(self.path).items():
            if status.outcome in ("finished", "stopped"):
                end_times[name] = status.since - 1
            if status.ready:
                yield status.ready, name, "ready", "its start is over"
            if status.outcome:
                yield status.since, name, "error" if status.outcome.startswith("failed") else "end", status.outcome
        for parent in (self.path / "checkpoints", self.path / "recovery"):
            for step in list_steps(parent)[-_MOST_EVENTS:]:
                with suppress(FileNotFoundError):  # pruned meanwhile
                    yield step_dir(parent, step).stat().st_mtime, "trainer", "checkpoint", f"{parent.name}/step_{step}"
        for path in (self.path / "logs").rglob("*.log"):
            for match in filter(None, map(_LOG_LINE.match, log_tail(path))):
                kind = match[2].lower().replace("critical", "error")
                with suppress(ValueError, OverflowError):  # no such day
                    time = datetime.fromisoformat(match[1]).timestamp()
                    if time < end_times.get(path.stem, time + 1):  # vLLM is noisy when it is asked to stop
                        yield time, path.stem, kind, match[3][:500]

    def ledger(self, params: Params) -> dict[str, Any]:
        """Return the audit's report: see `AuditReport`."""
        state = _stamp(self.path / LEDGER) + _stamp(self.path / "weights")
        report: dict[str, Any] = self._cached("ledger", state, lambda: audit(self.path)._asdict())
        return report

    def episodes(self, params: Params) -> dict[str, Any]:
        """Return a page of episodes, newest first, that fit `params`: env, outcome (a state, or why it was dropped),
        step, low and high (of the reward), offset."""
        chosen = {name: params[name] for name in _TERMS if params.get(name)}
        terms = " AND ".join(["1", *(_TERMS[name] for name in chosen)])
        values = [value if name in ("env", "outcome") else float(value) for name, value in chosen.items()]
        query = f"SELECT {_EPISODE} {_EPISODES} {terms} ORDER BY group_number DESC, e.number, attempt LIMIT ? OFFSET ?"
        with open_copy(self.path / LEDGER) as db:
            rows = db.execute(query, [*values, PAGE + 1, max(_number(params, "offset"), 0)]).fetchall()
            outcomes = [row[0] for row in db.execute(f"SELECT DISTINCT {_OUTCOME} FROM episodes e ORDER BY 1")]
        names = [column.removeprefix("e.") for column in _EPISODE.split(", ")]
        page = [dict(zip(names, row, strict=True)) for row in rows[:PAGE]]
        return {"rows": page, "more": len(rows) > PAGE, "outcomes": outcomes, "size": PAGE}

    def evals(self, params: Params) -> dict[str, Any]:
        return {name: _plain(value) for name, value in _read_json(self.path / "evals" / "report.json").items()}

    def config(self, params: Params) -> dict[str, dict[str, Any]]:
        """Return the settings of each process, by dotted key."""
        return {name: dict(_flat(table)) for name, table in self._tables().items()}

    def _tables(self) -> dict[str, Any]:
        tables = {}
        for path in sorted((self.path / "configs").glob("*.toml")):
            with suppress(OSError, ValueError):  # half of one
                tables[path.stem] = tomllib.loads(path.read_text(encoding="utf-8"))
        return tables

    def _decoder(self) -> Decoder | None:
        models = [name for table in self._tables().values() if (name := _table(table, "model").get("name"))]
        return find_decoder(self.path, str(models[0]) if models else "")

    def _cached(self, name: str, state: object, make: Callable[[], Any]) -> Any:
        """Return what `make` returned, as long as `state` is the same."""
        with self._lock:
            if self._cache.get(name, (None,))[0] != state:
                self._cache[name] = (state, make())
            return self._cache[name][1]


def _stamp(path: Path) -> float:
    """Return a number that changes when a file or the list of a directory does."""
    stat = path.stat() if path.exists() else None
    return 0.0 if stat is None else stat.st_size + stat.st_mtime


def _read_json(path: Path) -> dict[str, Any]:
    """Return a small file's table; nothing where there is none, or half of one."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _number(params: Params, name: str, default: int = 0) -> int:
    return int(float(params.get(name) or default))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        yield from _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", _plain(value))]


def _plain(value: Any) -> Any:
    """Return a value that JSON of a browser can have: a date or an infinity is its text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    has = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if has else str(value)


def _table(parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name)
    return value if isinstance(value, dict) else {}


def answer(run: RunFiles, query: str, params: Params) -> Any:
    """Answer a request of the page. Raises UserError, with a line to show: there is nothing to answer with."""
    if query not in QUERIES:
        raise UserError(f"no such request: {query}")
    try:
        return getattr(run, query)(params)
    except (CommitError, OSError, ValueError, OverflowError, sqlite3.Error) as error:
        raise UserError(one_line(error)) from error


# -- which runs --------------------------------------------------------------------------------------------------------


def find_runs(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the runs at `paths`, with short names; a deployment's are its own and its tenants'.
    Raises UserError: one is no run."""
    runs: list[Path] = []
    for path in paths:
        around = [one.resolve() for one in (path, *sorted((path / "tenants").glob("*"))) if rundir.is_run(one)]
        if not around:
            raise UserError(_no_run(path))
        runs = [*dict.fromkeys([*runs, *around])]  # a link may lead to another of them
    length = next(size for size in range(1, 99) if len({run.parts[-size:] for run in runs}) == len(runs))
    return {run: "/".join(run.parts[-length:]) for run in runs}


def _no_run(path: Path) -> str:
    """Return an error message that suggests runs nearby."""
    what = f"{path} is no run directory" if path.exists() else f"there is no directory {path}"
    roots = (path, next(parent for parent in path.absolute().parents if parent.is_dir()), Path())
    near = {one for root in roots for depth in ("*", "*/*") for one in root.glob(depth)}
    by_name = {one.name: str(one) for one in sorted(near) if rundir.is_run(one)}
    close = difflib.get_close_matches(path.name, by_name, n=3, cutoff=0.3) or sorted(by_name)[:3]
    names = ", ".join(by_name[name] for name in close)
    return f"{what}: give the output directory of a run" + (f"; near it: {names}" if names else "")
