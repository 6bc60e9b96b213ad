"""`scripts/tmux.sh`: shells that are named as the walkthroughs name them, each with its log beside it."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.wait import wait
from support.processes import REPOSITORY

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tmux of this test's own."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.chdir(tmp_path)
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True, timeout=30)


def script(*arguments: str | Path) -> str:
    command = ["bash", REPOSITORY / "scripts" / "tmux.sh", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], capture_output=True, text=True, timeout=30).stdout


def test_panes(tmp_path: Path) -> None:
    """What is typed into a pane runs in the checkout, by a shell; the log is shown beside. A second call is a no-op."""
    for _ in range(2):
        assert "exp" in script("-s", "exp", "-o", tmp_path / "out")
        listed = tmux("list-panes", "-t", "=exp:RL", "-F", "#{@name} #{pane_id} #{pane_width}x#{pane_height}")
        panes = {name: pane for name, pane, _ in map(str.split, listed.splitlines())}
        logs = [str(tmp_path / "out" / "logs" / f"{name}.log") for name in ("trainer", "orchestrator", "inference")]
        assert panes.keys() == {"Trainer", "Orchestrator", "Inference", *logs}
        assert len({size for _, _, size in map(str.split, listed.splitlines())}) <= 2  # a column apart
    for name in ("Trainer", "Inference"):
        typed = f"pwd > {tmp_path}/{name}; echo it says > {tmp_path}/out/logs/{name.lower()}.log"
        tmux("send-keys", "-t", panes[name], typed, "Enter")
        beside = panes[logs[0 if name == "Trainer" else 2]]
        wait(lambda: "it says" in tmux("capture-pane", "-p", "-t", beside), subject="the log", owner="tail", seconds=30)  # noqa: B023
        assert (tmp_path / name).read_text().strip() == str(REPOSITORY)
    script("kill", "-s", "exp")
    assert tmux("list-sessions") == ""


def test_the_older_spelling(tmp_path: Path) -> None:
    """`tmux.sh NAME`: session and directory by one name."""
    script(tmp_path.name)
    shutil.rmtree(REPOSITORY / "outputs" / tmp_path.name)
    panes = tmux("list-panes", "-t", f"={tmp_path.name}:RL", "-F", "#{@name}")
    assert f"outputs/{tmp_path.name}/logs/trainer.log" in panes
