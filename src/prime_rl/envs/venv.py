"""Python environments of an environment's own (`requirements`): uv makes them once, in the user's cache, and they are used again offline.

One is named by a hash of what decides its packages: the requirements, with the project files of local ones, what our worker needs beside them, and the
Python version. It is made in a directory of its own and renamed when it is whole.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from loguru import logger

from prime_rl.config.shared import EnvConfig
from prime_rl.envs.ids import VERSIONS
from prime_rl.errors import UserError
from prime_rl.redact import passed_on

BUILD_SECONDS = 1800.0
# What our side of a worker imports: the wire, and the token client with its renderers.
_OURS = ("msgpack", "pyzmq", "renderers", "transformers", "tokenizers", "jinja2", "aiohttp", "huggingface-hub")

Env = TypeVar("Env", bound=EnvConfig)


def prepare(environments: Sequence[Env]) -> list[Env]:
    """The environments, with the interpreter of its own for each that has requirements. Makes those that are not there yet, which may take minutes.

    Raises:
        UserError: requirements that cannot be installed, naming the environment, with uv's reason.
    """
    return [
        env.model_copy(update={"python": str(_python(env)), "requirements": []}) if env.requirements else env
        for env in environments
    ]


def check(environment: EnvConfig) -> None:
    """What can be known about requirements without installing them. Raises UserError."""
    where = f"environment {environment.name}: requirements"
    for requirement in environment.requirements:
        if (path := _local(requirement)) is not None and not path.exists():
            raise UserError(f"{where}: {requirement} does not exist")
    if shutil.which("uv") is None:
        raise UserError(f"{where} are installed by uv, which is not there: `pip install uv`")


def _python(env: EnvConfig) -> Path:
    check(env)
    own = importlib.metadata.version("verifiers")
    verifiers = {  # the newest that the environment's own package allows, of those that our adapters run
        "classic": ["verifiers==0.3.1"],
        "python": [],
        "verifiers": [f"verifiers=={own}"],
        "auto": [f"verifiers>=0.3.1,<={own}"],
    }[env.adapter]
    # In the versions of this interpreter: all kinds of environments make the same tokens of a conversation.
    wanted = [*verifiers, *(f"{package}=={importlib.metadata.version(package)}" for package in _OURS)]
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {platform.python_version()} {platform.machine()}".encode())
    for requirement in sorted(env.requirements):
        words = [requirement]
        if (path := _local(requirement)) is not None:  # uv runs elsewhere; edits of a directory count at once
            absolute = f"{path}{''.join(requirement.partition('[')[1:])}"
            words = ["--editable", absolute] if path.is_dir() else [absolute]
            for file in (path, *(path / name for name in ("pyproject.toml", "setup.py", "setup.cfg"))):
                digest.update(file.read_bytes() if file.is_file() else b"")
        wanted += words
    digest.update("\n".join(wanted).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-rl" / "environments"
    target = cache / digest.hexdigest()[:24]
    if not (target / "bin" / "python").exists():  # also where the interpreter that it was made with is gone
        logger.info("making the Python environment of {} in {}", env.name, target)
        try:
            _make(env, wanted, target)
        except OSError as error:
            raise UserError(f"environment {env.name}: {target} cannot be made: {error}") from error
    return target / "bin" / "python"


def _make(env: EnvConfig, wanted: Sequence[str], target: Path) -> None:
    """Raises UserError, with uv's reason."""
    # A package that is built runs code of its own; uv itself needs the keys to its indexes.
    passed, _ = passed_on(os.environ, [*env.secrets, *(name for name in os.environ if name.startswith("UV_"))])
    variables = {name: value for name, value in passed.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    where = f"environment {env.name}: its requirements {env.requirements} cannot be installed"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Outside any project, whose settings uv would take for ours.
        with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent, ignore_cleanup_errors=True) as made:
            run = partial(
                subprocess.run, cwd=made, env=variables, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS
            )  # fmt: skip
            run(["uv", "--quiet", "venv", "--relocatable", "--python", sys.executable, "venv"])
            run(["uv", "--quiet", "pip", "install", "--python", "venv/bin/python", *wanted])
            shutil.rmtree(target, ignore_errors=True)
            (Path(made) / "venv").rename(target)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{where} within {BUILD_SECONDS:.0f} s") from error
    except subprocess.CalledProcessError as error:
        which = f"\n{VERSIONS}" if env.adapter != "python" and "verifiers" in error.stderr else ""
        raise UserError(f"{where}\n{error.stderr.strip()}{which}") from error


def _local(requirement: str) -> Path | None:
    """The directory or file that a requirement is; None for one that names a package."""
    if not requirement.startswith((".", "/", "~")):
        return None
    return Path(requirement.partition("[")[0]).expanduser().resolve()
