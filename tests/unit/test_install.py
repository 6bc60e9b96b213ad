"""`scripts/install.sh` installs what the docs recommend for the machine."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.sh"


def stub(directory: Path, name: str, body: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{body}\n")
    (directory / name).chmod(0o755)


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [
        (None, [], "--group cpu"),
        (0, [], "--group cpu"),
        (1, [], "--extra cuda --extra fa"),
        (3, ["cuda"], "--extra cuda --extra fa"),
        (1, ["cpu"], "--group cpu"),
        (None, ["cuda", "--no-dev"], "--extra cuda --extra fa --no-dev"),
    ],
)
def test_what_is_installed(gpus: int | None, arguments: list[str], expected: str, tmp_path: Path) -> None:
    """The GPU's packages where one is seen; further arguments reach uv. None: the driver does not answer."""
    stub(tmp_path, "uv", 'echo "uv $*"')
    rows = "; ".join(f"echo 'GPU {number}: some GPU'" for number in range(gpus or 0))
    stub(tmp_path, "nvidia-smi", "exit 9" if gpus is None else rows or ":")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert f"uv sync {expected}" in found.stdout.splitlines()


def git(*arguments: str | Path) -> None:
    identity = ("-c", "user.name=name", "-c", "user.email=name@localhost")
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, timeout=60)


def test_piped_into_an_empty_directory(tmp_path: Path) -> None:
    """`cat install.sh | bash -s -- ARGUMENT…` clones, installs into the clone and says how to go on; the second time it
    uses the clone; within the clone it stays there."""
    stub(tmp_path, "uv", 'echo "uv $* in $PWD"')
    repository, here, plain = (tmp_path / name for name in ("repository", "empty", "plain"))
    for directory in (repository, here, plain):
        directory.mkdir()
    (repository / "pyproject.toml").write_text('[project]\nname = "prime-rl"\n')
    git("init", "--quiet", repository)
    git("-C", repository, "add", ".")
    git("-C", repository, "commit", "--quiet", "-m", "first")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PRIME_RL_REPO": str(repository)}

    def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"cwd": directory, "env": environment, "timeout": 60}
        return subprocess.run(command, input=SCRIPT.read_text(), capture_output=True, text=True, **options)

    for directory, go in ((here, "cd prime-rl && "), (here, "cd prime-rl && "), (here / "prime-rl", "")):
        found = run(directory, "bash", "-s", "--", "cpu", "--quiet")
        assert (found.returncode, found.stderr) == (0, "")
        assert f"uv sync --group cpu --quiet in {here}/prime-rl" in found.stdout.splitlines()
        assert found.stdout.endswith(f"ready: {go}uv run --group cpu rl @ examples/reverse_text/cpu.toml\n")
    assert "cloning" not in found.stdout
    stub(tmp_path, "nvidia-smi", "exit 9")
    assert run(plain, "bash").stdout.splitlines()[-1].startswith("ready: cd prime-rl && uv run ")
