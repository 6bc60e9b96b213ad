"""Bad input is found before anything is started, and named."""

import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config.shared import EnvConfig
from prime_rl.errors import UserError
from prime_rl.inference.checks import check_model
from prime_rl.launcher.preflight import check_dataset, check_environment

TINY = Path(__file__).parents[3] / "assets" / "tiny-reverse"
EMPTY_SAFETENSORS = b"\x02\0\0\0\0\0\0\0{}"


def test_models(tmp_path: Path) -> None:
    """Missing or broken local directories are refused; hub names pass."""
    check_model("Qwen/Qwen3-0.6B")
    with pytest.raises(UserError, match="is not a directory"):
        check_model(str(tmp_path / "none"))
    for text, message in (
        (None, r"config\.json is missing"),
        ("{", r"config\.json cannot be read"),
        ("{}", "no model_type"),
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            check_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match="holds no safetensors files"):
        check_model(str(tmp_path))
    check_model(str(tmp_path), weights=False)
    (tmp_path / "model.safetensors").write_bytes(EMPTY_SAFETENSORS)
    check_model(str(tmp_path))


def test_datasets(tmp_path: Path) -> None:
    """A local path that does not exist is named; hub names pass."""
    check_dataset("owner/dataset")
    check_dataset(str(tmp_path))
    for missing in (str(tmp_path / "none"), "none.jsonl", "./none"):
        with pytest.raises(UserError, match="does not exist"):
            check_dataset(missing)


def test_an_environment_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: workers find it there, and so does the check before; a typo gets the bundled one that is near."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    (tmp_path / "guess_here.py").write_text("def tasks(): return []\nasync def rollout(task, chat): return 0.0\n")
    check_environment(EnvConfig(id="guess-here"))
    with pytest.raises(UserError, match="did you mean reverse-text"):
        check_environment(EnvConfig(id="reverse-txt"))


def test_environments() -> None:
    """An environment that is not installed is named, with the command that installs it."""
    check_environment(EnvConfig(id="reverse-text"))
    check_environment(EnvConfig(id="owner/reverse-text"))
    refused: dict[str, dict[str, Any]] = {
        r"no-such-env is not installed .*prime env install no-such-env": {"id": "no-such-env"},
        "no Python interpreter": {"id": "elsewhere", "python": "/nonexistent/python"},
        r"asks for version 9\.9, and no package of its name is installed": {"id": "owner/reverse-text@9.9"},
        r"written for the classic verifiers API.*`python`": {"id": "reverse-text", "adapter": "classic"},
    }
    for message, given in refused.items():
        with pytest.raises(UserError, match=message):
            check_environment(EnvConfig(**given))
