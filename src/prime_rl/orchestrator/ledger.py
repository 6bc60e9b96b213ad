"""The ledger: every episode from its issue to its end, in `ledger.sqlite` of the run directory. It is the only count of episodes there is.

An episode `group.number.attempt` is *issued*, then *finished* or *dropped*; a finished one is *batched* with the batch that holds it, and *trained*
once the version after that step is committed. `record` only keeps an event; `flush` applies all that were recorded in one transaction, and refuses
what cannot have happened. The rename of `rollouts/step_n` is the commit of a batch: its manifest says which episodes are in it, and the ledger is an
index that `reconcile` brings to what the manifests say. A finished episode is stored with its tokens until its batch is committed.
"""

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_rl import faults
from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.orchestrator import ledger_file
from prime_rl.orchestrator.admission import output_tokens
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
    Start,
    State,
    Task,
)
from prime_rl.transport.commit import CommitError, disk_errors, list_steps, read_manifest

_FAULT = "episodes are lost or counted twice, so the run stops (a fault of prime-rl)"
_KEY = "group_number = ? AND number = ? AND attempt = ?"
_INSERT_GROUP = "INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, 'open', NULL)"
_INSERT_ISSUED = """
    INSERT OR IGNORE INTO episodes (group_number, number, attempt, state, detail, retried, version, life)
    SELECT ?1, ?2, ?3, 'issued', '', 0, ?4, ?5
    WHERE EXISTS (SELECT 1 FROM groups WHERE number = ?1 AND state = 'open') AND (?3 = 0 OR EXISTS (
        SELECT 1 FROM episodes WHERE group_number = ?1 AND number = ?2 AND attempt = ?3 - 1 AND retried
    ))"""
_INSERT_UNKNOWN = """
    INSERT OR IGNORE INTO episodes (group_number, number, attempt, state, detail, retried) VALUES (?, ?, ?, 'issued', '', 0)"""
_FINISH = f"""
    UPDATE episodes SET state = 'finished', life = ?, first = ?, last = ?, reward = ?, tokens = ?, output_tokens = ?, is_truncated = ?
    WHERE {_KEY} AND state = 'issued'"""
_CLOSE_GROUP = """
    UPDATE groups SET state = ?, step = ? WHERE number = ? AND state = 'open' AND NOT EXISTS (
        SELECT 1 FROM episodes WHERE group_number = groups.number AND episodes.state = 'issued'
    )"""
_CANCELLED = "state = 'dropped', reason = 'cancelled', detail = ?, step = NULL, retried = 0, life = NULL"
_EPISODES_OF = """
    SELECT number, attempt, state, retried, version, life, first, last, data
    FROM episodes LEFT JOIN results ON results.id = episodes.id WHERE group_number = ? ORDER BY number, attempt"""
_DISCARDED = """
    SELECT g.number, env, task_index, task_id, detail, reward FROM groups g JOIN episodes e ON e.group_number = g.number
    WHERE g.state = 'discarded' AND g.step >= ? AND e.state = 'dropped' AND reason IN ('filtered', 'truncated')
    ORDER BY g.number, e.number"""
# What ends needs neither its tokens nor its incarnation any more.
_LEAVE = f"UPDATE episodes SET state = ?, step = ?, reason = ?, detail = ?, retried = ?, life = NULL WHERE {_KEY} "


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
        """Episodes that were issued and are nowhere now; 0 if they are conserved."""
        return self.issued - (self.trained + sum(self.dropped.values()) + self.in_flight + self.finished + self.batched)

    def add(self, state: str, reason: str, count: int) -> None:
        """Count episodes in a state of the table `episodes`."""
        if state == "dropped":
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        else:
            name = "in_flight" if state == "issued" else state
            setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True)
class BatchRecord:
    """What the manifest of `rollouts/step_n` says about episodes; `batch_extra` writes it."""

    step: int
    trained: list[str]
    filtered: list[str]
    truncated: list[str]
    groups: list[tuple[int, str, int, str]]  # (number, env, task index, task id)
    groups_opened: int
    counts: dict[str, Counts]  # by environment, with this batch counted as batched
    details: dict[str, str] = field(default_factory=dict)  # which filter left an episode out


@dataclass(frozen=True)
class DiscardedGroup:
    """A complete group that left without a batch: why, and the rewards of its finished episodes in their order."""

    number: int
    task: Task
    reason: str
    rewards: list[float]


def read_counts(db: sqlite3.Connection) -> dict[str, Counts]:
    """Counts by environment; `issued` is what was counted when they were issued, the rest is what the rows say."""
    counts = {env: Counts(issued=count) for env, count in db.execute("SELECT env, count FROM issued ORDER BY env")}
    rows = """
        SELECT env, e.state, reason, COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number GROUP BY 1, 2, 3
        UNION ALL SELECT env, state, reason, count FROM carried ORDER BY 1, 2, 3
    """
    for env, state, reason, count in db.execute(rows):
        counts.setdefault(env, Counts()).add(state, reason, count)
    return counts


def total(counts: Mapping[str, Counts]) -> Counts:
    """All environments together."""
    summed = Counts()
    for one in counts.values():
        summed.issued += one.issued
        for state in ("in_flight", "finished", "batched", "trained"):
            summed.add(state, "", getattr(one, state))
        for reason, count in one.dropped.items():
            summed.add("dropped", reason, count)
    return summed


def batch_extra(
    event: Batched, groups: Sequence[Group[Any]], opened: int, counts: Mapping[str, Counts]
) -> dict[str, Any]:
    """What the manifest of a batch must say (`write_batch(extra=…)`), so that the ledger can be reconciled with it.

    Args:
        event: The batch, as it will be recorded once it is committed.
        groups: Its groups.
        opened: Groups opened so far.
        counts: Of the ledger, without this batch. They are changed: they have it counted as batched.
    """
    env = {group.number: group.task.env for group in groups}
    for names, state, reason in _fates(event):
        for name in names:
            its = counts[env[_key(name)[0]]]
            its.finished -= 1
            its.add(state, reason, 1)
    listed: dict[str, Any] = {reason or "trained": list(names) for names, _, reason in _fates(event)}
    listed |= {"details": dict(event.details)} if event.details else {}
    listed["groups"] = [[group.number, group.task.env, group.task.index, group.task.task_id] for group in groups]
    listed["account"] = {env: asdict(its) for env, its in sorted(counts.items())}
    return {"groups_opened": opened, "ledger": listed}


def read_batches(rollouts: Path) -> list[BatchRecord]:
    """The records of all committed batches under `rollouts`, by step.

    Raises:
        UserError: a committed batch's manifest cannot be read, or lists no episodes.
    """
    records = []
    for step in list_steps(rollouts):
        directory = rollouts / f"step_{step}"
        try:
            extra = read_manifest(directory).extra
            data = extra["ledger"]
            groups = [(int(number), str(env), int(index), str(task)) for number, env, index, task in data["groups"]]
            trained, filtered, truncated = (list(data[name]) for name in ("trained", "filtered", "truncated"))
            counts, details = (
                {env: Counts(**its) for env, its in data["account"].items()},
                dict(data.get("details", {})),
            )
            opened = int(extra["groups_opened"])
            records.append(BatchRecord(step, trained, filtered, truncated, groups, opened, counts, details))
        except CommitError as error:
            if directory.exists():  # else it was pruned since it was listed
                raise UserError(f"{error}: move the directory away, or put back a good copy") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory} does not say which episodes it holds ({error!r}): another version wrote it"
            ) from error
    return records


class Ledger:
    """One run's ledger. One writer: the orchestrator. `record` belongs to one thread; the rest may run in another at the same time.

    Args:
        path: `ledger.sqlite`; made if it is missing (then `reconcile` rebuilds what the manifests know). None: in memory alone.

    Raises:
        UserError: the file is damaged, truncated, locked or of a newer format; it is left as it is.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path("ledger.sqlite")
        if path is not None and not path.exists():
            ledger_file.create(path)
        self._db = ledger_file.in_memory() if path is None else ledger_file.connect(path)
        self._lock = threading.Lock()  # bounded: held for one transaction, whose own wait sqlite bounds
        self._events: list[Event] = []  # not written yet; one thread appends, another cuts, each in one operation
        self._recorded = self._written = 0
        with ledger_file.file_errors(self.path):
            meta = dict(self._db.execute("SELECT key, value FROM meta"))
        self.groups_opened: int = meta["groups_opened"]  # when it was opened or reconciled
        self._version = self._stored_version = meta["version"]

    # -- recording -------------------------------------------------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Keep an event until the next flush."""
        self._events.append(event)
        self._recorded += 1

    @property
    def recorded(self) -> int:
        """How many events were recorded so far."""
        return self._recorded

    def trained_through(self, version: int) -> None:
        """`version` of the present history is committed: batches of steps below it are trained."""
        self._version = max(self._version, version)

    def rewound(self, step: int) -> None:
        """A new incarnation of the trainer began at `step`: batches from there on are trained again, so they are batched, not trained."""
        self._version = min(self._version, step)

    # -- writing, in a worker thread -------------------------------------------------------------------------------------------

    def flush(self, recorded: int | None = None) -> None:
        """Write the first `recorded` events, or all so far, in one transaction. Call it before a batch is renamed into slot, and after.

        Raises:
            UserError: the disk is full, or another program keeps the file locked: a later flush writes the events. Or they contradict
                what is written.
        """
        with self._lock:
            events = self._events[: (self._recorded if recorded is None else recorded) - self._written]
            version = self._version
            if not events and version == self._stored_version:
                return
            gone = {event.start.episode for event in events if isinstance(event, Dropped)}
            closed = {event.group for event in events if isinstance(event, Discarded)}
            packed = {
                event.start.episode: ledger_file.pack_result(event.result)
                for event in events
                if isinstance(event, Finished) and event.start.episode not in gone and event.start.group not in closed
            }
            with self._transaction():
                issued: Counter[str] = Counter()
                for event in events:
                    self._apply(event, packed, issued)
                self._count_issued(issued)
                self._set_version(version)
            del self._events[: len(events)]
            self._written += len(events)
            self._stored_version = version

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with ledger_file.file_errors(self.path), disk_errors(self.path):
            faults.point("ledger:begin")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                faults.point("ledger:commit", ledger_file.journal_of(self.path))
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            faults.point("ledger:committed")

    def _apply(self, event: Event, packed: Mapping[str, bytes], issued: Counter[str]) -> None:
        """Write one event.

        Raises:
            UserError: it cannot have happened.
        """
        match event:
            case Opened(group, task):
                self._change(event, _INSERT_GROUP, (group, task.env, task.index, task.task_id))
                self._raise_groups_opened(group + 1)
            case Issued(start, incarnation):
                reissue = f"UPDATE episodes SET version = ?, life = ? WHERE {_KEY} AND state = 'issued'"
                if self._db.execute(reissue, (start.version, incarnation, *start.key)).rowcount == 0:
                    self._change(event, _INSERT_ISSUED, (*start.key, start.version, incarnation))
                    issued[start.task.env] += 1
            case Finished(start, first, last, result, incarnation):
                tokens = sum(len(sample.input_ids) for sample in result.samples)
                values = (first, last, result.reward, tokens, output_tokens(result), result.is_truncated)
                self._change(event, _FINISH, (incarnation, *values, *start.key))
                if data := packed.get(start.episode):
                    self._db.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", (start.episode, data))
            case Dropped(start, reason, detail, retried):
                open_still = "AND state IN ('issued', 'finished')"
                self._change(event, _LEAVE + open_still, ("dropped", None, reason, detail, retried, *start.key))
                self._db.execute("DELETE FROM results WHERE id = ?", (start.episode,))
            case Discarded(group, step, reason, detail):
                self._close_group(event, group, "discarded", step)
                leave = "SET state = 'dropped', reason = ?, detail = ?, life = NULL"
                finished = "WHERE group_number = ? AND state = 'finished'"
                self._db.execute(f"UPDATE episodes {leave} {finished}", (reason, detail, group))
            case Batched():
                self._apply_batched(event)

    def _apply_batched(self, event: Batched) -> None:
        for group in event.groups:
            self._close_group(event, group, "batched", event.step)
        for names, state, reason in _fates(event):
            step = event.step if state == "batched" else None
            for name in names:
                values = (state, step, reason or None, event.details.get(name, ""), False, *_key(name))
                self._change(event, _LEAVE + "AND state = 'finished'", values)
        left = "SELECT COUNT(*) FROM episodes WHERE group_number = ? AND state = 'finished'"
        for group in event.groups:
            if count := self._db.execute(left, (group,)).fetchone()[0]:
                raise UserError(
                    f"{_FAULT}: the batch of step {event.step} leaves {count} episodes of group {group} out"
                )

    def _change(self, event: Event, statement: str, values: tuple[object, ...]) -> None:
        if self._db.execute(statement, values).rowcount != 1:
            raise UserError(f"{_FAULT}: {event} does not follow what {self.path.name} holds")

    def _close_group(self, event: Event, group: int, state: str, step: int) -> None:
        self._change(event, _CLOSE_GROUP, (state, step, group))
        self._forget_results(group)

    def _forget_results(self, group: int) -> None:
        self._db.execute("DELETE FROM results WHERE id IN (SELECT id FROM episodes WHERE group_number = ?)", (group,))

    def _raise_groups_opened(self, opened: int) -> None:
        self._db.execute("UPDATE meta SET value = MAX(value, ?) WHERE key = 'groups_opened'", (opened,))

    def _count_issued(self, issued: Mapping[str, int]) -> None:
        statement = "INSERT INTO issued VALUES (?, ?) ON CONFLICT (env) DO UPDATE SET count = count + excluded.count"
        self._db.executemany(statement, sorted(issued.items()))

    def _set_version(self, version: int) -> None:
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'version'", (version,))
        self._db.execute("UPDATE episodes SET state = 'trained' WHERE state = 'batched' AND step < ?", (version,))
        if version < self._stored_version:
            self._db.execute("UPDATE episodes SET state = 'batched' WHERE state = 'trained' AND step >= ?", (version,))

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Counts]:
        """Counts by environment of all that was flushed."""
        with ledger_file.file_errors(self.path), self._lock:
            return read_counts(self._db)

    def check(self, held: int) -> dict[str, Counts]:
        """Counts by environment, once they are conserved: issued = trained + dropped + in flight.

        Args:
            held: Episodes that the scheduler holds, after the events that were flushed: issued, not dropped, and in no batch.

        Raises:
            UserError: they are not; the message has the difference.
        """
        counts = self.counts()
        wrong = [f"{env}: {one.difference:+d} of {one}" for env, one in counts.items() if one.difference]
        all_of_them = total(counts)
        if (stored := all_of_them.in_flight + all_of_them.finished) != held:
            wrong.append(
                f"{stored} are in flight or finished, of which the scheduler holds {held} ({stored - held:+d})"
            )
        if wrong:
            raise UserError(f"{_FAULT}: issued = trained + dropped + in flight does not hold: {'; '.join(wrong)}")
        return counts

    def open_groups(self, group_size: int) -> list[Group[EpisodeResult]]:
        """Groups that are neither batched nor discarded, in the order of opening. What was in flight is to be started again, same attempt."""
        groups = []
        with ledger_file.file_errors(self.path), self._lock:
            rows = self._db.execute(
                "SELECT number, env, task_index, task_id FROM groups WHERE state = 'open' ORDER BY 1"
            ).fetchall()
            for number, env, index, task_id in rows:
                group = self._open_group(Group(number, Task(env, index, task_id)), group_size)
                if any(slot.state is not State.FAILED for slot in group.slots.values()):
                    groups.append(group)
        return groups

    def _open_group(self, group: Group[EpisodeResult], size: int) -> Group[EpisodeResult]:
        latest = {number: GroupSlot(number) for number in range(size)}
        rows = self._db.execute(_EPISODES_OF, (group.number,)).fetchall()
        for number, attempt, state, retried, version, incarnation, first, last, data in rows:  # the latest attempt last
            slot = latest[number] = GroupSlot(number, attempt)
            if state == "issued":
                slot.state = State.RETRY
            elif state == "finished":
                if data is None:
                    name = f"{group.number}.{number}.{attempt}"
                    raise UserError(ledger_file.damaged(self.path, f"the tokens of episode {name} are missing"))
                slot.state = State.FINISHED
                start = Start(group.number, number, attempt, group.task, version)
                group.finished.append(Finished(start, first, last, ledger_file.unpack_result(data), incarnation))
            elif retried:
                slot.attempt += 1
            else:
                slot.state = State.FAILED
        group.slots = dict(sorted(latest.items()))
        return group

    def discarded_groups(self, step: int) -> list[DiscardedGroup]:
        """Complete groups that were discarded while `step` was collected, in the order of opening, as far as they were flushed."""
        groups: dict[int, DiscardedGroup] = {}
        with ledger_file.file_errors(self.path), self._lock:
            rows = self._db.execute(_DISCARDED, (step,)).fetchall()
        for number, env, index, task_id, detail, reward in rows:
            group = groups.setdefault(number, DiscardedGroup(number, Task(env, index, task_id), detail, []))
            group.rewards.append(reward)
        return list(groups.values())

    # -- reconciling -----------------------------------------------------------------------------------------------------------

    def reconcile(self, batches: Sequence[BatchRecord], version: int, step: int | None = None) -> list[str]:
        """Bring the ledger to what the committed batches say. Call it at start, before `open_groups`.

        Args:
            batches: Records of all batches that stand in the run directory (`read_batches`).
            version: The newest committed version of the present history: steps below it are trained, later ones will be trained again.
            step: The step that is collected next; groups discarded while later ones were collected, whose batches are gone, count for it.

        Returns:
            What had to be mended, for the log; empty when ledger and manifests agree.
        """
        said: list[str] = []
        rebuilt: BatchRecord | None = None
        with self._lock, self._transaction():
            query = "SELECT DISTINCT step FROM episodes WHERE state IN ('batched', 'trained')"
            known = {step for (step,) in self._db.execute(query).fetchall()}
            for batch in sorted(batches, key=lambda batch: batch.step):
                if batch.step not in known or batch.step >= min(
                    version, self._version
                ):  # else it is known to be trained
                    rebuilt = batch if self._apply_batch(batch, said) else rebuilt
            if rebuilt is not None:
                self._carry(rebuilt, said)
            for step in sorted(step for step in known - {batch.step for batch in batches} if step >= version):
                self._forget_batch(step, [], f"the batch of step {step} is gone", said)
            if step is not None:
                self._db.execute("UPDATE groups SET step = ?1 WHERE state = 'discarded' AND step > ?1", (step,))
            self._set_version(version)
            opened = "SELECT value FROM meta WHERE key = 'groups_opened'"
            self.groups_opened = self._db.execute(opened).fetchone()[0]
        self._version = self._stored_version = version
        return said

    def _apply_batch(self, batch: BatchRecord, said: list[str]) -> bool:
        """Make the rows say what `batch` says. Returns whether it holds episodes or groups that the ledger did not know."""
        self._forget_batch(batch.step, batch.trained, f"the batch of step {batch.step} was replaced", said)
        changed = unknown = 0
        for number, env, index, task_id in batch.groups:
            unknown += self._db.execute(_INSERT_GROUP, (number, env, index, task_id)).rowcount
            self._forget_results(number)
        env_of = {number: env for number, env, *_ in batch.groups}
        event = Batched(batch.step, list(env_of), batch.trained, batch.filtered, batch.truncated)
        issued: Counter[str] = Counter()
        for names, state, reason in _fates(event):
            batched = state == "batched"
            right = (
                "(state IN ('batched', 'trained') AND step = ?)" if batched else "(state = 'dropped' AND reason = ?)"
            )
            for name in names:
                key = _key(name)
                new = self._db.execute(_INSERT_UNKNOWN, key).rowcount
                issued[env_of[key[0]]] += new
                unknown += new
                step, detail = (batch.step, "") if batched else (None, batch.details.get(name, ""))
                values = (state, step, reason or None, detail, False, *key, batch.step if batched else reason)
                changed += self._db.execute(f"{_LEAVE} AND NOT {right}", values).rowcount
        self._count_issued(issued)
        for number in env_of:
            cancel = f"UPDATE episodes SET {_CANCELLED} WHERE group_number = ? AND state IN ('issued', 'finished')"
            changed += self._db.execute(
                cancel, (f"the batch of step {batch.step} was committed without it", number)
            ).rowcount
            self._db.execute("UPDATE groups SET state = 'batched', step = ? WHERE number = ?", (batch.step, number))
            self._raise_groups_opened(number + 1)
        if changed:
            said.append(f"step {batch.step} is committed: {changed} episodes brought to what its manifest says")
        return bool(unknown)

    def _forget_batch(self, step: int, kept: Sequence[str], detail: str, said: list[str]) -> None:
        """Episodes that the ledger has in the batch of `step`, but for those in `kept`, are in no batch: their tokens are gone."""
        query = "SELECT id FROM episodes WHERE state IN ('batched', 'trained') AND step = ?"
        gone = {name for (name,) in self._db.execute(query, (step,)).fetchall()} - set(kept)
        for name in gone:
            self._db.execute(f"UPDATE episodes SET {_CANCELLED} WHERE {_KEY}", (detail, *_key(name)))
        if gone:
            said.append(f"{detail}: {len(gone)} episodes of it are dropped")

    def _carry(self, newest: BatchRecord, said: list[str]) -> None:
        """The ledger was lost: what the newest manifest counts and no row has is kept as numbers; what was open then is dropped."""
        now, carried = read_counts(self._db), 0
        for env, then in newest.counts.items():
            have = now.get(env, Counts())
            missing = {("trained", ""): then.trained + then.batched - have.trained - have.batched}
            for reason, count in then.dropped.items():
                missing["dropped", reason] = count - have.dropped.get(reason, 0)
            still_open = then.in_flight + then.finished - have.in_flight - have.finished
            cancelled = ("dropped", str(Drop.CANCELLED))
            missing[cancelled] = missing.get(cancelled, 0) + max(0, still_open)
            rows = [(env, *key, count) for key, count in missing.items() if count > 0]
            insert = "INSERT INTO carried VALUES (?, ?, ?, ?) ON CONFLICT (env, state, reason) DO UPDATE SET count = count + excluded.count"
            self._db.executemany(insert, rows)
            self._count_issued({env: sum(count for *_, count in rows)})
            carried += sum(count for *_, count in rows)
        self._raise_groups_opened(newest.groups_opened)
        said.append(
            f"the ledger was rebuilt from the batches' manifests up to step {newest.step}; {carried} episodes are known by number only, "
            "those that waited for a batch then are dropped (cancelled)"
        )


def _key(episode: str) -> tuple[int, int, int]:
    """Group, number in it and attempt of `group.number.attempt`."""
    group, number, attempt = map(int, episode.split("."))
    return group, number, attempt


def _fates(batch: Batched) -> list[tuple[Sequence[str], str, str]]:
    """Episodes of a batch, the state that they get, and the reason of a drop."""
    return [
        (batch.trained, "batched", ""),
        (batch.filtered, "dropped", "filtered"),
        (batch.truncated, "dropped", "truncated"),
    ]
