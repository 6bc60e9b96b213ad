"""NVIDIA's MPS, played by a script."""

import os
import subprocess
from pathlib import Path

import pytest

from prime_rl.errors import UserError
from prime_rl.launcher.mps import mps_daemon
from prime_rl.processes import read
from prime_rl.wait import WaitTimeout

CONTROL = """#!/bin/bash
cd "$CUDA_MPS_PIPE_DIRECTORY"
if [ "${1:-}" = -f ]; then
  %s
  echo $$ > up
  until [ -e quit ]; do sleep 0.05; done
  exit
fi
read -r command
[ "$command" = quit ] && touch quit
[ -e up ]
"""


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, start: str = "") -> None:
    program = directory / "nvidia-cuda-mps-control"
    program.write_text(CONTROL % start)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_it_runs_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the client has been given some GPUs: the daemon counts all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    install(monkeypatch, tmp_path, 'test -z "${CUDA_VISIBLE_DEVICES:-}" || exit 1')
    with mps_daemon(tmp_path) as variables:
        pid = int(Path(variables["CUDA_MPS_PIPE_DIRECTORY"], "up").read_text())
        assert read(pid)
    assert read(pid) is None
    assert not Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_what_the_run_waits_for_is_not_of_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    with pytest.raises(WaitTimeout, match="^no batch from us"), mps_daemon(tmp_path):
        raise WaitTimeout("batch", "us", 1)


def test_a_daemon_of_the_user_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    monkeypatch.setattr(subprocess, "Popen", None)
    with mps_daemon(tmp_path) as variables:
        assert variables == {}


@pytest.mark.parametrize(
    ("start", "message"), [(None, "mps: there is no nvidia-cuda-mps"), ("exit 1", "does not start")]
)
def test_without_it_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: str | None, message: str
) -> None:
    if start:
        install(monkeypatch, tmp_path, start)
    with pytest.raises(UserError, match=message), mps_daemon(tmp_path):
        pytest.fail("started")
