"""Routers: how they are called, in float32 and with an engine's choice, and how evenly they use the experts.

Every call goes through `route`, where `Replay` replaces the result of the router's top-k by the replayed experts [T, K]
and their scores, of which the router computes the weights as ever. Letters: those of `moe.py`; M blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode

from prime_rl.errors import UserError
from prime_rl.trainer.report import Named

# Operators whose outputs activation checkpointing keeps: experts recomputed from logits that another kernel rounds
# differently would not match the rows that are kept.
KEPT = {torch.ops.aten.topk.default, torch.ops.aten.max.dim}


class SparseBlock(NamedTuple):
    """A block's experts, whose parameters are [E, …], its router, and the module that calls both."""

    module: nn.Module
    router: Any
    experts: Any


def set_up(router: Any, experts: Any) -> None:
    """Have a block's router called through `route`, with buffers in the place of parameters without gradients."""
    router.__class__ = _routed(type(router))  # type: ignore[arg-type]
    router.expert_count = len(next(experts.parameters()))
    # [T, K] experts that the engine chose, -1 where it chose none (None: no replay): set before each forward pass, and
    # read again by the backward pass of a checkpointed block.
    router.replayed = None
    experts.count_E = None  # set by `set_up_balance`
    for module in router.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:  # a correction bias, which other families keep in a buffer
                delattr(module, key)
                module.register_buffer(key, parameter.detach())


@cache  # a forward per router would mean a graph per layer
def _routed(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"forward": lambda router, *inputs: route(kind.forward, router, *inputs)})


def route(forward: Callable[..., Any], router: Any, hidden_TH: Tensor, *bias: Tensor) -> Any:
    """Call a router in float32: logits rounded to bfloat16 would tie, and it would choose otherwise than the engine."""
    # Compiled graphs change nothing in place, so nothing has to be cloned there. Dynamo enters a mode under
    # checkpointing only once `router_replay.set_up` has allowed that.
    if torch.compiler.is_compiling() and router.replayed is None:
        return forward(router, hidden_TH.float(), *bias)
    with Replay(router.expert_count, router.replayed):
        return forward(router, hidden_TH.float(), *bias)


class Replay(TorchFunctionMode):
    """Replaces a router's top-k by `replayed_TK`. Else clones its scores: checkpointing keeps what top-k returns, and
    routers may normalize it in place."""

    def __init__(self, experts: int, replayed_TK: Tensor | None) -> None:
        super().__init__()
        self.experts, self.replayed_TK = experts, replayed_TK
        self.limited: Any = None  # scores masked outside the chosen groups, and unmasked

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is Tensor.masked_fill:
            self.limited = out, args[0]
        if function not in (torch.topk, Tensor.topk):
            return out
        if self.replayed_TK is None or args[0].ndim != 2 or args[0].shape[1] != self.experts:  # of groups of experts
            return out[0].clone(), out[1]
        chosen_TK = torch.where(self.replayed_TK < 0, out[1], self.replayed_TK)
        scores_TE = self.limited[1] if self.limited and self.limited[0] is args[0] else args[0]
        return scores_TE.gather(-1, chosen_TK), chosen_TK


def shard_routers(routers: list[Any], mesh: DeviceMesh) -> list[FSDPModule]:
    """Make all routers one FSDP unit that computes in float32, before the layers become units; [] in a dense model.

    The caller of the model must gather it (`unshard`): its forward hooks are removed, to keep FSDP out of compiled
    blocks. It stays gathered until the end of backward, where FSDP reduces its gradients. One float32 all-gather and
    one reduction per micro-batch (50 MB for the 30B model) instead of one per layer.
    """
    if not routers:
        return []
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(routers, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    state = routers[0]._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return routers[:1]


def set_up_balance(lm: nn.Module, blocks: Sequence[SparseBlock], bias_update: float, device: torch.device) -> None:
    """Have blocks write tokens per expert into `count_E`. Raises UserError if there is to be a `bias_update`, and the
    model's routers have no correction biases."""
    if bias_update and not 0 < len(blocks) == len(correction_biases(blocks)):
        raise UserError(f"model.moe_bias_update: {type(lm).__name__} has no routers with a correction bias")
    for _, router, experts in blocks:
        experts.count_E = torch.zeros(router.expert_count, device=device)


def multi_hot(chosen_TK: Tensor, experts: int, tokens: Tensor) -> Tensor:
    """Return which experts a token goes to, [T, E] bool; none after `tokens` [] tokens: padding."""
    is_real_TK = (torch.arange(len(chosen_TK), device=chosen_TK.device) < tokens)[:, None].expand_as(chosen_TK)
    return is_real_TK.new_zeros(len(chosen_TK), experts).scatter(1, chosen_TK, is_real_TK)


def step_metrics(blocks: Sequence[SparseBlock], names: Named, sums: list[float]) -> Mapping[str, float]:
    """Return the metrics of a step's sums: of all blocks' `count_E`, equal in size, then those of `names`."""
    if not blocks:
        return names(sums)
    count = len(blocks) * len(blocks[0].experts.count_E)
    load_ME = torch.tensor(sums[:count]).view(len(blocks), -1)
    peak_M, unused = load_ME.amax(1) / load_ME.mean(1), (load_ME == 0).float().mean()
    own = {"load_max/mean": peak_M.mean(), "load_max/max": peak_M.max(), "unused_experts": unused}
    return {**names(sums[count:]), **{f"moe/{name}": value.item() for name, value in own.items()}}


def correction_biases(blocks: Sequence[SparseBlock]) -> list[Tensor]:
    """Return the buffers [E] that routers add to scores only to choose."""
    buffers = [(block.router.expert_count, *each) for block in blocks for each in block.module.named_buffers()]
    return [each for count, name, each in buffers if name.endswith("bias") and each.numel() == count]


@torch.no_grad()
def update_biases(blocks: Sequence[SparseBlock], sums: Tensor, rate: float) -> None:
    """Raise correction biases of experts below the mean load by `rate`, lower those above (arXiv:2412.19437)."""
    for number, bias in enumerate(correction_biases(blocks) if rate else ()):
        load_E = sums.narrow(0, number * bias.numel(), bias.numel())
        bias.add_((load_E.mean() - load_E).sign().view_as(bias), alpha=rate)
