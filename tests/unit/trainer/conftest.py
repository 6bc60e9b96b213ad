"""The fixtures of `support.trainer`, and a model of each kind."""

from pathlib import Path

import pytest

from support.trainer import make_policy, moe_model, quick_compiler, run_training, tied_model, untied_model, world  # noqa: F401


@pytest.fixture(params=["tied_model", "untied_model"])
def dense_model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["tied_model", "untied_model", "moe_model"])
def each_model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)
