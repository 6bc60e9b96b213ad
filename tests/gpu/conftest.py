"""Tests of this folder need an NVIDIA GPU, and are skipped without one."""

from collections.abc import Iterator

import pytest
import torch

from prime_rl.trainer.parallel import World, close_world, init_world


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip("no GPU"))


@pytest.fixture
def world() -> Iterator[World]:
    """Of this process alone."""
    yield init_world("cuda", 60)
    close_world()
