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
    "queue": "queue.get()",
    "process": "process.wait()",
    "run": "import subprocess\nsubprocess.run(['ls'])",
    "send": "async def f(self):\n    await self._socket.send_multipart([b'x'])",
    "pipe": "process.stdout.readline()",
    "sleep loop": "import time\nwhile not done():\n    time.sleep(1)",
    "await future": "async def f(future):\n    return await future",
    "await gather": "import asyncio\nasync def f(tasks):\n    await asyncio.gather(*tasks)",
    "after timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        pass\n    await t",
    "blocking in timeout": "import asyncio\nasync def f(t):\n    async with asyncio.timeout(1):\n        t.wait()",
    "httpx": "import httpx\nhttpx.get('http://h', timeout=None)",
    "group without timeout": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "executor": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as pool: pass",
    "exemption without a reason": "event.wait()  # bounded:",
    "loop's exemption does not cover what is in it": "while True:  # bounded: a daemon\n    time = socket.recv()\n",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_refused(source: str) -> None:
    """Contract: each of these may wait for ever, and is named with what to do about it."""
    findings, _ = check(source)
    assert findings
    assert all(finding.advice and str(finding).startswith(f"<source>:{finding.line}: ") for finding in findings)


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
