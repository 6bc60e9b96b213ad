"""Another process that is at work on a run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.processes import identify


@pytest.fixture
def partner() -> Iterator[int]:
    """The pid of a living process."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process.pid
        process.kill()


def belongs_to(root: Path, process: str, pid: int) -> None:
    """As if that process had committed these settings."""
    path, found = root / "settings" / f"{process}.json", identify(pid)
    assert found is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": pid, "started": found.started}))
