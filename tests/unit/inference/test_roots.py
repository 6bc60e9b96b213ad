"""Where a server loads weights from unless it is told."""

import os
from pathlib import Path

import pytest

from prime_rl.config import InferenceConfig
from prime_rl.inference import compat
from prime_rl.inference.server import plugin_context, prepare_environment


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({}, None, None),  # on loopback
        (
            {},
            "secret",
            None,
        ),  # who has the key may name any committed version, of runs that the server knows nothing of
        ({"weights_root": "elsewhere"}, "secret", "elsewhere"),
        ({"weights_root": "elsewhere"}, None, "elsewhere"),
        ({"weights_root": "elsewhere", "output_dir": "other"}, "secret", "elsewhere"),
    ],
)
def test_only_weights_root_confines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], key: str | None, expected: str | None
) -> None:
    """Contract: a key alone restricts no directory: the server of a run on another host was started without the run's --output-dir."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # what is set for vLLM ends with the test
    monkeypatch.chdir(tmp_path)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    config = InferenceConfig.model_validate({"model": {"name": "m"}, "output_dir": "run", **given})
    prepare_environment(config, compat.Engine((0, 31), "0.31.0", "cpu"))
    assert plugin_context().config.weights_root == (None if expected is None else tmp_path / expected)
