"""Python environments of an environment's own (`requirements`): uv makes them once, in the user's cache, and they are used again offline.

One is named by a hash of what decides its packages: the requirements, with the project files of local ones, what our worker needs beside them, and the
Python version. It is made in a directory of its own and renamed when it is whole, so that two runs may make it at once and neither sees half of one.
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
from pathlib import Path
from typing import TypeVar

from loguru import logger

from prime_rl.config.shared import EnvConfig
from prime_rl.envs.adapter import VERSIONS
from prime_rl.envs.worker_process import passed_on
from prime_rl.errors import UserError

BUILD_SECONDS = 1800.0
SHOWN_LINES = 8

# What our side of a worker imports: the wire, and the token client with its renderers.
_WIRE = ("msgpack", "pyzmq")
_TOKENS = ("renderers", "transformers", "tokenizers", "jinja2", "aiohttp", "huggingface-hub")
# Of verifiers the newest that the environment's own package allows, of those that our adapters run.
_OLDEST, _LAST_CLASSIC = "verifiers>=0.1.11", "<=0.3.1"
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")  # of a local directory: what it needs

_PROGRESS = ("Using ", "Resolved ", "Prepared ", "warning:", "Creating ", "Building ")  # lines of uv that say no reason

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
        if requirement.startswith("-") or not requirement.strip():
            raise UserError(f"{where}: {requirement!r} is not a package")
        path = _local(requirement)
        if path is not None and not path.exists():
            raise UserError(f"{where}: {requirement} does not exist")
        is_project = path is None or any((path / name).is_file() for name in ("pyproject.toml", "setup.py"))
        if path is not None and path.is_dir() and not is_project:
            raise UserError(f"{where}: {requirement} is not a package: it has neither pyproject.toml nor setup.py")
    if environment.requirements and shutil.which("uv") is None:
        raise UserError(f"{where} are installed by uv, which is not there: `pip install uv`")


def _python(env: EnvConfig) -> Path:
    check(env)
    own = importlib.metadata.version("verifiers")
    verifiers = {
        "classic": [f"{_OLDEST},{_LAST_CLASSIC}"],
        "python": [],
        "verifiers": [f"verifiers=={own}"],
        "auto": [f"{_OLDEST},<={own}"],
    }[env.adapter]
    # In the versions of this interpreter: all kinds of environments make the same tokens of a conversation.
    same = [f"{package}=={importlib.metadata.version(package)}" for package in (*_WIRE, *_TOKENS)]
    wanted = [*(word for each in env.requirements for word in _uv_words(each)), *verifiers, *same]
    target = _cache() / _key(wanted)
    if not (target / "bin" / "python").exists():  # also where the interpreter that it was made with is gone
        _make(env, wanted, target)
    return target / "bin" / "python"


def _make(env: EnvConfig, wanted: Sequence[str], target: Path) -> None:
    """Raises UserError."""
    logger.info("making the Python environment of {} in {}", env.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        _uv(env, made, "venv", "--quiet", "--relocatable", "--python", sys.executable, made / "venv")
        _uv(env, made, "pip", "install", "--python", made / "venv" / "bin" / "python", *wanted)
        if target.exists():  # broken, or another run's by now
            target.rename(made / "replaced")
        (made / "venv").rename(target)
    except OSError as error:
        if not (target / "bin" / "python").exists():
            raise UserError(f"environment {env.name}: {target} cannot be made: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _uv(env: EnvConfig, directory: Path, *arguments: object) -> None:
    """Run uv outside any project, whose settings would be taken for ours. Raises UserError."""
    command = ["uv", *map(str, arguments)]
    # A package that is built runs code of its own; uv itself needs the keys to its indexes.
    passed, _ = passed_on(os.environ, [*env.secrets, *(name for name in os.environ if name.startswith("UV_"))])
    variables = {name: value for name, value in passed.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            command, cwd=directory, env=variables, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"environment {env.name}: uv was not done after {BUILD_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line.rstrip() for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if not line.lstrip().startswith(_PROGRESS)] or lines
        shown = "\n".join(f"  | {line}" for line in reasons[:SHOWN_LINES])
        which = f"\n{VERSIONS}" if env.adapter != "python" and "verifiers" in done.stderr else ""
        raise UserError(
            f"environment {env.name}: its requirements {env.requirements} cannot be installed\n{shown}{which}"
        )


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "prime-rl" / "environments"


def _key(wanted: Sequence[str]) -> str:
    """Name a Python environment by all that decides what is installed."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {platform.python_version()} {platform.machine()}".encode())
    for requirement in sorted(wanted):
        digest.update(f"\n{requirement}\n".encode())
        if (path := _local(requirement)) is not None:
            for file in (path, *(path / name for name in _PROJECT_FILES)):
                digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:24]


def _local(requirement: str) -> Path | None:
    """The directory or file that a requirement is; None for one that names a package."""
    if not requirement.startswith((".", "/", "~")):
        return None
    return Path(requirement.partition("[")[0]).expanduser().resolve()


def _uv_words(requirement: str) -> list[str]:
    """What uv, which runs elsewhere, is to install: a local directory as it is, so that edits count without another build."""
    if (path := _local(requirement)) is None:
        return [requirement]
    absolute = f"{path}{''.join(requirement.partition('[')[1:])}"
    return ["--editable", absolute] if path.is_dir() else [absolute]
