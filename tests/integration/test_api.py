"""The Python API with real processes: the example notebook, and `rl chat`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import InferenceServer
from prime_rl.config import OrchestratorConfig, write_toml
from prime_rl.config.loader import from_files
from prime_rl.monitor import Status
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import write_base_version
from support.processes import REPOSITORY

TIMEOUT = 400
NOTEBOOK = REPOSITORY / "examples" / "notebook" / "reverse_text.ipynb"
SMALLER = {
    "max_steps=30": "max_steps=3, **{'orchestrator.batch_size': 16, 'orchestrator.eval.num_examples': 8}",
    "num_examples=64": "num_examples=8",
}
# Cells are run in one namespace, and an event loop runs around them, as in a kernel.
KERNEL = """
import asyncio, json, sys
async def kernel():
    for cell in json.loads(sys.argv[1]):
        exec(cell, globals())
    assert not trained.running
    print(scores["reverse-text"]["rollouts"], "attempts at version", scores["reverse-text"]["policy_version"])
asyncio.run(kernel())
"""


def test_the_notebook(tmp_path: Path) -> None:
    """Contract: its cells run from top to bottom: a run is made, read, served and evaluated as the version that it is,
    and nothing is left."""
    cells = [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    text = json.dumps(cells)
    for old, new in {**SMALLER, "outputs/notebook": str(tmp_path / "run")}.items():
        assert old in text
        text = text.replace(old, new)
    done = subprocess.run([sys.executable, "-c", KERNEL, text], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Step 2 [3/3] | reward" in done.stdout
    assert "Reverse the text character-by-character" in done.stdout  # a sample
    assert done.stdout.endswith("8.0 attempts at version 3.0\n")
    assert list_steps(tmp_path / "run" / "rollouts") == [0, 1, 2]


def chat(*arguments: object, typed: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "chat", *map(str, arguments)]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=TIMEOUT, cwd=REPOSITORY)


@pytest.mark.parametrize("way", ["message", "lines"])
def test_chat_asks_the_server_of_a_run_that_goes_on(
    way: str, tmp_path: Path, inference_server: InferenceServer
) -> None:
    """Contract: no other server is started; each reply is a line, and its conversation goes with the next question; one
    that is too long is said, and a new conversation begins."""
    values = {"model.name": str(inference_server.model), "client.base_url": inference_server.base_url}
    config = from_files(OrchestratorConfig, **values, environment={"id": "reverse-text"}, output_dir=tmp_path)
    write_toml(config, tmp_path / "configs" / "orchestrator.toml")
    inference_server.reset()
    write_base_version(tmp_path / "weights", inference_server.model)  # what it serves
    status = Status(tmp_path, "orchestrator")  # for others it runs as long as this process
    options = [tmp_path, "--temperature", 0]
    if way == "message":
        done = chat(*options, "--message", "Reverse the text: abc")
        assert done.stdout.count("\n") == 1
    else:
        done = chat(*options, typed=f"Reverse the text: abc\n{'too long ' * 3000}\nReverse the text: abc\n")
        first, *error, last = done.stdout.splitlines()
        assert first == last != ""
        assert error[0].startswith("error: ")
        assert "maximum context length" in error[0]
    status.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f", version 0, at {inference_server.root}" in done.stderr


def test_chat_says_what_it_cannot_talk_to(tmp_path: Path) -> None:
    """Contract: one line, status 1."""
    done = chat(tmp_path / "nothing")
    assert done.returncode == 1
    assert "nothing: give the output directory of a run" in done.stderr.splitlines()[-1]
