"""The audit tells the account as it is, names contradictions, and finds biased drops without crying wolf."""

import re
import sqlite3
import threading

import numpy as np
import pytest

from prime_rl.errors import UserError
from prime_rl.orchestrator import bias
from prime_rl.orchestrator.audit import audit, audit_text
from prime_rl.orchestrator.bias import GroupValues, difference, significant
from prime_rl.orchestrator.ledger import Ledger, episode_id
from support.ledgers import finish_group, open_group, result


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def rows_of(report) -> dict[tuple[str, str], tuple[int, bool | None]]:
    return {(row.reason, row.quantity): (row.difference.dropped, row.differs) for row in report.biases}


def test_a_run_without_a_ledger(tmp_path):
    with pytest.raises(UserError, match=r"ledger.sqlite does not exist: the run has no ledger"):
        audit_text(tmp_path)
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(UserError, match=r"ledger.sqlite is a directory"):
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
    assert "Nothing is trained yet." in text
    assert "Nothing was dropped." in text


def test_the_account_by_environment_and_reason(tmp_path, ledger):
    """Every number of the table is that of the ledger; step ranges hold what was trained in them."""
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
    assert report.account == ledger.account()
    assert report.faults == []
    assert [(part.first, part.last, part.trained) for part in report.ranges][:2] == [(0, 1, 6), (2, 3, 6)]
    assert sum(part.trained for part in report.ranges) == 57
    assert report.ranges[0].reward == pytest.approx((0.0 + 0.5 + 1.0) / 3)
    assert report.ranges[0].output_tokens == 3.0
    lines = audit_text(tmp_path).splitlines()
    assert lines[1].split() == ["environment", "issued", "trained", "batched", "finished", "in", "flight", "timeout"]
    assert [line.split() for line in lines[2:5]] == [
        ["code", "40", "19", "1", "0", "0", "20"],
        ["math", "42", "38", "2", "0", "2", "0"],
        ["all", "82", "57", "3", "0", "2", "20"],
    ]
    assert "Conserved" in lines[5]


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
    issued = [report.account.total.issued for report in reports]
    assert issued == sorted(issued)


# -- the test of bias ----------------------------------------------------------------------------------------------------------


def simulated(
    seed: int, groups: int, size: int = 8, share: float = 0.05, odds: float = 1.0, own: bool = True
) -> list[GroupValues]:
    """Groups of lognormal lengths, half of the spread between tasks; longer ones are dropped `odds` times as often as shorter ones."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        deviations = rng.normal(0, 0.5) + rng.normal(0, 0.5, size)
        dropped = rng.random(size) < share * 2 / (1 + odds) * np.where(deviations > 0, odds, 1.0)
        values = np.exp(5 + deviations)
        made.append(GroupValues(np.where(dropped & (not own), np.nan, values), dropped))
    return made


@pytest.mark.parametrize("own", [True, False])
def test_false_alarms_stay_within_the_level(own):
    """Of 200 runs whose drops have nothing to do with length 1 % may be called different at 99 % and 5 % at 95 %. An exact test gives more than
    5 and more than 18 of them in 2 and 1 of 100 such series; the seeds are fixed, so this one is either right or wrong."""
    p = [difference(simulated(seed, groups=80, own=own)).p for seed in range(200)]
    assert all(value is None or 0 < value <= 1 for value in p)
    assert sum(value is not None for value in p) > 150
    assert sum(value is not None and value <= 0.01 for value in p) <= 5
    assert sum(value is not None and value <= 0.05 for value in p) <= 18


@pytest.mark.parametrize("own", [True, False])
def test_a_drop_that_prefers_long_episodes_is_found(own):
    """5 % dropped, the longer half four times as likely: 512 groups of 8 show it at 99 % in nearly every run, also where only the siblings'
    lengths are known (`benchmarks/audit_power.py`: 100 % and 96 % of 100)."""
    found = [difference(simulated(seed, groups=512, odds=4.0, own=own)) for seed in range(10)]
    assert sum(result.p is not None and result.p <= 0.01 for result in found) >= 8
    assert all(
        result.dropped_mean > result.issued_mean for result in found if result.p is not None and result.p <= 0.01
    )
    assert all(result.siblings != own for result in found)


def test_whole_groups_that_are_dropped_are_few_observations():
    """Filtering drops whole groups: 8 groups of 8 similar lengths are 8 observations, not 64. Called different no more often than the level allows."""
    alarms = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        tasks = rng.normal(100, 30, 60)
        groups = [GroupValues(task + rng.normal(0, 1, 8), np.full(8, i < 8)) for i, task in enumerate(tasks)]
        p = difference(groups).p
        alarms += p is not None and p <= 0.01
    assert alarms <= 3


def test_p_by_hand():
    """Six groups of one episode, five dropped: each is as likely to be the one that is left, so the farthest sum of six has p = 1/6."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]
    groups = [GroupValues(np.array([value]), np.array([value != 60.0])) for value in values]
    assert difference(groups).p is None  # too few
    counts = np.array([1, 1, 1, 1, 1, 0])
    for null in (bias._Places([group.values for group in groups], counts), bias._Groups(np.array(values), counts)):
        assert null.expected == pytest.approx(sum(values) * 5 / 6)
        assert bias._p_value(null, 15.0) == pytest.approx(1 / 6, abs=0.03)


def test_all_alike_is_no_difference():
    """Equal values, or everything dropped: p is 1, not a division by zero."""
    alike = [GroupValues(np.full(4, 7.0), np.arange(4) < 1) for _ in range(30)]
    assert difference(alike).p == 1.0
    everything = [GroupValues(np.arange(4.0) + i, np.ones(4, dtype=bool)) for i in range(30)]
    assert difference(everything).p == 1.0
    nothing_left = [GroupValues(np.full(4, np.nan), np.ones(4, dtype=bool)) for _ in range(30)]
    assert difference(nothing_left).p is None


def test_many_tests_share_one_level():
    """Holm: the smallest p is held against level / 4, the next against level / 3, and after the first failure nothing is rejected."""
    assert significant([0.0024, 0.0034, 0.9, None, 0.004]) == [True, False, False, False, False]
    assert significant([0.0024, 0.0033, 0.9, None, 0.004]) == [True, True, False, False, True]
    assert significant([]) == []


def test_the_report_finds_long_stale_drops_and_is_silent_on_the_rest(tmp_path, ledger):
    """From ledger to verdict: stale drops prefer the long, errors are random, cancelled ones are too few, filtered differ in reward by design."""
    rng = np.random.default_rng(0)
    for number in range(240):
        ledger.opened(number, "math", number, "t")
        solved = number % 8 == 0
        for i in range(4):
            name = episode_id(number, i, 0)
            ledger.issued(name, 0, 0)
            if rng.random() < 0.1:
                ledger.dropped(name, "errored")
                continue
            length = int(rng.integers(10, 400))
            ledger.finished(name, 0, 0, 0, result(1.0 if solved else float(rng.random()) / 2, sampled=length))
            if length > 250 and rng.random() < 0.4:
                ledger.dropped(name, "stale")
        if solved:
            ledger.discarded([number])
    open_group(ledger, 240, size=3, env="math")
    ledger.dropped("240.0.0", "cancelled")
    ledger.flush()
    verdicts = {key: verdict for key, (_, verdict) in rows_of(audit(tmp_path)).items()}
    assert verdicts == {
        ("cancelled", "length"): None, ("cancelled", "reward"): None,
        ("errored", "length"): False, ("errored", "reward"): False,
        ("filtered", "length"): False, ("filtered", "reward"): True,
        ("stale", "length"): True, ("stale", "reward"): False,
    }  # fmt: skip
    text = audit_text(tmp_path)
    (stale,) = [line for line in text.splitlines() if line.split()[1:2] == ["stale"] and "length" in line]
    assert stale.endswith("DIFFERS")
    assert "differs (by design)" in text
    assert "By design: a setting chose these" in text
    assert "DIFFERS: no setting chose these" in text
    assert "too few" in text
    assert "99% confidence" in text
    assert text == audit_text(tmp_path)


def lengths_of_drops(ledger: Ledger, reason: str) -> None:
    """Groups in which every second one is short and solved by all; the short ones are dropped for this reason, the long ones trained."""
    rng = np.random.default_rng(0)
    for number in range(60):
        ledger.opened(number, "math", number, "t")
        solved = number % 2 == 0
        names = [episode_id(number, i, 0) for i in range(4)]
        for i, name in enumerate(names):
            ledger.issued(name, 0, 0)
            reward = 1.0 if solved else i / 3
            ledger.finished(name, 0, 0, 0, result(reward, sampled=int(rng.integers(10, 50) + 200 * (not solved))))
            if solved and reason != "filtered":
                ledger.dropped(name, reason)
        if solved and reason == "filtered":
            ledger.discarded([number])
    ledger.flush()


def test_a_filter_that_goes_along_with_length_is_told_calmly(tmp_path, ledger):
    """The user chose the filter: the difference is found and shown with its numbers, and is no alarm."""
    lengths_of_drops(ledger, "filtered")
    found = {row.quantity: row for row in audit(tmp_path).biases}
    assert found["length"].differs
    assert found["reward"].differs
    assert found["length"].by_design
    text = audit_text(tmp_path)
    (line,) = [line for line in text.splitlines() if line.split()[1:4] == ["filtered", "120", "length"]]
    assert re.search(r"\d+(\.\d+)? +\d+(\.\d+)? +0\.0001  differs \(by design\)$", line)
    assert "By design: a setting chose these" in text
    assert "DIFFERS" not in text


@pytest.mark.parametrize("reason", ["stale", "errored", "timeout", "cancelled"])
def test_the_same_drops_for_a_reason_that_nobody_chose_are_an_alarm(tmp_path, ledger, reason):
    """A failure that prefers short episodes biases what is trained; so it is said loudly."""
    lengths_of_drops(ledger, reason)
    assert [(row.differs, row.by_design) for row in audit(tmp_path).biases] == [(True, False)] * 2
    text = audit_text(tmp_path)
    assert sum(line.endswith("  DIFFERS") for line in text.splitlines()) == 2
    assert "DIFFERS: no setting chose these" in text
    assert "by design" not in text.lower()
