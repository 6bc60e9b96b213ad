"""A process of a run that dies, halts or gets nowhere is started again alone; how often is bounded; nothing of its old incarnation is left."""

import json
import os
import signal
import time
from collections.abc import Callable

from prime_rl.monitor import read_status
from prime_rl.processes import identify
from support.launching import Launch, all_gone, launch
from support.processes import until

PATIENT = {"max_restarts": 2, "backoff": 0.2, "heartbeat_timeout": 3.0, "stall_timeout": 600.0}

__all__ = ["launch"]  # a fixture

Start = Callable[..., Launch]


def incarnations(run: Launch, name: str) -> list[str]:
    """What `name` said at the start of each incarnation: its number and the options it was given on top."""
    file = run.base / "events"
    events = file.read_text().splitlines() if file.exists() else []
    return [line.removeprefix(f"{name} incarnation ") for line in events if line.startswith(f"{name} incarnation ")]


def test_a_killed_process_is_started_again_alone_with_recover(launch: Start) -> None:
    """It had been ready: it goes on from what is committed. Nothing of its old incarnation is left, not even a stopped grandchild
    in a session of its own; the others are not touched. Said in one line, and kept in a file."""
    run = launch("trainer=mends:killed-with-family", "orchestrator=after", policy=PATIENT)
    family = [run.pid("session"), run.pid("group")]
    status, out = run.wait()
    assert status == 0, out
    assert incarnations(run, "trainer") == ["1", "2 --recover"]
    assert (run.base / "orchestrator.incarnations").read_text() == "x"
    assert (
        "trainer was killed by SIGKILL: starting it again in 0.2 s (restart 1 of at most 2 an hour, recovering)" in out
    )
    (row,) = [json.loads(line) for line in (run.base / "run/logs/restarts.jsonl").read_text().splitlines()]
    assert (row["process"], row["number"], row["recover"]) == ("trainer", 1, True)
    assert not any(identify(pid) for pid in family)


MENDED = {
    "orchestrator=mends:stopped": "orchestrator has given no sign of life for",
    "trainer=mends:silent-rank": "trainer rank 1 has given no sign of life",
    "complains=mends:complains": "complains failed with exit status 1 (error: the disk is full)",
    "overdue=mends:overdue": "overdue still waits for rollouts/step_3 from orchestrator,",
    "told=mends:told-to-stop": "told ended too early (stopped): starting it again",
    "early=mends:early-raises": "early failed with exit status 1",
}


def test_each_kind_of_failure_is_mended(launch: Start) -> None:
    """Halted, ended by itself or by a stranger, or waiting beyond its own deadline: started again with --recover, and the reason is said. A halted rank
    takes its whole group along. A crash before ready is tried again as it was started: nothing of that incarnation was committed in order."""
    run = launch(*MENDED, policy=PATIENT)
    rank = run.pid("rank")
    status, out = run.wait()
    assert status == 0, out
    assert [text for text in MENDED.values() if text not in out] == []
    assert identify(rank) is None
    for name in (child.partition("=")[0] for child in MENDED):
        assert incarnations(run, name) == ["1", "2" if name == "early" else "2 --recover"], name


def test_what_another_try_would_not_mend_ends_the_run(launch: Start) -> None:
    """Before the process was ready a second try would end with the same error line."""
    run = launch("trainer=mends:early-complains", "orchestrator=waits", policy=PATIENT)
    status, out = run.wait()
    assert status == 1, out
    assert "error: the disk is full" in out
    assert "starting it again" not in out
    all_gone(run.pids())


def test_restarts_are_bounded(launch: Start) -> None:
    """Backoff doubles; past the limit the run ends with the reason, status 1 and nothing alive."""
    run = launch("trainer=always-raises", "orchestrator=waits", policy=PATIENT)
    status, out = run.wait()
    assert status == 1, out
    assert (run.base / "trainer.incarnations").read_text() == "xxx"
    assert "starting it again in 0.2 s (restart 1 of" in out
    assert "starting it again in 0.4 s (restart 2 of" in out
    assert "trainer was started again 2 times within an hour or without the run getting any further: giving up" in out
    assert "RuntimeError: incarnation 3" in out
    all_gone(run.pids())


def test_ctrl_c_during_backoff_drains_the_others(launch: Start) -> None:
    """The process that is down stays down; the run ends at once as interrupted."""
    run = launch("trainer=always-raises", "orchestrator=drains", policy={**PATIENT, "backoff": 60.0})
    run.up("orchestrator")
    until((run.base / "run/logs/restarts.jsonl").exists, "restart planned")
    run.popen.send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130, out
    assert "orchestrator finished after SIGINT" in (run.base / "events").read_text()
    assert (run.base / "trainer.incarnations").read_text() == "x"
    assert read_status(run.base / "run")["trainer"].outcome == "stopped", "nobody waits for its last word"
    all_gone(run.pids())


def test_an_own_server_is_started_again_and_nobody_else(launch: Start) -> None:
    """Dead or halted: it comes back under the same address, is awaited, and the jobs have gone on meanwhile."""
    run = launch("inference=serves", "trainer=after", policy=PATIENT)
    run.up("inference")
    for incarnation, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        served = f"serves in incarnation {incarnation + 1}"
        server = run.pid("inference")
        os.kill(server, number)
        until(lambda served=served: served in (run.base / "events").read_text(), served)
        assert identify(server) is None
    (run.base / "end").touch()
    status, out = run.wait()
    assert status == 0, out
    assert out.count("inference ready in") == 3
    assert (run.base / "trainer.incarnations").read_text() == "x"


def test_a_run_goes_on_without_a_server_that_cannot_be_started(launch: Start) -> None:
    """One of several that fails again and again is given up alone; the last one is not."""
    run = launch("inference=serves", "inference-1=always-raises", "trainer=after", policy=PATIENT)
    file = run.base / "inference-1.incarnations"
    until(lambda: file.exists() and file.read_text() == "xxx", "the last incarnation of the server")
    time.sleep(1.0)  # the launcher gives it up meanwhile
    (run.base / "end").touch()
    status, out = run.wait()
    assert status == 0, out
    assert "the run goes on without inference-1, on inference" in out
    assert file.read_text() == "xxx"


def test_a_launcher_that_was_halted_blames_nobody(launch: Start) -> None:
    """Suspended together with its children for longer than any timeout: afterwards all go on."""
    run = launch("trainer=mends:patient", "orchestrator=after", policy=PATIENT)
    family = [run.popen.pid, run.pid("trainer"), run.pid("orchestrator")]
    until(lambda: incarnations(run, "trainer") == ["1"], "trainer at work")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in family:
            os.kill(pid, number)
        time.sleep(3.5)
    (run.base / "end").touch()
    status, out = run.wait()
    assert status == 0, out
    assert "starting it again" not in out
