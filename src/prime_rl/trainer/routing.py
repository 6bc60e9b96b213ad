"""Routers: how they are called, in float32 and with an engine's choice, and how evenly they use the experts.

Every call goes through `route`, where `Replay` replaces the result of the router's top-k by the replayed experts [T, K]
and their scores, of which the router computes the weights as ever. Letters: those of `moe.py`; M blocks, F = E + 1.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode

from prime_rl.config.trainer import TrainerModel
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
    experts.count_F = router.loss_scale = None  # set by `set_up_balance`
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
        return add_loss(router, forward(router, hidden_TH.float(), *bias))
    with Replay(router.expert_count, router.replayed):
        return add_loss(router, forward(router, hidden_TH.float(), *bias))


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


def set_up_balance(lm: nn.Module, blocks: Sequence[SparseBlock], config: TrainerModel, device: torch.device) -> None:
    """Have blocks write tokens per expert and, last, the auxiliary loss (0: off) into `count_F` [E + 1]. Raises
    UserError if the model has no routers that can be balanced as `config` asks."""
    has_loss = "load_balancing_loss_func" in vars(sys.modules[type(lm).__module__])
    if config.moe_aux_loss and not (blocks and has_loss and type(blocks[0].router).__base__ is not nn.Linear):
        raise UserError(f"model.moe_aux_loss: {type(lm).__name__} has no routers with transformers' auxiliary loss")
    if config.moe_bias_update and not 0 < len(blocks) == len(correction_biases(blocks)):
        raise UserError(f"model.moe_bias_update: {type(lm).__name__} has no routers with a correction bias")
    for _, router, experts in blocks:
        router.count_F = experts.count_F = torch.zeros(router.expert_count + 1, device=device)
        router.loss_scale = torch.zeros((), device=device) if config.moe_aux_loss else None


def multi_hot(chosen_TK: Tensor, experts: int, tokens: Tensor) -> Tensor:
    """Return which experts a token goes to, [T, E] bool; none after `tokens` [] tokens: padding."""
    is_real_TK = (torch.arange(len(chosen_TK), device=chosen_TK.device) < tokens)[:, None].expand_as(chosen_TK)
    return is_real_TK.new_zeros(len(chosen_TK), experts).scatter(1, chosen_TK, is_real_TK)


def add_loss(router: Any, out: Any) -> Any:
    """Return `out`; its weights' backward adds the auxiliary loss  loss_scale · T · E · Σ_e load_e / T · P_e.

    P is the mean of softmax(logits) over a micro-batch's T tokens; loads have no gradient. Equal loads give K times
    loss_scale · T, as transformers' `load_balancing_loss_func` for a layer: K × Switch Transformer (arXiv:2101.03961).
    """
    if router.loss_scale is None:
        return out
    logits_TE, chosen_TK = (out[0], out[2]) if out[0].is_floating_point() else (out[2], out[0])
    choices_TE = multi_hot(chosen_TK, router.expert_count, router.tokens)
    sum_E = torch.where(choices_TE.any(1, keepdim=True), logits_TE.float().softmax(-1), 0.0).sum(0)
    share_E = choices_TE.sum(0) / router.tokens.clamp(min=1)
    loss = router.loss_scale * router.expert_count * (share_E * sum_E).sum()
    router.count_F[-1] = loss.detach()
    return out[0], with_loss(out[1], loss), *out[2:]


# Returns the weights; backward also gives the loss gradient 1.
with_loss: Any = torch.library.custom_op(
    "prime_rl::with_loss", lambda weight, _: weight.clone(), mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
with_loss.register_fake(lambda weight, _: torch.empty_like(weight))
with_loss.register_autograd(lambda ctx, grad_TK: (grad_TK, grad_TK.new_ones(())))


def step_metrics(blocks: Sequence[SparseBlock], names: Named, sums: list[float]) -> Mapping[str, float]:
    """Return the metrics of a step's sums: of all blocks' `count_F`, equal in size, then those of `names`."""
    if not blocks:
        return names(sums)
    count = len(blocks) * len(blocks[0].experts.count_F)
    count_MF = torch.tensor(sums[:count]).view(len(blocks), -1)
    load_ME, loss = count_MF[:, :-1], count_MF[:, -1].sum()
    peak_M, unused = load_ME.amax(1) / load_ME.mean(1), (load_ME == 0).float().mean()
    own = {"load_max/mean": peak_M.mean(), "load_max/max": peak_M.max(), "unused_experts": unused, "aux_loss": loss}
    return {**names(sums[count:]), **{f"moe/{name}": value.item() for name, value in own.items()}}


def correction_biases(blocks: Sequence[SparseBlock]) -> list[Tensor]:
    """Return the buffers [E] that routers add to scores only to choose."""
    buffers = [(block.router.expert_count, *each) for block in blocks for each in block.module.named_buffers()]
    return [each for count, name, each in buffers if name.endswith("bias") and each.numel() == count]


@torch.no_grad()
def update_biases(blocks: Sequence[SparseBlock], sums: Tensor, rate: float) -> None:
    """Raise correction biases of experts below the mean load by `rate`, lower those above (arXiv:2412.19437)."""
    for number, bias in enumerate(correction_biases(blocks) if rate else ()):
        load_E = sums.narrow(0, number * (bias.numel() + 1), bias.numel())
        bias.add_((load_E.mean() - load_E).sign().view_as(bias), alpha=rate)
