"""Tests of this folder need an NVIDIA GPU. Without one they are not even imported, which takes seconds."""

from collections.abc import Iterator

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
