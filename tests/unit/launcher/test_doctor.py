"""Who keeps a run from going on: directories as each typical fault leaves them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prime_rl.config.shared import MonitorConfig
from prime_rl.errors import UserError
from prime_rl.launcher import doctor
from prime_rl.launcher.rundir import Owner
from prime_rl.monitor import Monitor, Status
from prime_rl.monitor.status import ProcessStatus, Waiting, status_path, write_record
from prime_rl.processes import ProcessId, identify, me, read, this_host
from prime_rl.transport.tenants import ask_to_join, claim_name, tenant_dir
from prime_rl.wait import wait

DEAD = ProcessId(os.getpid(), 1)  # its pid is another process's now


@pytest.fixture(scope="module")
def stopped() -> Iterator[ProcessId]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as sleeper:
        process = identify(sleeper.pid)
        assert process is not None
        sleeper.send_signal(signal.SIGSTOP)
        wait(lambda: (found := read(sleeper.pid)) and found.stopped, subject="stop", owner="the kernel", seconds=60)
        yield process
        sleeper.kill()


def status(
    name: str, *, of: ProcessId | None = None, beat: float = 1.0, progress: float = 2.0, **more: object
) -> ProcessStatus:
    """`beat` and `progress`: seconds ago."""
    now, process = time.time(), of or me()
    known = ProcessStatus(name, process.pid, "at work", 41, now - progress, now - beat, None, None, now - progress)
    own = {"ready": now - 900.0, "host": this_host(), "started": process.started}
    return replace(known, **{**own, **more})


def waits(subject: str, owner: str, seconds: float) -> Waiting:
    return Waiting(subject, owner, time.time() - seconds, time.time() - seconds + 3600.0)


def running(seconds: float = 212.0) -> list[ProcessStatus]:
    return [
        status("trainer", waiting=waits("rollouts/step_41", "orchestrator", seconds)),
        status("orchestrator", waiting=waits("one of 16 episodes", "environments", seconds)),
    ]


def ended(*outcomes: str) -> list[ProcessStatus]:
    return [status(name, outcome=outcome) for name, outcome in zip(("trainer", "orchestrator"), outcomes, strict=True)]


# State of the launcher; statuses; what is found.
CASES: dict[str, tuple[str, Callable[[ProcessId], list[ProcessStatus]], str, str]] = {
    "a stopped engine": (
        "alive", lambda stopped: [*running(), status("inference", of=stopped, beat=212.0)], "stuck",
        "inference has been stopped (SIGSTOP) for 212 s",
    ),
    "a server that failed": (
        "alive", lambda _: [*running(), status("inference", outcome="failed: no memory")], "stuck",
        "inference has ended: failed: no memory",
    ),
    "a rank that hangs": (
        "alive", lambda stopped: [status("trainer"), status("trainer.3", of=stopped, beat=75.0)], "stuck",
        "trainer rank 3 has been stopped (SIGSTOP) for 75 s",
    ),
    "two faults": (
        "alive", lambda _: [status("orchestrator", progress=1900.0), status("trainer", of=DEAD, beat=30.0)], "stuck",
        "trainer died without a last word 30 s ago; orchestrator has stalled for 1900 s (at work, step 41)",
    ),
    "waits": (
        "alive", lambda _: [*running(), status("inference")], "runs",
        "trainer: waits for rollouts/step_41 from orchestrator, for 212 s; "
        "orchestrator: waits for one of 16 episodes from environments, for 212 s; inference: at work",
    ),
    "on another host": ("none", lambda _: [status("trainer", of=DEAD, host="far")], "runs", "trainer: at work"),
    "never started": ("none", lambda _: [], "never started", "no process of a run has reported here"),
    "finished": (
        "none", lambda _: [*ended("finished", "finished"), status("inference", outcome="stopped")], "finished",
        "the run has finished",
    ),
    "stopped": ("none", lambda _: ended("stopped", "finished"), "interrupted", "the run was stopped"),
    "failed": (
        "none", lambda _: ended("finished", "failed: no weights"), "failed",
        "orchestrator has ended: failed: no weights",
    ),
    "the launcher was killed": (
        "dead", lambda _: [status("trainer", of=DEAD)], "interrupted",
        "rl ended without a last word (killed, or the host went down), and everything with it",
    ),
    "one by hand was killed": (
        "none", lambda _: [status("trainer", of=DEAD, beat=50.0)], "failed", "trainer died without a last word 50 s ago"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_keeps_a_run_from_going_on(case, tmp_path, stopped, capsys, monkeypatch):
    """Contract: every fault that can be seen, else every long wait; of a run that is over how it ended."""
    launcher, statuses, state, sentence = CASES[case]
    (tmp_path / "rollouts" / "step_0").mkdir(parents=True)
    with Owner(tmp_path) if launcher == "alive" else nullcontext():
        if launcher == "dead":
            (tmp_path / "status").mkdir()
            write_record(status_path(tmp_path, "rl"), status("rl", of=DEAD))
        for each in statuses(stopped):
            status_path(tmp_path, each.process).parent.mkdir(exist_ok=True)
            write_record(status_path(tmp_path, each.process), each)
        advice = " (`rl … --recover` goes on from what is committed)" if state in ("interrupted", "failed") else ""
        assert doctor.examine(tmp_path) == (state in ("stuck", "interrupted", "failed"))
        assert capsys.readouterr().out.splitlines()[-1] == f"{state:<15}{sentence}{advice}"
        if state in ("stuck", "runs"):  # a full disk comes first, whatever else it has led to
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**20))
            doctor.examine(tmp_path)
            assert "the disk is full (3 MiB free)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("job", "made", "way"),
    [
        ("orchestrator", "rollouts/step_0", "`rl … --recover` goes on from what is committed"),
        ("orchestrator", "evals", "`rl … --clean` begins again"),
        ("sft", "weights/step_1", "`sft … --clean` begins again"),
        ("sft", "checkpoints/step_1", "`sft … --ckpt.resume-step -1` goes on from what is committed"),
    ],
)
def test_an_error_is_printed_once(job, made, way, tmp_path, capsys):
    """Contract: whichever processes and logs have it; the option that follows is the one that `rl` or `sft` takes."""
    error = "no episode has succeeded: timeout"
    for name in ("status", "metrics", "logs", made):
        (tmp_path / name).mkdir(parents=True)
    for process in (job, f"{job}.1"):
        write_record(status_path(tmp_path, process), status(process, outcome=f"failed: {error}"))
    (tmp_path / f"metrics/{job}.jsonl").write_text("{}\n")
    (tmp_path / f"logs/{job}.log").write_text(f"12:00:00 ERROR   {error}\nerror: {error}\n")
    assert doctor.examine(tmp_path) == 1
    out = capsys.readouterr().out
    assert out.count(error) == 1
    assert out.splitlines()[-1].endswith(f" has ended: failed: {error} ({way})")


def test_the_examination_of_a_live_run(tmp_path, capsys):
    """Processes, waits, what is committed, errors in logs, and the state; nothing in the directory is touched."""
    with Owner(tmp_path):
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs/inference.toml").touch()
        (tmp_path / "configs/inference-1.toml").touch()
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs/trainer.log").write_text("12:00:00 INFO    fine\nRuntimeError: out of memory\n")
        for name in ("rollouts/step_40", "weights/step_0", "weights/step_40", "recovery/step_30", "incarnations"):
            (tmp_path / name).mkdir(parents=True)
        trainer = Status(tmp_path, "trainer")
        trainer.step(40)
        trainer.waiting("weights", "inference", 600.0)
        write_record(status_path(tmp_path, "orchestrator"), status("orchestrator", beat=61.0))
        before = sorted(path for path in tmp_path.rglob("*") if ".tmp-" not in path.name)
        assert doctor.examine(tmp_path) == 1
        trainer.close()
        out = capsys.readouterr().out
        assert sorted(path for path in tmp_path.rglob("*") if ".tmp-" not in path.name) == before
    assert re.search("launcher +alive", out)
    assert re.search("trainer +alive +starting, step 40", out)
    assert re.search(r"waits for weights from inference, for \d+ s \(gives up in (10:00|9:5\d)\)", out)
    assert re.search(r"inference-1 +no report\n", out)
    assert "batch 40, version 40, checkpoint -, recovery checkpoint 30" in out
    assert "trainer.log: RuntimeError: out of memory" in out
    assert "orchestrator has given no sign of life for 61 s" in out.splitlines()[-1]


def test_tenants(tmp_path, capsys):
    """Of a deployment: each tenant, who waits for whom, its shares, slots without an orchestrator. A tenant's own
    directory is examined as any run's, without a launcher."""
    alice, bob = (tenant_dir(tmp_path, name) for name in ("alice", "bob"))
    for directory in (tmp_path, alice, bob):
        (directory / "status").mkdir(parents=True)
        write_record(status_path(directory, "trainer"), status("trainer", waiting=waits("its turn", "bob", 7.0)))
    for directory, of in ((alice, me()), (bob, DEAD)):
        claim_name(directory, str(directory))
        ask_to_join(directory, {})
        write_record(status_path(directory, "orchestrator"), status("orchestrator", of=of))
    for process, row in (("trainer", {"tenant/trainer_share": 0.4}), ("orchestrator", {"tenant/engine_share": 0.61})):
        Monitor(alice, process, MonitorConfig(), {}).log(3, row)
    (alice / "weights" / "step_3").mkdir(parents=True)
    assert doctor.examine(tmp_path) == 0
    out = capsys.readouterr().out
    assert "\ntenant alice   version 3, 40% of the trainer's time, 61% of the engines' time\n" in out
    assert "\n               runs: trainer: waits for its turn from bob, for 7 s; orchestrator: at work\n" in out
    assert out.count("holds a slot without an orchestrator") == 1
    assert f"start that again, or remove {bob / 'join.json'}" in out
    assert (doctor.examine(alice), doctor.examine(bob)) == (0, 1)
    own = capsys.readouterr().out
    assert f"deployment     {tmp_path}\n" in own
    assert "launcher" not in own
    assert "orchestrator died without a last word" in own


def test_a_wreck_and_no_run(tmp_path, capsys):
    """A typo is an error, an empty directory a finding; damaged files are passed over."""
    with pytest.raises(UserError, match="there is no directory"):
        doctor.examine(tmp_path / "typo")
    assert doctor.examine(tmp_path) == 0
    for name in ("status", "configs", "logs/trainer.log", "status/rl.json", "status/orchestrator.json"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "status/trainer.json").write_text(json.dumps([]))
    (tmp_path / "weights").touch()
    assert doctor.examine(tmp_path) == 0
    assert capsys.readouterr().out.count("never started") == 2
