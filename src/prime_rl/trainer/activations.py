"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again.

From the fastest to the leanest, each level keeping less than the one before:

    none        as autograd (compiled: as the partitioner) pleases
    pointwise   attention and every matrix product are kept; norms, rotary embedding and activation function are computed again
    wide        the widest products too: those into the feed-forward layer
    attention   all but the attention kernel
    full        all of the block, attention too
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from prime_rl.config.trainer import Recompute

LEVELS: "tuple[Recompute, ...]" = ("none", "pointwise", "wide", "attention", "full")

_aten = torch.ops.aten
# Where the second factor stands among the arguments. Linear layers arrive as these, in eager mode as well as while compiling.
_PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 1,
    _aten.bmm.default: 1,
    _aten.addmm.default: 2,
    _aten.baddbmm.default: 2,
    _aten._grouped_mm.default: 1,
}


def checkpoint_layers(
    layers: Sequence[nn.Module], levels: "Sequence[Recompute]", kept: set[Any], wide: set[int]
) -> list[nn.Module]:
    """Each layer with its level.

    Args:
        kept: The operators of the attention backend.
        wide: Output widths of the products that `wide` computes again.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    ways = {level: _checkpoint(level, kept, wide) for level in set(levels)}
    return [
        layer if level == "none" else Checkpointed(layer, level, ways[level])
        for layer, level in zip(layers, levels, strict=True)
    ]


def wide_products(config: PretrainedConfig) -> set[int]:
    """Output widths of the products into the feed-forward layer, for one expert where there are several (gate and up in one or apart)."""
    text = config.get_text_config()
    widths = {text.intermediate_size, getattr(text, "moe_intermediate_size", None)} - {None}
    return {width for one in widths for width in (one, 2 * one)}


class Checkpointed(ActivationWrapper):
    """A block that keeps what `level` says; `checkpoint` is torch's function, told so."""

    def __init__(self, block: nn.Module, level: "Recompute", checkpoint: Callable[..., Any]) -> None:
        super().__init__(block)
        self.level, self.checkpoint = level, checkpoint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The compiler does not compare policies when it decides whether one layer's graph serves another: of two layers with different
        # policies both would get the first one's. It does compare a string that is read here.
        assert self.level != "none"
        return self.checkpoint(self._checkpoint_wrapped_module, *args, **kwargs)


def _checkpoint(level: "Recompute", kept: set[Any], wide: set[int]) -> Callable[..., Any]:
    """torch's checkpoint with the policy of `level`."""
    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if level == "full":
        return plain
    products, again = level != "attention", wide if level == "wide" else set()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in kept
        if products and operator in _PRODUCTS:
            keep = args[_PRODUCTS[operator]].shape[-1] not in again
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(plain, context_fn=partial(create_selective_checkpoint_contexts, policy))


def _is_news(record: logging.LogRecord) -> bool:
    """torch warns at every compilation that blocks with a policy must not work in place; ours do not."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
