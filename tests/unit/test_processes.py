"""Which processes belong to another, and their end."""

import os
import subprocess
import sys

from prime_rl.processes import ProcessId, ProcessInfo, family, identify, kill_family, table
from prime_rl.wait import wait


def process(parent: int, group: int) -> ProcessInfo:
    return ProcessInfo(ProcessId(1, 1), parent, group, False, 1 << 20)


def test_a_family_by_hand() -> None:
    """By descent, also into other groups; by group, also where the parent is gone; not strangers."""
    processes = {
        1: process(0, 1),
        10: process(1, 10),  # the worker
        11: process(10, 10),
        12: process(11, 12),  # a session of its own
        13: process(1, 10),  # its parent is gone
        14: process(13, 14),
        20: process(1, 20),
        21: process(20, 20),
    }
    assert family(10, processes) == {10, 11, 12, 13, 14}
    del processes[10]
    assert family(10, processes) == {11, 12, 13, 14}


DAEMON = "import os,sys,time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(1000)"


def test_a_daemon_is_found_by_its_mark() -> None:
    """One that no descent and no group leads to."""
    mark = f"test-{os.getpid()}"
    variables = {**os.environ, "PRIMERL_TEST": mark}
    started = subprocess.Popen([sys.executable, "-c", DAEMON], env=variables, stdout=subprocess.PIPE)
    assert started.stdout is not None
    daemon = int(started.stdout.readline())
    started.wait(timeout=60)
    nobody = 2**22 + 1  # beyond the largest process number
    assert kill_family(nobody, "PRIMERL_TEST=another") == set()
    assert daemon in table()
    assert [process.id.pid for process in kill_family(nobody, f"PRIMERL_TEST={mark}")] == [daemon]
    # A killed process takes a moment to end.
    wait(lambda: identify(daemon) is None, subject="the daemon's end", owner="the kernel", seconds=30.0)
