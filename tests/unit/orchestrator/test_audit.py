"""`rl audit` prints where every episode went, and names contradictions of the ledger."""

import re
import sqlite3
import threading

import pytest

from prime_rl.errors import UserError
from prime_rl.orchestrator.audit import audit, audit_text
from support.ledgers import ScriptedLedger, finish_group, open_group, result


@pytest.fixture
def ledger(tmp_path):
    return ScriptedLedger(tmp_path / "ledger.sqlite")


def test_a_run_without_a_ledger(tmp_path):
    with pytest.raises(UserError, match=r"ledger.sqlite does not exist: the run has no ledger"):
        audit_text(tmp_path)


def test_a_damaged_ledger_is_named_not_its_copy(tmp_path, ledger):
    ledger.close()
    ledger.path.write_bytes(ledger.path.read_bytes()[:20_000])
    with pytest.raises(UserError, match=f"{ledger.path} is damaged"):
        audit_text(tmp_path)


def test_a_fresh_run(tmp_path, ledger):
    """Nothing issued yet is an account, too."""
    text = audit_text(tmp_path)
    assert "Conserved" in text
    assert "None was issued yet." in text


def test_the_account_by_environment_and_reason(tmp_path, ledger):
    """Every number of the table is that of the ledger."""
    for step in range(20):
        names = finish_group(ledger, 2 * step, env="math")
        other = open_group(ledger, 2 * step + 1, env="code")
        ledger.dropped(other[0], "timeout")
        ledger.finished(other[1], 0, 0, 0, result(1.0))
        ledger.batched(step, [*names, other[1]], [], [], [2 * step, 2 * step + 1])
    ledger.trained_through(19)
    open_group(ledger, 40, env="math")
    ledger.flush()
    report = audit(tmp_path)
    assert report.faults == []
    lines = audit_text(tmp_path).splitlines()
    assert lines[1].split() == ["environment", "outcome", "episodes", "mean", "length", "mean", "reward"]
    assert [re.split("  +", line.strip()) for line in lines[2:9]] == [
        ["code", "issued", "40", "3.0", "1.0000"],
        ["code", "trained", "19", "3.0", "1.0000"],
        ["code", "in a batch", "1", "3.0", "1.0000"],
        ["code", "dropped: timeout", "20", "-", "-"],
        ["math", "issued", "42", "3.0", "0.2500"],
        ["math", "trained", "38", "3.0", "0.2500"],
        ["math", "in a batch", "2", "3.0", "0.2500"],
    ]
    assert [re.split("  +", line.strip()) for line in lines[9:10]] == [["math", "in flight", "2", "-", "-"]]
    assert "Conserved" in lines[10]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DELETE FROM episodes WHERE id = '0.0.0'", r"reverse-text: \+1 episodes are unaccounted for"),
        ("DELETE FROM results WHERE id = '1.0.0'", "1 finished episodes without their tokens"),
        (
            "UPDATE episodes SET step = 7 WHERE id = '0.1.0'",
            "1 episodes trained at another step than their group's batch",
        ),
        ("UPDATE episodes SET state = 'issued' WHERE id = '0.1.0'", "1 episodes in flight, or waiting for a batch"),
        (
            "INSERT INTO episodes (group_number, number, attempt, state, detail, retried, step) VALUES (0, 1, 1, 'trained', '', 0, 0)",
            "1 episodes with more than one trained attempt",
        ),
        ("UPDATE episodes SET state = 'batched' WHERE id = '0.1.0'", "1 batched episodes of steps that are trained"),
        ("DELETE FROM groups WHERE number = 1", "2 episodes of no group"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_told(tmp_path, ledger, damage, message):
    """Conservation and exactly-once are checked on the rows, not believed."""
    ledger.batched(0, finish_group(ledger, 0), [], [], [0])
    finish_group(ledger, 1)
    ledger.trained_through(1)
    ledger.flush()
    ledger.close()
    assert "Conserved" in audit_text(tmp_path)
    db = sqlite3.connect(ledger.path)
    db.execute(damage)
    db.commit()
    db.close()
    text = audit_text(tmp_path)
    assert "NOT CONSERVED" in text
    assert any(re.search(message, fault) for fault in audit(tmp_path).faults)


def test_a_live_run_is_read_without_stopping_it(tmp_path, ledger):
    """The audit copies the file while the run writes it: every audit is conserved, no flush fails."""
    stop, failed = threading.Event(), []

    def run() -> None:
        number = 0
        try:
            while not stop.is_set():
                names = finish_group(ledger, number)
                ledger.flush()
                ledger.batched(number, names, [], [], [number])
                ledger.flush()
                number += 1
                stop.wait(0.02)
        except UserError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        reports = [audit(tmp_path) for _ in range(10)]
    finally:
        stop.set()
        thread.join(timeout=60)
    assert not failed
    assert [report.faults for report in reports] == [[]] * 10
    issued = [sum(row.episodes for row in report.outcomes if row.name == "issued") for report in reports]
    assert issued == sorted(issued)
