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

from prime_rl.entrypoints import rl
from prime_rl.errors import UserError
from prime_rl.launcher import doctor
from prime_rl.launcher.doctor import (
    Diagnosis,
    Facts,
    ProcessFacts,
    ProcessState,
    RunState,
    WorkerFacts,
    diagnose,
    examination,
)
from prime_rl.launcher.rundir import Owner
from prime_rl.launcher.supervise import Restart, RestartPolicy
from prime_rl.monitor import Status
from prime_rl.monitor.status import ProcessStatus, Waiting, status_path
from prime_rl.processes import identify, is_stopped
from prime_rl.wait import wait

NOW = 1_000_000.0
KILLED = Restart(NOW + 3.0, "inference", "was killed by SIGKILL", 1, 1.0, 60.0, False)


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


def test_a_stopped_engine_is_found_along_the_waits() -> None:
    """The trainer waits, the orchestrator waits, the engine does not run: all of it in one sentence."""
    stopped = ProcessFacts(ProcessState.STOPPED, replace(SERVER, heartbeat=NOW - 212.0))
    found = diagnose(facts(trainer=TRAINER, orchestrator=ORCHESTRATOR, inference=stopped))
    assert found.state is RunState.STUCK
    assert found.attribution == "inference"
    assert found.sentence == (
        "trainer ← rollouts/step_41 ← orchestrator ← one of 16 episodes to end ← inference, which has been stopped (SIGSTOP) for 212 s"
    )


def test_a_teacher_whose_host_is_called_like_a_process_is_none_of_them() -> None:
    """Contract: names of processes are found in the words of a wait, not in addresses."""
    wait = waits(
        "one of 16 episodes to end", "inference, environments and the teacher at http://sft-trainer:8000", 200.0
    )
    orchestrator = status("orchestrator", waiting=wait)
    assert diagnose(facts(trainer=TRAINER, orchestrator=orchestrator, inference=SERVER)).state is not RunState.STUCK


@pytest.mark.parametrize(
    ("server", "clause"),
    [
        (ProcessFacts(ProcessState.ALIVE, SERVER, stopped=(99,)), "whose process 99 is stopped (SIGSTOP)"),
        (replace(SERVER, progress=NOW - 90.0), "which has had no answer from its engine for 90 s"),
        (replace(SERVER, heartbeat=NOW - 61.0), "which has given no sign of life for 61 s"),
        (ProcessFacts(ProcessState.ABSENT), "which has not reported: somebody else runs it"),
        (replace(SERVER, outcome="failed: out of memory"), "which has ended: failed: out of memory"),
    ],
)
def test_what_may_be_wrong_with_a_server(server: ProcessFacts | ProcessStatus, clause: str) -> None:
    """Each has its own clause."""
    found = diagnose(facts(trainer=TRAINER, orchestrator=ORCHESTRATOR, inference=server))
    assert (found.state, found.attribution) == (RunState.STUCK, "inference")
    assert found.sentence.endswith(f"← inference, {clause}")


@pytest.mark.parametrize(
    ("restart", "clause"),
    [
        (KILLED, "which was killed by SIGKILL and is started again in 4 s"),
        (
            replace(KILLED, time=NOW - 7.0),
            "which was killed by SIGKILL, was started again 6 s ago and has not reported yet",
        ),
    ],
)
def test_a_restart_is_no_standstill(restart: Restart, clause: str) -> None:
    """What the launcher is mending is said, and told from what a person has to mend."""
    server = ProcessFacts(ProcessState.ABSENT, restart=restart)
    found = diagnose(facts(trainer=TRAINER, orchestrator=ORCHESTRATOR, inference=server))
    assert (found.state, found.attribution) == (RunState.RESTARTS, "inference")
    assert found.sentence.endswith(f"← inference, {clause}")
    halted = replace(facts(trainer=TRAINER, inference=server), launcher=ProcessState.STOPPED)
    assert diagnose(halted).state is RunState.STUCK


def test_one_of_several_servers_that_is_gone_is_no_fault_while_another_is_well() -> None:
    """The others take over what it had; all of them gone is what keeps the run from going on."""
    gone, well = ProcessFacts(ProcessState.DEAD, SERVER), SERVER
    jobs = {"trainer": TRAINER, "orchestrator": ORCHESTRATOR}
    for servers in ({"inference": gone, "inference-1": well}, {"inference": well, "inference-1": gone}):
        assert diagnose(facts(**jobs, **servers)).state is not RunState.STUCK
    found = diagnose(facts(**jobs, **{"inference": gone, "inference-1": gone}))
    assert (found.state, found.attribution) == (RunState.STUCK, "inference")


def test_a_server_that_was_idle_is_no_fault() -> None:
    """One that never told of its engine's answers is not blamed for getting nowhere."""
    idle = replace(SERVER, progress=NOW - 5000.0, ready=NOW - 4000.0)
    assert diagnose(facts(trainer=status("trainer"), inference=idle)).state is RunState.MOVES


def test_a_dead_trainer_with_its_last_error() -> None:
    """The orchestrator waits for weights that will not come."""
    dead = ProcessFacts(
        ProcessState.DEAD, replace(status("trainer"), heartbeat=NOW - 30.0), last_error="RuntimeError: boom"
    )
    waiting = status("orchestrator", waiting=waits("weights/step_42", "trainer", 25.0))
    found = diagnose(facts(trainer=dead, orchestrator=waiting, inference=SERVER))
    assert found.attribution == "trainer"
    assert "died without a last word 30 s ago; the last error in its log: RuntimeError: boom" in found.sentence


def test_a_rank_that_hangs() -> None:
    """Rank 0 waits in a collective; the other one is the reason."""
    rank = ProcessFacts(ProcessState.STOPPED, status("trainer.3", beat=75.0))
    found = diagnose(facts(trainer=status("trainer"), **{"trainer.3": rank}))
    assert found.sentence == "trainer, whose rank 3 has been stopped (SIGSTOP) for 75 s"


def test_a_stuck_environment() -> None:
    """The server is well: the environments are left; a stopped worker is named."""
    run = facts(trainer=TRAINER, orchestrator=ORCHESTRATOR, inference=SERVER)
    found = diagnose(run)
    assert (found.state, found.attribution) == (RunState.WAITS, "environments")
    assert found.sentence.endswith("none of them shows a fault; environment code may be slow or stuck: see logs/envs")
    found = diagnose(replace(run, workers=[WorkerFacts("rt/0", 8, False), WorkerFacts("rt/1", 9, True)]))
    assert (found.state, found.attribution) == (RunState.STUCK, "environment worker rt/1")
    assert found.sentence.endswith("← environment worker rt/1, which is stopped (SIGSTOP, pid 9)")


def test_work_that_gets_nowhere_and_waits_beyond_their_deadline() -> None:
    """By the run's own limits."""
    found = diagnose(facts(trainer=TRAINER, orchestrator=status("orchestrator", progress=1900.0)))
    assert found.sentence.endswith("← orchestrator, which has stalled for 1900 s (at work, step 41)")
    overdue = status("trainer", waiting=waits("rollouts/step_41", "orchestrator", 700.0, deadline=600.0))
    found = diagnose(facts(trainer=overdue, orchestrator=status("orchestrator")))
    assert (
        found.sentence
        == "trainer, which still waits for rollouts/step_41 from orchestrator, 100 s after its own deadline"
    )


def test_waiting_for_each_other() -> None:
    """A cycle is said, not followed for ever."""
    back = status("orchestrator", waiting=waits("weights/step_41", "trainer", 100.0))
    found = diagnose(facts(trainer=TRAINER, orchestrator=back))
    assert found.state is RunState.STUCK
    assert found.sentence.endswith("← weights/step_41 ← trainer, which waits for it in turn: they wait for each other")


def test_a_full_disk_comes_first() -> None:
    """Whatever else it has led to."""
    dead = ProcessFacts(ProcessState.DEAD, status("trainer"))
    found = diagnose(replace(facts(trainer=dead, orchestrator=ORCHESTRATOR), free=3 * 2**20))
    assert (found.state, found.attribution) == (RunState.STUCK, "disk")
    assert "the disk is full (3 MiB free)" in found.sentence


def test_nothing_is_wrong() -> None:
    """A short wait is part of the work."""
    brief = status("trainer", waiting=waits("rollouts/step_41", "orchestrator", 3.0))
    found = diagnose(facts(trainer=brief, orchestrator=status("orchestrator"), inference=SERVER))
    assert (found.state, found.attribution) == (RunState.MOVES, None)
    assert found.sentence == (
        "nothing is wrong: trainer waits for rollouts/step_41, orchestrator: at work, inference: serving"
    )
    halted = replace(facts(trainer=brief, orchestrator=status("orchestrator")), launcher=ProcessState.STOPPED)
    assert diagnose(halted).attribution == "launcher"


def test_runs_that_are_over() -> None:
    """Finished, stopped, failed, killed, never started: told apart; what can go on is said to."""
    gone = replace(facts(), launcher=ProcessState.ABSENT)

    def over(**statuses: ProcessStatus) -> tuple[RunState, str]:
        found = diagnose(
            replace(gone, processes={name: ProcessFacts(ProcessState.DEAD, each) for name, each in statuses.items()})
        )
        return found.state, found.sentence

    done = status("trainer", outcome="finished")
    assert over() == (RunState.NEVER, "no process of a run has reported here")
    assert over(trainer=done, orchestrator=done) == (RunState.FINISHED, "the run has finished")
    state, sentence = over(trainer=replace(done, outcome="stopped"), orchestrator=done)
    assert (state, "--recover" in sentence) == (RunState.INTERRUPTED, True)
    state, sentence = over(trainer=done, orchestrator=replace(done, outcome="failed: no weights"))
    assert state is RunState.FAILED
    assert sentence.startswith("orchestrator failed: no weights")
    killed = replace(facts(trainer=ProcessFacts(ProcessState.DEAD, status("trainer"))), launcher=ProcessState.DEAD)
    found = diagnose(killed)
    assert (found.state, found.attribution) == (RunState.INTERRUPTED, "launcher")
    assert "rl ended without a last word" in found.sentence
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
    """Processes, waits, what is committed, errors in logs, restarts ahead, and the state; nothing in the directory is touched."""
    with Owner(tmp_path):
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs/rl.toml").write_text("heartbeat_timeout = 5.0\n")
        (tmp_path / "configs/inference.toml").touch()
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/trainer.log").write_text("12:00:00 INFO    fine\nRuntimeError: out of memory\n")
        row = asdict(replace(KILLED, time=time.time(), after=60.0, reason="ended too early"))
        (tmp_path / "logs/restarts.jsonl").write_text(json.dumps(row) + "\n")
        for name in ("rollouts/step_40", "weights/step_0", "weights/step_40", "recovery/step_30", "incarnations"):
            (tmp_path / name).mkdir(parents=True)
        trainer = Status(tmp_path, "trainer")
        trainer.step(40)
        trainer.waiting("weights", "inference", 600.0)
        before = sorted(path for path in tmp_path.rglob("*") if ".tmp-" not in path.name)
        assert doctor.main([str(tmp_path)]) == 1
        trainer.close()
        out = capsys.readouterr().out
        assert sorted(path for path in tmp_path.rglob("*") if ".tmp-" not in path.name) == before
    assert re.search("launcher +alive", out)
    assert re.search("trainer +alive +starting, step 40", out)
    assert "waits for weights from inference for 0:00 (gives up in 10:00)" in out
    assert re.search(r"inference +no report +restart: ended too early", out)
    assert "batch 40, version 40, checkpoint -, recovery checkpoint 30" in out
    assert "trainer.log: RuntimeError: out of memory" in out
    assert "trainer ← weights ← inference, which ended too early and is started again in" in out.splitlines()[-1]


def test_a_directory_that_is_none_and_one_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typo is an error, an empty directory a finding."""
    with pytest.raises(UserError, match="is no directory"):
        doctor.main([str(tmp_path / "typo")])
    with pytest.raises(UserError, match="usage"):
        doctor.main([])
    assert doctor.main([str(tmp_path)]) == 0
    assert "never started" in capsys.readouterr().out


def test_damaged_files_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those who examine a wreck find all kinds of things in it."""
    for name in ("status", "configs", "logs/trainer.log", "launcher.json", "status/orchestrator.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "status/trainer.json").write_text("[]")
    (tmp_path / "configs/rl.toml").write_text('heartbeat_timeout = "long"\nstall_timeout = [1]\n')
    lines = ("{}", "[}", '{"time": "now", "process": 1, "after": 0, "reason": ""}', '{"time": 1e999}')
    (tmp_path / "logs/restarts.jsonl").write_text("\n".join(lines))
    (tmp_path / "weights").touch()
    assert doctor.main([str(tmp_path)]) == 0
    assert "never started" in capsys.readouterr().out
    (tmp_path / "configs/rl.toml").write_bytes(b"\xff")
    assert doctor.collect(tmp_path).policy == RestartPolicy()


def test_errors_of_a_log_are_shown_where_something_is_wrong(tmp_path: Path) -> None:
    """Contract: neither of a run that goes on after a restart, nor of a process that was stopped and was noisy on its way out."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "inference.log").write_text("EngineDeadError: it encountered an issue\nChildFailedError: \n")
    status = ProcessStatus("inference", 1, "serving", None, 1.0, 1.0, None, None)

    def shown(state: RunState, outcome: str | None = None) -> list[str]:
        facts = Facts(
            2.0,
            ProcessState.ABSENT,
            {"inference": ProcessFacts(ProcessState.ALIVE, replace(status, outcome=outcome))},
        )
        lines = examination(tmp_path, facts, Diagnosis(state, "so it is"))
        return [line for line in lines if line.startswith("error")]

    assert shown(RunState.STUCK) == ["error          inference.log: EngineDeadError: it encountered an issue"]
    assert shown(RunState.FAILED, "failed: it was killed") == shown(RunState.STUCK)
    assert shown(RunState.MOVES) == []
    assert shown(RunState.INTERRUPTED, "stopped") == []


@pytest.mark.parametrize(
    ("word", "answer"), [("docter", "did you mean `rl doctor RUN`"), ("run.toml", "there are `rl @ CONFIG.toml`")]
)
def test_what_is_no_command_is_answered_by_those_there_are(
    monkeypatch: pytest.MonkeyPatch, word: str, answer: str
) -> None:
    """Contract: a slip of the pen names the way on, and starts nothing."""
    monkeypatch.setattr(sys, "argv", ["rl", word, "outputs"])
    with pytest.raises(UserError, match=answer):
        rl._run()
