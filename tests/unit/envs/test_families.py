"""Which processes are a worker's."""

import os
import subprocess
import sys
import time

from prime_rl.envs.families import MARK_VAR, Process, end_family, family, marked, resident, table
from prime_rl.wait import wait


def process(parent: int, group: int, zombie: bool = False) -> Process:
    return Process(parent, group, 1 << 20, zombie, 0.0)


def test_a_family_by_hand() -> None:
    """By descent, also into other groups; by group, also where the parent is gone; not the dead, nor strangers."""
    processes = {
        1: process(0, 1),
        10: process(1, 10),  # the worker
        11: process(10, 10),
        12: process(11, 12),  # a session of its own
        13: process(1, 10),  # its parent is gone
        14: process(13, 14),
        15: process(10, 10, zombie=True),
        20: process(1, 20),
        21: process(20, 20),
    }
    assert family(processes, 10) == {10, 11, 12, 13, 14}
    assert resident(processes, 10) == 5 << 20
    del processes[10]
    assert family(processes, 10) == {11, 12, 13, 14}


DAEMON = "import os,sys,time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(1000)"


def test_a_daemon_is_found_by_its_mark() -> None:
    """One that no descent and no group leads to."""
    mark, born = f"test-{os.getpid()}", time.clock_gettime(time.CLOCK_BOOTTIME)
    variables = {**os.environ, MARK_VAR: mark}
    started = subprocess.Popen([sys.executable, "-c", DAEMON], env=variables, stdout=subprocess.PIPE)
    assert started.stdout is not None
    daemon = int(started.stdout.readline())
    started.wait(timeout=60)
    nobody = 2**22 + 1  # beyond the largest process number
    assert daemon in marked(mark, table())
    assert end_family(nobody, mark, born + 1000) == 0
    assert end_family(nobody, mark, born) == 1
    # A killed process takes a moment to end.
    wait(lambda: not marked(mark, alive()), subject="the daemon's end", owner="the kernel", seconds=30.0)


def alive() -> list[int]:
    return [pid for pid, one in table().items() if not one.zombie]
