"""Who counts as stalled, and what the log of a process says of its end."""

from dataclasses import replace

import pytest

from prime_rl.launcher.supervise import RestartPolicy, stall_reason
from prime_rl.monitor.status import ProcessStatus, Waiting

POLICY = RestartPolicy(max_restarts=3, backoff=1.0, heartbeat_timeout=60.0, stall_timeout=1800.0)
WORKING = ProcessStatus("trainer", 7, "training", 3, 0.0, 0.0, None, None, progress=0.0, ready=0.0)

NOW = 1e9
WAIT = Waiting("rollouts/step_3", "orchestrator", NOW - 1900.0, NOW)
SERVER = replace(WORKING, process="inference", phase="serving", step=None, ready=NOW - 9000.0, progress=NOW - 9000.0)


def beats(status: ProcessStatus = WORKING, ago: float = 1.0, progress: float = 1.0, **more: object) -> ProcessStatus:
    """`ago`, `progress`: seconds since the last heartbeat, and the last progress."""
    return replace(status, **{"heartbeat": NOW - ago, "progress": NOW - progress, **more})


RANK = replace(WORKING, process="trainer.1")
OVERDUE = replace(WAIT, since=NOW - 161.0, deadline=NOW - 61.0)
STALLS: list[tuple[ProcessStatus, str | None]] = [
    (beats(ago=60.0), None),
    (beats(ago=61.0), "has given no sign of life for 61 s"),
    (beats(RANK, ago=70.0), "rank 1 has given no sign of life for 70 s"),
    (beats(RANK, progress=9000.0), None),  # rank 0 reports progress for all
    (beats(progress=1800.0), None),
    (beats(progress=1801.0), "has stalled for 1801 s (training, step 3)"),
    (beats(progress=1900.0, waiting=WAIT), None),  # within its own deadline
    (beats(progress=1900.0, waiting=replace(OVERDUE, deadline=NOW - 60.0)), None),
    (beats(waiting=OVERDUE), "has stalled for 161 s (it waits for rollouts/step_3 from orchestrator)"),
    (beats(ago=299.0, outcome="finished"), None),
    (beats(ago=301.0, outcome="finished"), "said `finished` 301 s ago and has not ended"),
    # A service may idle, and start slowly. Once it has reported answers of its engine it must go on with that.
    (beats(SERVER, ago=9000.0, ready=None), None),
    (beats(SERVER, progress=9000.0), None),
    (beats(SERVER, ago=61.0, progress=9000.0), "has given no sign of life for 61 s"),
    (beats(SERVER, progress=50.0), None),
    (beats(SERVER, progress=61.0), "has stalled for 61 s (serving)"),
    (beats(SERVER, progress=61.0, waiting=WAIT), None),  # a change with its own deadline
]


@pytest.mark.parametrize(("status", "expected"), STALLS)
def test_who_counts_as_stalled(status: ProcessStatus, expected: str | None) -> None:
    """No sign of life, no progress while nobody is waited for, a wait beyond its own deadline, hanging at exit.
    Whatever lies before the start, or before the host woke up, counts for nothing."""
    service = status.process == "inference"
    assert stall_reason(status.process, status, POLICY, NOW, NOW - 1e5, service) == expected
    assert stall_reason(status.process, status, POLICY, NOW, NOW - 10.0, service) is None
