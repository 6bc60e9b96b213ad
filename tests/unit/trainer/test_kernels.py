"""The Triton kernels, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_under_the_interpreter() -> None:
    """Every test of interpreted_kernels.py passes, in a process of its own: Triton settles when it is imported whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).with_name("interpreted_kernels.py"), "-W", "ignore"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
