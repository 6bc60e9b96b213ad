"""The lifeline: whoever watches it dies with the launcher, together with its group; nobody else is touched."""

import os
import signal
import subprocess
import sys

import pytest

from prime_rl.lifeline import ENV, Lifeline, ancestors, follow
from prime_rl.processes import read
from prime_rl.wait import wait

CHILD = """
import subprocess, sys, time
from prime_rl import lifeline
lifeline.watch()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(grandchild.pid, flush=True)
time.sleep(60)
"""
RANK = "from prime_rl import lifeline; lifeline.watch(); import time; print('up', flush=True); time.sleep(60)"
TORCHRUN = f"""
import subprocess, sys, time
from prime_rl import lifeline
lifeline.watch()
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}], start_new_session=True, stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(60)
"""


def spawn(code: str, line: Lifeline) -> tuple[subprocess.Popen[str], int]:
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=line.pass_fds,
        env={**os.environ, **line.env},
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def gone(pid: int) -> bool:
    return wait(lambda: read(pid) is None, subject="its end", owner="the kernel", seconds=60) is True


def test_cutting_the_line_kills_child_and_grandchild() -> None:
    """A child and what it spawned in its group die when the write end closes."""
    line = Lifeline()
    child, grandchild = spawn(CHILD, line)
    assert child.poll() is None
    line.close()
    assert child.wait(60) == -signal.SIGKILL
    assert gone(grandchild)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_in_its_own_session_dies_with_its_agent(stopped: bool) -> None:
    """A rank that torchrun started in a session of its own, without the pipe; one that is stopped cannot watch: the kernel wakes it."""
    line = Lifeline()
    agent, rank = spawn(TORCHRUN, line)
    if stopped:
        os.kill(rank, signal.SIGSTOP)
    line.close()
    assert agent.wait(60) == -signal.SIGKILL
    assert gone(rank)


FOLLOWER = "import os, sys, time; from prime_rl.lifeline import follow; assert follow(int(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
FOLLOWED = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {FOLLOWER!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_follower_of_a_killed_process_ends() -> None:
    """SIGKILL of the followed process ends the follower. What is no ancestor (another host's process) is not followed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FOLLOWED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=30)
    assert gone(child), "the child outlived its parent"
    assert os.getppid() in ancestors()
    assert not follow(os.getpid())
    assert not follow(2**22 + 1)


def test_another_file_under_the_same_number_is_not_read() -> None:
    """A stale variable must not make a process read a file descriptor that is something else."""
    read, write = os.pipe()
    os.write(write, b"payload")
    code = (
        f"from prime_rl import lifeline; lifeline.watch(); import os, time; time.sleep(0.2); print(os.read({read}, 7))"
    )
    env = {**os.environ, ENV: f"{read}:1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, pass_fds=(read,), capture_output=True, text=True)
    assert out.stdout.strip() == "b'payload'"


def test_module_runs_under_the_watch() -> None:
    """`python -m prime_rl.lifeline -m module args` runs the module as __main__ with its own arguments."""
    out = subprocess.run(
        [sys.executable, "-m", "prime_rl.lifeline", "-m", "json.tool", "--compact"],
        input='{"a": 1}',
        capture_output=True,
        text=True,
    )
    assert (out.returncode, out.stdout.strip()) == (0, '{"a":1}')
