"""Where a server loads weights from unless it is told."""

import os
from pathlib import Path

import pytest

from prime_rl.config import InferenceConfig
from prime_rl.inference import compat
from prime_rl.inference.server import prepare_environment
from prime_rl.inference.settings import exported_settings


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({}, None, None),  # on loopback: any local directory
        ({}, "secret", "run/weights"),
        ({"weights_root": "elsewhere"}, "secret", "elsewhere"),
        ({"weights_root": "elsewhere"}, None, "elsewhere"),
        ({"server": {"host": "127.0.0.1"}}, "secret", None),
    ],
)
def test_who_is_reached_by_others_loads_the_runs_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], key: str | None, expected: str | None
) -> None:
    """Contract: a server with a key listens everywhere; without a word its weights are those of its output directory, and nothing else of the host."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is set for vLLM ends with the test
    monkeypatch.chdir(tmp_path)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    config = InferenceConfig.model_validate({"model": {"name": "m"}, "output_dir": "run", **given})
    prepare_environment(config, compat.Engine((0, 31), "0.31.0", "cpu"))
    assert exported_settings().weights_root == (None if expected is None else tmp_path / expected)
