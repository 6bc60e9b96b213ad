"""The ledger: every episode from its issue to its end, in `ledger.sqlite` of the run directory.

It is the only count of episodes there is. An episode `group.number.attempt` is *issued* (in flight), then *finished*
or *dropped*; a finished one is *batched* with the batch that holds it, or dropped. A batched one is in a batch, and
trained once the version after that step is committed.
`record` only keeps an event; `flush` applies all that were recorded in one transaction, and refuses what cannot have
happened. The rename of `rollouts/step_n` is the commit of a batch; its manifest lists the episodes in it, and
`reconcile` brings the ledger to what the manifests say. The tokens of a finished episode are stored until its batch is
committed.

Nothing in the file depends on a clock, so two equal runs have equal ledgers. The rollback journal and one writer make
it safe on network file systems.
"""

import itertools
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
from loguru import logger

from prime_rl import faults
from prime_rl.envs.protocol import EpisodeResult, pack_episode, unpack_episode
from prime_rl.errors import UserError
from prime_rl.orchestrator.checkpoint import ResumePoint
from prime_rl.orchestrator.scheduler import (
    Batched,
    Discarded,
    Drop,
    Dropped,
    Event,
    Finished,
    Group,
    GroupSlot,
    Issued,
    Scheduler,
    Start,
    State,
    Task,
)
from prime_rl.orchestrator.tasks import Pools
from prime_rl.transport.commit import (
    CommitError,
    clean_stages,
    disk_errors,
    list_steps,
    read_manifest,
    write_atomically,
)

FORMAT = 2
_BUSY_SECONDS = 10.0
_INCONSISTENT = "episodes are lost or counted twice, so the run stops (a bug in prime-rl)"

# 16 KiB pages: tokens of an episode lie in few overflow pages. `issued` counts independently of the rows, as a
# cross-check.
_SCHEMA = f"""
PRAGMA page_size = 16384;
BEGIN;
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE issued (env TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, env TEXT NOT NULL, task_index INTEGER NOT NULL, task_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'batched', 'discarded')), step INTEGER
);
CREATE TABLE episodes (
    group_number INTEGER NOT NULL, number INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('issued', 'finished', 'batched', 'dropped')),
    reason TEXT, detail TEXT NOT NULL DEFAULT '', retried INTEGER NOT NULL DEFAULT 0, step INTEGER,
    version INTEGER, incarnation INTEGER, first INTEGER, last INTEGER, tokens INTEGER, reward REAL,
    id TEXT GENERATED ALWAYS AS (group_number || '.' || number || '.' || attempt) VIRTUAL,
    PRIMARY KEY (group_number, number, attempt)
) WITHOUT ROWID;
CREATE TABLE results (id TEXT PRIMARY KEY, data BLOB NOT NULL);
INSERT INTO meta VALUES ('format', {FORMAT});
COMMIT;
"""
_KEY = "group_number = ? AND number = ? AND attempt = ?"
_OPEN_GROUP = "INTO groups VALUES (?, ?, ?, ?, 'open', NULL)"
_ISSUE = """
    INSERT OR IGNORE INTO episodes (group_number, number, attempt, state, version, incarnation)
    SELECT ?1, ?2, ?3, 'issued', ?4, ?5 WHERE EXISTS (SELECT 1 FROM groups WHERE number = ?1 AND state = 'open')"""
_COUNT_ISSUED = "INSERT INTO issued VALUES (?, 1) ON CONFLICT (env) DO UPDATE SET count = count + 1"
# An episode that has ended needs neither its tokens nor its incarnation any more.
_END = "UPDATE episodes SET state = ?, step = ?, reason = ?, detail = ?, retried = ?, incarnation = NULL"
_OPEN_GROUPS = """
    SELECT g.number, env, task_index, task_id, e.number, attempt, e.state, retried, version, incarnation, first, last,
        data
    FROM groups g LEFT JOIN episodes e ON e.group_number = g.number LEFT JOIN results r ON r.id = e.id
    WHERE g.state = 'open' ORDER BY g.number, e.number, attempt"""


# -- counts and the records of batches ---------------------------------------------------------------------------------


@dataclass
class Counts:
    """Counts of episodes (attempts: one that was retried counts once for each)."""

    issued: int = 0
    in_flight: int = 0  # issued, not ended
    finished: int = 0  # ended with a result, not in a batch yet
    batched: int = 0  # in a committed batch
    dropped: dict[str, int] = field(default_factory=dict)  # by reason; reasons that never occurred are left out

    @property
    def difference(self) -> int:
        """Issued minus accounted-for episodes; 0 if none is lost or counted twice."""
        return self.issued - (self.batched + sum(self.dropped.values()) + self.in_flight + self.finished)


def batch_extra(event: Batched) -> dict[str, Any]:
    """Return what a batch's manifest must say (`write_batch(extra=…)`) for the ledger to be reconciled with it."""
    groups = [[number, task.env, task.index, task.task_id] for number, task in event.groups.items()]
    return {"ledger": vars(event) | {"groups": groups}}


def read_batches(rollouts: Path) -> list[Batched]:
    """Read what the manifests of all committed batches under `rollouts` say about episodes, by step.
    Raises UserError: a committed batch's manifest cannot be read, or lists no episodes."""
    batches = []
    for step in list_steps(rollouts):
        directory = rollouts / f"step_{step}"
        try:
            data = read_manifest(directory).extra["ledger"]
            groups = {int(number): Task(str(env), int(index), str(name)) for number, env, index, name in data["groups"]}
            left_out = [*data["filtered"], *data.get("truncated", ())]  # the latter before 2026-11-28
            batches.append(Batched(step, groups, data["trained"], left_out))
        except CommitError as error:
            if directory.exists():  # else it was pruned since it was listed
                raise UserError(f"{error}: move the directory away, or put back a good copy") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{directory} does not name its episodes ({error!r}): another version wrote it") from error
    return batches


def _key(episode: str) -> tuple[int, int, int]:
    """Split `group.number.attempt`."""
    group, number, attempt = map(int, episode.split("."))
    return group, number, attempt


# -- the ledger --------------------------------------------------------------------------------------------------------


class Ledger:
    """One run's ledger. One writer: the orchestrator. `record` belongs to one thread; the rest may run in another."""

    def __init__(self, path: Path) -> None:
        """Open `ledger.sqlite`, which is made if it is missing (then `reconcile` rebuilds what the manifests list).
        Raises UserError: the file is damaged, truncated, locked or of a newer format; it is left as it is."""
        self.path = path
        self._lock = threading.Lock()  # bounded: held for one transaction, whose own wait sqlite bounds
        self._events: list[Event] = []  # not written yet; one thread appends, another cuts, each in one operation
        if not path.exists():
            _create(path)
        with _file_errors(path), ExitStack() as stack:
            self._db = stack.enter_context(closing(_open(path)))
            _check(self._db, path)
            self._db.execute("PRAGMA secure_delete = OFF")  # freed tokens need not be overwritten
            self._db.execute("PRAGMA cache_size = -131072")  # KiB: a step's changes stay in memory until the commit …
            self._db.execute("PRAGMA cache_spill = OFF")  # … so that until then only the journal is written
            stack.pop_all()

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        with self._lock:
            self._db.close()

    def record(self, event: Event) -> None:
        self._events.append(event)

    @property
    def unwritten(self) -> int:
        """Events that were recorded and not flushed."""
        return len(self._events)

    def flush(self, count: int | None = None) -> None:
        """Write the first `count` unwritten events, or all so far, in one transaction.

        Call it before a batch is renamed into place, and after. Raises UserError: the disk is full, or another program
        keeps the file locked: a later flush writes the events. Or they contradict what is written.
        """
        with self._lock:
            if not (events := self._events[:count]):
                return
            with self._transaction():
                for event in events:
                    self._apply(event)
            del self._events[: len(events)]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _file_errors(self.path):
            faults.point("ledger:begin")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                faults.point("ledger:commit", Path(f"{self.path}-journal"))
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            faults.point("ledger:committed")

    def _apply(self, event: Event) -> None:
        """Write one event. Raises UserError where it cannot have happened."""
        match event:
            case Issued(start, incarnation):
                task = start.task
                self._update(f"INSERT OR IGNORE {_OPEN_GROUP}", start.group, task.env, task.index, task.task_id)
                self._change(event, _ISSUE, *start.key, start.version, incarnation)
                self._update(_COUNT_ISSUED, start.task.env)
            case Finished(start, first, last, result, incarnation):
                finish = "SET state = 'finished', incarnation = ?, first = ?, last = ?, tokens = ?, reward = ?"
                tokens = sum(sample.loss_mask.count(1) for sample in result.samples)
                values = (incarnation, first, last, tokens, result.reward, *start.key)
                self._change(event, f"UPDATE episodes {finish} WHERE {_KEY} AND state = 'issued'", *values)
                data = pack_episode(result)
                self._update("INSERT OR REPLACE INTO results VALUES (?, ?)", start.episode, data)
            case Dropped(start, reason, detail, retried):
                unbatched = f"{_END} WHERE {_KEY} AND state IN ('issued', 'finished')"
                self._change(event, unbatched, "dropped", None, reason, detail, retried, *start.key)
                self._update("DELETE FROM results WHERE id = ?", start.episode)
            case Discarded(group, reason, detail):
                self._drop_open(group, reason, detail)
                self._close_group(event, group, "discarded", None)
            case Batched(step, groups):
                outcomes: dict[str, tuple[object, ...]] = dict.fromkeys(event.trained, ("batched", step, None))
                outcomes |= dict.fromkeys(event.filtered, ("dropped", None, Drop.FILTERED))
                for name, end in outcomes.items():
                    self._change(event, f"{_END} WHERE {_KEY} AND state = 'finished'", *end, "", False, *_key(name))
                for group in groups:
                    self._close_group(event, group, "batched", step)

    def _update(self, statement: str, *values: object) -> int:
        """Execute a statement. Returns how many rows it changed."""
        return self._db.execute(statement, values).rowcount

    def _change(self, event: Event, statement: str, *values: object) -> None:
        if self._update(statement, *values) != 1:
            raise UserError(f"{_INCONSISTENT}: {event} does not follow what {self.path.name} holds")

    def _drop_open(self, group: int, reason: Drop, detail: str) -> None:
        of_group = f"{_END} WHERE group_number = ? AND state IN ('issued', 'finished')"
        self._update(of_group, "dropped", None, reason, detail, False, group)

    def _close_group(self, event: Event, group: int, state: str, step: int | None) -> None:
        close = "UPDATE groups SET state = ?, step = ? WHERE number = ? AND state = 'open'"
        self._change(event, close, state, step, group)
        self._update("DELETE FROM results WHERE id IN (SELECT id FROM episodes WHERE group_number = ?)", group)

    # -- reading -------------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Count all episodes that were flushed: `issued` as counted when they were issued, the rest as the rows say."""
        query = "SELECT COALESCE(reason, state), COUNT(*) FROM episodes GROUP BY 1 ORDER BY 1"
        with _file_errors(self.path), self._lock:
            rows = dict(self._db.execute(query).fetchall())
            (issued,) = self._db.execute("SELECT COALESCE(SUM(count), 0) FROM issued").fetchone()
        in_flight, finished, batched = (rows.pop(name, 0) for name in ("issued", "finished", "batched"))
        return Counts(issued, in_flight, finished, batched, dropped=rows)

    def check(self, held: int) -> Counts:
        """Check that issued = trained + in a batch + dropped + in flight + finished. Returns the counts.

        `held` are the episodes that the scheduler holds, after the events that were flushed: issued, not dropped, in no
        batch. Raises UserError: it does not hold; the message has the difference.
        """
        counts = self.counts()
        stored = counts.in_flight + counts.finished
        if counts.difference or stored != held:
            raise UserError(
                f"{_INCONSISTENT}: issued = batched + dropped + in flight + finished does not hold: "
                f"{counts.difference:+d} of {counts}; "
                f"{stored} are in flight or finished, of which the scheduler holds {held} ({stored - held:+d})"
            )
        return counts

    @property
    def groups_opened(self) -> int:
        """Groups that were opened, as far as the ledger knows: their numbers count up from 0."""
        with _file_errors(self.path), self._lock:
            return self._db.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM groups").fetchone()[0]

    def open_groups(self, group_size: int) -> list[Group[EpisodeResult]]:
        """Read the open groups in the order of opening, once the ledger is reconciled."""
        groups: dict[int, Group[EpisodeResult]] = {}
        with _file_errors(self.path), self._lock:
            for opened, env, index, task_id, number, *episode in self._db.execute(_OPEN_GROUPS):
                slots = {place: GroupSlot(place) for place in range(group_size)}
                group = groups.setdefault(opened, Group(opened, Task(env, index, task_id), slots))
                if number is None:  # all its episodes were in flight: `reconcile` removed them
                    continue
                attempt, state, retried, version, incarnation, first, last, data = episode
                slot = group.slots[number] = GroupSlot(number, attempt)  # the latest attempt comes last
                if state == "finished":
                    start = Start(opened, number, attempt, group.task, version)
                    if data is None:
                        raise UserError(_damaged(self.path, f"the tokens of episode {start.episode} are missing"))
                    slot.state = State.FINISHED
                    group.finished.append(
                        Finished(start, first, last, unpack_episode(msgpack.unpackb(data)), incarnation)
                    )
                elif retried:
                    slot.attempt += 1
                else:
                    slot.state = State.FAILED
        return list(groups.values())

    # -- reconciling ---------------------------------------------------------------------------------------------------

    def reconcile(self, batches: Sequence[Batched], version: int) -> list[str]:
        """Make the ledger agree with the committed batches. Call it at start, before `open_groups`.

        What was in flight counts as never issued: it will be, under the same name. Return what had to be mended, for
        the log; nothing when ledger and manifests agree.

        Args:
            batches: All batches in the run directory (`read_batches`), by step.
            version: The newest committed version of the current lineage: batches of steps below it may be pruned.
        """
        mended: list[str] = []
        with self._lock, self._transaction():
            known = {step for (step,) in self._db.execute("SELECT step FROM groups WHERE state = 'batched'")}
            for batch in batches:
                if batch.step not in known:
                    self._adopt(batch)
                    mended.append(f"step {batch.step} is committed: its {len(batch.episodes)} episodes are recorded")
            for gone in sorted(known.difference(batch.step for batch in batches)):
                if gone >= version:
                    end = ("dropped", None, Drop.CANCELLED, f"the batch of step {gone} is gone", False)
                    count = self._update(f"{_END} WHERE state = 'batched' AND step = ?", *end, gone)
                    self._update("UPDATE groups SET state = 'discarded' WHERE state = 'batched' AND step = ?", gone)
                    mended.append(f"the batch of step {gone} is gone: {count} episodes of it are dropped")
            in_flight = (
                "SELECT COUNT(*) FROM groups g JOIN episodes e ON g.number = group_number AND e.state = 'issued'"
            )
            self._update(f"UPDATE issued SET count = count - ({in_flight} WHERE g.env = issued.env)")
            self._update("DELETE FROM episodes WHERE state = 'issued'")
        return mended

    def _adopt(self, batch: Batched) -> None:
        """Record a batch whose event was not flushed; its episodes may be known only as issued, or not at all."""
        for number, task in batch.groups.items():
            self._update(f"INSERT OR REPLACE {_OPEN_GROUP}", number, task.env, task.index, task.task_id)
        for name in batch.episodes:
            if self._update(_ISSUE, *_key(name), None, None):
                self._update(_COUNT_ISSUED, batch.groups[_key(name)[0]].env)
            self._update(f"UPDATE episodes SET state = 'finished' WHERE {_KEY}", *_key(name))
        self._apply(batch)
        for number in batch.groups:
            self._drop_open(number, Drop.CANCELLED, f"the batch of step {batch.step} was committed without it")


# -- resuming a run ----------------------------------------------------------------------------------------------------


def restore(
    scheduler: Scheduler[EpisodeResult],
    ledger: Ledger,
    rollouts: Path,
    progress: ResumePoint,
    stream: Iterator[Task],
    version: int,
    pools: Mapping[str, Pools],
) -> None:
    """Restore the state of an earlier orchestrator into `scheduler`, and advance `stream` to its position.

    Where the ledger is missing (a checkpoint that was taken elsewhere), groups that were open then are left out.
    `stream` and the difficulty `pools` are as at the beginning of a run; `version` is the newest committed one of the
    current lineage. Raises UserError: the ledger's tasks are not the ones that the stream gives.
    """
    state = progress.state
    for line in ledger.reconcile(read_batches(rollouts), version):
        logger.warning("ledger: {}", line)
    # Pools change only at batch commits, so draws after `state` repeat exactly; for draws before it, only the choice of
    # environment matters.
    tasks = list(itertools.islice(stream, state.groups_opened))
    for env in pools.keys() & state.curriculum.keys():
        pools[env].load(state.curriculum[env])
    tasks += itertools.islice(stream, max(0, ledger.groups_opened - len(tasks)))
    scheduler.groups_opened = len(tasks)
    groups = ledger.open_groups(scheduler.limits.group_size)
    for group in groups:
        task, drawn = group.task, tasks[group.number]
        if (pools[task.env].task(task.index) if task.env in pools else drawn) != task:
            ledger_task = f"group {group.number} is about task {task.task_id} of {task.env}"
            stream_task = f"the environments give {drawn.task_id} of {drawn.env}"
            raise UserError(f"{ledger_task}, but {stream_task}: resume with those that the run began with")
    scheduler.restore(groups)
    if groups:
        finished = sum(len(group.finished) for group in groups)
        logger.info("{} open groups are continued, with {} finished episodes", len(groups), finished)


# -- the file ----------------------------------------------------------------------------------------------------------


def _create(path: Path) -> None:
    """Make an empty ledger. Raises UserError where another one's crashed transaction would be rolled back into it."""
    if (left := Path(f"{path}-journal")).exists():
        raise UserError(f"{left} stands there without its ledger: put {path.name} back beside it, or move it away")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clean_stages(path.parent, path.name)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            write_atomically(path, db.serialize())


def _open(path: Path, mode: str = "rw") -> sqlite3.Connection:
    """Open an existing ledger. By "rw" a transaction that a crash cut short is rolled back."""
    if not path.exists():
        raise UserError(f"{path} does not exist: the run has no ledger")
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raise UserError where it is damaged, truncated or of another format."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        raise UserError(_damaged(path, "it is no ledger"))
    row = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if row != (FORMAT,):
        other = f"{path} has format {row and row[0]}; this version reads format {FORMAT}"
        raise UserError(f"{other}: resume with the version that wrote it")
    if (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise UserError(_damaged(path, problem.splitlines()[-1]))


@contextmanager
def open_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Copy a ledger that may be in use, and open the copy: the writer waits for the copy alone, and nothing is written
    beside it. Raises UserError: there is no ledger, it is locked, or it is damaged."""
    with _file_errors(path), closing(sqlite3.connect("")) as copy:  # "": a temporary file
        try:
            with closing(_open(path, "ro")) as db:
                db.backup(copy)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            with TemporaryDirectory() as directory:  # a crash cut a transaction short: it is rolled back in a copy
                for file in (path, Path(f"{path}-journal")):
                    shutil.copy(file, directory)
                with closing(_open(Path(directory, path.name))) as db:
                    db.backup(copy)
        _check(copy, path)
        yield copy


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn what sqlite and the system say about the file, the disk and its locks into a `UserError`."""
    try:
        with disk_errors(path):
            yield
    except sqlite3.Error as error:
        match (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF:
            case sqlite3.SQLITE_BUSY:
                limit = f"more than {_BUSY_SECONDS:.0f} s"
                what = f"{path} is locked by another program for {limit}: end it (readers copy the file first)"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                what = _damaged(path, str(error))
            case sqlite3.SQLITE_ERROR | sqlite3.SQLITE_CONSTRAINT | sqlite3.SQLITE_MISUSE:  # bugs in this file
                raise
            case _:
                what = f"cannot read or write {path} ({error}): check disk and permissions; nothing was committed"
        raise UserError(what) from error


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged ({what}). Put back a good copy; or move {path.name}* out of the way and start again: it is "
        "then rebuilt from the committed batches, without what was in flight or waited for a batch"
    )
