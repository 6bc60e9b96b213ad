"""Who counts as stalled, how often a process is restarted, and what its log says of its end: without any process but one."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.launcher.plan import ProcessSpec
from prime_rl.launcher.supervise import (
    Grant,
    LoopClock,
    RestartBudget,
    RestartPolicy,
    SupervisedChild,
    Watchdog,
    killed_rank,
)
from prime_rl.lifeline import Lifeline
from prime_rl.monitor.status import ProcessStatus, Waiting
from prime_rl.processes import ProcessId
from prime_rl.wait import wait

POLICY = RestartPolicy(max_restarts=3, backoff=1.0, heartbeat_timeout=60.0, stall_timeout=1800.0)
HOUR, STANDSTILL = "within an hour", "without the run getting any further"
WORKING = ProcessStatus("trainer", 7, "training", 3, 0.0, 0.0, None, None, progress=0.0, ready=0.0)


class Run:
    """Feeds a watchdog with statuses whose clocks have nothing to do with the launcher's."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(POLICY)
        self.now = 0.0
        self.beats = 0

    def look(self, seconds: float, *statuses: ProcessStatus, beating: bool = True, **more: object) -> dict[str, str]:
        self.now += seconds
        self.beats += beating
        by_name = {status.process: replace(status, heartbeat=-5e8 + self.beats) for status in statuses}
        return self.watchdog.stalled(self.now, by_name, more.get("stopped", {}), more.get("services", ()))  # type: ignore[arg-type]


@pytest.fixture
def run() -> Run:
    run = Run()
    run.watchdog.begin("trainer", 0.0)
    return run


def test_a_heart_that_beats_and_work_that_moves_are_no_stall(run: Run) -> None:
    """However long, and whatever the other's clock says."""
    for hour in range(100):
        assert run.look(50.0, replace(WORKING, progress=float(hour))) == {}


def test_silence_is_a_stall_after_heartbeat_timeout(run: Run) -> None:
    """Nothing new in the file for longer than that."""
    assert run.look(1.0, WORKING) == {}
    assert run.look(60.0, WORKING, beating=False) == {}
    assert run.look(1.0, WORKING, beating=False) == {"trainer": "has given no sign of life for 61 s"}


def test_a_rank_speaks_for_its_process(run: Run) -> None:
    """Rank 1 silent: the trainer has stalled. Its progress does not count, rank 0 speaks for all."""
    rank = replace(WORKING, process="trainer.1")
    for hour in range(10):
        assert run.look(600.0, replace(WORKING, progress=float(hour)), rank) == {}
    for _ in range(2):
        found = run.look(35.0, rank, beating=False)
    assert found == {"trainer": "rank 1 has given no sign of life for 70 s"}


def test_no_progress_while_nobody_is_waited_for(run: Run) -> None:
    """The end of a wait begins the time anew."""
    wait = replace(WORKING, waiting=Waiting("rollouts/step_3", "orchestrator", 0.0, 7200.0))
    run.look(0.0, WORKING)
    assert run.look(1800.0, WORKING) == {}
    assert run.look(1.0, WORKING) == {"trainer": "has stalled for 1801 s (training, step 3)"}
    assert run.look(1.0, wait) == {}
    assert run.look(7000.0, wait) == {}
    assert run.look(1.0, WORKING) == {}


def test_a_wait_beyond_its_own_deadline(run: Run) -> None:
    """Its owner should have ended it: the launcher does, after a little more."""
    wait = replace(WORKING, waiting=Waiting("rollouts/step_3", "orchestrator", 1e9, 1e9 + 100.0))
    assert run.look(0.0, wait) == {}
    assert run.look(160.0, wait) == {}
    assert run.look(1.0, wait) == {
        "trainer": "still waits for rollouts/step_3 from orchestrator, 61 s after its own deadline"
    }


def test_a_stopped_process_without_status(run: Run) -> None:
    """torchrun's agent writes no status; /proc tells. One that goes on in between has not stalled."""
    stopped = {"trainer": [ProcessId(9, 1)]}
    assert run.look(0.0, WORKING, stopped=stopped) == {}
    assert run.look(50.0, WORKING) == {}
    assert run.look(20.0, WORKING, stopped=stopped) == {}
    assert run.look(61.0, WORKING, stopped=stopped) == {"trainer": "has been stopped (SIGSTOP) for 61 s"}


def test_never_a_report(run: Run) -> None:
    """A process that hangs before its first word."""
    assert run.look(1800.0) == {}
    assert run.look(1.0) == {"trainer": "has not reported within 1800 s"}


def test_a_service_may_idle_and_take_its_time_to_start(run: Run) -> None:
    """Without requests it gets nowhere; while it starts its own deadline counts; once ready its heart must beat."""
    run.watchdog.begin("inference", 0.0)
    server = replace(WORKING, process="inference", ready=None)
    options: dict[str, object] = {"services": ["inference"]}
    assert run.look(9000.0, server, replace(WORKING, progress=1.0), beating=False, **options) == {}
    assert run.look(900.0, server, replace(WORKING, progress=2.0), **options) == {}
    assert run.look(9000.0, replace(server, ready=1.0), replace(WORKING, progress=3.0), **options) == {}
    found = run.look(61.0, replace(server, ready=1.0), replace(WORKING, progress=4.0), beating=False, **options)
    assert found["inference"] == "has given no sign of life for 61 s"


def test_a_server_whose_engine_falls_silent(run: Run) -> None:
    """Once it has reported answers of its engine it must go on with that, except while a change has a deadline of its own."""
    run.watchdog.begin("inference", 0.0)
    run.watchdog.end("trainer")
    serving = replace(WORKING, process="inference")
    loading = replace(serving, progress=2.0, waiting=Waiting("update", "engine", 0.0, 600.0))
    options: dict[str, object] = {"services": ["inference"]}
    for status in (serving, replace(serving, progress=1.0), replace(serving, progress=2.0), loading, loading):
        assert run.look(50.0, status, **options) == {}
    assert run.look(50.0, replace(serving, progress=2.0), **options) == {}
    found = run.look(61.0, replace(serving, progress=2.0), **options)
    assert found == {"inference": "has had no answer from its engine for 61 s"}


def test_a_process_that_said_goodbye_must_go(run: Run) -> None:
    """Its heartbeat ends with its last word; hanging at exit is a stall all the same."""
    done = replace(WORKING, outcome="finished")
    run.look(0.0, done)
    assert run.look(299.0, done, beating=False) == {}
    assert run.look(2.0, done, beating=False) == {"trainer": "said `finished` 301 s ago and has not ended"}


def test_an_absent_launcher_and_a_new_incarnation_begin_anew(run: Run) -> None:
    """What was seen before counts no more."""
    run.look(0.0, WORKING)
    run.now += 5000.0
    run.watchdog.reset(run.now)
    assert run.look(0.0, WORKING, beating=False) == {}
    run.now += 5000.0
    run.watchdog.begin("trainer", run.now)
    assert run.look(0.0, WORKING, beating=False) == {}


def test_the_launchers_clock_stands_still_while_it_is_away() -> None:
    """A laptop that slept for an hour, seen from any monotonic clock."""
    times = iter([0.0, 0.1, 3600.1, 3600.2])
    clock = LoopClock(lambda: next(times))
    assert not clock.tick()
    assert clock.tick()
    assert not clock.tick()
    assert clock.now == pytest.approx(2.7)


def test_restarts_are_counted_a_process_and_an_hour() -> None:
    """Backoff doubles within the hour; what lies further back is forgotten; each process has its own number."""
    budget = RestartBudget(POLICY, (0, 0))
    assert [budget.ask("trainer", now, (0, 0)) for now in (0.0, 10.0, 20.0, 30.0)] == [
        Grant(1, 1.0), Grant(2, 2.0), Grant(3, 4.0), HOUR,
    ]  # fmt: skip
    assert budget.ask("orchestrator", 30.0, (0, 0)) == Grant(1, 1.0)
    assert budget.ask("trainer", 3590.0, (1, 1)) == HOUR
    assert budget.ask("trainer", 3600.0, (1, 1)) == Grant(3, 4.0)
    assert RestartBudget(RestartPolicy(max_restarts=0)).ask("trainer", 0.0) == HOUR
    patient = RestartBudget(RestartPolicy(max_restarts=100))
    grants = [patient.ask("x", 0.0) for _ in range(20)]
    assert max(grant.seconds for grant in grants if isinstance(grant, Grant)) == 60.0


def test_a_fault_that_comes_back_is_not_mended_for_ever() -> None:
    """However slowly it comes back: only a run that got further than ever before gets its restarts back, not one that repeats steps."""
    budget = RestartBudget(POLICY, (4, 3))
    assert [isinstance(budget.ask("trainer", at * 3000.0, (4, 4)), Grant) for at in range(3)] == [True] * 3
    assert budget.ask("trainer", 9000.0, (5, 4)) == Grant(2, 2.0)  # a batch more
    for now, reached in ((20000.0, (5, 2)), (30000.0, (5, 4))):  # it went back, and came as far as before
        assert budget.ask("trainer", now, reached) == Grant(1, 1.0)
    assert budget.ask("trainer", 40000.0, (5, 4)) == STANDSTILL
    assert budget.ask("orchestrator", 40000.0, (5, 4)) == Grant(1, 1.0)
    assert budget.ask("trainer", 40001.0, (5, 5)) == Grant(1, 1.0)


REPORT = """\
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_20:59:01
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 101)
  traceback : Signal 15 (SIGTERM) received by PID 101
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_20:59:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 102)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 102
============================================================
"""


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        (REPORT.format(code="-9"), ["rank 1 was killed by SIGKILL"]),
        ("error: the disk is full\n" + REPORT.format(code="-9"), ["error: the disk is full"]),
        ("one\n\n---\ntwo", ["one", "two"]),
        (REPORT.format(code="1"), None),
    ],
)
def test_last_words(tmp_path: Path, printed: str, last: list[str] | None) -> None:
    """An error for the user before a killed rank before the last lines; never a ruler, nor what an earlier incarnation printed."""
    log = tmp_path / "log"
    log.write_text("error: of an earlier incarnation\n")
    spec = ProcessSpec("trainer", (sys.executable, "-c", f"print({printed!r})"), log)
    with Lifeline() as lifeline:
        child = SupervisedChild(spec, lifeline, os.environ)
        wait(lambda: child.status is not None, subject="end", owner="the child", seconds=60.0)
        child.reap()
    assert child.status == 0
    if last is None:
        assert child.last_words()[-1].startswith("  traceback")
        assert killed_rank(printed.splitlines()) == []
    else:
        assert child.last_words() == last
