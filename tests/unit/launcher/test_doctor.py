"""Who keeps a run from going on: crafted facts for each typical fault, and the collector over crafted directories and live processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
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
from prime_rl.processes import identify, is_stopped
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


def facts(**processes: ProcessFacts | ProcessStatus) -> Facts:
    known = {
        name: ProcessFacts(ProcessState.ALIVE, each) if isinstance(each, ProcessStatus) else each
        for name, each in processes.items()
    }
    return Facts(NOW, ProcessState.ALIVE, known, recoverable=True)


BATCH = waits("rollouts/step_41", "orchestrator", 212.0)
EPISODE = waits("one of 16 episodes to end", "inference and environments", 200.0)
TRAINER = status("trainer", waiting=BATCH)
ORCHESTRATOR = status("orchestrator", waiting=EPISODE)
SERVER = status("inference", phase="serving")
RUN: dict[str, ProcessFacts | ProcessStatus] = {"trainer": TRAINER, "orchestrator": ORCHESTRATOR}
STUCK = RunState.STUCK


def server(state: ProcessState = ProcessState.ALIVE, **changed: object) -> ProcessFacts:
    return ProcessFacts(state, replace(SERVER, **changed))


CASES: dict[str, tuple[dict[str, ProcessFacts | ProcessStatus], RunState, str]] = {
    "a stopped engine": (
        {**RUN, "inference": server(ProcessState.STOPPED, heartbeat=NOW - 212.0)}, STUCK,
        "inference has been stopped (SIGSTOP) for 212 s",
    ),
    "a server that failed": (
        {**RUN, "inference": server(outcome="failed: no memory")}, STUCK, "inference has ended: failed: no memory",
    ),
    "a rank that hangs": (
        {"trainer": status("trainer"), "trainer.3": ProcessFacts(ProcessState.STOPPED, status("trainer.3", beat=75.0))},
        STUCK, "trainer rank 3 has been stopped (SIGSTOP) for 75 s",
    ),
    "two faults": (
        {
            "trainer": ProcessFacts(ProcessState.DEAD, status("trainer", beat=30.0)),
            "orchestrator": status("orchestrator", progress=1900.0),
        },
        STUCK,
        "trainer died without a last word 30 s ago; orchestrator has stalled for 1900 s (at work, step 41)",
    ),
    # The others take over what one of several servers had.
    "another server is well": (
        {**RUN, "inference": server(ProcessState.DEAD), "inference-1": SERVER}, RunState.WAITS,
        "trainer waits for rollouts/step_41 from orchestrator for 212 s, orchestrator waits for one of 16 episodes to "
        "end from inference and environments for 200 s; no process shows a fault, for environments see logs/envs",
    ),
    "a short wait": (
        {"trainer": status("trainer", waiting=waits("rollouts/step_41", "orchestrator", 3.0)), "inference": SERVER},
        RunState.MOVES, "nothing is wrong: trainer waits for rollouts/step_41, inference: serving",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_keeps_a_run_from_going_on(case: str) -> None:
    """Contract: every fault that can be seen, else every long wait, in one sentence."""
    processes, state, sentence = CASES[case]
    assert diagnose(facts(**processes)) == (state, sentence)


def test_a_full_disk_comes_first() -> None:
    """Whatever else it has led to."""
    dead = ProcessFacts(ProcessState.DEAD, status("trainer"))
    state, sentence = diagnose(replace(facts(trainer=dead, orchestrator=ORCHESTRATOR), free=3 * 2**20))
    assert state is STUCK
    assert "the disk is full (3 MiB free)" in sentence


def test_runs_that_are_over() -> None:
    """Finished, stopped, failed, killed, never started: told apart; what can go on is said to."""
    gone = replace(facts(), launcher=ProcessState.ABSENT)

    def over(**statuses: ProcessStatus) -> tuple[RunState, str]:
        dead = {name: ProcessFacts(ProcessState.DEAD, each) for name, each in statuses.items()}
        return diagnose(replace(gone, processes=dead))

    done = status("trainer", outcome="finished")
    assert over() == (RunState.NEVER, "no process of a run has reported here")
    assert over(trainer=done, orchestrator=done) == (RunState.FINISHED, "the run has finished")
    state, sentence = over(trainer=replace(done, outcome="stopped"), orchestrator=done)
    assert (state, "--recover" in sentence) == (RunState.INTERRUPTED, True)
    state, sentence = over(trainer=done, orchestrator=replace(done, outcome="failed: no weights"))
    assert state is RunState.FAILED
    assert sentence.startswith("orchestrator failed: no weights")
    killed = replace(facts(trainer=ProcessFacts(ProcessState.DEAD, status("trainer"))), launcher=ProcessState.DEAD)
    state, sentence = diagnose(killed)
    assert state is RunState.INTERRUPTED
    assert "rl ended without a last word" in sentence
    state, sentence = over(trainer=status("trainer", beat=50.0), orchestrator=done)
    assert state is RunState.FAILED
    assert sentence.startswith("trainer ended without a last word 50 s ago")


# -- the collector ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process
        process.kill()


def write_status(run: Path, name: str, pid: int, *, started: int = 0, **fields: object) -> None:
    found = identify(pid)
    now = time.time()
    content = ProcessStatus(
        name, pid, "at work", 3, now, now, None, None, now, now, socket.gethostname(), started or (found.started if found else 1)
    )  # fmt: skip
    path = status_path(run, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(content), **fields}))


def test_the_process_table_tells_dead_stopped_and_alive_apart(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """By pid and start time: a pid that another process got is not the one that reported."""
    write_status(tmp_path, "trainer", sleeper.pid)
    write_status(tmp_path, "orchestrator", os.getpid(), started=1)
    write_status(tmp_path, "inference", 1, host="elsewhere")
    write_status(tmp_path, "trainer.1", sleeper.pid)
    found = doctor.collect(tmp_path).processes
    assert {name: process.state for name, process in found.items()} == {
        "trainer": ProcessState.ALIVE,
        "orchestrator": ProcessState.DEAD,
        "inference": ProcessState.UNKNOWN,
        "trainer.1": ProcessState.ALIVE,
    }
    sleeper.send_signal(signal.SIGSTOP)
    process = identify(sleeper.pid)
    assert process is not None
    wait(lambda: is_stopped(process), subject="stop", owner="the kernel", seconds=60)
    processes = doctor.collect(tmp_path).processes
    assert processes["trainer"].state is processes["trainer.1"].state is ProcessState.STOPPED


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
        write_status(tmp_path, "orchestrator", os.getpid(), started=1)
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


def test_a_directory_that_is_none_and_one_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is an error, an empty directory a finding."""
    with pytest.raises(UserError, match="is no directory"):
        doctor.examine(tmp_path / "typo")
    assert doctor.examine(tmp_path) == 0
    assert "never started" in capsys.readouterr().out


def test_damaged_files_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those who examine a wreck find all kinds of things in it."""
    for name in ("status", "configs", "logs/trainer.log", "launcher.json", "status/orchestrator.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "status/trainer.json").write_text("[]")
    (tmp_path / "configs/rl.toml").write_text('heartbeat_timeout = "long"\nstall_timeout = [1]\n')
    (tmp_path / "weights").touch()
    assert doctor.examine(tmp_path) == 0
    assert "never started" in capsys.readouterr().out
    (tmp_path / "configs/rl.toml").write_bytes(b"\xff")
    assert doctor.collect(tmp_path).policy == RestartPolicy()
