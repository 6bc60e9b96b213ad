"""Tests of this folder need an NVIDIA GPU. Without one they are not even imported, which takes seconds."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prime_rl.trainer.parallel import World, close_world, init_world

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)


@pytest.fixture
def world() -> Iterator[World]:
    """Of this process alone."""
    yield init_world("cuda", 60)
    close_world()


@pytest.fixture
def vllm_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is not installed, let vLLM find its routes; and compile no kernel at the start."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from package import plugin_path

    path = [*plugin_path(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sys.path_importer_cache.clear()
