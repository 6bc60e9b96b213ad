"""Other projects as oracles: each is installed into an environment of its own when a test first asks for it, and called there as a black box.

Such an environment sees the packages of this one (torch, transformers, datasets …) through a .pth file, so that both compute with the same torch,
and little has to be installed: what is named here, and nothing that it depends on.
"""

import fcntl
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

PACKAGES: dict[str, tuple[str, ...]] = {
    "trl": ("trl==1.16.0", "accelerate==1.15.0"),
    "verl": (
        "verl==0.9.1", "tensordict==0.15.3", "ray==2.60.0", "omegaconf==2.4.0",
        "codetiming==1.4.0", "orjson==3.13.0", "pyvers==0.2.3",
    ),
}  # fmt: skip
Answers = Callable[[str], dict[str, Any]]  # of a peer, by its name
SECONDS = 500  # that one command may take, installing included


class Oracle:
    """Another project, in its own environment.

    Args:
        cache: Where environments are kept; a lock in it keeps test processes from installing the same one at a time.
    """

    def __init__(self, name: str, cache: Path) -> None:
        identity = json.dumps([PACKAGES[name], sys.prefix, sys.version])
        self.name, self._home = name, cache / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        self.python = self._home / "bin" / "python"
        with (cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self._home / "complete").exists():
                self._install()

    def _install(self) -> None:
        """Skip the test where the packages cannot be had."""
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip(f"{self.name} cannot be installed: uv is not on the PATH")
        shutil.rmtree(self._home, ignore_errors=True)
        for command in (
            [uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(self._home)],
            [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(self.python), *PACKAGES[self.name]],
        ):
            process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=REPOSITORY)
            if process.returncode:
                pytest.skip(f"{self.name} cannot be installed: {' '.join(process.stderr.split())}")
        (packages,) = self._home.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
        (self._home / "complete").touch()

    def answer(self, script: Path, question: Any, directory: Path) -> Any:
        """Return what `script` writes to its second argument, having read `question` from its first, both as JSON: floats pass unchanged.

        It runs in `directory`, without a GPU and without a hub.
        """
        question_file, answer_file = directory / f"{self.name}-question.json", directory / f"{self.name}-answer.json"
        question_file.write_text(json.dumps(question))
        base = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.run(
            [str(self.python), str(script), str(question_file), str(answer_file)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=directory,
            env={**base, **offline},
        )
        assert process.returncode == 0, f"{self.name} failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        return json.loads(answer_file.read_text())
