"""The launcher's own code over small Python programs that stand in for trainer, orchestrator and server."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.processes import identify
from support.processes import until

# argv = output_dir, drain seconds, seconds until a server must be ready, policy as JSON, then name=kind pairs.
DRIVER = """
import json, sys
from pathlib import Path
from prime_rl.errors import UserError
from prime_rl.launcher import rundir, supervise
from prime_rl.launcher.console import Console
from prime_rl.launcher.plan import ProcessSpec, ServerSpec
from prime_rl.launcher.supervise import RestartPolicy, Supervisor

root, drain, ready = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
supervise._DRAIN_SECONDS, supervise._STOP_SECONDS = drain, 1.0
processes = []
for pair in sys.argv[5:]:
    name, _, kind = pair.partition("=")
    argv = (sys.executable, "-c", (root.parent / "child.py").read_text(), kind, str(root), name)
    server = ServerSpec("http://localhost:1", ready) if name.startswith("inference") else None
    processes.append(ProcessSpec(name, argv, root / "logs" / f"{name}.log", server=server,
                             drain_children=kind == "agent"))
try:
    console = Console(root, 3, logs={one.name: one.log for one in processes})
    with rundir.Owner(root), console.region:
        supervisor = Supervisor(processes, root, console.say, console.look, RestartPolicy(**json.loads(sys.argv[4])))
        status = supervisor.run().value
        console.look()
        console.say(f"restarts: {supervisor.restarts}")
except UserError as error:
    print(f"error: {error}")
    status = 1
sys.exit(status)
"""

CHILD = r"""
import json, os, signal, subprocess, sys, time
from pathlib import Path
from prime_rl import processes
processes.watch()
kind, root, name, options = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
base = root.parent
(base / f"{name}.pid").write_text(str(os.getpid()))
incarnations = base / f"{name}.incarnations"
incarnations.open("a").write("x")
incarnation = len(incarnations.read_text())  # 1-based

def note(text):
    with (base / "events").open("a") as file:
        file.write(f"{name} {text}\n")

def sleep_forever():
    (base / f"{name}.up").touch()
    while True:
        time.sleep(60)

def finish(number, frame):
    note(f"finished after {signal.Signals(number).name}")
    sys.exit(0)

def start(what, code, *arguments, session=False):
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=session)
    (base / f"{what}.pid").write_text(str(child.pid))
    return child

def start_family():
    start("group", "import time; time.sleep(600)")
    return start("session", "import time; time.sleep(600)", session=True)

def status():
    from prime_rl.monitor import Status
    return Status(root, name)

def wait_for_end():
    while not (base / "end").exists():
        time.sleep(0.05)

if kind == "steps":
    from prime_rl.config.shared import MonitorConfig
    from prime_rl.monitor import Monitor
    status = status()
    status.phase("training")
    time.sleep(2)
    out = Monitor(root, name, MonitorConfig(), {})
    for step in range(3):
        out.log(step, {"reward/mean": 0.5, "loss/mean": 0.1, "time/step": 0.1})
    status.done("finished")
elif kind == "drains":
    signal.signal(signal.SIGINT, finish)
    sleep_forever()
elif kind == "stubborn":
    status()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_forever()
elif kind == "family":
    start_family()
    sleep_forever()
elif kind == "agent":  # as torchrun: its rank is in a session of its own
    signal.signal(signal.SIGINT, lambda *a: sys.exit(9))
    code = "import signal, sys, time\nfrom pathlib import Path\nfrom prime_rl import processes\nprocesses.watch()\n" \
           "signal.signal(signal.SIGINT, lambda *a: sys.exit(0))\nPath(sys.argv[1]).touch()\ntime.sleep(600)"
    sys.exit(start("rank", code, str(base / f"{name}.up"), session=True).wait())
elif kind == "serves":
    signal.signal(signal.SIGTERM, finish)
    status().ready()
    note(f"serves in incarnation {incarnation}")
    sleep_forever()
elif kind == "fails":
    time.sleep(0.5)
    print("loading", "error: the model is broken", "cleaning up", sep="\n")
    sys.exit(3)
elif kind.startswith("dies:"):  # as a server whose engine does, whatever its first request was
    status().ready()
    print("Traceback (most recent call last):", '  File "engine.py", line 1, in step', kind.partition(":")[2],
          "vllm.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
          "INFO shutting down", sep="\n")
    sys.exit(1)
elif kind == "fails-for-good":
    from prime_rl.errors import NEVER_WORKED
    status().ready()
    sys.exit(f"error: {NEVER_WORKED}: 4 of 4 failed")
elif kind == "quits":
    time.sleep(0.5)
elif kind == "after":  # ends well once the file is there
    wait_for_end()
elif kind == "always-raises":
    (base / f"{name}.{incarnation}.pid").write_text(str(os.getpid()))
    status().ready()
    raise RuntimeError(f"incarnation {incarnation}")
elif kind.startswith("mends:"):  # the first incarnation goes wrong as said, the second ends well
    fault = kind.partition(":")[2]
    note(f"incarnation {incarnation} {' '.join(options)}".strip())
    if incarnation == 2:
        (base / "end").touch()
        sys.exit(0)
    status = status()
    if not fault.startswith("early-"):
        status.phase("working")
        status.ready()
    if fault == "killed-with-family":
        os.kill(start_family().pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "patient":  # waits for somebody longer than stall_timeout, within its own deadline
        status.waiting("rollouts/step_3", "orchestrator", 600)
        wait_for_end()
        status.done("finished")
    elif fault == "silent-rank":
        code = "import os, signal, sys; from pathlib import Path; from prime_rl.monitor import Status; " \
               "Status(Path(sys.argv[1]), 'trainer.1'); os.kill(os.getpid(), signal.SIGSTOP)"
        start("rank", code, str(root), session=True)
        time.sleep(600)
    elif fault == "told-to-stop":  # by somebody else than its launcher
        status.done("stopped")
    elif fault.endswith("raises"):
        raise RuntimeError("unexpected")
    elif fault.endswith("complains"):
        sys.exit("error: the disk is full")
else:
    sleep_forever()
"""


def driver(root: Path, *children: str, drain: float = 20.0, ready: float = 600.0, policy: object = None) -> list[str]:
    """Return the command of a launcher that starts these children in `root`."""
    (root / "child.py").write_text(CHILD)
    arguments = [str(root / "run"), str(drain), str(ready), json.dumps(policy or {}), *children]
    return [sys.executable, "-c", DRIVER, *arguments]


class Launch:
    """A launcher in a session of its own, as a terminal would run it. Options are those of `driver`."""

    def __init__(self, root: Path, *children: str, **options: Any) -> None:
        self.base = root
        self.popen = subprocess.Popen(
            driver(root, *children, **options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, status: int) -> str:
        """Return its output. It ends with this status and leaves nothing behind, even in other sessions."""
        out, _ = self.popen.communicate(timeout=60)
        assert self.popen.returncode == status, out
        all_gone([int(path.read_text()) for path in self.base.glob("*.pid")])
        return str(out)

    def pid(self, name: str) -> int:
        path = self.base / f"{name}.pid"
        until(lambda: path.exists() and path.read_text() != "", f"{path.name}")
        return int(path.read_text())

    def up(self, *names: str) -> None:
        for name in names:
            until((self.base / f"{name}.up").exists, f"{name} up")


def all_gone(pids: list[int]) -> None:
    until(lambda: not any(identify(pid) for pid in pids), "end of every process")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    started: list[Launch] = []

    def start(*children: str, **options: Any) -> Launch:
        started.append(Launch(tmp_path, *children, **options))
        return started[-1]

    yield start
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
            each.popen.wait()
