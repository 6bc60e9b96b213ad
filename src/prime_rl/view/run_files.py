"""Read one run directory: one method per query of the page."""

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.errors import UserError, one_line
from prime_rl.evals.results import REPORT, flat, report_table
from prime_rl.launcher import doctor
from prime_rl.launcher.supervise import log_tail
from prime_rl.monitor.limits import Row
from prime_rl.monitor.run_directory import RunDirectory, open_run
from prime_rl.orchestrator.audit import audit_text
from prime_rl.orchestrator.ledger import open_copy
from prime_rl.transport.commit import CommitError, list_steps, step_dir
from prime_rl.transport.incarnations import read_incarnations
from prime_rl.transport.settings import LEDGER
from prime_rl.view.step_samples import PAGE, ROUNDING, Decoder, StepSamples, find_decoder

PROCESSES = ("trainer", "orchestrator", "inference", "eval")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (WARNING|ERROR|CRITICAL) +(.*)")
_MOST_EVENTS, _MOST_POINTS = 300, 5000
_OUTCOME = "coalesce(CASE WHEN reason = 'filtered' AND detail <> '' THEN 'filtered: ' || detail END, reason, e.state)"
_EPISODE = "e.id, env, task_id, task_index, e.state, reason, detail, e.step, first, last, tokens, reward"
_EPISODES = "FROM episodes e JOIN groups g ON g.number = group_number WHERE"
_TERMS = {"env": "env = ?", "outcome": f"? IN ({_OUTCOME}, reason)", "step": "e.step = ?"}
_TERMS |= {"low": f"reward >= ? - {ROUNDING}", "high": f"reward <= ? + {ROUNDING}"}

Params = Mapping[str, str]  # the parameters of a request


class RunFiles:
    """A run directory, with a method for each query. They raise UserError or what `answer` converts to one."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.run = path, name, RunDirectory(path)
        self._audit: tuple[object, str] = None, ""  # what it was made from, and the text of the audit
        self.lock = threading.Lock()  # bounded: held while one answer is made from files

    def summary(self, params: Params) -> dict[str, Any]:
        """Return what the page polls: the run's state, last step, keys of curves. `pulse` changes when its files do."""
        state, sentence, text = doctor.report(self.run)
        files = ("rollouts", "token_stats", "metrics/*.jsonl", LEDGER, f"evals/{REPORT}")
        keys = {process: set[str]().union(*self.run.rows(process).values()) - {"step"} for process in PROCESSES}
        return {
            "name": self.name,
            "path": str(self.path),
            "state": state.value,
            "sentence": sentence,
            "doctor": text,
            "pulse": sum(_stamp(path) for name in files for path in self.path.glob(name)),
            "last_step": self.run.last_step,
            "keys": [f"{process}:{key}" for process in PROCESSES for key in sorted(keys[process])],
        }

    def series(self, params: Params) -> dict[str, Any]:
        """Return the curves of `keys`: `process:metric`, separated by "|"."""
        points = min(max(_number(params, "points", 600), 10), _MOST_POINTS)
        low, high = (float(params.get(name) or sign * 1e18) for name, sign in (("low", -1), ("high", 1)))
        rows = {process: self.run.rows(process) for process in PROCESSES}
        keys = (key.partition(":") for key in params.get("keys", "").split("|"))
        return {f"{name}:{key}": curve(rows[name], key, points, low, high) for name, _, key in keys if name in rows}

    def steps(self, params: Params) -> dict[str, Any]:
        """Return the steps that have samples, and a note to show where there are none."""
        steps = self.run.steps
        return {"steps": steps, "note": self.run.missing_reason(steps[-1] + 1 if steps else 0)}

    def samples(self, params: Params) -> dict[str, Any]:
        """Return a page of the samples of `step`, from `offset` on; see `StepSamples.rows`."""
        batch, decoder = StepSamples(self.path, _number(params, "step")), self._decoder()
        rows, offset = batch.rows(params, decoder), max(_number(params, "offset"), 0)
        return {
            "total": len(rows),
            "of": len(batch.columns["env"]),
            "envs": sorted({*batch.columns["env"]}),
            "rows": batch.lines(rows[offset : offset + PAGE], decoder),
            "size": PAGE,
        }

    def sample(self, params: Params) -> dict[str, Any]:
        """Return the sample at `row` of `step`, or the first one of the episode `id`."""
        batch, row = StepSamples(self.path, _number(params, "step")), _number(params, "row")
        if name := params.get("id"):
            row = next((row for row, key in enumerate(batch.columns["sample_id"]) if key.startswith(f"{name}.")), -1)
            if row < 0:
                raise UserError(f"step {params.get('step')} has no sample of episode {name}: nothing of it is trained")
        return batch.sample(row, self._decoder())

    def events(self, params: Params) -> list[dict[str, Any]]:
        """Return the newest events by time: starts, ends, checkpoints, warnings and errors at the ends of the logs."""
        rows = sorted(self._events(), key=lambda row: float(row[0]))[-_MOST_EVENTS:]
        return [dict(zip(("time", "process", "kind", "text"), row, strict=True)) for row in rows]

    def _events(self) -> Iterator[tuple[float, str, str, str]]:
        for number, step in read_incarnations(self.path).items():
            kind, time = "restart" if number else "start", (self.path / f"incarnations/{number}.json").stat().st_mtime
            yield time, "trainer", kind, f"starts at step {step} (incarnation {number})"
        end_times: dict[str, float] = {}
        for name, status in self.run.statuses.items():
            if status.outcome in ("finished", "stopped"):
                end_times[name] = status.since - 1
            if status.ready:
                yield status.ready, name, "ready", "started"
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

    def ledger(self, params: Params) -> str:
        """Return what `rl audit` says."""
        stamp = _stamp(self.path / LEDGER), _stamp(self.path / "weights"), self.run.running
        if self._audit[0] != stamp:
            self._audit = stamp, audit_text(self.path)
        return self._audit[1]

    def episodes(self, params: Params) -> dict[str, Any]:
        """Return a page of the episodes that match `params`, newest first: by env, outcome (state or reason of the
        drop), step, low and high (of the reward), offset."""
        chosen = {name: params[name] for name in _TERMS if params.get(name)}
        terms = " AND ".join(["1", *(_TERMS[name] for name in chosen)])
        values = [value if name in ("env", "outcome") else float(value) for name, value in chosen.items()]
        query = f"SELECT {_EPISODE} {_EPISODES} {terms} ORDER BY group_number DESC, e.number, attempt LIMIT ? OFFSET ?"
        with open_copy(self.path / LEDGER) as db:
            rows = db.execute(query, [*values, PAGE + 1, max(_number(params, "offset"), 0)]).fetchall()
            outcomes = [row[0] for row in db.execute(f"SELECT DISTINCT {_OUTCOME} FROM episodes e ORDER BY 1")]
            envs = [row[0] for row in db.execute("SELECT DISTINCT env FROM groups ORDER BY 1")]
        names = [column.removeprefix("e.") for column in _EPISODE.split(", ")]
        page = [dict(zip(names, row, strict=True)) for row in rows[:PAGE]]
        return {"rows": page, "more": len(rows) > PAGE, "outcomes": outcomes, "envs": envs, "size": PAGE}

    def evals(self, params: Params) -> str:
        """Return what `eval` prints at its end."""
        return report_table(path) if (path := self.path / "evals" / REPORT).exists() else ""

    def config(self, params: Params) -> dict[str, dict[str, str]]:
        """Return the settings of each process, by dotted key."""
        return {
            name: {key: v if isinstance(v, str) else json.dumps(v, default=str) for key, v in flat(table).items()}
            for name, table in self.run.config.items()
        }

    def _decoder(self) -> Decoder | None:
        tables = (table.get("model") for table in self.run.config.values())
        names = (str(table["name"]) for table in tables if isinstance(table, dict) and "name" in table)
        return find_decoder(self.path, next(names, ""))


def _stamp(path: Path) -> float:
    """Return a number that changes when a file or the entries of a directory do; 0 where there is none."""
    return (stat := path.stat()).st_size + stat.st_mtime if path.exists() else 0.0


def _number(params: Params, name: str, default: int = 0) -> int:
    return int(float(params.get(name) or default))


def curve(rows: Mapping[int, Row], key: str, points: int, low: float, high: float) -> dict[str, Any]:
    """Return lists `step` and `value` of at most `points` points of steps `low` to `high`; `rows` are in order. A time
    that a step did not log counts as 0. Where there are more steps than points, steps share buckets, the same for every
    key. A bucket is one point, at its first step, with the mean as `value`, and `min` and `max`."""
    timed = "time/step" if key.startswith("time/") else key
    steps = np.array([step for step, row in rows.items() if timed in row and low <= step <= high], dtype=int)
    values = np.array([rows[step].get(key, 0.0) for step in steps.tolist()], dtype=float)
    low, high = max(low, min(rows, default=0)), min(high, max(rows, default=0))
    if high - low < points or not len(steps):
        return {"step": steps.tolist(), "value": _short(values)}
    bucket = ((steps - low) * points // (high - low + 1)).astype(int)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    return {
        "step": steps[starts].tolist(),
        "value": _short(np.add.reduceat(values, starts) / np.diff([*starts, len(steps)])),
        "min": _short(np.minimum.reduceat(values, starts)),
        "max": _short(np.maximum.reduceat(values, starts)),
    }


def _short(values: npt.NDArray[np.float64]) -> list[float]:
    """Round to six digits, which a screen can show; unix times need fourteen."""
    return [float(f"{value:.14g}" if value > 1e9 else f"{value:.6g}") for value in values.tolist()]


_QUERIES: dict[str, Callable[[RunFiles, Params], Any]] = {
    "summary": RunFiles.summary, "series": RunFiles.series, "steps": RunFiles.steps, "samples": RunFiles.samples,
    "sample": RunFiles.sample, "events": RunFiles.events, "ledger": RunFiles.ledger, "episodes": RunFiles.episodes,
    "evals": RunFiles.evals, "config": RunFiles.config,
}  # fmt: skip


def answer(run: RunFiles, query: str, params: Params) -> Any:
    """Answer a request of the page. Raises UserError, with a line to show: it has no answer."""
    if query not in _QUERIES:
        raise UserError(f"no such request: {query}")
    try:
        with run.lock:
            return _QUERIES[query](run, params)
    except (CommitError, OSError, ValueError, OverflowError, sqlite3.Error) as error:
        raise UserError(one_line(error)) from error


def find_runs(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the runs at `paths`, with short names. Of a deployment: its own run, if it has one, and its tenants'.
    Raises UserError: a path is no run."""
    runs: list[Path] = []
    for path in paths:
        tenants = [entry for entry in sorted((path / "tenants").glob("*")) if RunDirectory(entry).exists]
        own = [] if tenants and not RunDirectory(path).exists else [open_run(path).directory]
        runs += [run.resolve() for run in (*own, *tenants)]
    runs = [*dict.fromkeys(runs)]  # a link may lead to a run that is listed, too
    length = next(size for size in range(1, 99) if len({run.parts[-size:] for run in runs}) == len(runs))
    return {run: "/".join(run.parts[-length:]) for run in runs}
