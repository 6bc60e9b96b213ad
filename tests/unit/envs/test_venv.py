"""Python environments of an environment's own: made once, found again; uv's reasons are shown."""

import stat
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import venv
from prime_rl.errors import UserError

FAKE_UV = """#!/bin/sh
shift
echo "$@" >> "$UV_CALLS"
env > "$UV_CALLS.env"
if [ -n "$UV_FAILS" ] && [ "$1" = pip ]; then printf '%s\\n' "$UV_FAILS" >&2; exit 1; fi
if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; ln -s /bin/true "$last/bin/python"; fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uv that makes an empty environment, and the file in which it notes what it was asked."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(FAKE_UV)
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=":")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("UV_FAILS", "")
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local package, below the working directory."""
    directory = tmp_path / "my_env"
    directory.mkdir()
    (directory / "pyproject.toml").write_text('[project]\nname = "my-env"\nversion = "0.1"\n')
    (directory / "my_env.py").write_text("tasks = []\n")
    monkeypatch.chdir(tmp_path)
    return directory


def prepared(*requirements: str, **settings: Any) -> str:
    (env,) = venv.prepare([EnvConfig(id="my-env", requirements=list(requirements), **settings)])
    assert env.python is not None
    return env.python


def test_made_once(calls: Path) -> None:
    """The second time, and for another environment with the same requirements, uv is not asked: it works offline; nor is it without requirements.
    One whose interpreter was removed is made again."""
    env = EnvConfig(id="a", python="/usr/bin/python3")
    assert venv.prepare([env]) == [env]
    assert not calls.read_text()
    first = prepared("wordle==0.3", "numpy")
    made = calls.read_text()
    assert Path(first).exists()
    assert prepared("numpy", "wordle==0.3", name="another") == first
    assert calls.read_text() == made
    assert not list(Path(first).parents[2].glob(".making-*"))
    Path(first).unlink()
    Path(first).symlink_to("/nonexistent/python")
    assert Path(prepared("wordle==0.3", "numpy")).exists()


def test_kinds_need_their_own(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of verifiers what the package allows, of what its adapter runs; plain ones none; all get the wire and the same renderers. What is built runs
    code of its own: it gets the keys that the environment was promised, and uv those of its indexes."""
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "UV_INDEX_OURS_PASSWORD", "USEFUL"):
        monkeypatch.setenv(name, "s3cret")
    wanted = {"auto": ">=0.3.1,<=0.4.0 ", "verifiers": "==0.4.0 ", "classic": "==0.3.1 "}
    places = {prepared("x", adapter=adapter, secrets=["HF_TOKEN"]) for adapter in (*wanted, "python")}
    asked = [line for line in calls.read_text().splitlines() if line.startswith("pip")]
    assert len(places) == len(asked) == 4
    assert all(f" verifiers{versions}" in line for versions, line in zip(wanted.values(), asked, strict=False))
    assert "verifiers" not in asked[-1]
    assert all("pyzmq==" in line and "msgpack==" in line and "renderers==" in line for line in asked)
    seen = calls.with_suffix(".env").read_text()
    passed = [name for name in ("OPENAI_API_KEY", "HF_TOKEN", "UV_INDEX_OURS_PASSWORD", "USEFUL") if f"{name}=" in seen]
    assert passed == ["HF_TOKEN", "UV_INDEX_OURS_PASSWORD", "USEFUL"]


def test_local_package(calls: Path, package: Path) -> None:
    """It is installed as it is, so that edits count at once; other dependencies make another environment."""
    first = prepared("./my_env[extra]")
    assert f" --editable {package}[extra]" in calls.read_text()
    (package / "my_env.py").write_text("tasks = [1]\n")
    assert prepared("./my_env[extra]") == first
    with (package / "pyproject.toml").open("a") as file:
        file.write('dependencies = ["numpy"]\n')
    assert prepared("./my_env[extra]") != first


def test_uv_says_why(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason, with the environment's name; nothing is left behind, and the next try tries again."""
    monkeypatch.setenv("UV_FAILS", "  ╰─▶ Because nope was not found")
    with pytest.raises(UserError) as caught:
        prepared("nope", name="mine")
    assert "environment mine: its requirements ['nope'] cannot be installed\n╰─▶ Because nope" in str(caught.value)
    assert "verifiers" not in str(caught.value)
    assert not list((tmp_path / "cache" / "prime-rl" / "environments").iterdir())
    monkeypatch.setenv("UV_FAILS", "  ╰─▶ Because my-env depends on verifiers<0.1.10")
    with pytest.raises(UserError, match=r"run with verifiers 0\.3\.1, those of verifiers.v1 with 0\.4\.0"):
        prepared("nope", name="mine")
    monkeypatch.setenv("UV_FAILS", "")
    assert Path(prepared("nope")).exists()


def test_without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named before anything is made, and so in a dry run too."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="pip install uv"):
        venv.check(EnvConfig(id="a", requirements=["x"]))
