"""A process that follows another ends with it."""

import os
import select
import subprocess
import sys

from prime_rl.lifeline import ancestors, follow

CHILD = "import os, sys, time; from prime_rl.lifeline import follow; assert follow(int(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_the_child_of_a_killed_parent_ends() -> None:
    """Contract: SIGKILL of the followed process ends the follower. Its standard output closes when it is gone."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    parent.kill()
    parent.communicate(timeout=30)
    assert select.select([watch], [], [], 30)[0], "the child outlived its parent"


def test_only_ancestors_are_followed() -> None:
    """Contract: a number that is no ancestor (another host's process) is not followed."""
    assert os.getppid() in ancestors()
    assert not follow(os.getpid())
    assert not follow(2**22 + 1)
