"""What must hold in a run directory once the run has ended, whatever happened to its processes. Reads nothing else."""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from prime_rl.monitor import read_metrics
from prime_rl.transport import checkpoints, protocol
from prime_rl.transport.commit import CommitError, list_steps, read_manifest, verify
from prime_rl.transport.weights import verify_weights, version_hash, weights_manifest

REASONS = {"stale", "filtered", "errored", "cancelled", "timeout"}
# Not compared: times, and what is counted since the last step or the last start of the orchestrator.
_TIMED = (
    "time/",
    "perf/",
    "limit/",
    "workers/cpu",
    "errors/",
    "off_policy/dropped",
    "made/",
    "turned_away/",
    "tenant/",
)


def problems(
    run: Path, max_steps: int, kept: Collection[int], served: dict[str, Any], *, interrupted: bool = False
) -> list[str]:
    """Everything that is wrong with a finished run of `max_steps` steps; empty when the run ended right.

    Args:
        kept: Checkpoints that must stand there, complete.
        served: What the engine says it serves (`GET /weights`).
        interrupted: Whether the run ended in between: a trainer that is asked to stop saves a checkpoint there.
    """
    return [
        *_batches(run, max_steps),
        *_weights(run, max_steps, served),
        *_checkpoints(run, kept, interrupted),
        *_ledger(run, max_steps),
        *_leftovers(run),
        *_metrics(run, max_steps),
    ]


def never_committed(run: Path, served: dict[str, Any]) -> str | None:
    """Return what is wrong with the weights that an engine says it serves (another hash); None for a pruned version."""
    directory = run / "weights" / f"step_{served['version']}"
    if not directory.is_dir() or served["hash"] == (hashed := weights_manifest(directory).hash):
        return None
    return f"an engine serves version {served['version']} with hash {served['hash'][:12]}, not {hashed[:12]}"


def _batches(run: Path, max_steps: int) -> Iterator[str]:
    steps = list_steps(run / "rollouts")
    if steps != list(range(max_steps)):
        yield f"batches of steps {steps} stand there"
    seen: Counter[str] = Counter()
    for step in steps:
        try:
            manifest = verify(run / "rollouts" / f"step_{step}")
        except CommitError as error:
            yield str(error)
            continue
        seen.update(manifest.extra["samples"])
        if not manifest.extra["samples"]:
            yield f"the batch of step {step} is empty"
    if twice := sorted(name for name, count in seen.items() if count > 1):
        yield f"samples in two batches: {twice}"
    places = Counter(tuple(name.split(".")[i] for i in (0, 1, 3)) for name in seen)
    if twice_attempted := sorted(".".join(place) for place, count in places.items() if count > 1):
        yield f"two attempts at one episode were trained: {twice_attempted}"


def _weights(run: Path, max_steps: int, served: dict[str, Any]) -> Iterator[str]:
    steps = list_steps(run / "weights")
    if not steps or steps[-1] != max_steps:
        yield f"the versions {steps} stand there"
        return
    incarnations = {
        int(path.stem): json.loads(path.read_text())["step"] for path in (run / "incarnations").glob("*.json")
    }
    for version in steps:
        directory = run / "weights" / f"step_{version}"
        try:
            manifest = weights_manifest(directory)
            if manifest.publisher is None or version == max_steps:  # the others went from memory
                verify_weights(directory)
        except CommitError as error:
            yield str(error)
            continue
        if not protocol.valid(version, manifest.incarnation, incarnations):
            yield f"version {version} of incarnation {manifest.incarnation} was given up and still stands there"
    final = weights_manifest(run / "weights" / f"step_{max_steps}")
    if (served["version"], served["hash"]) != (max_steps, final.hash):
        served_version = f"version {served['version']} ({served['hash'][:12]})"
        yield f"the engine serves {served_version}, not {max_steps} ({final.hash[:12]})"


def _checkpoints(run: Path, kept: Collection[int], interrupted: bool) -> Iterator[str]:
    root = run / "checkpoints"
    complete = checkpoints.complete_steps(root)
    if (list_steps(root) != sorted(kept) and not interrupted) or not set(kept) <= set(complete):
        yield f"the checkpoints {complete} are complete, parts stand in {list_steps(root)}"
    try:
        for step in complete:
            for part in read_manifest(root / f"step_{step}").extra["parts"]:
                checkpoints.check(root, step, part)
                verify(checkpoints.part_dir(root, step, part))
        for step in list_steps(run / "recovery"):
            verify(run / "recovery" / f"step_{step}")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        yield f"a checkpoint: {error}"


@contextmanager
def open_ledger(run: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
        yield database


def _ledger(run: Path, max_steps: int) -> Iterator[str]:
    """Check by SQL alone, without the ledger's code: an episode has one row that says how it ended; batches agree."""
    if not (run / "ledger.sqlite").exists():
        yield "there is no ledger"
        return
    with open_ledger(run) as database:
        issued = dict(database.execute("SELECT env, count FROM issued"))
        rows = database.execute("SELECT id, state, reason, step FROM episodes").fetchall()
        stored = database.execute("SELECT COUNT(*) FROM results").fetchone()[0]
    if sum(issued.values()) != len(rows):
        yield f"the ledger counts {issued} issued episodes and tells of {len(rows)}"
    if open_rows := sorted(f"{id_} {state}" for id_, state, _, _ in rows if state not in ("batched", "dropped")):
        yield f"the ledger has episodes that did not end: {open_rows}"
    if odd := sorted({str(reason) for _, state, reason, _ in rows if state == "dropped"} - REASONS):
        yield f"the ledger has drops for {odd}"
    if stored:
        yield f"the ledger still holds the tokens of {stored} episodes"
    for step in range(max_steps):
        told = {id_ for id_, state, _, at in rows if state == "batched" and at == step}
        try:
            trained = {
                name.rpartition(".")[0] for name in read_manifest(run / "rollouts" / f"step_{step}").extra["samples"]
            }
        except CommitError:
            continue
        if told != trained:
            yield f"step {step}: the ledger says {sorted(told)} were trained, the batch holds {sorted(trained)}"


def account(run: Path) -> dict[str, int]:
    """Episodes by where they ended."""
    if not (run / "ledger.sqlite").exists():
        return {}
    with open_ledger(run) as database:
        issued = database.execute("SELECT SUM(count) FROM issued").fetchone()[0]
        ended = "SELECT COALESCE(reason, state), COUNT(*) FROM episodes GROUP BY 1 ORDER BY 1"
        return {"issued": issued, **dict(database.execute(ended).fetchall())}


def _leftovers(run: Path) -> Iterator[str]:
    left = [path for path in run.rglob(".*") if ".tmp-" in path.name or ".old-" in path.name]
    if left:
        yield f"left over: {sorted(str(path.relative_to(run)) for path in left)}"
    if (run / "leases" / "orchestrator.json").exists():
        yield "the orchestrator's lease stands there after a clean end"


def _metrics(run: Path, max_steps: int) -> Iterator[str]:
    for process in ("trainer", "orchestrator"):
        steps = [int(row["step"]) for row in read_metrics(run / "metrics" / f"{process}.jsonl")]
        if steps != list(range(max_steps)):
            yield f"metrics/{process}.jsonl has rows of steps {steps}"


def differences(run: Path, reference: Path, *, attempts: bool) -> list[str]:
    """What distinguishes a run from the one that was not disturbed: weights, batches, metrics, ledger, bit for bit.

    Args:
        attempts: Whether the numbers of attempts, and with them the ledger and the error metrics, must be equal too.
    """
    found = []
    ours, theirs = (_final_versions(path) for path in (run, reference))
    if ours != theirs:
        found.append(f"weights differ: {ours} instead of {theirs}")
    for step in list_steps(reference / "rollouts"):
        mine, other = (_batch(path, step, attempts) for path in (run, reference))
        if mine != other:
            found.append(f"the batch of step {step} differs: {_first_difference(mine, other)}")
    for process in ("trainer", *(["orchestrator"] if attempts else [])):
        mine, other = (_untimed(path, process) for path in (run, reference))
        if mine != other:
            found.append(f"metrics/{process}.jsonl differs: {_first_difference(mine, other)}")
    if attempts:
        mine, other = (list(ledger_rows(path)) for path in (run, reference))
        if mine != other:
            found.append(f"the ledger differs: {_first_difference(mine, other)}")
    return found


def _final_versions(run: Path) -> dict[int, str]:
    newest = max(list_steps(run / "weights"))
    tensors = weights_manifest(run / "weights" / f"step_{newest}").tensors
    # By the bytes of the files: the version's own hash depends on how it was published.
    return {newest: version_hash({name: replace(entry, file="", checksum="") for name, entry in tensors.items()})}


def _batch(run: Path, step: int, attempts: bool) -> list[dict[str, Any]]:
    file = run / "rollouts" / f"step_{step}" / "samples.arrow"
    if not file.exists():
        return []
    rows = pa.ipc.open_file(str(file)).read_all().to_pylist()
    for row in rows:
        if not attempts:
            group, number, _, sequence = row["sample_id"].split(".")
            row["sample_id"] = f"{group}.{number}.{sequence}"
    return rows


def _untimed(run: Path, process: str) -> list[dict[str, float]]:
    rows = read_metrics(run / "metrics" / f"{process}.jsonl")
    return [
        {key: value for key, value in row.items() if not (key.startswith(_TIMED) or key.endswith("time"))}
        for row in rows
    ]


def ledger_rows(run: Path) -> Iterator[tuple[Any, ...]]:
    """Every row of every table of a run's ledger, in a fixed order."""
    if not (run / "ledger.sqlite").exists():
        return
    with open_ledger(run) as database:
        tables = database.execute("select name from sqlite_master where type = 'table' order by name").fetchall()
        for (table,) in tables:
            yield from sorted(((table, *row) for row in database.execute(f"select * from {table}")), key=repr)


def _first_difference(mine: list[Any], other: list[Any]) -> str:
    for number, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            both = [sorted(row.items()) if isinstance(row, dict) else list(row) for row in (a, b)]
            first, second = ([item for item in row if item not in both[1 - side]] for side, row in enumerate(both))
            return f"row {number}: {str(first)[:200]} / {str(second)[:200]}"
    return f"{len(mine)} / {len(other)} rows"
