"""`scripts/install.sh` installs what the docs recommend for the machine."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.sh"


def stub(directory: Path, name: str, body: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{body}\n")
    (directory / name).chmod(0o755)


@pytest.mark.parametrize(
    ("capabilities", "machine", "arguments", "expected"),
    [
        (None, "x86_64", [], "--group cpu"),
        ("", "x86_64", [], "--group cpu"),
        ("8.0", "x86_64", [], "--extra cuda"),
        ("9.0", "x86_64", [], "--extra cuda --extra flash-attn-3"),
        ("9.0", "x86_64", ["cuda"], "--extra cuda --extra flash-attn-3"),
        ("9.0 8.0 8.0", "x86_64", ["cuda"], "--extra cuda --extra flash-attn-3"),
        ("9.0", "aarch64", ["cuda"], "--extra cuda"),
        ("12.0", "x86_64", ["cuda"], "--extra cuda"),
        ("9.0", "x86_64", ["cpu"], "--group cpu"),
        (None, "x86_64", ["cuda"], "--extra cuda"),
        (None, "x86_64", ["cuda", "--extra", "flash-attn-3"], "--extra cuda --extra flash-attn-3"),
    ],
)
def test_what_is_installed(
    capabilities: str | None, machine: str, arguments: list[str], expected: str, tmp_path: Path
) -> None:
    """FlashAttention 3 where a Hopper GPU is seen and there is a wheel for it; further arguments reach uv. None: the driver does not answer."""
    stub(tmp_path, "uv", 'echo "uv $*"')
    stub(tmp_path, "uname", f"echo {machine}")
    if capabilities is None:
        stub(tmp_path, "nvidia-smi", "exit 9")
    else:
        told = capabilities.split()
        listed = "; ".join(f"echo 'GPU {number}: some GPU'" for number in range(len(told)))
        answers = "; ".join(f"echo {capability}" for capability in told)
        stub(tmp_path, "nvidia-smi", f'if [ "$1" = -L ]; then {listed or ":"}; else {answers or ":"}; fi')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert f"uv sync {expected}" in found.stdout.splitlines()


def test_an_unknown_machine_is_refused() -> None:
    """With the usage, before anything is installed."""
    found = subprocess.run(["bash", SCRIPT, "tpu"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "usage: bash scripts/install.sh" in found.stderr
