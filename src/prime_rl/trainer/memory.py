"""What a step keeps in memory, and which settings are the fastest that fit."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.trainer.parallel import World

if TYPE_CHECKING:
    from prime_rl.config.trainer import Recompute, TrainerModel


@dataclass(frozen=True)
class MemoryPlan:
    """Settings without any `auto` left.

    Args:
        levels: What each layer computes again in backward.
        head_chunk: Tokens whose logits exist at the same time.
        reshard: Whether gathered parameters are freed between forward and backward.
        offload: Whether what blocks keep is parked in host memory.
    """

    levels: "list[Recompute]"
    head_chunk: int
    reshard: bool
    offload: bool


def plan_memory(config: "TrainerModel", layers: int, world: World) -> MemoryPlan:
    """Settle what `config` leaves open."""
    level: Recompute = "none" if config.activation_checkpointing == "auto" else config.activation_checkpointing
    count = layers if config.checkpointed_layers is None else min(config.checkpointed_layers, layers)
    return MemoryPlan(
        levels=[level] * count + ["none"] * (layers - count),
        head_chunk=config.head_chunk or 4096,
        reshard=world.size > 1 if config.reshard_after_forward is None else config.reshard_after_forward,
        offload=config.activation_offload,
    )
