"""Who keeps a run from going on: crafted facts for each typical fault, then crafted directories."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.launcher import doctor
from prime_rl.launcher.doctor import (
    Facts,
    ProcessFacts,
    ProcessState,
    RunState,
    diagnose,
)
from prime_rl.launcher.rundir import Owner
from prime_rl.launcher.supervise import RestartPolicy
from prime_rl.monitor import Status
from prime_rl.monitor.status import ProcessStatus, Waiting, status_path
from prime_rl.processes import ProcessId, identify, is_stopped
from prime_rl.wait import wait

NOW = 1_000_000.0


def status(
    name: str, *, beat: float = 1.0, progress: float = 2.0, phase: str = "at work", **more: object
) -> ProcessStatus:
    """`beat` and `progress`: seconds ago."""
    times = {"since": NOW - progress, "heartbeat": NOW - beat, "progress": NOW - progress, "ready": NOW - 900.0}
    known = ProcessStatus(name, 7, phase, 41, 0.0, 0.0, None, None, host="here", started=1)
    return replace(known, **{**times, **more})


def waits(subject: str, owner: str, seconds: float, deadline: float = 3600.0) -> Waiting:
    return Waiting(subject, owner, NOW - seconds, NOW - seconds + deadline)


BATCH = waits("rollouts/step_41", "orchestrator", 212.0)
EPISODE = waits("one of 16 episodes to end", "inference and environments", 200.0)
TRAINER, ORCHESTRATOR = status("trainer", waiting=BATCH), status("orchestrator", waiting=EPISODE)
SERVER = status("inference", phase="serving")
ALIVE, DEAD, STOPPED, ABSENT = ProcessState.ALIVE, ProcessState.DEAD, ProcessState.STOPPED, ProcessState.ABSENT
STUCK, INTERRUPTED, FAILED = RunState.STUCK, RunState.INTERRUPTED, RunState.FAILED
DONE = status("trainer", outcome="finished")
RUN = {"trainer": TRAINER, "orchestrator": ORCHESTRATOR}

# State of the launcher, statuses of those that live and of those that do not; what is found.
CASES: dict[str, tuple[ProcessState, dict[str, ProcessStatus], dict[str, ProcessFacts], RunState, str]] = {
    "a stopped engine": (
        ALIVE, RUN, {"inference": ProcessFacts(STOPPED, replace(SERVER, heartbeat=NOW - 212.0))}, STUCK,
        "inference has been stopped (SIGSTOP) for 212 s",
    ),
    "a server that failed": (
        ALIVE, {**RUN, "inference": replace(SERVER, outcome="failed: no memory")}, {}, STUCK,
        "inference has ended: failed: no memory",
    ),
    "a rank that hangs": (
        ALIVE, {"trainer": status("trainer")},
        {"trainer.3": ProcessFacts(STOPPED, status("trainer.3", beat=75.0))}, STUCK,
        "trainer rank 3 has been stopped (SIGSTOP) for 75 s",
    ),
    "two faults": (
        ALIVE, {"orchestrator": status("orchestrator", progress=1900.0)},
        {"trainer": ProcessFacts(DEAD, status("trainer", beat=30.0))}, STUCK,
        "orchestrator has stalled for 1900 s (at work, step 41); trainer died without a last word 30 s ago",
    ),
    # The others take over what one of several servers had.
    "another server is well": (
        ALIVE, {**RUN, "inference-1": SERVER}, {"inference": ProcessFacts(DEAD, SERVER)}, RunState.WAITS,
        "trainer waits for rollouts/step_41 from orchestrator for 212 s, orchestrator waits for one of 16 episodes to "
        "end from inference and environments for 200 s; no process shows a fault, for environments see logs/envs",
    ),
    "a short wait": (
        ALIVE,
        {"trainer": status("trainer", waiting=waits("rollouts/step_41", "orchestrator", 3.0)), "inference": SERVER},
        {"orchestrator": ProcessFacts(ABSENT, restart="was killed")}, RunState.MOVES,
        "nothing to do: trainer waits for rollouts/step_41, inference: serving, orchestrator was killed",
    ),
    "never started": (ABSENT, {}, {}, RunState.NEVER, "no process of a run has reported here"),
    "finished": (ABSENT, {"trainer": DONE, "orchestrator": DONE}, {}, RunState.FINISHED, "the run has finished"),
    "stopped": (
        ABSENT, {"trainer": replace(DONE, outcome="stopped"), "orchestrator": DONE}, {}, INTERRUPTED,
        "the run was stopped",
    ),
    "failed": (
        ABSENT, {"trainer": DONE, "orchestrator": replace(DONE, outcome="failed: no weights")}, {}, FAILED,
        "orchestrator failed: no weights",
    ),
    "the launcher was killed": (
        DEAD, {}, {"trainer": ProcessFacts(DEAD, status("trainer"))}, INTERRUPTED,
        "rl ended without a last word (killed, or the host went down), and everything with it",
    ),
    "one by hand was killed": (
        ABSENT, {"orchestrator": DONE}, {"trainer": ProcessFacts(DEAD, status("trainer", beat=50.0))}, FAILED,
        "trainer ended without a last word 50 s ago",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_keeps_a_run_from_going_on(case: str) -> None:
    """Contract: every fault that can be seen, else every long wait; of a run that is over how it ended."""
    launcher, alive, others, state, sentence = CASES[case]
    processes = {name: ProcessFacts(ALIVE, each) for name, each in alive.items()} | others
    facts = Facts(NOW, launcher, processes, recoverable=True)
    advice = " (`rl … --recover` goes on from what is committed)" if state in (INTERRUPTED, FAILED) else ""
    assert diagnose(facts) == (state, sentence + advice)
    if state in (STUCK, RunState.WAITS):  # a full disk comes first, whatever else it has led to
        state, sentence = diagnose(replace(facts, free=3 * 2**20))
        assert (state, "the disk is full (3 MiB free)" in sentence) == (STUCK, True)


def test_the_process_table_tells_dead_stopped_and_alive_apart(tmp_path: Path) -> None:
    """By pid and start time: a pid that another process got is not the one that reported."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as sleeper:
        process = identify(sleeper.pid)
        assert process is not None
        for name in ("trainer", "trainer.1"):
            Status(tmp_path, name, of=process).close()
        Status(tmp_path, "orchestrator", of=ProcessId(os.getpid(), 1)).close()
        Status(tmp_path, "inference").close()
        path = status_path(tmp_path, "inference")
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))
        stopped = partial(is_stopped, process)
        for state in (ALIVE, STOPPED):
            found = doctor.collect(tmp_path).processes
            states = {"trainer": state, "trainer.1": state, "orchestrator": DEAD, "inference": ProcessState.UNKNOWN}
            assert {name: each.state for name, each in found.items()} == states
            sleeper.send_signal(signal.SIGSTOP)
            wait(stopped, subject="stop", owner="the kernel", seconds=60)
        sleeper.kill()


def test_the_examination_of_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes, waits, what is committed, errors in logs, and the state; nothing in the directory is touched."""
    with Owner(tmp_path):
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs/rl.toml").write_text("heartbeat_timeout = 5.0\n")
        (tmp_path / "configs/inference.toml").touch()
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/trainer.log").write_text("12:00:00 INFO    fine\nRuntimeError: out of memory\n")
        for name in ("rollouts/step_40", "weights/step_0", "weights/step_40", "recovery/step_30", "incarnations"):
            (tmp_path / name).mkdir(parents=True)
        trainer = Status(tmp_path, "trainer")
        trainer.step(40)
        trainer.waiting("weights", "inference", 600.0)
        Status(tmp_path, "orchestrator", of=ProcessId(os.getpid(), 1)).close()
        (tmp_path / "configs/inference-1.toml").touch()
        restart = {"process": "inference-1", "reason": "was killed by SIGKILL", "time": time.time()}
        (tmp_path / "logs/restarts.jsonl").write_text(json.dumps(restart) + "\n[]\n")
        before = sorted(path for path in tmp_path.rglob("*") if ".tmp-" not in path.name)
        assert doctor.examine(tmp_path) == 1
        trainer.close()
        out = capsys.readouterr().out
        assert sorted(path for path in tmp_path.rglob("*") if ".tmp-" not in path.name) == before
    assert re.search("launcher +alive", out)
    assert re.search("trainer +alive +starting, step 40", out)
    assert "waits for weights from inference for 0:00 (gives up in 10:00)" in out
    assert re.search(r"inference +no report\n", out)
    assert re.search(r"inference-1 +was killed by SIGKILL 0:00 ago, is being started again\n", out)
    assert "batch 40, version 40, checkpoint -, recovery checkpoint 30" in out
    assert "trainer.log: RuntimeError: out of memory" in out
    assert "orchestrator died without a last word 0 s ago" in out.splitlines()[-1]


def test_a_wreck_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is an error, an empty directory a finding; damaged files are passed over."""
    with pytest.raises(UserError, match="is no directory"):
        doctor.examine(tmp_path / "typo")
    assert doctor.examine(tmp_path) == 0
    for name in ("status", "configs", "logs/trainer.log", "launcher.json", "status/orchestrator.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "status/trainer.json").write_text("[]")
    (tmp_path / "weights").touch()
    for text in (b'heartbeat_timeout = "long"\nstall_timeout = [1]\n', b"\xff"):
        (tmp_path / "configs/rl.toml").write_bytes(text)
        assert doctor.examine(tmp_path) == 0
        assert doctor.collect(tmp_path).policy == RestartPolicy()
    assert capsys.readouterr().out.count("never started") == 3
