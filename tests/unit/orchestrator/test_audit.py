"""`rl audit` prints where every episode went, and names contradictions of the ledger."""

import os
import re
from dataclasses import replace

import pytest

from prime_rl.errors import UserError
from prime_rl.monitor.status import new_status, status_path, write_record
from prime_rl.orchestrator.audit import audit, audit_text
from prime_rl.processes import identify
from support.ledgers import ScriptedLedger, an_episode, execute, finish_group, open_group
from support.scripted import World


def test_the_account_by_environment_and_reason(tmp_path):
    """Every number of the table is that of the ledger; nothing issued yet is an account, too. What a run has not
    finished is in flight only while it runs."""
    with pytest.raises(UserError, match="holds no run: give the output directory"):
        audit_text(tmp_path)
    ledger = ScriptedLedger(tmp_path / "ledger.sqlite")
    for step in range(20):
        names = finish_group(ledger, 2 * step, env="math")
        other = open_group(ledger, 2 * step + 1, env="code")
        ledger.dropped(other[0], "timeout")
        ledger.finished(other[1], result=an_episode(1.0))
        ledger.batched(step, [*names, other[1]], [], [2 * step, 2 * step + 1])
    world = World(tmp_path)
    world.trainer.live(0, 0)
    world.trainer.commit(19)
    open_group(ledger, 40, env="math")
    ledger.flush()
    assert audit(tmp_path)[1] == []
    lines = [re.split("  +", line.strip()) for line in audit_text(tmp_path).splitlines()[2:]]
    assert lines[:-1] == [
        ["code", "issued", "40", "100.0%", "3.0", "1.0000"],
        ["code", "dropped: timeout", "20", "50.0%", "-", "-"],
        ["code", "trained", "19", "47.5%", "3.0", "1.0000"],
        ["code", "in a batch", "1", "2.5%", "3.0", "1.0000"],
        ["math", "issued", "42", "100.0%", "3.0", "0.2500"],
        ["math", "trained", "38", "90.5%", "3.0", "0.2500"],
        ["math", "unfinished", "2", "4.8%", "-", "-"],
        ["math", "in a batch", "2", "4.8%", "3.0", "0.2500"],
    ]
    status, parent = new_status("orchestrator"), identify(os.getppid())
    write_record(status_path(tmp_path, "orchestrator"), replace(status, pid=parent.pid, started=parent.started))
    assert ("math", "in flight", 2, None, None) in audit(tmp_path)[0]
    assert lines[-1][0].startswith("In every environment, issued = trained")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DELETE FROM episodes WHERE id = '0.0.0'", "reverse-text: +1 episodes are unaccounted for"),
        ("DELETE FROM results WHERE id = '1.0.0'", "1 finished episodes without their tokens"),
        ("UPDATE episodes SET state = 'issued' WHERE id = '0.1.0'", "1 episodes in flight, or waiting for a batch"),
        (
            "INSERT INTO episodes (group_number, number, attempt, state, detail, retried, step) "
            "VALUES (0, 1, 1, 'batched', '', 0, 0)",
            "1 episodes with more than one trained attempt",
        ),
        ("DELETE FROM groups WHERE number = 1", "reverse-text: +2 episodes are unaccounted for"),
    ],
)
def test_a_ledger_that_contradicts_itself_is_told(tmp_path, damage, message):
    """Conservation and exactly-once are checked on the rows, not believed."""
    ledger = ScriptedLedger(tmp_path / "ledger.sqlite")
    ledger.batched(0, finish_group(ledger, 0), [], [0])
    finish_group(ledger, 1)
    ledger.flush()
    ledger.close()
    execute(ledger.path, damage)
    assert "NOT CONSERVED" in audit_text(tmp_path)
    assert any(message in fault for fault in audit(tmp_path)[1])
