"""TRL and verl as black boxes. Each is installed into an environment of its own when the first test asks for it.

Such an environment sees the packages of this one (torch, transformers, datasets …) through a .pth file, so that both
compute with the same torch and little has to be installed. Where that is impossible tests are skipped with the reason.
"""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY

PACKAGES = {
    "trl": ["trl==1.16.0", "accelerate==1.15.0"],
    "verl": [
        *("verl==0.9.1", "tensordict==0.15.3", "ray==2.60.0", "omegaconf==2.4.0"),
        *("codetiming==1.4.0", "orjson==3.13.0", "pyvers==0.2.3"),
    ],
}
SECONDS = 500  # that one command may take, installing included


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """What a peer, by its name, gives for all that the module asks it (`question`); it is started once."""

    @functools.cache
    def answer(peer: str) -> Any:
        python = install(peer, request.config.cache.mkdir("oracles"))  # type: ignore[union-attr]
        directory = tmp_path_factory.mktemp(peer)
        question, reply = directory / "question.json", directory / "answer.json"
        question.write_text(json.dumps({"model": str(tiny_model)} | request.module.question(peer)))
        base = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        command = [str(python), str(Path(__file__).with_name("call_peers.py")), peer, str(question), str(reply)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, cwd=directory, env=base | offline
        )
        assert done.returncode == 0, f"{peer} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(reply.read_text())

    return answer


def install(peer: str, cache: Path) -> Path:
    """The Python of a peer's environment. A lock keeps test processes from installing one at the same time."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip(f"{peer} cannot be installed: uv is not on the PATH")
    identity = json.dumps([PACKAGES[peer], sys.prefix, sys.version])
    home = cache / f"{peer}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    python = home / "bin" / "python"
    with (cache / f"{peer}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (home / "complete").exists():
            return python
        shutil.rmtree(home, ignore_errors=True)
        for command in (
            [uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(home)],
            [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), *PACKAGES[peer]],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=REPOSITORY)
            if done.returncode:
                pytest.skip(f"{peer} cannot be installed: {' '.join(done.stderr.split())}")
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
        (home / "complete").touch()
    return python
