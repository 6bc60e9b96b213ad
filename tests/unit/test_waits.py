"""`scripts/check_waits.py`, by which CI refuses waits in src/ without a bound, finds them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_waits.py"
check = runpy.run_path(str(SCRIPT))["check"]

REFUSED = {
    "event": "self.event.wait()",
    "thread": "thread.join()",
    "queue": "queue.get()",
    "process": "process.wait()",
    "run": "import subprocess\nsubprocess.run(['ls'])",
    "lock": "import threading\nlock = threading.Lock()",
    "queue with room for few": "import queue\nq = queue.Queue(8)",
    "future": "future.result()",
    "send": "async def f(self):\n    await self._socket.send_multipart([b'x'])",
    "pipe": "process.stdout.readline()",
    "read": "import os\nos.read(fd, 1)",
    "sleep loop": "import time\nwhile not done():\n    time.sleep(1)",
    "wait by pieces": "while not stopped.wait(1.0):\n    look()",
    "spin": "while not done():\n    pass",
    "await future": "async def f(future):\n    return await future",
    "await event": "async def f(event):\n    await event.wait()",
    "await gather": "import asyncio\nasync def f(tasks):\n    await asyncio.gather(*tasks)",
    "wait_for None": "import asyncio\nasync def f(task):\n    await asyncio.wait_for(task, None)",
    "timeout None": "import asyncio\nasync def f(task):\n    async with asyncio.timeout(None):\n        await task",
    "after the timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        pass\n    await t",
    "blocking call in asyncio.timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        t.wait()",
    "connect": "import asyncio\nasync def f():\n    await asyncio.open_connection('h', 1)",
    "httpx": "import httpx\nhttpx.get('http://h', timeout=None)",
    "group without timeout": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "work": "work = dist.all_reduce(x, async_op=True)\nwork.wait()",
    "executor": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as pool: pass",
    "exemption without a reason": "event.wait()  # bounded:",
    "loop's exemption does not cover what is in it": "while True:  # bounded: a daemon\n    time = socket.recv()\n",
}

ACCEPTED = {
    "event": "event.wait(1.0)",
    "strings and paths": "import os\n','.join(names)\nos.path.join('a', 'b')",
    "dict": "d.get('key')\nd.get('key', None)\nos.environ.get('A')",
    "queue": "queue.get(timeout=1)\nqueue.get(False)\nqueue.get(True, 1.0)\nqueue.get_nowait()",
    "lock": "lock.acquire(timeout=1)\nlock.acquire(blocking=False)\nlock.acquire(False)",
    "flock": "import fcntl\nfcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\nfcntl.flock(fd, fcntl.LOCK_UN)",
    "known to be done": "def f(future):\n    if future.done():\n        return future.result()",
    "zmq": "import zmq\nsocket.recv(zmq.NOBLOCK)",
    "sleep once": "import time\ntime.sleep(1)\nfor n in range(3):\n    time.sleep(n)",
    "await in a limit": "import asyncio\nasync def f(t, e):\n    async with asyncio.timeout(1):\n        await t\n        await e.wait()",
    "within": "from prime_rl.wait import within\nasync def f(e):\n    await within(e.wait(), subject='s', owner='o', seconds=1)",
    "wait_for": "import asyncio\nasync def f(e):\n    await asyncio.wait_for(e.wait(), 3)",
    "task": "import asyncio\nasync def f(e):\n    t = asyncio.create_task(e.wait())",
    "httpx has a default": "import httpx\nhttpx.get('http://h')\nhttpx.AsyncClient(timeout=3)",
    "group": "import torch.distributed as dist\ndist.init_process_group('gloo', timeout=limit)\ndist.barrier()",
    "exempt wait": "process.wait()  # bounded: it has been killed",
    "exempt loop": "import time\nwhile True:  # bounded: a daemon thread\n    time.sleep(1)",
    "exempt lock": "import threading\nlock = threading.Lock()  # bounded: held for one assignment\nwith lock: pass",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_refused(source: str) -> None:
    """Contract: each of these may wait for ever, and is named with what to do about it."""
    findings, _ = check(source)
    assert findings
    assert all(finding.advice and str(finding).startswith(f"<source>:{finding.line}: ") for finding in findings)


@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(source: str) -> None:
    """Contract: none of these waits for ever, or it says why not."""
    findings, _ = check(source)
    assert not findings, "\n".join(map(str, findings))


def test_the_command(tmp_path: Path) -> None:
    """Contract: the exit status tells CI; a finding is a line, and so is what was excused, with its reason."""
    file = tmp_path / "bad.py"
    file.write_text("event.wait()\nprocess.wait()  # bounded: it has been killed\n")
    command = [sys.executable, SCRIPT, file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stdout.startswith(f"{file}:1: ")
    done = subprocess.run([*command, "--exemptions"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{file}:2: it has been killed\n")
