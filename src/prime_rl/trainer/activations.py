"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def checkpointed(layer: nn.Module, level: str, kept: set[Any]) -> nn.Module:
    """`none` | `full` (recompute the block) | `attention` (recompute all of it but the attention kernel)."""
    if level == "none":
        return layer
    if level == "full":
        return checkpoint_wrapper(layer, preserve_rng_state=False)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=contexts)
