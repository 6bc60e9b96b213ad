"""Fault injection: a plan's faults happen where, when and as often as it says, over all incarnations of a process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from prime_rl import faults
from prime_rl.faults import Fault

PASS = """
import sys
from pathlib import Path
from prime_rl import faults
faults.arm(sys.argv[1])
for name in sys.argv[3:]:
    try:
        print(name, faults.point(name, Path(sys.argv[2])), flush=True)
    except OSError as error:
        print(name, error.errno, flush=True)
"""


class Plan:
    """A plan file, and processes that pass points under it."""

    def __init__(self, directory: Path, *planned: Fault) -> None:
        self.file, self.path = directory / "file", directory / "plan.json"
        self.file.write_bytes(b"0123456789")
        self.path.write_text(json.dumps([vars(fault) for fault in planned]))
        self.env = {**os.environ, faults.ENV: str(self.path)}

    def incarnation(self, process: str, *points: str) -> tuple[int, list[str]]:
        """Exit status of a process that passes the points, and what it saw at each."""
        command = [sys.executable, "-c", PASS, process, str(self.file), *points]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout.splitlines()


def test_faults_are_counted_over_all_incarnations_of_their_process(tmp_path: Path) -> None:
    """The counter lies beside the plan: the incarnation after the killed one passes the same point unharmed."""
    result = Fault("result:*", "environment", "error", nth=2, times=2)
    plan = Plan(tmp_path, Fault("rename:*", "trainer", "kill"), result)
    assert plan.incarnation("orchestrator", "rename:a") == (0, ["rename:a None"])
    assert plan.incarnation("trainer", "write:a", "rename:a", "rename:b") == (-signal.SIGKILL, ["write:a None"])
    assert plan.incarnation("trainer", "rename:a", "rename:b") == (0, ["rename:a None", "rename:b None"])
    assert plan.incarnation("environment", "result:e", "result:e")[1] == ["result:e None", "result:e error"]
    assert plan.incarnation("environment", "result:e", "result:e")[1] == ["result:e error", "result:e None"]


def test_each_kind_does_what_it_says(tmp_path: Path) -> None:
    """`drop`, `duplicate` and `error` are left to the caller; `tear` leaves half of the file and no process."""
    returned = [Fault(f"{kind}:*", "trainer", kind) for kind in ("drop", "duplicate", "error")]
    plan = Plan(tmp_path, *returned, Fault("write:*", "trainer", "enospc"), Fault("manifest:*", "trainer", "tear"))
    status, seen = plan.incarnation("trainer", "drop:a", "duplicate:a", "error:a", "write:a", "write:a", "manifest:a")
    assert seen == ["drop:a drop", "duplicate:a duplicate", "error:a error", "write:a 28", "write:a None"]
    assert status == -signal.SIGKILL
    assert plan.file.read_bytes() == b"01234"


def test_a_plan_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    """A misspelt plan must not pass for one under which everything survived."""
    plan = Plan(tmp_path)
    plan.path.write_text('[{"point": "x", "process": "trainer", "do": "kill", "nht": 2}]')
    assert plan.incarnation("trainer", "x")[0] == 1
