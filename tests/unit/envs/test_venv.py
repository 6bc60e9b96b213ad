"""Python environments of an environment's own: made once, found again; uv's reasons are told."""

import stat
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config.shared import EnvConfig
from prime_rl.envs import venv
from prime_rl.errors import UserError

FAKE_UV = """#!/bin/sh
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


def test_kinds_need_their_own(calls: Path) -> None:
    """Of verifiers what the package allows, of what its adapter runs; plain ones none; all get the wire and the same renderers."""
    places = {adapter: prepared("x", adapter=adapter) for adapter in ("auto", "verifiers", "classic", "python")}
    asked = [line for line in calls.read_text().splitlines() if line.startswith("pip")]
    assert len(set(places.values())) == len(asked) == 4
    wanted = ["verifiers>=0.1.11,<=0.4.0 ", "verifiers==0.4.0 ", "verifiers>=0.1.11,<=0.3.1 "]
    assert [[want in line for want in wanted].count(True) for line in asked] == [1, 1, 1, 0]
    assert [want in line for want, line in zip(wanted, asked, strict=False)] == [True] * 3
    assert all("pyzmq==" in line and "msgpack==" in line and "renderers==" in line for line in asked)


def test_local_package(calls: Path, package: Path) -> None:
    """It is installed as it is, so that edits count at once; other dependencies make another environment."""
    first = prepared("./my_env[extra]")
    assert f" --editable {package}[extra]" in calls.read_text()
    (package / "my_env.py").write_text("tasks = [1]\n")
    assert prepared("./my_env[extra]") == first
    with (package / "pyproject.toml").open("a") as file:
        file.write('dependencies = ["numpy"]\n')
    assert prepared("./my_env[extra]") != first


def test_builds_see_no_secrets(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built runs code of its own: it gets the keys that the environment was promised, and uv those of its indexes."""
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "UV_INDEX_OURS_PASSWORD", "USEFUL"):
        monkeypatch.setenv(name, "s3cret")
    prepared("x", secrets=["HF_TOKEN"])
    seen = calls.with_suffix(".env").read_text()
    assert [name for name in ("OPENAI_API_KEY", "HF_TOKEN", "UV_INDEX_OURS_PASSWORD", "USEFUL") if f"{name}=" in seen] == [
        "HF_TOKEN", "UV_INDEX_OURS_PASSWORD", "USEFUL",
    ]  # fmt: skip


def test_uv_tells_why(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason in a few lines, with the environment's name; nothing is left behind, and the next try tries again."""
    told = "Using Python 3.11 environment at: x\n  × No solution found when resolving dependencies:\n  ╰─▶ Because nope was not found"
    monkeypatch.setenv("UV_FAILS", told)
    with pytest.raises(UserError) as caught:
        prepared("nope", name="mine")
    assert "environment mine: its requirements ['nope'] cannot be installed\n" in str(caught.value)
    assert "× No solution found" in str(caught.value)
    assert "Using Python" not in str(caught.value)
    assert "verifiers" not in str(caught.value)
    assert not list(venv._cache().iterdir())
    monkeypatch.setenv("UV_FAILS", "  ╰─▶ Because my-env depends on verifiers<0.1.10")
    with pytest.raises(UserError, match=r"run with verifiers 0\.1\.11 to 0\.3\.1, those of verifiers.v1 with 0\.4\.0"):
        prepared("nope", name="mine")
    monkeypatch.setenv("UV_FAILS", "")
    assert Path(prepared("nope")).exists()


def test_two_runs_at_once(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is second finds it there, and uses it."""
    real, others = venv._uv, []

    def slower(env: EnvConfig, directory: Path, *arguments: object) -> None:
        real(env, directory, *arguments)
        if arguments[0] == "pip" and not others:
            others.append("")
            others[0] = prepared("x")  # the other run, which is done before us

    monkeypatch.setattr(venv, "_uv", slower)
    assert prepared("x") == others[0]
    assert Path(others[0]).exists()
    assert [path.name for path in venv._cache().iterdir()] == [Path(others[0]).parents[1].name]


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("./not_there", "./not_there does not exist"),
        ("--index-url=x", "'--index-url=x' is not a package"),
        ("./empty", "neither pyproject.toml nor setup.py"),
    ],
)
def test_bad_requirements(
    requirement: str, message: str, calls: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before uv is asked, and so in a dry run too; also that there is no uv."""
    (package.parent / "empty").mkdir()
    with pytest.raises(UserError, match=r"environment my-env: requirements") as caught:
        venv.check(EnvConfig(id="my-env", requirements=[requirement]))
    assert message in str(caught.value)
    assert not calls.read_text()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="pip install uv"):
        venv.check(EnvConfig(id="a", requirements=["x"]))
