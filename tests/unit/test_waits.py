"""`scripts/check_waits.py`, by which CI refuses waits in src/ without a bound, finds them."""

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_waits.py"


@pytest.fixture(scope="module")
def waits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_waits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_waits"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


REFUSED = {
    "event": "self.event.wait()",
    "event, None": "self.event.wait(None)",
    "event, timeout None": "self.event.wait(timeout=None)",
    "thread": "thread.join()",
    "lock": "lock.acquire()",
    "lock, blocking": "lock.acquire(blocking=True)",
    "queue": "queue.get()",
    "queue, block": "queue.get(True)",
    "full queue": "import queue\nq = queue.Queue(8)\nq.put(1)",
    "process": "process.wait()",
    "communicate": "process.communicate()",
    "communicate with input": "process.communicate(input=b'')",
    "run": "import subprocess\nsubprocess.run(['ls'])",
    "run, imported name": "from subprocess import check_output as out\nout(['ls'])",
    "run, timeout None": "import subprocess\nsubprocess.run(['ls'], timeout=None)",
    "system": "import os\nos.system('ls')",
    "with Popen": "import subprocess\nwith subprocess.Popen(['ls']) as p: pass",
    "waitpid": "import os\nos.waitpid(-1, 0)",
    "select": "import select\nselect.select([fd], [], [])",
    "select, None": "import select\nselect.select([fd], [], [], None)",
    "poll": "import select\npoller = select.poll()\npoller.poll()",
    "selector": "selector.select()",
    "flock": "import fcntl\nfcntl.flock(fd, fcntl.LOCK_EX)",
    "with lock": "import threading\nlock = threading.Lock()\nwith lock: pass",
    "future": "future.result()",
    "future, None": "executor.submit(f).result()",
    "zmq": "socket.recv_multipart()",
    "socket": "connection.recv(4096)",
    "send": "async def f(self):\n    await self._socket.send_multipart([b'x'])",
    "accept": "server.accept()",
    "pipe": "process.stdout.readline()",
    "pipe, lines": "for line in process.stdout: print(line)",
    "read": "import os\nos.read(fd, 1)",
    "sleep loop": "import time\nwhile not done():\n    time.sleep(1)",
    "sleep loop, imported name": "from time import sleep\nwhile True:\n    if x:\n        sleep(1)",
    "counting sleep loop": "import itertools, time\nfor n in itertools.count():\n    time.sleep(1)",
    "wait by pieces": "while not stopped.wait(1.0):\n    look()",
    "spin": "while not done():\n    pass",
    "await future": "async def f(future):\n    return await future",
    "await attribute": "async def f(self):\n    await self.task",
    "await event": "async def f(event):\n    await event.wait()",
    "await queue": "async def f(queue):\n    return await queue.get()",
    "await gather": "import asyncio\nasync def f(tasks):\n    await asyncio.gather(*tasks)",
    "await shield": "import asyncio\nasync def f(task):\n    await asyncio.shield(task)",
    "asyncio.wait": "import asyncio\nasync def f(tasks):\n    await asyncio.wait(tasks)",
    "wait_for None": "import asyncio\nasync def f(task):\n    await asyncio.wait_for(task, None)",
    "timeout None": "import asyncio\nasync def f(task):\n    async with asyncio.timeout(None):\n        await task",
    "after the timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        pass\n    await t",
    "blocking call in asyncio.timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        t.wait()",
    "function in asyncio.timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        async def g():\n            await t\n",
    "async lock": "import asyncio\nlock = asyncio.Lock()\nasync def f():\n    async with lock: pass",
    "connect": "import asyncio\nasync def f():\n    await asyncio.open_connection('h', 1)",
    "urlopen": "from urllib.request import urlopen\nurlopen('http://h')",
    "opener": "import urllib.request\nopener = urllib.request.build_opener()\nopener.open('http://h')",
    "requests": "import requests\nrequests.get('http://h')",
    "httpx": "import httpx\nhttpx.get('http://h', timeout=None)",
    "httpx client": "import httpx\nhttpx.AsyncClient(timeout=None)",
    "aiohttp": "import aiohttp\naiohttp.ClientTimeout(total=None)",
    "group without timeout": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "work": "work = dist.all_reduce(x, async_op=True)\nwork.wait()",
    "executor": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as pool: pass",
    "shutdown": "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()\npool.shutdown()",
    "exemption without a reason": "event.wait()  # bounded:",
    "exemption elsewhere": "x = 1  # bounded: for no wait\n",
    "loop's exemption does not cover what is in it": "while True:  # bounded: a daemon\n    time = socket.recv()\n",
}

ACCEPTED = {
    "event": "event.wait(1.0)",
    "thread": "thread.join(timeout=5)",
    "strings and paths": "import os\n','.join(names)\nos.path.join('a', 'b')",
    "dict": "d.get('key')\nd.get('key', None)\nos.environ.get('A')",
    "queue": "queue.get(timeout=1)\nqueue.get(False)\nqueue.get(True, 1.0)\nqueue.get_nowait()",
    "endless queue": "import queue\nq = queue.Queue()\nq.put(1)",
    "lock": "lock.acquire(timeout=1)\nlock.acquire(blocking=False)\nlock.acquire(False)",
    "run": "import subprocess\nsubprocess.run(['ls'], timeout=3)",
    "popen": "import subprocess\np = subprocess.Popen(['ls'])\np.poll()\np.wait(3)",
    "waitpid": "import os\nos.waitpid(-1, os.WNOHANG)",
    "flock": "import fcntl\nfcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\nfcntl.flock(fd, fcntl.LOCK_UN)",
    "select": "import select\nselect.select([fd], [], [], 1.0)",
    "known to be done": "def f(future):\n    if future.done():\n        return future.result()",
    "asyncio task": "import asyncio\ndef f(task: asyncio.Task[None]):\n    return task.exception()",
    "zmq": "import zmq\nsocket.recv(zmq.NOBLOCK)",
    "zmq send": "import zmq\nsocket.send(b'x', zmq.NOBLOCK)",
    "sleep once": "import time\ntime.sleep(1)\nfor n in range(3):\n    time.sleep(n)",
    "await a call": "async def f():\n    await work()",
    "await in a limit": "import asyncio\nasync def f(t, e):\n    async with asyncio.timeout(1):\n        await t\n        await e.wait()",
    "lock in a limit": "import asyncio\nlock = asyncio.Lock()\nasync def f():\n    async with asyncio.timeout(1), lock: pass",
    "within": "from prime_rl.wait import within\nasync def f(e):\n    await within(e.wait(), subject='s', owner='o', seconds=1)",
    "wait_for": "import asyncio\nasync def f(e):\n    await asyncio.wait_for(e.wait(), 3)",
    "asyncio.wait": "import asyncio\nasync def f(tasks):\n    await asyncio.wait(tasks, timeout=3)",
    "task": "import asyncio\nasync def f(e):\n    t = asyncio.create_task(e.wait())",
    "gather of calls": "import asyncio\nasync def f(xs):\n    await asyncio.gather(*(g(x) for x in xs), h())",
    "urlopen": "from urllib.request import urlopen\nurlopen('http://h', timeout=2)",
    "httpx has a default": "import httpx\nhttpx.get('http://h')\nhttpx.AsyncClient(timeout=3)",
    "aiohttp": "import aiohttp\naiohttp.ClientTimeout(total=3)",
    "group": "import torch.distributed as dist\ndist.init_process_group('gloo', timeout=limit)\ndist.barrier()",
    "shutdown": "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()\npool.shutdown(wait=False)",
    "exempt wait": "process.wait()  # bounded: it has been killed",
    "exempt loop": "import time\nwhile True:  # bounded: a daemon thread\n    time.sleep(1)",
    "exempt lock": "import threading\nlock = threading.Lock()  # bounded: held for one assignment\nwith lock: pass",
    "exempt wait over lines": "process.wait(\n)  # bounded: it has been killed",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_refused(waits: ModuleType, source: str) -> None:
    """Contract: each of these may wait for ever, and is named with what to do about it."""
    findings, _ = waits.check(textwrap.dedent(source))
    assert findings
    assert all(finding.mend and str(finding).startswith(f"<source>:{finding.line}: ") for finding in findings)


@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted(waits: ModuleType, source: str) -> None:
    """Contract: none of these waits for ever, or it says why not."""
    findings, _ = waits.check(textwrap.dedent(source))
    assert not findings, "\n".join(map(str, findings))


def test_exemptions_are_listed(waits: ModuleType) -> None:
    """Contract: the list shows what was excused, and the reason."""
    _, exemptions = waits.check("process.wait()  # bounded: it has been killed", "src/a.py")
    assert [str(exemption) for exemption in exemptions] == ["src/a.py:1: it has been killed"]


def test_locks_of_other_modules(waits: ModuleType, tmp_path: Path) -> None:
    """Contract: a lock is explained where it is made, or else wherever it is waited for."""
    (tmp_path / "user.py").write_text("async def f(self):\n    async with self.serving.gate: pass\n")
    for reason, findings in (("", 1), ("  # bounded: held for one assignment", 0)):
        maker = f"import asyncio\nclass S:\n    def __init__(self):\n        self.gate = asyncio.Lock(){reason}\n"
        (tmp_path / "maker.py").write_text(maker)
        assert len(waits.check_files([tmp_path])[0]) == findings


def test_the_command(tmp_path: Path) -> None:
    """Contract: the exit status tells CI; what was found is one line each."""
    import subprocess

    file = tmp_path / "bad.py"
    file.write_text("event.wait()\n")
    done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert done.stdout.startswith(f"{file}:1: ")
