"""The ledger tells of every episode, survives what may happen to it, and agrees with the committed batches."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.orchestrator import ledger as ledger_module
from prime_rl.orchestrator.ledger import Counts, open_copy, read_batches, read_counts, total
from prime_rl.orchestrator.scheduler import State, Task
from support.ledgers import ScriptedLedger, commit, dump, finish_group, open_group, result

TESTS = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def rollouts(tmp_path):
    return tmp_path / "rollouts"


def reopened(ledger: ScriptedLedger) -> ScriptedLedger:
    """The ledger as the next incarnation finds it; what was not flushed is lost."""
    ledger.close()
    return ScriptedLedger(ledger.path)


def stored_counts(path: Path) -> dict[str, Counts]:
    with open_copy(path) as db:
        return read_counts(db)


def stored_results(path: Path) -> list[str]:
    with open_copy(path) as db:
        return [name for (name,) in db.execute("SELECT id FROM results ORDER BY id")]


# -- what is recorded ----------------------------------------------------------------------------------------------------------


def test_an_episode_from_issue_to_training(path):
    """Every end is counted once, under its state and reason, and tokens are kept just as long as they are needed."""
    ledger = ScriptedLedger(path)
    names = open_group(ledger, 0, size=5)
    ledger.finished(names[0], 0, 1, 0, result())
    ledger.finished(names[1], 0, 0, 0, result())
    ledger.finished(names[2], 0, 0, 0, result())
    ledger.dropped(names[3], "timeout")
    ledger.dropped(names[4], "errored", "worker died", retried=True)
    ledger.issued("0.4.1", 1, 0)
    ledger.finished("0.4.1", 1, 1, 0, result())
    ledger.dropped("0.4.1", "stale", "too old")
    ledger.flush()
    assert stored_results(path) == names[:3]
    ledger.batched(0, [names[0]], [names[1]], [names[2]], [0])
    ledger.flush()
    assert stored_results(path) == []
    drops = {"errored": 1, "filtered": 1, "stale": 1, "timeout": 1, "truncated": 1}
    expected = {"reverse-text": Counts(issued=6, batched=1, dropped=drops)}
    assert ledger.counts() == stored_counts(path) == expected
    ledger.trained_through(1)
    ledger.flush()
    expected["reverse-text"].batched, expected["reverse-text"].trained = 0, 1
    assert ledger.counts() == stored_counts(path) == reopened(ledger).counts() == expected


def test_events_are_recorded_while_another_thread_flushes(path):
    """Contract: a flush writes what was recorded before it was asked for, and no event is lost or written twice."""
    applying, recorded = threading.Event(), threading.Event()

    class SlowLedger(ScriptedLedger):
        def _apply(self, event):
            applying.set()
            assert recorded.wait(60)
            super()._apply(event)

    ledger = SlowLedger(path)
    finish_group(ledger, 0)
    with ThreadPoolExecutor(1) as thread:
        flush = thread.submit(ledger.flush, ledger.recorded)
        assert applying.wait(60)
        finish_group(ledger, 1)
        recorded.set()
        flush.result(60)
    assert total(stored_counts(path)) == Counts(issued=2, finished=2)
    assert ledger.total() == Counts(issued=4, finished=4)


def test_what_cannot_happen_is_refused(path):
    """An episode neither ends unissued nor twice; a batch names exactly what its groups finished."""
    ledger = ScriptedLedger(path)
    first, second = open_group(ledger, 0)
    ledger.finished(first, 0, 0, 0, result())
    for wrong in (
        lambda: ledger.opened(0),
        lambda: ledger.finished(first, 0, 0, 0, result()),
        lambda: ledger.finished("0.7.0", 0, 0, 0, result()),
        lambda: ledger.finished("9.0.0", 0, 0, 0, result()),
        lambda: ledger.issued(first),
        lambda: ledger.issued("0.1.1"),
        lambda: ledger.issued("0.5.1"),
        lambda: ledger.issued("9.0.0"),
        lambda: ledger.dropped("0.5.0", "stale"),
        lambda: ledger.batched(0, [first], [], [], [0]),
        lambda: ledger.batched(0, [], [], [], [0]),
        lambda: ledger.discarded([0]),
        lambda: ledger.discarded([3]),
    ):
        before = ledger.counts()
        wrong()
        with pytest.raises(
            UserError, match=r"a fault of prime-rl\): (Opened|Issued|Finished|Dropped|Batched|Discarded)"
        ):
            ledger.flush()
        ledger._events.clear()
        ledger._recorded = ledger._written
        assert stored_counts(path) == ledger.counts() == before
    ledger.dropped(second, "errored", retried=False)
    ledger.issued("0.1.1")  # it was not to be tried again
    with pytest.raises(UserError, match="does not follow"):
        ledger.flush()


def test_a_lost_episode_stops_the_run(path):
    """issued = trained + dropped + in flight, the last as the scheduler has it; else the message has the difference."""
    ledger = ScriptedLedger(path)
    finish_group(ledger, 0)
    open_group(ledger, 1)
    ledger.flush()
    assert ledger.check(4)["reverse-text"] == Counts(issued=4, in_flight=2, finished=2)
    with pytest.raises(UserError, match=r"4 are in flight or finished, of which the scheduler holds 3 \(\+1\)"):
        ledger.check(3)
    ledger._db.execute("DELETE FROM episodes WHERE id = '1.0.0'")
    with pytest.raises(UserError, match=r"does not hold: reverse-text: \+1 of .*issued=4, in_flight=1"):
        ledger.check(3)


# -- after a crash -------------------------------------------------------------------------------------------------------------


def test_what_the_core_needs_to_go_on(path):
    """Finished episodes come back with their tokens; what was in flight starts again under the same name; a retry keeps its number."""
    ledger = ScriptedLedger(path)
    names = open_group(ledger, 3, size=4)
    mine = result(0.25, sampled=17)
    ledger.finished(names[0], 1, 2, 5, mine)
    ledger.dropped(names[1], "timeout", retried=True)
    ledger.dropped(names[2], "errored")
    ledger.flush()
    ledger.finished(names[3], 0, 0, 0, result())  # never flushed: in flight, for the next incarnation
    ledger = reopened(ledger)
    (group,) = ledger.open_groups(6)
    assert (group.number, group.task) == (3, Task("reverse-text", 103, "task-3"))
    assert [(place.number, place.attempt, place.state) for place in group.slots.values()] == [
        (0, 0, State.FINISHED),
        (1, 1, State.PENDING),
        (2, 0, State.FAILED),
        (3, 0, State.RETRY),
        (4, 0, State.PENDING),
        (5, 0, State.PENDING),
    ]
    (finished,) = group.finished
    assert (finished.start.episode, finished.incarnation, finished.first, finished.last) == ("3.0.0", 5, 1, 2)
    assert finished.result == mine
    assert ledger.groups_opened == 4
    ledger.issued("3.3.0", 2, 6)
    assert ledger.total().issued == 4


_INCARNATION = """
import sys
from pathlib import Path
from support.ledgers import finish_group
from prime_rl import faults
from support.ledgers import ScriptedLedger
faults.arm("orchestrator")
ledger = ScriptedLedger(Path(sys.argv[1]))
names = finish_group(ledger, 0)
ledger.flush()
finish_group(ledger, 1)
ledger.batched(0, names, [], [], [0])
ledger.flush()
"""


@pytest.mark.parametrize("do", ["kill", "tear"])
@pytest.mark.parametrize(("point", "whole"), [("begin", False), ("commit", False), ("committed", True)])
def test_killed_at_any_point_the_flush_is_there_or_not(tmp_path, path, point, whole, do):
    """One transaction: SIGKILL before the commit leaves the flush before, after it this one; nothing in between. A torn journal is harmless."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"point": f"ledger:{point}", "process": "orchestrator", "do": do, "nth": 2}]))
    search = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _INCARNATION, path],
        env={**os.environ, "PRIMERL_FAULTS": str(plan), "PYTHONPATH": search},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    found = ScriptedLedger(path).total()
    expected = Counts(issued=4, finished=2, batched=2) if whole else Counts(issued=2, finished=2)
    assert found == expected
    assert stored_results(path) == (["1.0.0", "1.1.0"] if whole else ["0.0.0", "0.1.0"])


# -- writing -------------------------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing(path):
    """The flush fails as a user error, the file is as before, and the next flush writes everything, also what happened meanwhile."""
    ledger = ScriptedLedger(path)
    first = finish_group(ledger, 0)
    ledger.flush()
    before = dump(path)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    second = open_group(ledger, 1)
    for name in second:
        ledger.finished(name, 0, 0, 0, result(sampled=50_000))
    with pytest.raises(UserError, match="disk full while writing .*ledger.sqlite: nothing was committed"):
        ledger.flush()
    assert dump(path) == before
    ledger.batched(0, first, [], [], [0])
    ledger._db.execute("PRAGMA max_page_count = 100000")
    ledger.flush()
    assert stored_counts(path) == ledger.counts()
    assert stored_results(path) == second
    again = reopened(ledger).open_groups(2)
    assert [len(stored.result.samples[0].input_ids) for stored in again[0].finished] == [50_002, 50_002]


def test_a_lock_is_waited_for_only_so_long(path, monkeypatch):
    """Another program that holds the file is named after a bounded time; nothing is lost."""
    monkeypatch.setattr(ledger_module, "_BUSY_SECONDS", 0.1)
    ledger = ScriptedLedger(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    finish_group(ledger, 0)
    with pytest.raises(UserError, match="locked by another program"):
        ledger.flush()
    other.execute("ROLLBACK")
    other.close()
    ledger.flush()
    assert stored_counts(path) == ledger.counts()


# -- bad files -----------------------------------------------------------------------------------------------------------------


def damage_middle(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)


def damage_foreign(path):
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE other (x)")
    db.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(b"x" * 5000),
        damage_middle,
        damage_foreign,
    ],
)
def test_a_damaged_ledger_is_refused_and_left_alone(path, damage):
    """A truncated, emptied, overwritten or foreign file is no new ledger: the error says what to do, and not a byte changes."""
    ledger = ScriptedLedger(path)
    for number in range(20):
        finish_group(ledger, number)
    ledger.flush()
    ledger.close()
    damage(path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"ledger.sqlite is damaged .* move ledger.sqlite\* out of the way"):
        ScriptedLedger(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(path):
    ScriptedLedger(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = 2 WHERE key = 'format'")
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(UserError, match="has format 2; this version reads format 1"):
        ScriptedLedger(path)
    assert path.read_bytes() == before


def test_a_journal_without_its_ledger_is_not_applied_to_a_new_one(path):
    path.with_name("ledger.sqlite-journal").write_bytes(b"old pages")
    with pytest.raises(UserError, match="stands there without its ledger"):
        ScriptedLedger(path)


# -- the manifests are the truth -----------------------------------------------------------------------------------------------


def test_a_crash_between_rename_and_flush(path, rollouts):
    """The batch is committed though the ledger does not know it: reconciled, it does, and no tokens of it are left."""
    ledger = ScriptedLedger(path)
    names = [*finish_group(ledger, 0), *finish_group(ledger, 1)]
    finish_group(ledger, 2)
    ledger.flush()
    commit(ledger, rollouts, 0, names[:3], names[3:], [0, 1])
    ledger = reopened(ledger)
    said = ledger.reconcile(read_batches(rollouts), version=0)
    assert said == ["step 0 is committed: 4 episodes brought to what its manifest says"]
    expected = {"reverse-text": Counts(issued=6, finished=2, batched=3, dropped={"filtered": 1})}
    assert ledger.counts() == stored_counts(path) == expected == reopened(ledger).counts()
    assert stored_results(path) == ["2.0.0", "2.1.0"]
    ledger = ScriptedLedger(path)
    assert [group.number for group in ledger.open_groups(2)] == [2]
    assert ledger.reconcile(read_batches(rollouts), version=1) == []
    assert ledger.total().trained == 3


def test_a_lost_ledger_is_rebuilt_from_the_manifests(path, rollouts):
    """Trained and filtered by name, earlier drops by number, what was open then as cancelled, never silently gone; the counts add up."""
    ledger = ScriptedLedger(path)
    for step in range(3):
        names = finish_group(ledger, 2 * step, size=3)
        ledger.issued(f"{2 * step}.3.0", 0, 0)
        ledger.dropped(f"{2 * step}.3.0", "timeout")
        open_group(ledger, 2 * step + 1, size=1)
        ledger.dropped(f"{2 * step + 1}.0.0", "errored")
        ledger.discarded([2 * step + 1])
        if step == 2:
            open_group(ledger, 6)
            finish_group(ledger, 7)
        ledger.flush()
        commit(ledger, rollouts, step, names[:2], names[2:], [2 * step])
        ledger.batched(step, names[:2], names[2:], [], [2 * step])
    before = ledger.total()
    ledger.close()
    path.unlink()
    shutil.rmtree(rollouts / "step_0")  # pruned long ago
    ledger = ScriptedLedger(path)
    said = ledger.reconcile(read_batches(rollouts), version=2)
    assert any("rebuilt" in line for line in said)
    after = ledger.counts()
    summed = total(after)
    assert (summed.difference, summed.dropped) == (0, before.dropped | {"cancelled": 4})
    assert (summed.trained, summed.batched, summed.issued) == (4, 2, before.issued)
    assert ledger.open_groups(2) == []
    assert reopened(ledger).counts() == after == stored_counts(path)
    assert ScriptedLedger(path).reconcile(read_batches(rollouts), version=2) == []


def test_a_batch_that_is_gone_before_it_was_trained(path, rollouts):
    """Somebody removed a committed batch: its episodes are dropped, and the log says so."""
    ledger = ScriptedLedger(path)
    names = finish_group(ledger, 0)
    ledger.flush()
    commit(ledger, rollouts, 0, names, [], [0])
    ledger.batched(0, names, [], [], [0])
    ledger.flush()
    shutil.rmtree(rollouts / "step_0")
    ledger = reopened(ledger)
    assert ledger.reconcile(read_batches(rollouts), version=0) == [
        "the batch of step 0 is gone: 2 episodes of it are dropped"
    ]
    assert ledger.total() == Counts(issued=2, dropped={"cancelled": 2})


def test_a_new_incarnation_trains_again_what_is_committed(path):
    """From the step it starts at, batches are batched again; a later version trains them again, once."""
    ledger = ScriptedLedger(path)
    for step in range(4):
        ledger.batched(step, finish_group(ledger, step), [], [], [step])
    ledger.trained_through(4)
    ledger.flush()
    ledger.rewound(1)
    ledger.flush()
    assert (total(stored_counts(path)).trained, total(stored_counts(path)).batched) == (2, 6)
    assert reopened(ledger).total().batched == 6
    ledger = ScriptedLedger(path)
    ledger.trained_through(3)
    ledger.flush()
    assert ledger.counts() == stored_counts(path)
    assert (total(stored_counts(path)).trained, total(stored_counts(path)).batched) == (6, 2)


def test_a_batch_of_another_version_is_refused(tmp_path, rollouts):
    """A manifest that lists no episodes cannot be reconciled with: said, not skipped."""
    ledger = ScriptedLedger(tmp_path / "ledger.sqlite")
    commit(ledger, rollouts, 0, finish_group(ledger, 0), [], [0])
    manifest = rollouts / "step_0" / "manifest.json"
    data = json.loads(manifest.read_text())
    del data["extra"]["ledger"]
    manifest.write_text(json.dumps(data))
    with pytest.raises(UserError, match="step_0 does not say which episodes it holds"):
        read_batches(rollouts)
