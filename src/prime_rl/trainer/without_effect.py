"""Options that were given and change nothing here, as far as only a process at work can know. The config refuses the others."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loguru import logger
from torch import nn

from prime_rl.trainer import optim_int8
from prime_rl.trainer.parallel import World

if TYPE_CHECKING:
    from prime_rl.config.trainer import TrainingConfig


def say_without_effect(config: "TrainingConfig", policy: nn.Module, world: World) -> None:
    """Warn of every such option, one line each, on rank 0."""
    if world.is_main:
        for line in without_effect(config, policy, world.device.type):
            logger.warning(line)


def without_effect(config: "TrainingConfig", policy: nn.Module, device: str) -> Iterator[str]:
    """A line about each option without effect on `device` (`cpu` or `cuda`), or for this model."""
    model, optim = config.model, config.optim
    if device == "cpu" and model.memory_limit is not None:
        yield f"model.memory_limit {model.memory_limit:g} has no effect: memory is planned on GPUs only, and this is a CPU"
    if device == "cpu" and model.checkpointed_layers is not None and model.activation_checkpointing == "auto":
        yield (
            f"model.checkpointed_layers {model.checkpointed_layers} has no effect: on a CPU model.activation_checkpointing 'auto' "
            "checkpoints no layer, give a level"
        )
    if optim.type == "adamw" and optim.state == "int8" and not any(map(optim_int8.quantizable, policy.parameters())):
        yield (
            f"optim.state int8 has no effect: no matrix of this model has rows of a multiple of {optim_int8.BLOCK} numbers, all states "
            "stay float32"
        )
