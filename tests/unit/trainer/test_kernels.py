"""The Triton kernels, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("kernels", ["lm_head", "moe"])
def test_under_the_interpreter(kernels: str) -> None:
    """Every test of the interpreted file passes. It has a process of its own: Triton settles when it is imported whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).with_name(f"interpreted_{kernels}_kernels.py"), "-W", "ignore"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
