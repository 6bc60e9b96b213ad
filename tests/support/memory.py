"""For tests of memory: shapes of real models, and settings chosen for them. Take the fixture into a test module with `shapes = memory.shapes`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from prime_rl.config.trainer import Recompute, TrainerModel
from prime_rl.trainer.activations import LEVELS
from prime_rl.trainer.memory import GIB, Job, Settings, Shape, choose, estimate
from prime_rl.trainer.source import find_model


def qwen3(name: str) -> Shape:
    config = find_model(f"Qwen/Qwen3-{name}", random_weights=True).config
    return shape_of(config)


def shape_of(config: PretrainedConfig) -> Shape:
    with torch.device("meta"):
        return Shape.of(AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="session")
def shapes() -> dict[str, Shape]:
    return {name: qwen3(name) for name in ("0.6B", "4B", "8B")}


def everywhere(shape: Shape, level: Recompute, chunk: int = 4096) -> Settings:
    """One level in all layers, nothing offloaded."""
    return Settings((level,) * shape.layers, chunk, reshard=False, offloaded=0.0)


def chosen(shape: Shape, gib: float, tokens: int = 16384, host: float = 100 * GIB, **config: Any) -> Settings:
    return choose(TrainerModel(**config), shape, Job(tokens), gib * GIB, host)


def fits(shape: Shape, job: Job, settings: Settings, gib: float) -> bool:
    return 1.03 * estimate(shape, job, settings).total <= gib * GIB


def check_fit(shape: Shape, job: Job, settings: Settings, gib: float) -> None:
    """They fit, the first layers have the leaner level, and with one layer less of it they would not fit."""
    assert fits(shape, job, settings, gib)
    order = [LEVELS.index(level) for level in settings.levels]
    assert order == sorted(order, reverse=True)
    if order[0]:
        last = order.count(order[0]) - 1
        richer = (*settings.levels[:last], LEVELS[order[0] - 1], *settings.levels[last + 1 :])
        assert not fits(shape, job, replace(settings, levels=richer), gib)
