"""Who counts as stalled, how often a process is restarted, and what its log says of its end: without any process but one."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.launcher.plan import ProcessSpec
from prime_rl.launcher.supervise import RestartBudget, RestartPolicy, SupervisedChild, stalled
from prime_rl.lifeline import Lifeline
from prime_rl.monitor.status import ProcessStatus, Waiting
from prime_rl.wait import wait

POLICY = RestartPolicy(max_restarts=3, backoff=1.0, heartbeat_timeout=60.0, stall_timeout=1800.0)
WORKING = ProcessStatus("trainer", 7, "training", 3, 0.0, 0.0, None, None, progress=0.0, ready=0.0)


NOW = 1e9
WAIT = Waiting("rollouts/step_3", "orchestrator", NOW - 1900.0, NOW)
SERVER = replace(WORKING, process="inference", ready=NOW - 9000.0, progress=NOW - 9000.0)


def reason(*statuses: ProcessStatus, since: float = NOW - 1e5, service: bool = False) -> str | None:
    name = "inference" if service else "trainer"
    return stalled(name, {status.process: status for status in statuses}, POLICY, NOW, since, service)


def beats(status: ProcessStatus = WORKING, ago: float = 1.0, progress: float = 1.0, **more: object) -> ProcessStatus:
    """`ago`, `progress`: seconds since the last heartbeat, and the last progress."""
    return replace(status, **{"heartbeat": NOW - ago, "progress": NOW - progress, **more})


RANK = replace(WORKING, process="trainer.1")
OVERDUE = replace(WAIT, since=NOW - 161.0, deadline=NOW - 61.0)
STALLS: list[tuple[tuple[ProcessStatus, ...], str | None]] = [
    ((beats(ago=60.0),), None),
    ((beats(ago=61.0),), "has given no sign of life for 61 s"),
    ((beats(), beats(RANK, ago=70.0)), "rank 1 has given no sign of life for 70 s"),
    ((beats(), beats(RANK, progress=9000.0)), None),  # rank 0 reports progress for all
    ((beats(progress=1800.0),), None),
    ((beats(progress=1801.0),), "has stalled for 1801 s (training, step 3)"),
    ((beats(progress=1900.0, waiting=WAIT),), None),  # within its own deadline
    ((beats(progress=1900.0, waiting=replace(OVERDUE, deadline=NOW - 60.0)),), None),
    ((beats(waiting=OVERDUE),), "still waits for rollouts/step_3 from orchestrator, 61 s after its own deadline"),
    ((beats(ago=299.0, outcome="finished"),), None),
    ((beats(ago=301.0, outcome="finished"),), "said `finished` 301 s ago and has not ended"),
    ((), "has not reported within 1800 s"),
]


@pytest.mark.parametrize(("statuses", "expected"), STALLS)
def test_who_counts_as_stalled(statuses: tuple[ProcessStatus, ...], expected: str | None) -> None:
    """No sign of life, no progress while nobody is waited for, a wait beyond its own deadline, hanging at exit, no report.

    Whatever lies before the start, or before the host woke up, counts for nothing.
    """
    assert reason(*statuses) == expected
    assert reason(*statuses, since=NOW - 10.0) is None


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (beats(SERVER, ago=9000.0, ready=None), None),
        (beats(SERVER, progress=9000.0), None),
        (beats(SERVER, ago=61.0, progress=9000.0), "has given no sign of life for 61 s"),
        (beats(SERVER, progress=50.0), None),
        (beats(SERVER, progress=61.0), "has had no answer from its engine for 61 s"),
        (beats(SERVER, progress=61.0, waiting=WAIT), None),
    ],
)
def test_a_service_may_idle_and_take_its_time_to_start(status: ProcessStatus, expected: str | None) -> None:
    """Once it has reported answers of its engine it must go on with that, except in a change with its own deadline."""
    assert reason(status, service=True) == expected
    assert reason(service=True) is None


def test_restarts_are_bounded() -> None:
    """Within an hour, with a doubling backoff; and until the run gets further than ever, not by repeated steps."""
    budget = RestartBudget(POLICY, (0, 0))
    assert [budget.ask(now, (0, 0)) for now in (0.0, 10.0, 20.0, 30.0)] == [(1, 1.0), (2, 2.0), (3, 4.0), None]
    assert budget.ask(3590.0, (1, 1)) is None
    assert budget.ask(3600.0, (1, 1)) == (3, 4.0)  # the first one lies an hour back
    assert budget.ask(9000.0, (1, 1)) == (2, 2.0)
    assert budget.ask(13000.0, (0, 1)) == (3, 4.0)  # it went back, and is not as far as before
    assert budget.ask(99000.0, (1, 1)) is None
    assert budget.ask(99001.0, (2, 1)) == (1, 1.0)
    assert RestartBudget(RestartPolicy(max_restarts=0)).ask(0.0) is None
    patient = RestartBudget(RestartPolicy(max_restarts=100))
    assert [patient.ask(0.0) for _ in range(20)][-1] == (20, 60.0)


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
        child = SupervisedChild(spec, RestartBudget(POLICY))
        child.start(lifeline, os.environ)
        wait(lambda: child.process.status is not None, subject="end", owner="the child", seconds=60.0)
        child.process.reap()
    assert child.process.status == 0
    assert child.last_words() == last
