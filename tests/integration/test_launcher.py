"""Supervision of real processes: small Python programs stand in for trainer, orchestrator and server."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from prime_rl.monitor import read_status
from prime_rl.processes import identify
from support.launching import Launch, all_gone, launch

__all__ = ["launch"]  # a fixture


def test_success_stops_the_server_and_prints_the_steps(launch: Callable[..., Launch]) -> None:
    """Both jobs end well: the server is stopped with SIGTERM, exit 0, phases and one line per step were shown."""
    run = launch("inference=serves", "trainer=steps", "orchestrator=steps")
    status, out = run.wait()
    assert status == 0, out
    assert "inference ready in" in out
    assert "trainer: training" in out
    assert [line for line in out.splitlines() if "Step 2 [3/3] | reward 0.5000 | loss 0.1000 | 0.10 s" in line]
    assert "inference finished after SIGTERM" in (run.base / "events").read_text()
    all_gone(run.pids())


FAILURES = {
    "a job that fails": (("trainer=family", "orchestrator=fails"), "error: orchestrator failed with exit status 3"),
    "a server that ends before the jobs, though with status 0": (("inference=quits", "trainer=waits"), "error: inference ended too early"),
    "a server that never comes up": (("inference=waits", "trainer=waits"), "inference is not ready after 1 s"),
}  # fmt: skip


@pytest.mark.parametrize(("children", "says"), FAILURES.values(), ids=FAILURES)
def test_first_failure_is_reported_and_everything_stopped(
    launch: Callable[..., Launch], children: tuple[str, ...], says: str
) -> None:
    """The failing process is named with its `error:` line; nothing is left, grandchildren in other sessions included."""
    run = launch(*children, ready=1.0 if "inference=waits" in children else 600.0)
    if "trainer=family" in children:
        run.up("trainer")
    status, out = run.wait()
    assert (status, says in out) == (1, True), out
    assert ("  error: the model is broken" in out) == ("orchestrator=fails" in children)
    assert "cleaning up" not in out
    all_gone(run.pids())


def test_no_orphans_after_kill_9_of_the_launcher(launch: Callable[..., Launch]) -> None:
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


def test_ctrl_c_drains(launch: Callable[..., Launch]) -> None:
    """The first Ctrl-C asks the jobs, and a torchrun's ranks, to finish; the server goes last; exit 130."""
    run = launch("inference=serves", "trainer=agent", "orchestrator=drains")
    run.up("inference", "trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130, out
    assert "draining" in out
    assert "failed" not in out
    events = (run.base / "events").read_text().splitlines()
    assert events[1:] == ["orchestrator finished after SIGINT", "inference finished after SIGTERM"]
    all_gone(run.pids())


def test_second_ctrl_c_stops_now(launch: Callable[..., Launch]) -> None:
    """Even processes that ignore every polite signal are gone at once."""
    run = launch("trainer=stubborn", "orchestrator=stubborn", drain=300.0)
    run.up("trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT)
    assert run.popen.stdout is not None
    assert "draining" in run.popen.stdout.readline()  # it has taken the first
    # A second one at once would be an echo of the first (`uv run` passes on what the terminal sends to all).
    time.sleep(1.0)
    run.popen.send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130
    assert "stopping now" in out
    all_gone(run.pids())


def test_drain_is_bounded(launch: Callable[..., Launch]) -> None:
    """A job that does not finish in time is named and stopped. Schedulers send SIGTERM, which drains like Ctrl-C."""
    run = launch("trainer=stubborn", "orchestrator=drains", drain=1.0)
    run.up("trainer", "orchestrator")
    run.popen.terminate()
    status, out = run.wait()
    assert status == 130
    assert "trainer did not finish within 1 s" in out
    all_gone(run.pids())


def test_a_closed_pipe_does_not_end_the_run(launch: Callable[..., Launch]) -> None:
    """`rl … | head` and a closed terminal lose the console, not the training."""
    run = launch("trainer=steps", "orchestrator=quits")
    assert run.popen.stdout is not None
    run.popen.stdout.close()
    assert run.popen.wait(30) == 0
    assert read_status(run.base / "run")["trainer"].outcome == "finished"
