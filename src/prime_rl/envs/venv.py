"""Python environments of an environment's own (`requirements`): uv makes them once, in the user's cache, and they are used again offline.

One is named by a hash of all that goes into it: the requirements, with the files of local ones, what our worker needs beside them, and the Python
version. It is made in a directory of its own and renamed when it is whole, so that two runs may make it at once and neither sees half of one.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from loguru import logger

from prime_rl.config.shared import EnvConfig
from prime_rl.envs.adapter import VERSIONS
from prime_rl.envs.worker_process import passed_on
from prime_rl.errors import UserError

BUILD_SECONDS = 1800.0
ABANDONED_SECONDS = 86400.0  # what is left of a build that was killed
SHOWN_LINES = 8

# What our side of a worker imports: the wire, and the token client with its renderers.
_WIRE = ("msgpack", "pyzmq")
_TOKENS = ("renderers", "transformers", "tokenizers", "jinja2", "aiohttp", "huggingface-hub")
# Of verifiers the newest that the environment's own package allows, of those that our adapters run.
_OLDEST, _LAST_CLASSIC = "verifiers>=0.1.11", "<=0.3.1"
_NOT_CONTENT = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", "build", "dist"}

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
        if path is not None and path.is_dir():
            _check_project(path, f"{where}: {requirement}")
    if environment.requirements and shutil.which("uv") is None:
        raise UserError(f"{where} are installed by uv, which is not there: `pip install uv`")


def _python(env: EnvConfig) -> Path:
    check(env)
    wanted = [*_absolute(env.requirements), *_needs(env)]
    place = _cache() / _key(wanted)
    python = Path("bin") / "python"
    if not (place / python).exists():  # also where the interpreter that it was made with is gone
        _make(env, wanted, place)
    return place / python


def _needs(env: EnvConfig) -> list[str]:
    """Beside the requirements, in the versions of this interpreter: all kinds of environments make the same tokens of a conversation."""
    kind = {
        "classic": [f"{_OLDEST},{_LAST_CLASSIC}"],
        "python": [],
        "verifiers": [_same("verifiers")],
        "auto": [f"{_OLDEST},<={importlib.metadata.version('verifiers')}"],
    }[env.adapter]
    return [*kind, *(_same(name) for name in (*_WIRE, *_TOKENS))]


def _same(package: str) -> str:
    return f"{package}=={importlib.metadata.version(package)}"


def _make(env: EnvConfig, wanted: Sequence[str], place: Path) -> None:
    """Raises UserError."""
    logger.info("making the Python environment of {} in {}", env.name, place)
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    try:
        _uv(env, made, "venv", "--quiet", "--relocatable", "--python", sys.executable, made / "venv")
        _uv(env, made, "pip", "install", "--python", made / "venv" / "bin" / "python", *_refreshed(wanted), *wanted)
        if place.exists():  # broken, or another run's by now
            place.rename(made / "replaced")
        (made / "venv").rename(place)
    except OSError as error:
        if not (place / "bin" / "python").exists():
            raise UserError(f"environment {env.name}: {place} cannot be made: {error}") from error
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
        shown = "\n".join(f"  | {line}" for line in _reason(done.stderr))
        which = f"\n{VERSIONS}" if env.adapter != "python" and "verifiers" in done.stderr else ""
        raise UserError(
            f"environment {env.name}: its requirements {env.requirements} cannot be installed\n{shown}{which}"
        )


def _reason(output: str) -> list[str]:
    """The first lines of uv's that say what is wrong."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    noise = ("Using ", "Resolved ", "Prepared ", "warning:", "Creating ", "   Building ", "Building ")
    reasons = [line for line in lines if not line.lstrip().startswith(noise)] or lines
    return reasons[:SHOWN_LINES]


def _sweep(cache: Path) -> None:
    """Remove what builds that were killed have left."""
    for left in cache.glob(".making-*"):
        try:
            old = time.time() - left.stat().st_mtime > ABANDONED_SECONDS
        except OSError:  # its owner removes it
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "prime-rl" / "environments"


def _key(wanted: Sequence[str]) -> str:
    """Changes with everything that makes another Python environment."""
    digest = hashlib.sha256(f"{sys.implementation.cache_tag} {platform.python_version()} {platform.machine()}".encode())
    for requirement in sorted(wanted):
        digest.update(f"\n{requirement}".encode())
        path = _local(requirement)
        for entry in _files(path) if path is not None else ():
            digest.update(f"\n{entry}".encode())
    return digest.hexdigest()[:24]


def _files(path: Path) -> Iterator[str]:
    """Name, size and time of change of every file of a local package."""
    if path.is_file():
        yield _entry(path, path.name)
    for directory, below, names in os.walk(path):
        below[:] = sorted(name for name in below if name not in _NOT_CONTENT and not name.endswith(".egg-info"))
        for name in sorted(names):
            file = Path(directory) / name
            yield _entry(file, str(file.relative_to(path)))


def _entry(file: Path, name: str) -> str:
    status = file.lstat()
    return f"{name} {status.st_size} {status.st_mtime_ns}"


def _local(requirement: str) -> Path | None:
    """The directory or file that a requirement is; None for one that names a package."""
    if not requirement.startswith((".", "/", "~")):
        return None
    return Path(requirement.partition("[")[0]).expanduser().resolve()


def _absolute(requirements: Sequence[str]) -> list[str]:
    """Local ones by their whole path: uv runs elsewhere."""
    expanded = []
    for requirement in requirements:
        path, (_, bracket, extras) = _local(requirement), requirement.partition("[")
        expanded.append(requirement if path is None else f"{path}{bracket}{extras}")
    return expanded


def _refreshed(wanted: Sequence[str]) -> Iterator[str]:
    """uv keeps what it built of a local package for as long as its pyproject.toml is as old: it is to look again."""
    for path in filter(None, map(_local, wanted)):
        file = path / "pyproject.toml"
        project = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
        yield f"--refresh-package={project['name']}" if "name" in project else "--refresh"


def _check_project(path: Path, where: str) -> None:
    if not (path / "pyproject.toml").is_file() and not (path / "setup.py").is_file():
        raise UserError(f"{where} is not a package: it has neither pyproject.toml nor setup.py")
    try:
        tomllib.loads((path / "pyproject.toml").read_text() if (path / "pyproject.toml").is_file() else "")
    except ValueError as error:
        raise UserError(f"{where} has a pyproject.toml that cannot be read: {error}") from error
