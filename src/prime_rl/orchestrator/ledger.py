"""The ledger: every episode from its issue to its end, in `ledger.sqlite` of the run directory.

An episode `group.number.attempt` is *issued*, then *finished* or *dropped*; a finished one is *batched* with the batch that holds it, and *trained*
once the version after that step is committed. Recording is cheap and in memory, in the order of events; `flush` writes what changed since the
last one in a single transaction. The rename of `rollouts/step_n` is the commit of a batch: its manifest says which episodes are in it, and the
ledger is an index that `reconcile` brings to what the manifests say. A finished episode is stored with its tokens until its batch is committed.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl import faults
from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.orchestrator import ledger_file
from prime_rl.orchestrator.account import Account, EnvAccount
from prime_rl.orchestrator.book import Book, Group, episode_id, parse_id
from prime_rl.orchestrator.ledger_file import Changes, EpisodeRow, GroupRow, State
from prime_rl.transport.commit import CommitError, disk_errors, list_steps, read_manifest

__all__ = [
    "Account",
    "BatchRecord",
    "EnvAccount",
    "Ledger",
    "LeftGroup",
    "OpenGroup",
    "Stored",
    "episode_id",
    "read_batches",
]


@dataclass(frozen=True)
class Stored:
    """A finished episode that is in no batch: issued on `version`, sampled by `first` … `last` as they stood in incarnation `incarnation`."""

    number: int
    attempt: int
    version: int
    incarnation: int
    first: int
    last: int
    result: EpisodeResult


@dataclass
class OpenGroup:
    """A group that is neither batched nor discarded, as far as the ledger knows it: what the core needs to go on."""

    number: int
    env: str
    task_index: int
    task_id: str
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (number in the group, attempt) not issued yet
    again: list[tuple[int, int]] = field(default_factory=list)  # issued, but in flight when the orchestrator died
    finished: list[Stored] = field(default_factory=list)
    lost: int = 0  # ended without a result, and not issued again


@dataclass(frozen=True)
class LeftGroup:
    """A group that left without a batch: what its finished episodes, in their order, were worth."""

    number: int
    env: str
    task_index: int
    task_id: str
    rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class BatchRecord:
    """What the manifest of `rollouts/step_n` says about episodes; `Ledger.batch_extra` writes it."""

    step: int
    trained: list[str]
    filtered: list[str]
    truncated: list[str]
    groups: list[tuple[int, str, int, str]]  # (number, env, task index, task id)
    groups_opened: int
    account: Account  # with this batch counted as batched
    details: dict[str, str] = field(default_factory=dict)  # which filter left an episode out


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
            records.append(_read_record(step, extra["ledger"], extra["groups_opened"]))
        except CommitError as error:
            if directory.exists():  # else it was pruned since it was listed
                raise UserError(f"{error}: move the directory away, or put back a good copy") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{directory} does not say which episodes it holds ({error!r}): another version wrote it"
            ) from error
    return records


def _read_record(step: int, data: dict[str, Any], groups_opened: int) -> BatchRecord:
    groups = [(int(number), str(env), int(index), str(task)) for number, env, index, task in data["groups"]]
    trained, filtered, truncated = (list(data[name]) for name in ("trained", "filtered", "truncated"))
    account, details = Account.from_json(data["account"]), dict(data.get("details", {}))
    return BatchRecord(step, trained, filtered, truncated, groups, groups_opened, account, details)


class Ledger(Book):
    """One run's ledger. One writer: the orchestrator. Recording calls belong to one thread; `flush` may run in another at the same time.

    Args:
        path: `ledger.sqlite`; made if it is missing (then `created` is set, and `reconcile` rebuilds what the manifests know).

    Raises:
        UserError: the file is damaged, truncated, locked or of a newer format; it is left as it is.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.created = not path.exists()
        if self.created:
            ledger_file.create(path)
        self._db = ledger_file.connect(path)
        self._flushing = threading.Lock()  # bounded: held for one transaction, whose own wait sqlite bounds
        with ledger_file.file_errors(path):
            self._load()

    # -- writing, in a worker thread -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write everything recorded so far in one transaction. Call it before a batch is renamed into place, and after.

        Raises:
            UserError: the disk is full, or another program keeps the file locked. What was to be written is kept: a later flush writes it.
        """
        with self._flushing:
            if not self._changed:
                return
            with self._recording:
                taken, changes = self._take()
            written = False
            try:
                self._write(changes)
                written = True
            finally:
                if not written:
                    with self._recording:
                        self._give_back(taken, changes)

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        with self._flushing:
            self._db.close()

    def _write(self, changes: Changes) -> None:
        packed = [(name, ledger_file.pack_result(result)) for name, result in changes.results.items()]
        with ledger_file.file_errors(self.path), disk_errors(self.path):
            faults.point("ledger:begin")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                ledger_file.write(self._db, changes, packed)
                faults.point("ledger:commit", ledger_file.journal_of(self.path))
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            faults.point("ledger:committed")

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def open_groups(self, group_size: int) -> list[OpenGroup]:
        """Groups that are neither batched nor discarded, in the order of opening; what was in flight is to be started again, same attempt."""
        with self._flushing, self._recording:
            groups = [self._open_group(self._groups[number], group_size) for number in sorted(self._groups)]
        return [group for group in groups if group.waiting or group.again or group.finished]

    def left_since(self, step: int) -> list[LeftGroup]:
        """Groups with finished episodes that were discarded while `step` was collected, by number. Call it at start, after `reconcile`.

        `step` is collected from now on: what left at later ones, whose batches are gone, has left at this one.
        """
        found: dict[int, LeftGroup] = {}
        with ledger_file.file_errors(self.path), self._flushing, self._recording:
            self._collecting = step
            for number, env, index, task, reward in self._db.execute(ledger_file.SELECT_LEFT, (step,)).fetchall():
                found.setdefault(number, LeftGroup(number, env, index, task)).rewards.append(reward)
            self._db.execute("UPDATE groups SET step = ? WHERE state = 'discarded' AND step > ?", (step, step))
        return list(found.values())

    def reconcile(self, batches: Sequence[BatchRecord], version: int) -> list[str]:
        """Bring the ledger to what the committed batches say, and flush it. Call it at start, before `open_groups`.

        Args:
            batches: Records of all batches that stand in the run directory (`read_batches`).
            version: The newest committed version of the present history: steps below it are trained, later ones will be trained again.

        Returns:
            What had to be mended, for the log; empty when ledger and manifests agree.
        """
        self.flush()
        said: list[str] = []
        rebuilt: BatchRecord | None = None
        with ledger_file.file_errors(self.path), self._recording:
            for batch in sorted(batches, key=lambda batch: batch.step):
                if batch.step in self._by_step and batch.step < min(version, self._version):
                    continue  # trained, and known to be
                rebuilt = batch if self._apply(batch, said) else rebuilt
            if rebuilt is not None:
                self._carry(rebuilt, said)
            standing = {batch.step for batch in batches}
            for step in sorted(step for step in self._by_step if step >= version and step not in standing):
                self._forget_batch(step, set(), f"the batch of step {step} is gone", said)
            self._rewound |= version < self._version
            self._version, self._changed = version, True
        self.flush()
        return said

    def _load(self) -> None:
        meta = dict(self._db.execute("SELECT key, value FROM meta"))
        self._groups_opened, self._version = meta["groups_opened"], meta["version"]
        self._counts = {
            env: EnvAccount(issued=count) for env, count in self._db.execute("SELECT env, count FROM issued")
        }
        counted = "SELECT env, e.state, reason, e.step, COUNT(*) FROM episodes e JOIN groups g ON g.number = group_number GROUP BY 1, 2, 3, 4"
        for env, state, reason, step, count in self._db.execute(counted).fetchall():
            self._count(env, EpisodeRow(0, 0, 0, state, reason, step=step), count)
        for env, state, reason, count in self._db.execute("SELECT env, state, reason, count FROM carried").fetchall():
            self._add_carried(env, state, reason, count)
        discards = (
            "SELECT detail, COUNT(DISTINCT group_number) FROM episodes e JOIN groups g ON g.number = group_number "
            "WHERE g.state = 'discarded' AND reason = 'filtered' GROUP BY detail"
        )
        self.discards.update(dict(self._db.execute(discards).fetchall()))
        for (number,) in self._db.execute("SELECT number FROM groups WHERE state = 'open'").fetchall():
            group = self._fetch_group(number)
            assert group is not None
            self._groups[number] = group
            self._counts.setdefault(group.row.env, EnvAccount())

    def _fetch_group(self, number: int) -> Group | None:
        """A group as the file has it."""
        values = self._db.execute("SELECT * FROM groups WHERE number = ?", (number,)).fetchone()
        if values is None:
            return None
        rows = self._db.execute(ledger_file.SELECT_EPISODES + "WHERE group_number = ?", (number,)).fetchall()
        episodes = {row.id: self._dirty.get(row.id, row) for row in map(ledger_file.read_episode, rows)}
        return Group(self._dirty_groups.get(number) or GroupRow(*values), episodes)

    def _add_carried(self, env: str, state: str, reason: str, count: int) -> None:
        """Count episodes that are known by number only."""
        self._carried[env, state, reason] += count
        counts = self._counts.setdefault(env, EnvAccount())
        if state == State.TRAINED:
            counts.trained += count
        else:
            counts.dropped[reason] = counts.dropped.get(reason, 0) + count

    def _open_group(self, group: Group, group_size: int) -> OpenGroup:
        row = group.row
        found = OpenGroup(row.number, row.env, row.task_index, row.task_id)
        latest = group.latest()
        for number in sorted({*range(group_size), *latest}):
            episode = latest.get(number)
            if episode is None:
                found.waiting.append((number, 0))
            elif episode.state == State.ISSUED:
                found.again.append((number, episode.attempt))
            elif episode.state == State.FINISHED:
                found.finished.append(self._stored(episode))
            elif episode.retried:
                found.waiting.append((number, episode.attempt + 1))
            else:
                found.lost += 1
        return found

    def _stored(self, row: EpisodeRow) -> Stored:
        assert None not in (row.version, row.incarnation, row.first, row.last)
        result = self._results.get(row.id)
        if result is None:
            with ledger_file.file_errors(self.path):
                data = self._db.execute("SELECT data FROM results WHERE id = ?", (row.id,)).fetchone()
            if data is None:
                raise UserError(ledger_file.damaged(self.path, f"the tokens of episode {row.id} are missing"))
            result = ledger_file.unpack_result(data[0])
        return Stored(row.number, row.attempt, row.version, row.incarnation, row.first, row.last, result)  # type: ignore[arg-type]

    # -- private: reconciling ----------------------------------------------------------------------------------------------------

    def _apply(self, batch: BatchRecord, said: list[str]) -> bool:
        """Make the rows say what `batch` says. Returns whether it holds episodes or groups that the ledger did not know."""
        self._forget_batch(batch.step, set(batch.trained), f"the batch of step {batch.step} was replaced", said)
        targets: dict[int, dict[str, str]] = {number: {} for number, *_ in batch.groups}
        for reason, names in (("", batch.trained), ("filtered", batch.filtered), ("truncated", batch.truncated)):
            for name in names:
                targets[parse_id(name)[0]][name] = reason
        changed, unknown = 0, False
        for number, env, index, task in batch.groups:
            group = self._groups.get(number) or self._fetch_group(number)
            if group is None:
                group, unknown = self._add_group(GroupRow(number, env, index, task)), True
            for name in sorted(targets[number].keys() - group.episodes.keys()):
                self._add_episode(group, EpisodeRow(*parse_id(name)))
                unknown = True
            changed += self._settle(group, targets[number], batch.step, batch.details)
            if (group.row.state, group.row.step) != ("batched", batch.step):
                self._groups[number] = group
                self._close(number, "batched", batch.step)
        if changed:
            said.append(f"step {batch.step} is committed: {changed} episodes brought to what its manifest says")
        return unknown

    def _settle(self, group: Group, targets: dict[str, str], step: int, details: dict[str, str]) -> int:
        """Bring a batched group's episodes to their `targets` (a drop's reason, or "" for trained). Returns how many changed."""
        changed = 0
        for name, row in group.episodes.items():
            reason = targets.get(name)
            if reason is None and row.state in (State.ISSUED, State.FINISHED):
                self._drop(group, row, "cancelled", f"the batch of step {step} was committed without it")
            elif reason == "" and (row.state not in (State.BATCHED, State.TRAINED) or row.step != step):
                self._move(group, row, State.BATCHED, step=step)
            elif reason and (row.state != State.DROPPED or row.reason != reason):
                self._drop(group, row, reason, details.get(name, ""))
            else:
                continue
            changed += 1
        return changed

    def _forget_batch(self, step: int, kept: set[str], detail: str, said: list[str]) -> None:
        """Episodes that the ledger has in the batch of `step`, but for those in `kept`, are in no batch: their tokens are gone."""
        if step not in self._by_step:
            return
        query = "SELECT id, group_number FROM episodes WHERE step = ?"
        gone = [found for found in self._db.execute(query, (step,)).fetchall() if found[0] not in kept]
        for name, number in gone:
            group = self._fetch_group(number)
            assert group is not None
            self._drop(group, group.episodes[name], "cancelled", detail)
        if gone:
            said.append(f"{detail}: {len(gone)} episodes of it are dropped")

    def _carry(self, newest: BatchRecord, said: list[str]) -> None:
        """The ledger was lost: what the newest manifest's account counts and no row tells of is kept as numbers; what was open is dropped."""
        now, carried = self._account(), 0
        for env, then in newest.account.envs.items():
            have = now.envs.get(env, EnvAccount())
            missing = {(State.TRAINED.value, ""): then.trained + then.batched - have.trained - have.batched}
            for reason, count in then.dropped.items():
                missing[State.DROPPED.value, reason] = count - have.dropped.get(reason, 0)
            still_open = then.in_flight + then.finished - have.in_flight - have.finished
            cancelled = (State.DROPPED.value, "cancelled")
            missing[cancelled] = missing.get(cancelled, 0) + max(0, still_open)
            for (state, reason), count in missing.items():
                if count > 0:
                    self._add_carried(env, state, reason, count)
                    self._counts[env].issued += count
                    carried += count
        self._groups_opened = max(self._groups_opened, newest.groups_opened)
        said.append(
            f"the ledger was rebuilt from the batches' manifests up to step {newest.step}; {carried} episodes are known by number only, "
            "those that waited for a batch then are dropped (cancelled)"
        )
