"""No orphans: who watches its launcher dies with it; which processes belong to another, and their end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from prime_rl import processes
from prime_rl.processes import identify, kill_family, table
from prime_rl.wait import wait

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
WATCH = f"from prime_rl import processes; processes.watch(); {SLEEP}"
# Starts WATCH through a process in between, as torchrun starts ranks: in a session of its own. Prints its pid.
AGENT = f"""
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {WATCH!r}], start_new_session=True, stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
rank.wait()
"""
LAUNCHER = AGENT.replace("start_new_session=True", "start_new_session=True, env=os.environ | processes.variable()")
LAUNCHER = f"import os; from prime_rl import processes{LAUNCHER}"
FOLLOWER = f"import sys; from prime_rl.processes import follow; assert follow(int(sys.argv[1])); {SLEEP}"
FOLLOWED = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {FOLLOWER!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def gone(pid: int) -> bool:
    return wait(lambda: identify(pid) is None, subject="its end", owner="the kernel", seconds=60) is True


@pytest.mark.parametrize(("code", "stopped"), [(LAUNCHER, False), (LAUNCHER, True), (FOLLOWED, False)])
def test_who_watches_a_process_ends_with_it(code: str, stopped: bool) -> None:
    """SIGKILL of the launcher ends its child, also a stopped one; of a server, its engine."""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if stopped:
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait(30)
    assert gone(child)
    with suppress(ProcessLookupError):  # what was in between, and watches nothing
        os.killpg(parent.pid, signal.SIGKILL)


def test_strangers_are_not_followed() -> None:
    """What is no ancestor (another host's process) is not followed; a launcher that is gone already ends the child."""
    assert not processes.follow(os.getpid())
    assert not processes.follow(2**22 + 1)
    late = {**os.environ, processes.ENV: f"{os.getpid()}:1"}  # its pid is another process's now
    command = [sys.executable, "-c", WATCH]
    done = subprocess.run(command, env=late, start_new_session=True, capture_output=True, text=True)
    assert (done.returncode, "is gone" in done.stderr) == (-signal.SIGKILL, True)


OUT_OF_DESCRIPTORS = """
import os, resource, time
from prime_rl import processes
assert processes.follow(os.getppid())
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
time.sleep(4 * processes._LOOK_SECONDS)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
"""


def test_who_has_no_file_descriptor_left_lives_on() -> None:
    """Contract: what cannot be looked up is not taken for gone."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_DESCRIPTORS], start_new_session=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


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
    assert [process.pid for process in kill_family(nobody, f"PRIMERL_TEST={mark}")] == [daemon]
    assert gone(daemon)
