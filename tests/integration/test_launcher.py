"""Supervision of real processes: small Python programs stand in for trainer, orchestrator and server.

A process of a run that dies, halts or gets nowhere is started again alone; how often is bounded; nothing of its old
incarnation is left.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.errors import NEVER_WORKED
from prime_rl.monitor import read_status
from prime_rl.processes import identify
from support.launching import Launch, all_gone, driver, launch
from support.processes import until
from support.terminal import Screen, Terminal

__all__ = ["launch"]  # a fixture

Start = Callable[..., Launch]
PATIENT = {"max_restarts": 2, "backoff": 0.2, "heartbeat_timeout": 3.0, "stall_timeout": 600.0}


def test_success_stops_the_server_and_prints_the_steps(launch: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both jobs end well: the server is stopped with SIGTERM, exit 0, phases and one line per step were shown. A pipe
    gets nothing but lines, whatever the environment says of terminals."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = launch("inference=serves", "trainer=steps", "orchestrator=steps")
    out = run.wait(0)
    assert "inference ready in" in out
    assert "trainer: training" in out
    assert [line for line in out.splitlines() if "Step 2 [3/3] | reward 0.5000 | loss 0.1000 | 0.10 s" in line]
    assert "inference finished after SIGTERM" in (run.base / "events").read_text()
    assert "\x1b" not in out
    assert "●" not in out


@pytest.mark.parametrize(("trainer", "status"), [("steps", 0), ("fails", 1), ("drains", 130)])
def test_a_terminal(tmp_path: Path, trainer: str, status: int) -> None:
    """On a terminal there are rows of progress and of every process, below the same lines; they are removed at the end
    of a run, of one that fails and of one that is interrupted."""
    terminal = Terminal(driver(tmp_path, "inference=serves", f"trainer={trainer}", "orchestrator=steps"), columns=200)
    until(lambda: "inference     ● starting" in "\n".join(Screen(200).feed(terminal.whole).lines), "rows")
    if trainer == "drains":
        until((tmp_path / "trainer.up").exists, "trainer up")
        terminal.popen.send_signal(signal.SIGINT)
    lines = Screen(200).feed(terminal.wait(status)).lines
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines if line)
    assert [line[9:] for line in lines if line][-1] == "restarts: {}"
    assert len([line for line in lines if "Step 2 [3/3] | reward 0.5000" in line]) == (trainer == "steps")


FAILURES = {
    "a job that fails": (("trainer=family", "orchestrator=fails"), "error: orchestrator failed with exit status 3"),
    "a server that ends before the jobs, with status 0": (
        ("inference=quits", "trainer=waits"), "error: inference ended too early"
    ),
    "a server that never comes up": (("inference=waits", "trainer=waits"), "inference is not ready after 1 s"),
    "a job not mended by a retry": (("trainer=mends:early-complains", "orchestrator=waits"), "error: the disk is full"),
}  # fmt: skip


@pytest.mark.parametrize(("children", "says"), FAILURES.values(), ids=FAILURES)
def test_first_failure_is_reported_and_everything_stopped(launch: Start, children: tuple[str, ...], says: str) -> None:
    """The failing process is named with its `error:` line; nothing is left, even grandchildren in other sessions."""
    ready = 1.0 if "inference=waits" in children else 600.0
    run = launch(*children, ready=ready, policy=PATIENT if "trainer=mends:early-complains" in children else {})
    if "trainer=family" in children:
        run.up("trainer")
    out = run.wait(1)
    assert says in out, out
    assert ("  error: the model is broken" in out) == ("orchestrator=fails" in children)
    assert "cleaning up" not in out
    assert "starting it again" not in out


def test_no_orphans_after_kill_9_of_the_launcher(launch: Start) -> None:
    """SIGKILL leaves nobody time to clean up: children, grandchildren and torchrun-like ranks die all the same."""
    run = launch("inference=waits", "trainer=agent", "orchestrator=family")
    run.up("inference", "trainer", "orchestrator")
    pids = [run.pid(name) for name in ("inference", "trainer", "orchestrator", "rank", "group")]
    stray = run.pid("session")  # left the group and watches nothing: beyond what a lifeline can promise
    run.popen.kill()
    run.popen.wait()
    all_gone(pids)
    if identify(stray):
        os.kill(stray, signal.SIGKILL)


def test_ctrl_c_drains(launch: Start) -> None:
    """The first Ctrl-C asks the jobs, and a torchrun's ranks, to finish; the server goes last; exit 130."""
    run = launch("inference=serves", "trainer=agent", "orchestrator=drains")
    run.up("inference", "trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT)
    out = run.wait(130)
    assert "draining" in out
    assert "failed" not in out
    events = (run.base / "events").read_text().splitlines()
    assert events[1:] == ["orchestrator finished after SIGINT", "inference finished after SIGTERM"]


@pytest.mark.parametrize(("drain", "says"), [(300.0, "stopping now"), (1.0, "trainer did not finish within 1 s")])
def test_who_ignores_polite_signals_is_stopped(launch: Start, drain: float, says: str) -> None:
    """At a second Ctrl-C at once, else when the drain is over. Schedulers send SIGTERM, which drains like Ctrl-C."""
    run = launch("trainer=stubborn", "orchestrator=drains", drain=drain)
    run.up("trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT if drain > 1.0 else signal.SIGTERM)
    assert run.popen.stdout is not None
    assert "draining" in run.popen.stdout.readline()  # it has taken the first
    if drain > 1.0:
        # A second one at once would be an echo of the first (`uv run` passes on what the terminal sends to all).
        time.sleep(1.0)
        run.popen.send_signal(signal.SIGINT)
    out = run.wait(130)
    assert says in out, out
    assert read_status(run.base / "run")["trainer"].outcome == "stopped"


def incarnations(run: Launch, name: str) -> list[str]:
    """What `name` said at the start of each incarnation: its number and the options it was given on top."""
    file = run.base / "events"
    events = file.read_text().splitlines() if file.exists() else []
    return [line.removeprefix(f"{name} incarnation ") for line in events if line.startswith(f"{name} incarnation ")]


MENDED = {
    "victim=mends:killed-with-family": (
        "victim was killed by SIGKILL: starting it again in 0.2 s (restart 1 of at most 2 in a row, recovering)"
    ),
    "orchestrator=mends:stopped": "orchestrator has given no sign of life for",
    "trainer=mends:silent-rank": "trainer rank 1 has given no sign of life",
    "told=mends:told-to-stop": "told ended too early (stopped): starting it again",
    "early=mends:early-raises": "early failed with exit status 1",
}


def test_each_kind_of_failure_is_mended(launch: Start) -> None:
    """Killed, halted, ended by itself or by a stranger: started again alone, with
    --recover, and the reason is said in one line. Nothing of its old incarnation is left: a halted
    rank takes its whole group along, and a stopped grandchild in its own session goes, too. A crash before ready is
    tried again as it was started: nothing of that incarnation was committed in order."""
    run = launch(*MENDED, "bystander=after", policy=PATIENT)
    family = [run.pid(name) for name in ("session", "group", "rank")]
    out = run.wait(0)
    assert [text for text in MENDED.values() if text not in out] == []
    assert not any(identify(pid) for pid in family)
    for name in (child.partition("=")[0] for child in MENDED):
        assert incarnations(run, name) == ["1", "2" if name == "early" else "2 --recover"], name
    assert (run.base / "bystander.incarnations").read_text() == "x"


def test_restarts_are_bounded(launch: Start) -> None:
    """Backoff doubles; past the limit the run ends with the reason, status 1 and nothing alive."""
    run = launch("trainer=always-raises", "orchestrator=waits", policy=PATIENT)
    out = run.wait(1)
    assert (run.base / "trainer.incarnations").read_text() == "xxx"
    assert "starting it again in 0.2 s (restart 1 of" in out
    assert "starting it again in 0.4 s (restart 2 of" in out
    assert "trainer was started again 2 times without the run getting any further: giving up" in out
    assert "restarts: {'trainer': 2}" in out
    assert "RuntimeError: incarnation 3" in out


HOPELESS = {
    "what vLLM does not support": ("inference=dies:RuntimeError: Unsupported attention: head_dim=16", 1),
    "the same error twice": ("inference=dies:torch.OutOfMemoryError: out of memory", 2),
    "an environment that never worked": ("orchestrator=fails-for-good", 1),
}


@pytest.mark.parametrize(("child", "incarnations"), HOPELESS.values(), ids=HOPELESS)
def test_what_cannot_heal_is_not_started_again(launch: Start, child: str, incarnations: int) -> None:
    """The run ends at once, with the reason alone, said once for each incarnation; not vLLM's pointer to it."""
    name = child.partition("=")[0]
    run = launch(child, "trainer=waits", policy=PATIENT)
    out = run.wait(1)
    reason = child.partition(":")[2] or f"error: {NEVER_WORKED}: 4 of 4 failed"
    assert (run.base / f"{name}.incarnations").read_text() == "x" * incarnations, out
    assert f"\n  {reason}\n" in re.sub(r"\d\d:\d\d:\d\d ", "", out)
    assert out.count(reason) == incarnations
    assert "EngineDeadError" not in out
    assert "shutting down" not in out
    assert out.count("starting it again") == incarnations - 1


def test_ctrl_c_during_backoff_drains_the_others(launch: Start) -> None:
    """The process that is down stays down; the run ends at once as interrupted."""
    run = launch("trainer=always-raises", "orchestrator=drains", policy={**PATIENT, "backoff": 60.0})
    run.up("orchestrator")
    assert run.popen.stdout is not None
    while "starting it again" not in run.popen.stdout.readline():
        pass
    run.popen.send_signal(signal.SIGINT)
    run.wait(130)
    assert "orchestrator finished after SIGINT" in (run.base / "events").read_text()
    assert (run.base / "trainer.incarnations").read_text() == "x"
    assert read_status(run.base / "run")["trainer"].outcome == "stopped", "nobody waits for its last word"


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
    out = run.wait(0)
    assert out.count("inference ready in") == 3
    assert (run.base / "trainer.incarnations").read_text() == "x"


def test_a_run_goes_on_without_a_server_that_cannot_be_started(launch: Start) -> None:
    """One of several that fails again and again is given up alone; the last one is not."""
    run = launch("inference=serves", "inference-1=always-raises", "trainer=after", policy=PATIENT)
    last = run.base / "inference-1.3.pid"
    until(lambda: last.exists() and last.read_text(), "the last incarnation of the server")
    pid = last.read_text()
    until(lambda: not Path("/proc", pid).exists(), "the launcher to reap it")
    (run.base / "end").touch()
    out = run.wait(0)
    assert "the run goes on without inference-1, on inference" in out
    assert (run.base / "inference-1.incarnations").read_text() == "xxx"


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
    out = run.wait(0)
    assert "starting it again" not in out
