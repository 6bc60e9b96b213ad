"""When the trainer counts as ended. Too early would lose the run's last checkpoint and serve a superseded version."""

import pytest

from prime_rl.monitor.status import GONE_SECONDS, WAITS_FOR_US_SECONDS, Status, TrainerWatch, status_path


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("prime_rl.monitor.status.monotonic", lambda: made.now)
    return made


@pytest.mark.parametrize(("outcome", "ended"), [("finished", True), ("stopped", True), ("failed: disk full", False)])
def test_its_last_word(tmp_path, outcome, ended):
    """One that failed may be started again, but not while all is being stopped."""
    watch = TrainerWatch(tmp_path)
    Status(tmp_path, "trainer").done(outcome)
    assert watch.ended(asked_to_stop=False) is ended
    assert watch.ended(asked_to_stop=True)


def test_one_without_a_sign_for_long_is_gone(tmp_path, clock):
    """No status is a trainer that is being started again. Of several processes the one that beat last counts."""
    watch = TrainerWatch(tmp_path, ("trainer", "sft"))
    Status(tmp_path, "sft").done("finished")  # an earlier run's
    for seconds in (0.0, GONE_SECONDS - 1):
        clock.now += seconds
        Status(tmp_path, "trainer").phase("loading the model")
        assert not watch.ended(asked_to_stop=False)
    for name in ("trainer", "sft"):
        status_path(tmp_path, name).unlink()
    clock.now += 1
    assert not watch.ended(asked_to_stop=False)
    clock.now += GONE_SECONDS + 1
    assert watch.ended(asked_to_stop=False)


def test_one_that_waits_for_our_batches_is_not_waited_for_once_we_stop(tmp_path, clock):
    """Else each would wait for the other: somebody asked the orchestrator alone to stop."""
    watch = TrainerWatch(tmp_path)
    Status(tmp_path, "trainer").waiting("rollouts/step_3", "orchestrator", 3600.0)
    assert not watch.ended(asked_to_stop=True)
    clock.now = WAITS_FOR_US_SECONDS + 1
    assert not watch.ended(asked_to_stop=False), "while batches come it is right to wait"
    assert not watch.ended(asked_to_stop=True)
    clock.now += WAITS_FOR_US_SECONDS + 1
    assert watch.ended(asked_to_stop=True)
