"""Hashing on a GPU, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    """Every test of the interpreted file passes. It has a process of its own: Triton settles when it is imported whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).with_name("interpreted_device_hash.py"), "-W", "ignore"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
