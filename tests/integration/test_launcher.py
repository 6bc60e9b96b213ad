"""Supervision of real processes: small Python programs stand in for trainer, orchestrator and server."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prime_rl.launcher.procs import identify
from prime_rl.monitor import read_status

PORT = 8250

# The launcher's own code with other commands in the plan: argv = output_dir, then name=kind pairs.
DRIVER = """
import sys
from pathlib import Path
from prime_rl.errors import UserError
from prime_rl.launcher import rundir
from prime_rl.launcher.console import Console
from prime_rl.launcher.plan import Process, Server
from prime_rl.launcher.clock import Policy
from prime_rl.launcher.supervise import Supervisor

root, drain, port = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
processes = []
for pair in sys.argv[4:]:
    name, _, kind = pair.partition("=")
    argv = (sys.executable, "-c", (root.parent / "child.py").read_text(), kind, str(root), name, str(port))
    processes.append(Process(name, argv, root / "logs" / f"{name}.log", service=name == "inference",
                             drain_children=kind == "agent", after="trainer" if kind == "late" else None))
server = Server(f"http://localhost:{port}", f"http://localhost:{port}/health", 3.0, "127.0.0.1", port) if port else None
try:
    with rundir.Owner(root), Console(root, 3) as console:
        status = Supervisor(processes, server, root, console.say, console.tick, drain_seconds=drain, stop_seconds=3.0).run().value
        console.look()
except UserError as error:
    print(f"error: {error}")
    status = 1
sys.exit(status)
"""

CHILD = """
import http.server, json, os, signal, subprocess, sys, time
from pathlib import Path
from prime_rl import lifeline
lifeline.watch()
kind, root, name, port = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
(root.parent / f"{name}.pid").write_text(str(os.getpid()))

def say_up():
    (root.parent / f"{name}.up").touch()

def note(text):
    with (root.parent / "events").open("a") as file:
        file.write(f"{name} {text}\\n")

def sleep_forever():
    say_up()
    while True:
        time.sleep(60)

def finish(number, frame):
    note(f"finished after {signal.Signals(number).name}")
    sys.exit(0)

if kind == "steps":
    from prime_rl.monitor import Status
    from prime_rl.monitor.monitor import JsonlWriter, metrics_path
    status = Status(root, name)
    status.phase("training")
    time.sleep(2)
    out = JsonlWriter(metrics_path(root, name))
    for step in range(3):
        out.write(step, {"reward/mean": 0.5, "loss/mean": 0.1, "time/step": 0.1})
    status.done("finished")
elif kind == "drains":
    signal.signal(signal.SIGINT, finish)
    sleep_forever()
elif kind == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_forever()
elif kind == "family":
    out_of_session = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    in_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (root.parent / "group.pid").write_text(str(in_group.pid))
    (root.parent / "session.pid").write_text(str(out_of_session.pid))
    sleep_forever()
elif kind == "agent":
    rank = "import signal, sys, time\\nfrom pathlib import Path\\nfrom prime_rl import lifeline\\nlifeline.watch()\\n" \\
           "signal.signal(signal.SIGINT, lambda *a: sys.exit(0))\\n" \\
           f"Path({str(root.parent / (name + '.up'))!r}).touch()\\ntime.sleep(600)"
    signal.signal(signal.SIGINT, lambda *a: sys.exit(9))
    child = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True)
    (root.parent / "rank.pid").write_text(str(child.pid))
    sys.exit(child.wait())
elif kind in ("serves", "crashes-with-server"):
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *args):
            pass
    server = http.server.HTTPServer(("127.0.0.1", port), Health)
    say_up()
    signal.signal(signal.SIGTERM, finish)
    server.serve_forever()
elif kind == "fails":
    time.sleep(0.5)
    print("loading")
    print("error: the model is broken")
    print("cleaning up")
    sys.exit(3)
elif kind == "raises":
    time.sleep(0.5)
    raise RuntimeError("unexpected")
elif kind == "quits":
    time.sleep(0.5)
elif kind == "late":
    assert (root / "status" / "trainer.json").exists()
else:
    sleep_forever()
"""


class Launch:
    """A launcher in a session of its own, as a terminal would run it."""

    def __init__(self, root: Path, *children: str, drain: float = 20.0, port: int = 0) -> None:
        self.base = root
        (root / "child.py").write_text(CHILD)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(root / "run"), str(drain), str(port), *children],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> tuple[int, str]:
        out, _ = self.popen.communicate(timeout=60)
        return self.popen.returncode, out

    def pid(self, name: str) -> int:
        path = self.base / f"{name}.pid"
        until(lambda: path.exists() and path.read_text() != "", f"{path.name}")
        return int(path.read_text())

    def up(self, *names: str) -> None:
        for name in names:
            until((self.base / f"{name}.up").exists, f"{name} up")

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.base.glob("*.pid")]


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def all_gone(pids: list[int]) -> None:
    until(lambda: not any(identify(pid) for pid in pids), "end of every process")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*children: str, **options: float) -> Launch:
        started.append(Launch(tmp_path, *children, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
            each.popen.wait()


def test_success_stops_the_server_and_prints_the_steps(launch: Callable[..., Launch]) -> None:
    """Both jobs end well: the server is stopped with SIGTERM, exit 0, phases and one line per step were shown."""
    run = launch("inference=serves", "trainer=steps", "orchestrator=steps", port=PORT)
    status, out = run.wait()
    assert status == 0, out
    assert "inference ready in" in out
    assert "trainer: training" in out
    assert [line for line in out.splitlines() if "Step 2 [3/3] | reward 0.5000 | loss 0.1000" in line]
    assert "inference finished after SIGTERM" in (run.base / "events").read_text()
    all_gone(run.pids())


def test_first_failure_is_reported_and_everything_stopped(launch: Callable[..., Launch]) -> None:
    """The failing process is named with its `error:` line; nothing is left, grandchildren in other sessions included."""
    run = launch("trainer=family", "orchestrator=fails")
    run.up("trainer")
    status, out = run.wait()
    assert status == 1
    assert "error: orchestrator failed with exit status 3" in out
    assert "  error: the model is broken" in out
    assert "cleaning up" not in out
    all_gone(run.pids())


def test_without_an_error_line_the_last_lines_are_shown(launch: Callable[..., Launch]) -> None:
    """A traceback ends up on the console."""
    status, out = launch("trainer=raises", "orchestrator=waits").wait()
    assert status == 1
    assert "RuntimeError: unexpected" in out


def test_a_service_that_stops_is_a_failure(launch: Callable[..., Launch]) -> None:
    """A server must outlive the jobs, even if it ends with status 0."""
    status, out = launch("inference=quits", "trainer=waits").wait()
    assert status == 1
    assert "error: inference ended too early" in out


def test_a_server_that_never_comes_up_is_reported(launch: Callable[..., Launch]) -> None:
    """The wait for readiness has a deadline that is said."""
    run = launch("inference=waits", "trainer=waits", port=PORT + 1)
    status, out = run.wait()
    assert status == 1
    assert f"no inference server at http://localhost:{PORT + 1} after 3 s" in out
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
    run = launch("inference=serves", "trainer=agent", "orchestrator=drains", port=PORT + 2)
    run.up("inference", "trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130, out
    assert "draining" in out
    assert "failed" not in out
    events = (run.base / "events").read_text().splitlines()
    assert events == ["orchestrator finished after SIGINT", "inference finished after SIGTERM"]
    all_gone(run.pids())


def test_sigterm_drains_too(launch: Callable[..., Launch]) -> None:
    """Schedulers send SIGTERM."""
    run = launch("orchestrator=drains")
    run.up("orchestrator")
    run.popen.terminate()
    assert run.wait()[0] == 130


def test_second_ctrl_c_stops_now(launch: Callable[..., Launch]) -> None:
    """Even processes that ignore every polite signal are gone at once."""
    run = launch("trainer=stubborn", "orchestrator=stubborn", drain=300.0)
    run.up("trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.popen.poll() is None
    run.popen.send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130
    assert "stopping now" in out
    all_gone(run.pids())


def test_drain_is_bounded(launch: Callable[..., Launch]) -> None:
    """Who does not finish in time is named and stopped."""
    run = launch("trainer=stubborn", "orchestrator=drains", drain=1.0)
    run.up("trainer", "orchestrator")
    run.popen.send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130
    assert "trainer did not finish within 1 s" in out
    all_gone(run.pids())


def test_one_launcher_per_directory(launch: Callable[..., Launch]) -> None:
    """A second launcher on the same run directory is refused and disturbs nothing; after a kill -9 it may take over."""
    first = launch("trainer=waits")
    first.up("trainer")
    status, out = launch("trainer=waits").wait()
    assert status == 1
    assert re.search(r"error: .*run is in use by another rl \(pid \d+", out)
    assert first.popen.poll() is None
    first.popen.kill()
    first.popen.wait()
    all_gone(first.pids())
    status, out = launch("trainer=quits").wait()
    assert status == 0, out


def test_a_process_can_wait_for_anothers_first_report(launch: Callable[..., Launch]) -> None:
    """`after`: the later process starts once the earlier one has written its status."""
    status, out = launch("trainer=steps", "orchestrator=late").wait()
    assert status == 0, out


def test_a_closed_pipe_does_not_end_the_run(launch: Callable[..., Launch]) -> None:
    """`rl … | head` and a closed terminal lose the console, not the training."""
    run = launch("trainer=steps", "orchestrator=steps")
    assert run.popen.stdout is not None
    run.popen.stdout.close()
    assert run.popen.wait(30) == 0
    assert read_status(run.base / "run")["trainer"].outcome == "finished"
