"""Router replay: tokens go to the experts that the sampling engine chose, weighted by the trainer's own router.

Where scores nearly tie, rounding decides, and trainer and engine would differ. Path: `Sample.routed_experts`,
`chosen_experts`, `lay_out`, `router.replayed`, `routing.Replay`. Letters: M layers with experts, T tokens, K of each.
"""

from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from prime_rl.errors import UserError, one_line
from prime_rl.trainer.moe import moe_blocks

Chosen = npt.NDArray[np.int16]  # [M, T, K] experts; -1 where the engine chose none and the trainer's router does


class Routers(NamedTuple):
    """A model's routers: all of one size."""

    layers: int  # with experts or without
    sparse: tuple[int, ...]  # indices of the M with some
    k: int
    experts: int


def set_up(layers: nn.ModuleList, name: str) -> Routers:
    """Return the routers of a model's layers, and let compiled blocks replace their choice. Raises UserError if there
    are none, their sizes differ, or a choice cannot be replaced."""
    blocks = {number: block for number, layer in enumerate(layers) for block in moe_blocks(layer)}
    sizes = {(_probe_top_k(block.router, name), block.router.expert_count) for block in blocks.values()}
    if len(sizes) != 1:
        raise UserError(f"router_replay: {name} has {'routers of several sizes' if sizes else 'no experts to choose'}")
    # Dynamo may skip side effects in recomputation: those of entering and leaving `routing.Replay` cancel out.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return Routers(len(layers), tuple(blocks), *sizes.pop())


@torch.no_grad()
def _probe_top_k(router: Any, name: str) -> int:
    """Return how many experts a router chooses for a token, by trying it with random weights on the CPU. Raises
    UserError if it does not return the experts to replay."""
    draw, refused = torch.Generator().manual_seed(0), f"router_replay: {type(router).__name__} in {name}"
    tensors = (*router.named_parameters(), *router.named_buffers())
    values = {key: torch.rand(tensor.shape, generator=draw) for key, tensor in tensors}
    width = next(parameter.shape[1] for parameter in router.parameters() if parameter.ndim == 2)
    inputs, loss_scale = [torch.rand(8, width, generator=draw)], router.loss_scale
    router.loss_scale = None  # an auxiliary loss would need the tokens' number on the CPU

    def choose() -> list[torch.Tensor]:
        return [answer for answer in functional_call(router, values, tuple(inputs)) if answer.ndim == 2]

    try:
        own: Any = next(kind for kind in type(router).__mro__ if not kind.__module__.startswith("prime_rl"))
        inputs += [torch.zeros(router.expert_count)] * (len(signature(own.forward).parameters) - 2)  # a block's bias
        try:
            choose()
        except ValueError:  # AFMoE's takes [1, T, H]
            inputs[0] = inputs[0][None]
        for chosen_TK in [answer for answer in choose() if answer.dtype == torch.int64][:1]:
            router.replayed = (chosen_TK + router.expert_count // 2) % router.expert_count  # also other groups
            answers = [answer for answer in choose() if answer.shape == chosen_TK.shape]
            # A weight of 0: the expert's group was masked, as can happen.
            weighted = all(answer.all() for answer in answers if answer.is_floating_point())
            if weighted and any(torch.equal(answer, router.replayed) for answer in answers):
                return chosen_TK.shape[1]
    except Exception as error:  # code of any model
        raise UserError(f"{refused} cannot be tried: {one_line(error)}") from error
    finally:
        router.replayed, router.loss_scale = None, loss_scale
    raise UserError(f"{refused} does not return the experts chosen for it, weighted")


def chosen_experts(rows: npt.NDArray[np.unsignedinteger], routers: Routers, sample: str) -> Chosen:
    """Return what the engine chose for a sample's first N tokens, [M, N, K], from rows [N, layers · K]. Raises
    UserError if this model cannot have chosen so."""
    hint = "is it the model that sampled it?"
    if rows.shape[1] != routers.layers * routers.k:
        raise UserError(
            f"sample {sample} has {rows.shape[1]} experts a token, the trainer's model {routers.layers} layers with "
            f"{routers.k} each: {hint}"
        )
    chosen_MNK = rows.reshape(-1, routers.layers, routers.k)[:, routers.sparse].swapaxes(0, 1).astype(np.int16)
    if (largest := chosen_MNK.max(initial=0)) >= routers.experts:
        raise UserError(f"sample {sample} has expert {largest}, the trainer's model has {routers.experts}: {hint}")
    # Usually zeros, left by an engine that did not record its router's choice.
    if routers.k > 1 and (chosen_MNK[..., 0] == chosen_MNK[..., 1]).any():
        raise UserError(f"sample {sample} has a token with the same expert twice: the engine did not say what it chose")
    return chosen_MNK


def lay_out(parts: "list[Chosen | None]", lengths: "npt.NDArray[np.int64]", routers: Routers) -> Chosen:
    """Concatenate packed documents' choices, [M, T, K]; -1 where a document of `lengths` has none."""
    chosen_MTK = np.full((len(routers.sparse), int(lengths.sum()), routers.k), -1, dtype=np.int16)
    for start, part_MNK in zip(np.cumsum(lengths) - lengths, parts, strict=True):
        if part_MNK is not None:
            chosen_MTK[:, start : start + part_MNK.shape[1]] = part_MNK
    return chosen_MTK
