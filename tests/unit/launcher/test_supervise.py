"""Who counts as stalled, how often a process is restarted, and what its log says of its end: without any process but one."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.launcher.plan import ProcessSpec
from prime_rl.launcher.supervise import RestartBudget, RestartPolicy, SupervisedChild, Watchdog
from prime_rl.lifeline import Lifeline
from prime_rl.monitor.status import ProcessStatus, Waiting
from prime_rl.wait import wait

POLICY = RestartPolicy(max_restarts=3, backoff=1.0, heartbeat_timeout=60.0, stall_timeout=1800.0)
HOUR, STANDSTILL = "within an hour", "without the run getting any further"
WORKING = ProcessStatus("trainer", 7, "training", 3, 0.0, 0.0, None, None, progress=0.0, ready=0.0)


class Run:
    """Feeds a watchdog with statuses whose clocks have nothing to do with the launcher's."""

    def __init__(self, name: str = "trainer", service: bool = False) -> None:
        self.watchdog = Watchdog(POLICY, name, 0.0, service)
        self.now = 0.0
        self.beats = 0

    def look(self, seconds: float, *statuses: ProcessStatus, beating: bool = True) -> str | None:
        self.now += seconds
        self.beats += beating
        by_name = {status.process: replace(status, heartbeat=-5e8 + self.beats) for status in statuses}
        return self.watchdog.stalled(self.now, by_name)


@pytest.fixture
def run() -> Run:
    return Run()


def test_heartbeats_and_progress_are_no_stall(run: Run) -> None:
    """However long, and whatever the other's clock says."""
    for hour in range(100):
        assert run.look(50.0, replace(WORKING, progress=float(hour))) is None


def test_silence_is_a_stall_after_heartbeat_timeout(run: Run) -> None:
    assert run.look(1.0, WORKING) is None
    assert run.look(60.0, WORKING, beating=False) is None
    assert run.look(1.0, WORKING, beating=False) == "has given no sign of life for 61 s"


def test_a_silent_rank_is_a_stall_of_its_process(run: Run) -> None:
    """Its progress does not count: rank 0 reports for all."""
    rank = replace(WORKING, process="trainer.1")
    for hour in range(10):
        assert run.look(600.0, replace(WORKING, progress=float(hour)), rank) is None
    for _ in range(2):
        reason = run.look(35.0, rank, beating=False)
    assert reason == "rank 1 has given no sign of life for 70 s"


def test_no_progress_while_nobody_is_waited_for(run: Run) -> None:
    """The end of a wait begins the time anew."""
    wait = replace(WORKING, waiting=Waiting("rollouts/step_3", "orchestrator", 0.0, 7200.0))
    run.look(0.0, WORKING)
    assert run.look(1800.0, WORKING) is None
    assert run.look(1.0, WORKING) == "has stalled for 1801 s (training, step 3)"
    assert run.look(1.0, wait) is None
    assert run.look(7000.0, wait) is None
    assert run.look(1.0, WORKING) is None


def test_a_wait_beyond_its_own_deadline(run: Run) -> None:
    """Its owner should have ended it: the launcher does, after a little more."""
    wait = replace(WORKING, waiting=Waiting("rollouts/step_3", "orchestrator", 1e9, 1e9 + 100.0))
    assert run.look(0.0, wait) is None
    assert run.look(160.0, wait) is None
    assert run.look(1.0, wait) == "still waits for rollouts/step_3 from orchestrator, 61 s after its own deadline"


def test_never_a_report(run: Run) -> None:
    """A process that hangs before its first status."""
    assert run.look(1800.0) is None
    assert run.look(1.0) == "has not reported within 1800 s"


def test_a_service_may_idle_and_take_its_time_to_start() -> None:
    """Without requests it makes no progress; while it starts its own deadline counts; once ready it must send heartbeats."""
    run, server = Run("inference", service=True), replace(WORKING, process="inference", ready=None)
    assert run.look(9000.0, server, beating=False) is None
    assert run.look(900.0, server) is None
    assert run.look(9000.0, replace(server, ready=1.0)) is None
    assert run.look(61.0, replace(server, ready=1.0), beating=False) == "has given no sign of life for 61 s"


def test_a_server_whose_engine_falls_silent() -> None:
    """Once it has reported answers of its engine it must go on with that, except while a change has a deadline of its own."""
    run, server = Run("inference", service=True), replace(WORKING, process="inference")
    loading = replace(server, progress=2.0, waiting=Waiting("update", "engine", 0.0, 600.0))
    for status in (server, replace(server, progress=1.0), replace(server, progress=2.0), loading, loading):
        assert run.look(50.0, status) is None
    assert run.look(50.0, replace(server, progress=2.0)) is None
    assert run.look(61.0, replace(server, progress=2.0)) == "has had no answer from its engine for 61 s"


def test_a_process_that_reported_its_end_must_exit(run: Run) -> None:
    """Its heartbeat ends with its last status; hanging at exit is a stall all the same."""
    done = replace(WORKING, outcome="finished")
    run.look(0.0, done)
    assert run.look(299.0, done, beating=False) is None
    assert run.look(2.0, done, beating=False) == "said `finished` 301 s ago and has not ended"


def test_restarts_are_counted_within_an_hour() -> None:
    """Backoff doubles within the hour, up to a minute; what lies further back is forgotten."""
    budget = RestartBudget(POLICY, (0, 0))
    assert [budget.ask(now, (0, 0)) for now in (0.0, 10.0, 20.0, 30.0)] == [(1, 1.0), (2, 2.0), (3, 4.0), HOUR]
    assert budget.ask(3590.0, (1, 1)) == HOUR
    assert budget.ask(3600.0, (1, 1)) == (3, 4.0)
    assert RestartBudget(RestartPolicy(max_restarts=0)).ask(0.0) == HOUR
    patient = RestartBudget(RestartPolicy(max_restarts=100))
    assert [patient.ask(0.0) for _ in range(20)][-1] == (20, 60.0)


def test_a_fault_that_comes_back_is_not_mended_for_ever() -> None:
    """However slowly it comes back: only a run that got further than ever before gets its restarts back, not one that repeats steps."""
    budget = RestartBudget(POLICY, (4, 3))
    assert [budget.ask(at * 3000.0, (4, 4))[0] for at in range(3)] == [1, 2, 2]
    assert budget.ask(9000.0, (5, 4)) == (2, 2.0)  # a batch more
    for now, reached in ((20000.0, (5, 2)), (30000.0, (5, 4))):  # it went back, and came as far as before
        assert budget.ask(now, reached) == (1, 1.0)
    assert budget.ask(40000.0, (5, 4)) == STANDSTILL
    assert budget.ask(40001.0, (5, 5)) == (1, 1.0)


@pytest.mark.parametrize(
    ("printed", "last"),
    [("error: the disk is full\none\ntwo", ["error: the disk is full"]), ("one\n\n---\ntwo", ["one", "two"])],
)
def test_last_words(tmp_path: Path, printed: str, last: list[str]) -> None:
    """An error for the user before the last lines; never a ruler, nor what an earlier incarnation printed."""
    log = tmp_path / "log"
    log.write_text("error: of an earlier incarnation\n")
    spec = ProcessSpec("trainer", (sys.executable, "-c", f"print({printed!r})"), log)
    with Lifeline() as lifeline:
        child = SupervisedChild(spec, None, RestartBudget(POLICY))
        child.start(lifeline, os.environ)
        wait(lambda: child.process.status is not None, subject="end", owner="the child", seconds=60.0)
        child.process.reap()
    assert child.process.status == 0
    assert child.last_words() == last
