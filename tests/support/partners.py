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
    change(path, pid=pid, started=found.started)


def change(path: Path, **fields: object) -> dict[str, object]:
    """Change the status in committed settings. Return it."""
    record = json.loads(path.read_text())
    record["status"] |= fields
    path.write_text(json.dumps(record))
    return dict(record["status"])
