"""The ledger: every episode from its issue to its end, in `ledger.sqlite` of the run directory. It is the only count of episodes there is.

An episode `group.number.attempt` is *issued*, then *finished* or *dropped*; a finished one is *batched* with the batch that holds it, and *trained*
once the version after that step is committed. `record` only keeps an event; `flush` applies all that were recorded in one transaction, and refuses
what cannot have happened. The rename of `rollouts/step_n` is the commit of a batch: its manifest says which episodes are in it, and the ledger is an
index that `reconcile` brings to what the manifests say. A finished episode is stored with its tokens until its batch is committed.

Nothing in the file depends on a clock, so two equal runs have equal ledgers. The rollback journal and one writer make it safe on network file systems.
"""

import itertools
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from loguru import logger

from prime_rl import faults
from prime_rl.envs.protocol import EpisodeResult, pack_episode, unpack_episode
from prime_rl.errors import UserError
from prime_rl.orchestrator.admission import output_tokens
from prime_rl.orchestrator.checkpoint import ResumePoint, refuse_other_seed
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
    Opened,
    Scheduler,
    Start,
    State,
    Task,
)
from prime_rl.orchestrator.tasks import Curriculum
from prime_rl.transport.commit import (
    CommitError,
    clean_stages,
    disk_errors,
    list_steps,
    read_manifest,
    write_atomically,
)
from prime_rl.transport.rollouts import as_array
from prime_rl.transport.settings import LEDGER, suggestions

FORMAT = 1
_BUSY_SECONDS = 10.0
_FAULT = "episodes are lost or counted twice, so the run stops (a fault of prime-rl)"

# 16 KiB pages: tokens of an episode lie in few overflow pages. The partial index holds only what is not trained yet.
# `life` is the trainer's incarnation; `issued` counts independently of the rows, as a cross-check; `carried` holds
# counts taken from manifests after a ledger was lost.
_SCHEMA = f"""
PRAGMA page_size = 16384;
BEGIN;
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE issued (env TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE carried (
    env TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (env, state, reason)
) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, env TEXT NOT NULL, task_index INTEGER NOT NULL, task_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'batched', 'discarded')), step INTEGER
);
CREATE TABLE episodes (
    group_number INTEGER NOT NULL, number INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('issued', 'finished', 'batched', 'trained', 'dropped')),
    reason TEXT, detail TEXT NOT NULL, retried INTEGER NOT NULL, step INTEGER,
    version INTEGER, life INTEGER, first INTEGER, last INTEGER,
    reward REAL, tokens INTEGER, output_tokens INTEGER, is_truncated INTEGER,
    id TEXT GENERATED ALWAYS AS (group_number || '.' || number || '.' || attempt) VIRTUAL,
    PRIMARY KEY (group_number, number, attempt)
) WITHOUT ROWID;
CREATE INDEX episodes_batched ON episodes (step) WHERE state = 'batched';
CREATE TABLE results (id TEXT PRIMARY KEY, data BLOB NOT NULL);
INSERT INTO meta VALUES ('format', {FORMAT}), ('version', 0);
COMMIT;
"""
_KEY = "group_number = ? AND number = ? AND attempt = ?"
_INSERT_GROUP = "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, 'open', NULL)"
_REISSUE = f"UPDATE episodes SET version = ?, life = ? WHERE {_KEY} AND state = 'issued'"
_ISSUE = """
    INSERT OR IGNORE INTO episodes (group_number, number, attempt, state, detail, retried, version, life)
    SELECT ?1, ?2, ?3, 'issued', '', 0, ?4, ?5
    WHERE EXISTS (SELECT 1 FROM groups WHERE number = ?1 AND state = 'open') AND (?3 = 0 OR EXISTS (
        SELECT 1 FROM episodes WHERE group_number = ?1 AND number = ?2 AND attempt = ?3 - 1 AND retried
    ))"""
_ISSUE_UNKNOWN = """
    INSERT OR IGNORE INTO episodes (group_number, number, attempt, state, detail, retried) VALUES (?, ?, ?, 'issued', '', 0)"""
_FINISH = f"""
    UPDATE episodes SET state = 'finished', life = ?, first = ?, last = ?, reward = ?, tokens = ?, output_tokens = ?, is_truncated = ?
    WHERE {_KEY} AND state = 'issued'"""
# An episode that has ended needs neither its tokens nor its incarnation any more.
_END = f"UPDATE episodes SET state = ?, step = ?, reason = ?, detail = ?, retried = ?, life = NULL WHERE {_KEY}"
_CANCEL = (
    "UPDATE episodes SET state = 'dropped', reason = 'cancelled', detail = ?, step = NULL, retried = 0, life = NULL"
)
_CLOSE_GROUP = """
    UPDATE groups SET state = ?, step = ? WHERE number = ? AND state = 'open' AND NOT EXISTS (
        SELECT 1 FROM episodes WHERE group_number = groups.number AND episodes.state = 'issued'
    )"""
_OPEN_GROUPS = """
    SELECT g.number, env, task_index, task_id, e.number, attempt, e.state, retried, version, life, first, last, data
    FROM groups g LEFT JOIN episodes e ON e.group_number = g.number LEFT JOIN results r ON r.id = e.id
    WHERE g.state = 'open' ORDER BY g.number, e.number, attempt"""
_DISCARDED = """
    SELECT g.number, env, task_index, task_id, detail, reward FROM groups g JOIN episodes e ON e.group_number = g.number
    WHERE g.state = 'discarded' AND g.step >= ? AND e.state = 'dropped' AND reason IN ('filtered', 'truncated')
    ORDER BY g.number, e.number"""


# -- counts and the records of batches ---------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Counts of episodes (attempts, so one that was retried counts once for every attempt). Its fields are in the batches' manifests."""

    issued: int = 0
    in_flight: int = 0  # issued, not ended
    finished: int = 0  # ended with a result, not in a batch yet
    batched: int = 0  # in a committed batch that is not trained yet
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason; reasons that never occurred are left out

    @property
    def difference(self) -> int:
        """Issued minus accounted-for episodes; 0 if none is lost or counted twice."""
        return self.issued - (self.trained + sum(self.dropped.values()) + self.in_flight + self.finished + self.batched)

    def add(self, state: str, reason: str, count: int) -> None:
        """Count episodes in a state of the table `episodes`."""
        if state == "dropped":
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        else:
            name = "in_flight" if state == "issued" else state
            setattr(self, name, getattr(self, name) + count)


def read_counts(db: sqlite3.Connection) -> dict[str, Counts]:
    """Read counts by environment; `issued` is what was counted when they were issued, the rest is what the rows say."""
    counts = {env: Counts(issued=count) for env, count in db.execute("SELECT env, count FROM issued ORDER BY env")}
    rows = """
        SELECT env, e.state, reason, COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number GROUP BY 1, 2, 3
        UNION ALL SELECT env, state, reason, count FROM carried ORDER BY 1, 2, 3
    """
    for env, state, reason, count in db.execute(rows):
        counts.setdefault(env, Counts()).add(state, reason, count)
    return counts


def total(counts: Mapping[str, Counts]) -> Counts:
    """Sum the counts of all environments."""
    summed = Counts()
    for one in counts.values():
        summed.issued += one.issued
        for state in ("in_flight", "finished", "batched", "trained"):
            summed.add(state, "", getattr(one, state))
        for reason, count in one.dropped.items():
            summed.add("dropped", reason, count)
    return summed


@dataclass(frozen=True)
class BatchRecord:
    """What the manifest of `rollouts/step_n` says about episodes; `batch_extra` writes it."""

    event: Batched
    groups: list[tuple[int, str, int, str]]  # (number, env, task index, task id)
    counts: dict[str, Counts]  # by environment, with this batch counted as batched


@dataclass(frozen=True)
class DiscardedGroup:
    """A complete group that left without a batch: why, and the rewards of its finished episodes in their order."""

    number: int
    task: Task
    reason: str
    rewards: list[float]


def batch_extra(event: Batched, groups: Sequence[Group[Any]], counts: Mapping[str, Counts]) -> dict[str, Any]:
    """Make what the manifest of a batch must say (`write_batch(extra=…)`), so that the ledger can be reconciled with it.

    Args:
        event: The batch, as it will be recorded once it is committed.
        groups: Its groups.
        counts: Of the ledger, without this batch. They are changed: they have it counted as batched.
    """
    env = {group.number: group.task.env for group in groups}
    for name, state, reason in _outcomes(event):
        env_counts = counts[env[_key(name)[0]]]
        env_counts.finished -= 1
        env_counts.add(state, reason, 1)
    ledger = {
        "trained": list(event.trained),
        "filtered": list(event.filtered),
        "truncated": list(event.truncated),
        "groups": [[group.number, group.task.env, group.task.index, group.task.task_id] for group in groups],
        "account": {env: asdict(env_counts) for env, env_counts in sorted(counts.items())},
    }
    return {"ledger": ledger | ({"details": dict(event.details)} if event.details else {})}


def read_batches(rollouts: Path) -> list[BatchRecord]:
    """Read the records of all committed batches under `rollouts`, by step.

    Raises:
        UserError: a committed batch's manifest cannot be read, or lists no episodes.
    """
    records = []
    for step in list_steps(rollouts):
        directory = rollouts / f"step_{step}"
        try:
            data = read_manifest(directory).extra["ledger"]
            groups = [(int(number), str(env), int(index), str(task)) for number, env, index, task in data["groups"]]
            trained, filtered, truncated = (list(data[name]) for name in ("trained", "filtered", "truncated"))
            numbers, details = [number for number, *_ in groups], dict(data.get("details", {}))
            event = Batched(step, numbers, trained, filtered, truncated, details)
            counts = {env: Counts(**fields) for env, fields in data["account"].items()}
            records.append(BatchRecord(event, groups, counts))
        except CommitError as error:
            if directory.exists():  # else it was pruned since it was listed
                raise UserError(f"{error}: move the directory away, or put back a good copy") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory} does not say which episodes it holds ({error!r}): another version wrote it"
            ) from error
    return records


# -- the ledger --------------------------------------------------------------------------------------------------------------------


class Ledger:
    """One run's ledger. One writer: the orchestrator. `record` belongs to one thread; the rest may run in another at the same time.

    Args:
        path: `ledger.sqlite`; made if it is missing (then `reconcile` rebuilds what the manifests know).

    Raises:
        UserError: the file is damaged, truncated, locked or of a newer format; it is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            _create(path)
        self._db = connect(path)
        self._lock = threading.Lock()  # bounded: held for one transaction, whose own wait sqlite bounds
        self._events: list[Event] = []  # not written yet; one thread appends, another cuts, each in one operation
        self.recorded = self._written = 0  # events so far
        with _file_errors(self.path):
            self._db.execute("PRAGMA secure_delete = OFF")  # freed tokens need not be overwritten
            self._db.execute("PRAGMA cache_size = -131072")  # KiB: a step's changes stay in memory until the commit …
            self._db.execute("PRAGMA cache_spill = OFF")  # … so that until then only the journal is written
            (version,) = self._db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        self._version = self._stored_version = version

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        with self._lock:
            self._db.close()

    def record(self, event: Event) -> None:
        """Keep an event until the next flush."""
        self._events.append(event)
        self.recorded += 1

    def trained_through(self, version: int) -> None:
        """Mark the batches of steps below `version` trained: it is committed, and of the present history."""
        self._version = max(self._version, version)

    def rewound(self, step: int) -> None:
        """Mark the batches from `step` on batched, not trained: a new incarnation of the trainer began there and trains them again."""
        self._version = min(self._version, step)

    # -- writing, in a worker thread -------------------------------------------------------------------------------------------

    def flush(self, recorded: int | None = None) -> None:
        """Write the first `recorded` events, or all so far, in one transaction. Call it before a batch is renamed into place, and after.

        Raises:
            UserError: the disk is full, or another program keeps the file locked: a later flush writes the events. Or they contradict
                what is written.
        """
        with self._lock:
            events = self._events[: (self.recorded if recorded is None else recorded) - self._written]
            version = self._version
            if not events and version == self._stored_version:
                return
            with self._transaction():
                for event in events:
                    self._apply(event)
                self._set_version(version)
            del self._events[: len(events)]
            self._written += len(events)
            self._stored_version = version

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _file_errors(self.path):
            faults.point("ledger:begin")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                faults.point("ledger:commit", _rollback_file(self.path))
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            faults.point("ledger:committed")

    def _apply(self, event: Event) -> None:
        """Write one event. Raises UserError where it cannot have happened."""
        match event:
            case Opened(group, task):
                self._change(event, _INSERT_GROUP, group, task.env, task.index, task.task_id)
            case Issued(start, incarnation):
                if not self._update(_REISSUE, start.version, incarnation, *start.key):
                    self._change(event, _ISSUE, *start.key, start.version, incarnation)
                    self._count_issued(start.task.env, 1)
            case Finished(start, first, last, result, incarnation):
                tokens = sum(len(sample.input_ids) for sample in result.samples)
                lengths = tokens, output_tokens(result)
                values = (incarnation, first, last, result.reward, *lengths, result.is_truncated)
                self._change(event, _FINISH, *values, *start.key)
                self._update("INSERT OR REPLACE INTO results VALUES (?, ?)", start.episode, pack_result(result))
            case Dropped(start, reason, detail, retried):
                left = f"{_END} AND state IN ('issued', 'finished')"
                self._change(event, left, "dropped", None, reason, detail, retried, *start.key)
                self._update("DELETE FROM results WHERE id = ?", start.episode)
            case Discarded(group, step, reason, detail):
                self._close_group(event, group, "discarded", step)
                drop = "UPDATE episodes SET state = 'dropped', reason = ?, detail = ?, life = NULL"
                self._update(f"{drop} WHERE group_number = ? AND state = 'finished'", reason, detail, group)
            case Batched(step, groups):
                for group in groups:
                    self._close_group(event, group, "batched", step)
                for name, state, why in _outcomes(event):
                    end = (state, None if why else step, why or None, event.details.get(name, ""), False)
                    self._change(event, f"{_END} AND state = 'finished'", *end, *_key(name))
                for group in groups:
                    left_out = "SELECT COUNT(*) FROM episodes WHERE group_number = ? AND state = 'finished'"
                    if count := self._db.execute(left_out, (group,)).fetchone()[0]:
                        raise UserError(
                            f"{_FAULT}: the batch of step {step} leaves {count} episodes of group {group} out"
                        )

    def _update(self, statement: str, *values: object) -> int:
        """Execute a statement. Returns how many rows it changed."""
        return self._db.execute(statement, values).rowcount

    def _change(self, event: Event, statement: str, *values: object) -> None:
        if self._update(statement, *values) != 1:
            raise UserError(f"{_FAULT}: {event} does not follow what {self.path.name} holds")

    def _close_group(self, event: Event, group: int, state: str, step: int) -> None:
        self._change(event, _CLOSE_GROUP, state, step, group)
        self._forget_results(group)

    def _forget_results(self, group: int) -> None:
        self._update("DELETE FROM results WHERE id IN (SELECT id FROM episodes WHERE group_number = ?)", group)

    def _count_issued(self, env: str, count: int) -> None:
        add = "ON CONFLICT (env) DO UPDATE SET count = count + excluded.count"
        self._update(f"INSERT INTO issued VALUES (?, ?) {add}", env, count)

    def _set_version(self, version: int) -> None:
        self._update("UPDATE meta SET value = ? WHERE key = 'version'", version)
        self._update("UPDATE episodes SET state = 'trained' WHERE state = 'batched' AND step < ?", version)
        if version < self._stored_version:
            self._update("UPDATE episodes SET state = 'batched' WHERE state = 'trained' AND step >= ?", version)

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Counts]:
        """Read counts by environment of all that was flushed."""
        with _file_errors(self.path), self._lock:
            return read_counts(self._db)

    def check(self, held: int) -> dict[str, Counts]:
        """Read counts by environment and check that episodes are conserved: issued = trained + dropped + in flight.

        Args:
            held: Episodes that the scheduler holds, after the events that were flushed: issued, not dropped, and in no batch.

        Raises:
            UserError: they are not; the message has the difference.
        """
        counts = self.counts()
        wrong = [f"{env}: {one.difference:+d} of {one}" for env, one in counts.items() if one.difference]
        stored = sum(one.in_flight + one.finished for one in counts.values())
        if stored != held:
            wrong.append(
                f"{stored} are in flight or finished, of which the scheduler holds {held} ({stored - held:+d})"
            )
        if wrong:
            raise UserError(f"{_FAULT}: issued = trained + dropped + in flight does not hold: {'; '.join(wrong)}")
        return counts

    @property
    def groups_opened(self) -> int:
        """Groups that were opened, as far as the ledger knows: their numbers count up from 0."""
        with _file_errors(self.path), self._lock:
            return self._db.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM groups").fetchone()[0]

    def open_groups(self, group_size: int) -> list[Group[EpisodeResult]]:
        """Read the groups that are neither batched nor discarded, in the order of opening. What was in flight is started again, same attempt."""
        groups: dict[int, Group[EpisodeResult]] = {}
        with _file_errors(self.path), self._lock:
            for opened, env, index, task_id, number, *episode in self._db.execute(_OPEN_GROUPS):
                slots = {place: GroupSlot(place) for place in range(group_size)}
                group = groups.setdefault(opened, Group(opened, Task(env, index, task_id), slots))
                if number is None:  # no episode of it was issued
                    continue
                attempt, state, retried, version, incarnation, first, last, data = episode
                slot = group.slots[number] = GroupSlot(number, attempt)  # the latest attempt comes last
                if state == "issued":
                    slot.state = State.RETRY
                elif state == "finished":
                    start = Start(opened, number, attempt, group.task, version)
                    if data is None:
                        raise UserError(_damaged(self.path, f"the tokens of episode {start.episode} are missing"))
                    slot.state = State.FINISHED
                    group.finished.append(Finished(start, first, last, unpack_result(data), incarnation))
                elif retried:
                    slot.attempt += 1
                else:
                    slot.state = State.FAILED
        return list(groups.values())

    def discarded_groups(self, step: int) -> list[DiscardedGroup]:
        """Read the complete groups that were discarded while `step` was collected, in the order of opening, as far as they were flushed."""
        groups: dict[int, DiscardedGroup] = {}
        with _file_errors(self.path), self._lock:
            for number, env, index, task_id, detail, reward in self._db.execute(_DISCARDED, (step,)):
                group = groups.setdefault(number, DiscardedGroup(number, Task(env, index, task_id), detail, []))
                group.rewards.append(reward)
        return list(groups.values())

    # -- reconciling -----------------------------------------------------------------------------------------------------------

    def reconcile(self, batches: Sequence[BatchRecord], version: int, step: int | None = None) -> list[str]:
        """Make the ledger agree with the committed batches. Call it at start, before `open_groups`.

        Args:
            batches: Records of all batches that stand in the run directory (`read_batches`), by step.
            version: The newest committed version of the present history: steps below it are trained, later ones will be trained again.
            step: The step that is collected next; groups discarded while later ones were collected, whose batches are gone, count for it.

        Returns:
            What had to be mended, for the log; empty when ledger and manifests agree.
        """
        mended: list[str] = []
        with self._lock, self._transaction():
            query = "SELECT DISTINCT step FROM episodes WHERE state IN ('batched', 'trained')"
            known = {known for (known,) in self._db.execute(query).fetchall()}
            rebuilt: BatchRecord | None = None
            for batch in batches:
                trained = batch.event.step in known and batch.event.step < min(version, self._version)
                if not trained and self._apply_batch(batch, mended):
                    rebuilt = batch
            if rebuilt is not None:
                self._carry(rebuilt, mended)
            for gone in sorted(known - {batch.event.step for batch in batches}):
                if gone >= version:
                    self._forget_batch(gone, [], f"the batch of step {gone} is gone", mended)
            if step is not None:
                self._update("UPDATE groups SET step = ?1 WHERE state = 'discarded' AND step > ?1", step)
            self._set_version(version)
        self._version = self._stored_version = version
        return mended

    def _apply_batch(self, batch: BatchRecord, mended: list[str]) -> bool:
        """Make the rows say what `batch` says. Returns whether it holds episodes or groups that the ledger did not know."""
        step, env_of = batch.event.step, {number: env for number, env, *_ in batch.groups}
        self._forget_batch(step, batch.event.trained, f"the batch of step {step} was replaced", mended)
        changed = unknown = 0
        for group in batch.groups:
            unknown += self._update(_INSERT_GROUP, *group)
            self._forget_results(group[0])
        for name, state, reason in _outcomes(batch.event):
            key = _key(name)
            if self._update(_ISSUE_UNKNOWN, *key):
                self._count_issued(env_of[key[0]], 1)
                unknown += 1
            right = "state = 'dropped' AND reason = ?" if reason else "state IN ('batched', 'trained') AND step = ?"
            end = (state, None if reason else step, reason or None, batch.event.details.get(name, ""), False)
            changed += self._update(f"{_END} AND NOT ({right})", *end, *key, reason or step)
        for number in env_of:
            detail = f"the batch of step {step} was committed without it"
            changed += self._update(f"{_CANCEL} WHERE group_number = ? AND state IN ('issued', 'finished')", detail, number)  # fmt: skip
            self._update("UPDATE groups SET state = 'batched', step = ? WHERE number = ?", step, number)
        if changed:
            mended.append(f"step {step} is committed: {changed} episodes brought to what its manifest says")
        return bool(unknown)

    def _forget_batch(self, step: int, kept: Sequence[str], detail: str, mended: list[str]) -> None:
        """Drop episodes that the ledger has in the batch of `step`, but for those in `kept`: they are in no batch, and their tokens are gone."""
        query = "SELECT id FROM episodes WHERE state IN ('batched', 'trained') AND step = ?"
        gone = {name for (name,) in self._db.execute(query, (step,)).fetchall()} - set(kept)
        for name in gone:
            self._update(f"{_CANCEL} WHERE {_KEY}", detail, *_key(name))
        if gone:
            mended.append(f"{detail}: {len(gone)} episodes of it are dropped")

    def _carry(self, newest: BatchRecord, mended: list[str]) -> None:
        """After the ledger was lost, store what only the newest manifest counted as totals; drop what was open then."""
        now, carried = read_counts(self._db), 0
        for env, then in newest.counts.items():
            have = now.get(env, Counts())
            missing = Counter(
                {("dropped", why): count - have.dropped.get(why, 0) for why, count in then.dropped.items()}
            )
            missing["trained", ""] = then.trained + then.batched - have.trained - have.batched
            still_open = then.in_flight + then.finished - have.in_flight - have.finished
            missing["dropped", str(Drop.CANCELLED)] += max(0, still_open)
            for (state, reason), count in missing.items():
                if count > 0:
                    add = "ON CONFLICT (env, state, reason) DO UPDATE SET count = count + excluded.count"
                    self._update(f"INSERT INTO carried VALUES (?, ?, ?, ?) {add}", env, state, reason, count)
                    self._count_issued(env, count)
                    carried += count
        mended.append(
            f"the ledger was rebuilt from the batches' manifests up to step {newest.event.step}; {carried} episodes are known by number only, "
            "those that waited for a batch then are dropped (cancelled)"
        )


# -- going on with a run -----------------------------------------------------------------------------------------------------------


def open_ledger(output_dir: Path, seed: int, progress: ResumePoint) -> Ledger:
    """Open the run's ledger.

    Raises:
        UserError: it is damaged, or belongs to a run that this one would be mixed with.
    """
    ledger = Ledger(output_dir / LEDGER)
    try:
        issued = total(ledger.counts()).issued
        if progress.fresh and issued:
            ways = suggestions(output_dir, saved=False)
            raise UserError(f"{ledger.path} has {issued} episodes of an earlier run: {ways}")
        refuse_other_seed(progress, seed)
    except UserError:
        ledger.close()
        raise
    return ledger


def restore(
    scheduler: Scheduler[EpisodeResult],
    ledger: Ledger,
    rollouts: Path,
    progress: ResumePoint,
    stream: Iterator[Task],
    version: int,
    curriculum: Curriculum,
) -> Counts:
    """Restore what an earlier orchestrator left into `scheduler`, and draw `stream` to where it was.

    Where the ledger is missing (a checkpoint that was taken elsewhere), groups that were open then are left out.

    Args:
        stream: The task stream from its beginning.
        version: The newest committed version of the present history.
        curriculum: Difficulty pools as at the beginning of a run; they go on from the saved state.

    Returns:
        Counts over all environments at the last committed batch, or now if that batch was removed.

    Raises:
        UserError: the ledger's tasks are not the ones that the stream gives.
    """
    state, batches = progress.state, read_batches(rollouts)
    for line in ledger.reconcile(batches, version, progress.step):
        logger.warning("ledger: {}", line)
    # Pools change only at batch commits, so draws after `state` repeat exactly; for draws before it, only the choice of
    # environment matters.
    tasks = list(itertools.islice(stream, state.groups_opened))
    curriculum.load(state.curriculum)
    tasks += itertools.islice(stream, max(0, ledger.groups_opened - len(tasks)))
    scheduler.groups_opened = len(tasks)
    groups = ledger.open_groups(scheduler.limits.group_size)
    for group in groups:
        task, pools = group.task, curriculum.pools.get(group.task.env)
        if (pools.task(task.index) if pools is not None else tasks[group.number]) != task:
            drawn = tasks[group.number]
            raise UserError(
                f"group {group.number} is about task {task.task_id} of {task.env}, but the seed and the environments give "
                f"{drawn.task_id} of {drawn.env}: go on with those that the run began with"
            )
    scheduler.restore(groups)
    if groups:
        finished = sum(len(group.finished) for group in groups)
        retried = sum(slot.state is State.RETRY for group in groups for slot in group.slots.values())
        logger.info(
            "{} open groups go on, with {} finished episodes; {} are started again", len(groups), finished, retried
        )
    newest = next((batch for batch in batches if batch.event.step == progress.step - 1), None)
    before = newest.counts if newest is not None else ledger.counts() if progress.step else {}
    return total(before)


def _key(episode: str) -> tuple[int, int, int]:
    """Split `group.number.attempt`."""
    group, number, attempt = map(int, episode.split("."))
    return group, number, attempt


def _outcomes(batch: Batched) -> Iterator[tuple[str, str, str]]:
    """Yield each episode of a batch, the state that it gets, and the reason of a drop."""
    yield from ((name, "batched", "") for name in batch.trained)
    yield from ((name, "dropped", str(Drop.FILTERED)) for name in batch.filtered)
    yield from ((name, "dropped", str(Drop.TRUNCATED)) for name in batch.truncated)


# -- results -----------------------------------------------------------------------------------------------------------------------


def pack_result(result: EpisodeResult) -> bytes:
    """Pack a result as on the wire, but for eight of the mask a byte."""
    data = pack_episode(result)
    for sample in data["samples"]:
        sample["loss_mask"] = np.packbits(as_array(sample["loss_mask"], np.bool_)).tobytes()
    return msgpack.packb(data)


def unpack_result(data: bytes) -> EpisodeResult:
    """Invert `pack_result`."""
    values = {"parts": [], **msgpack.unpackb(data)}  # an earlier release knew no parts
    for sample in values["samples"]:
        tokens = len(sample["input_ids"]) // 4
        sample["loss_mask"] = np.unpackbits(np.frombuffer(sample["loss_mask"], dtype=np.uint8), count=tokens).tobytes()
    return unpack_episode(values)


# -- the file ----------------------------------------------------------------------------------------------------------------------


def _create(path: Path) -> None:
    """Make an empty ledger. Raises UserError where a crashed transaction of another one would be rolled back into it."""
    if (left := _rollback_file(path)).exists():
        raise UserError(f"{left} stands there without its ledger: put {path.name} back beside it, or move it away")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clean_stages(path.parent, path.name)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            write_atomically(path, db.serialize())


def connect(path: Path) -> sqlite3.Connection:
    """Open an existing ledger; a transaction that a crash cut short is rolled back.

    Raises:
        UserError: it is damaged, truncated, locked or of another format. Nothing is written then.
    """
    with _file_errors(path):
        db = _open(path)
        try:
            _check(db, path)
        except BaseException:
            db.close()
            raise
    return db


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise UserError(f"{path} does not exist: the run has no ledger")
    quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{quoted}?mode=rw", uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)  # fmt: skip


def _check(db: sqlite3.Connection, path: Path) -> None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        raise UserError(_damaged(path, "it is no ledger"))
    row = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    if row is None or row[0] != FORMAT:
        format_ = row[0] if row else "unknown"
        raise UserError(
            f"{path} has format {format_}; this version reads format {FORMAT}: go on with the version that wrote it"
        )
    if (problem := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise UserError(_damaged(path, problem.splitlines()[-1]))


@contextmanager
def open_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Copy a ledger that may be in use, and open the copy. The writer waits for the copy alone, not for its check or its reader.

    Raises:
        UserError: there is no ledger, it is locked, or it is damaged.
    """
    with _file_errors(path):
        db, copy = _open(path), sqlite3.connect("")  # "": a temporary file
        try:
            db.backup(copy)
            db.close()
            _check(copy, path)
            yield copy
        finally:
            db.close()
            copy.close()


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn what sqlite and the system say about the file, the disk and its locks into a `UserError`; everything else passes."""
    try:
        with disk_errors(path):
            yield
    except sqlite3.Error as error:
        match (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF:
            case sqlite3.SQLITE_FULL:
                what = f"disk full while writing {path}: nothing was committed; free space and start again"
            case sqlite3.SQLITE_BUSY:
                what = f"{path} is locked by another program for more than {_BUSY_SECONDS:.0f} s: end it (readers copy the file first)"
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
                what = f"cannot read or write {path} ({error}): check the disk and the permissions, then start again"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                what = _damaged(path, str(error))
            case _:
                raise
        raise UserError(what) from error


def _rollback_file(path: Path) -> Path:
    """Where sqlite keeps the old pages during a transaction."""
    return path.with_name(f"{path.name}-journal")


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged ({what}). Put back a good copy; or move {path.name}* out of the way and start again: it is then rebuilt from the "
        "committed batches, without what was in flight or waited for a batch"
    )
