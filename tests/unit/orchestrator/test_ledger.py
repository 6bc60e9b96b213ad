"""The ledger tells of every episode, survives what may happen to it, and agrees with the committed batches."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.orchestrator import ledger as ledger_module
from prime_rl.orchestrator.audit import audit
from prime_rl.orchestrator.ledger import Counts, open_copy, read_batches
from prime_rl.orchestrator.scheduler import State, Task
from support.ledgers import ScriptedLedger, an_episode, commit, execute, finish_group, open_group, stored_counts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path):
    return ScriptedLedger(path)


@pytest.fixture
def rollouts(tmp_path):
    return tmp_path / "rollouts"


def stored_results(path: Path) -> list[str]:
    with open_copy(path) as db:
        return [name for (name,) in db.execute("SELECT id FROM results ORDER BY id")]


def test_an_episode_from_issue_to_training(path, ledger):
    """Every end is counted once, under its state and reason; tokens are kept just as long as they are needed."""
    names = open_group(ledger, 0, size=5)
    for name in names[:3]:
        ledger.finished(name, 0, 1)
    ledger.dropped(names[3], "timeout")
    ledger.dropped(names[4], "errored", "worker died", retried=True)
    ledger.issued("0.4.1", 1)
    ledger.finished("0.4.1", 1, 1)
    ledger.dropped("0.4.1", "stale", "too old")
    ledger.flush()
    assert stored_results(path) == names[:3]
    ledger.batched(0, [names[0]], names[1:3], [0])
    ledger.flush()
    assert stored_results(path) == []
    drops = {"errored": 1, "filtered": 2, "stale": 1, "timeout": 1}
    assert ledger.counts() == ledger.reopened().counts() == Counts(issued=6, batched=1, dropped=drops)


def test_what_cannot_happen_is_refused(path, ledger):
    """An episode neither ends unissued nor twice; a batch names exactly what its groups finished."""
    first, second = open_group(ledger, 0)
    ledger.finished(first)
    for wrong in (
        lambda: ledger.finished(first),
        lambda: ledger.finished("0.7.0"),
        lambda: ledger.finished("9.0.0"),
        lambda: ledger.issued(first),
        lambda: ledger.dropped("0.5.0", "stale"),
        lambda: ledger.batched(0, [second], [], [0]),
        lambda: ledger.discarded(3),
    ):
        before = ledger.counts()
        wrong()
        events = "Issued|Finished|Dropped|Batched|Discarded"
        with pytest.raises(UserError, match=rf"a bug in prime-rl\): ({events}).* does not follow"):
            ledger.flush()
        ledger._events.clear()
        assert stored_counts(path) == ledger.counts() == before


def test_a_lost_episode_stops_the_run(ledger):
    """issued = trained + dropped + in flight, the last as the scheduler has it; else the message has the difference."""
    finish_group(ledger, 0)
    open_group(ledger, 1)
    ledger.flush()
    assert ledger.check(4) == Counts(issued=4, in_flight=2, finished=2)
    with pytest.raises(UserError, match=r"4 are in flight or finished, of which the scheduler holds 3 \(\+1\)"):
        ledger.check(3)
    ledger._db.execute("DELETE FROM episodes WHERE id = '1.0.0'")
    with pytest.raises(UserError, match=r"does not hold: \+1 of .*issued=4, in_flight=1"):
        ledger.check(3)


def test_what_the_scheduler_needs_to_go_on(ledger):
    """Finished episodes come back with tokens; what was in flight starts again under its name, a retry as such."""
    names = open_group(ledger, 3, size=4)
    mine = an_episode(0.25, sampled=17)
    ledger.finished(names[0], 1, 2, 5, mine)
    ledger.dropped(names[1], "timeout", retried=True)
    ledger.dropped(names[2], "errored")
    ledger.flush()
    ledger.finished(names[3])  # never flushed: in flight, for the next incarnation
    ledger = ledger.reopened()
    assert ledger.reconcile([], version=0) == []
    (group,) = ledger.open_groups(6)
    assert (group.number, group.task) == (3, Task("reverse-text", 103, "task-3"))
    assert [(place.number, place.attempt, place.state) for place in group.slots.values()] == [
        *((0, 0, State.FINISHED), (1, 1, State.PENDING), (2, 0, State.FAILED)),
        *((number, 0, State.PENDING) for number in (3, 4, 5)),
    ]
    (finished,) = group.finished
    assert (finished.start.episode, finished.incarnation, finished.first, finished.last) == ("3.0.0", 5, 1, 2)
    assert finished.result == mine
    assert ledger.groups_opened == 4
    ledger.issued("3.3.0", 2, 6)
    assert ledger.counts().issued == 4


@pytest.mark.parametrize(("point", "whole"), [("begin", False), ("commit", False), ("committed", True)])
def test_killed_at_any_point_the_flush_is_there_or_not(tmp_path, path, ledger, monkeypatch, point, whole):
    """One transaction: what a SIGKILL before the commit leaves on the disk is the flush before, after it this one."""
    names = finish_group(ledger, 0)
    ledger.flush()
    finish_group(ledger, 1)
    ledger.batched(0, names, [], [0])
    left = tmp_path / "left"

    def keep(name, file=None):
        if name == f"ledger:{point}":
            shutil.copytree(tmp_path, left)

    monkeypatch.setattr(faults, "point", keep)
    ledger.flush()
    expected = Counts(issued=4, finished=2, batched=2) if whole else Counts(issued=2, finished=2)
    assert stored_counts(left / path.name) == expected
    assert stored_results(left / path.name) == (["1.0.0", "1.1.0"] if whole else ["0.0.0", "0.1.0"])


def test_a_full_disk_or_a_lock_loses_nothing(path, ledger, monkeypatch):
    """The flush fails as a user error within a bounded time, the file is as before, and the next flush writes all."""
    monkeypatch.setattr(ledger_module, "_BUSY_SECONDS", 0.1)
    ledger = ledger.reopened()
    first = finish_group(ledger, 0)
    ledger.flush()
    before = path.read_bytes()
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    second = open_group(ledger, 1)
    for name in second:
        ledger.finished(name, result=an_episode(sampled=50_000))
    with pytest.raises(UserError, match=r"ledger.sqlite \(database or disk is full\).* nothing was committed"):
        ledger.flush()
    assert path.read_bytes() == before
    ledger.batched(0, first, [], [0])
    ledger._db.execute("PRAGMA max_page_count = 100000")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UserError, match="locked by another program"):
            ledger.flush()
    ledger.flush()
    assert stored_counts(path) == ledger.counts()
    assert stored_results(path) == second
    (group,) = ledger.reopened().open_groups(2)
    assert [len(stored.result.samples[0].input_ids) for stored in group.finished] == [50_002, 50_002]


DAMAGED = r"ledger.sqlite is damaged .* move ledger.sqlite\* out of the way"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), DAMAGED),
        (lambda path: os.truncate(path, 0), DAMAGED),
        (lambda path: path.write_bytes(b"x" * 5000), DAMAGED),
        (lambda path: [os.truncate(path, size) for size in (path.stat().st_size // 2, path.stat().st_size)], DAMAGED),
        (lambda path: (path.unlink(), execute(path, "CREATE TABLE other (x)")), DAMAGED),
        (
            lambda path: execute(path, "UPDATE meta SET value = 1 WHERE key = 'format'"),
            "has format 1; this version reads format 2",
        ),
    ],
)
def test_a_bad_file_is_refused_and_left_alone(tmp_path, path, ledger, damage, message):
    """No new ledger is made of it, nor an audit: the error says what to do, and not a byte changes."""
    for number in range(20):
        finish_group(ledger, number)
    ledger.flush()
    ledger.close()
    damage(path)
    before = path.read_bytes()
    for read in (lambda: ScriptedLedger(path), lambda: audit(tmp_path)):
        with pytest.raises(UserError, match=f"^{tmp_path}.*{message}"):
            read()
    assert path.read_bytes() == before


def test_a_crash_between_rename_and_flush(path, ledger, rollouts):
    """The batch is committed though the ledger does not know it: reconciled, it does, and no tokens of it are left."""
    names = [*finish_group(ledger, 0), *finish_group(ledger, 1)]
    finish_group(ledger, 2)
    ledger.issued("0.1.1")  # an older copy of the ledger may know other attempts
    ledger.flush()
    commit(rollouts, 0, names[:3], names[3:], [0, 1])
    ledger = ledger.reopened()
    said = ledger.reconcile(read_batches(rollouts), version=0)
    assert said == ["step 0 is committed: its 4 episodes are recorded"]
    ledger = ledger.reopened()
    assert ledger.counts() == Counts(issued=7, finished=2, batched=3, dropped={"cancelled": 1, "filtered": 1})
    assert stored_results(path) == ["2.0.0", "2.1.0"]
    assert audit(path.parent)[1] == []
    assert [group.number for group in ledger.open_groups(2)] == [2]
    assert ledger.reconcile(read_batches(rollouts), version=1) == []


def test_a_batch_that_is_gone_is_collected_again(ledger, rollouts):
    """Somebody moved a committed batch away: its episodes are dropped, and the log says so, once."""
    names = [finish_group(ledger, number) for number in range(2)]
    for step in range(2):
        ledger.batched(step, names[step], [], [step])
    ledger.flush()
    commit(rollouts, 0, names[0], [], [0])
    ledger = ledger.reopened()
    gone = "the batch of step 1 is gone: 2 episodes of it are dropped"
    assert ledger.reconcile(read_batches(rollouts), version=0) == [gone]
    assert ledger.counts() == Counts(issued=4, batched=2, dropped={"cancelled": 2})
    ledger = ledger.reopened()
    assert ledger.reconcile(read_batches(rollouts), version=0) == []
    assert ledger.reconcile([], version=2) == [], "those of steps that are trained are pruned"
