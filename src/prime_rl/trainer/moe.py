"""Mixture-of-experts blocks that use transformers' experts interface: float32 routing, grouped matrix products.

Blocks and routers stay transformers' own modules. The experts' forward is `mix`, registered as `NAME`; every call of a
router goes through `route`. For router replay, `Replay` replaces the result of the router's top-k there: the replayed
experts [T, K] and their scores, from which the router computes the weights as ever. Letters: T tokens, K experts per
token, S = T·K, E experts, F = E + 1, I width of an expert's hidden layer, J of its first product (2·I with a gate),
H hidden size, M blocks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.lm_head import use_triton
from prime_rl.trainer.report import Named

NAME = "prime_rl_grouped"
# Operators whose outputs activation checkpointing keeps: experts recomputed from logits that another kernel rounds
# differently would not match the rows that are kept.
KEPT = {torch.ops.aten.topk.default, torch.ops.aten.max.dim}


class SparseBlock(NamedTuple):
    """A block's experts, whose parameters are [E, …], its router, and the module that calls both."""

    module: nn.Module
    router: Any
    experts: Any


def set_up(lm: PreTrainedModel, name: str) -> None:
    """Have the model's experts computed by `mix` and its routers called through `route`. Does nothing in a dense model.

    Raises UserError if the model has experts that do not go through transformers' interface.
    """
    blocks = moe_blocks(lm)
    known = {block.experts for block in blocks}
    for path, module in lm.named_modules():
        if path.endswith(".experts") and module not in known:
            raise UserError(
                f"model {name} cannot be trained: {type(module).__name__} is not part of transformers' experts "
                "interface"
            )
    if any("is_transposed" in vars(experts) for experts in known):
        lm.set_experts_implementation(NAME)
    for block, router, experts in blocks:
        block.eval()  # no jitter, no sampling of experts
        if runs_all(experts):  # they are passed tokens times the router's weights
            logger.warning("{}: all experts compute every token, which is slow", type(experts).__name__)
            router.register_forward_hook(lambda _, inputs, out: tuple(each.to(inputs[0].dtype) for each in out))
        router.__class__ = _routed(type(router))  # type: ignore[arg-type]
        router.expert_count = len(next(experts.parameters()))
        # [T, K] experts that the engine chose, -1 where it chose none: set before each forward pass that replays them,
        # and read again by the backward pass of a checkpointed block.
        router.replayed = None
        experts.count_F = router.loss_scale = None  # set by `set_up_balance`
        for module in router.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:  # a correction bias, which other families keep in a buffer
                    delattr(module, key)
                    module.register_buffer(key, parameter.detach())


def moe_blocks(model: nn.Module) -> list[SparseBlock]:
    """Return the MoE blocks, first to last: experts of the interface (`is_transposed`) or dense ones."""
    parts = [(module, dict(module.named_children())) for module in model.modules()]
    blocks = [
        SparseBlock(each, of.get("gate", of.get("router")), of["experts"]) for each, of in parts if "experts" in of
    ]
    known = (each for each in blocks if "is_transposed" in vars(each.experts) or runs_all(each.experts))
    return [each for each in known if each.router is not None]


def runs_all(experts: nn.Module) -> bool:
    """Return whether every expert computes every token, scaled by its weight or 0 (Llama 4)."""
    return [*signature(experts.forward).parameters] == ["hidden_states"]


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the routers' parameters: float32 in any compute dtype."""
    return [parameter for block in moe_blocks(model) for parameter in block.router.parameters()]


def shard_routers(lm: PreTrainedModel, mesh: DeviceMesh) -> list[FSDPModule]:
    """Make all routers one FSDP unit that computes in float32, before the layers become units; [] in a dense model.

    The caller of the model must gather it (`unshard`): its forward hooks are removed, to keep FSDP out of compiled
    blocks. It stays gathered until the end of backward, where FSDP reduces its gradients. One float32 all-gather and
    one reduction per micro-batch (50 MB for the 30B model) instead of one per layer.
    """
    routers = [block.router for block in moe_blocks(lm)]
    if not routers:
        return []
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(routers, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    state = routers[0]._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return routers[:1]


def experts_per_token(lm: PreTrainedModel) -> int:
    """Return K from the config, whatever its name there; 1 without experts, E where all compute every token."""
    text, blocks = lm.config.get_text_config(), moe_blocks(lm)
    if blocks and runs_all(blocks[0].experts):
        return int(blocks[0].experts.num_experts)
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1


class Replay(TorchFunctionMode):
    """Replaces a router's top-k by `replayed_TK`. Copies kept scores, which routers may change in place."""

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


def route(forward: Callable[..., Any], router: Any, hidden_TH: Tensor, *bias: Tensor) -> Any:
    """Call a router in float32, whatever the block computes in.

    Logits rounded to bfloat16 would tie, and the router would choose other experts than the engine.
    """
    # Compiled code changes nothing in place, and enters a mode only once `router_replay.set_up` has allowed that.
    if torch.compiler.is_compiling() and router.replayed is None:
        return add_loss(router, forward(router, hidden_TH.float(), *bias))
    with Replay(router.expert_count, router.replayed):
        return add_loss(router, forward(router, hidden_TH.float(), *bias))


@cache  # a forward per router would mean a graph per layer
def _routed(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"forward": lambda router, *inputs: route(kind.forward, router, *inputs)})


def mix(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return every token's weighted sum over its experts [T, H].

    Rows are sorted by expert: each projection is one grouped matrix product, without a device sync. The weights scale
    the hidden layer, not the output: the same sum (cheaper if I < H), and backward keeps no expert outputs.
    """
    count, (tokens, k) = experts.num_experts, chosen_TK.shape
    if experts.count_F is not None:  # assigned, not added: backward may recompute a block
        experts.count_F[:-1] = choices(chosen_TK, count, experts.tokens).sum(0)
    sorted_S, order_S = chosen_TK.flatten().to(torch.int32).sort(stable=True)
    numbers = torch.arange(count, device=sorted_S.device, dtype=torch.int32)
    end_E = torch.searchsorted(sorted_S, numbers, right=True, out_int32=True)
    place_S = torch.arange(tokens * k, device=order_S.device, dtype=torch.int32)
    place_TK = torch.empty_like(place_S).scatter_(0, order_S, place_S).view(tokens, k)

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    rows_SJ = grouped_linear(spread(hidden_TH, place_TK), getattr(experts, first), end_E, experts.is_transposed)
    if experts.has_bias:
        rows_SJ = rows_SJ + getattr(experts, f"{first}_bias")[sorted_S]
    weight_S1 = weight_TK.flatten().gather(0, order_S)[:, None]
    if experts.has_gate and type(experts)._apply_gate is _default_apply_gate:
        gate_SI, up_SI = rows_SJ.chunk(2, dim=-1)
        active_SI = experts.act_fn(gate_SI.float()) * up_SI.float()
    else:
        active_SI = (experts._apply_gate if experts.has_gate else experts.act_fn)(rows_SJ.float())
    hidden_SI = (active_SI * weight_S1).to(hidden_TH.dtype)
    out_TH = collect(grouped_linear(hidden_SI, experts.down_proj, end_E, experts.is_transposed), place_TK)
    if experts.has_bias:  # a dense product, without atomics in backward
        weight_TE = weight_TK.new_zeros(tokens, count).scatter(1, chosen_TK, weight_TK)
        out_TH = out_TH + weight_TE.to(hidden_TH.dtype) @ experts.down_proj_bias
    return out_TH


ALL_EXPERTS_FUNCTIONS.register(NAME, mix)


def grouped_linear(rows_SI: Tensor, weight_EOI: Tensor, end_E: Tensor, transposed: bool) -> Tensor:
    """Multiply rows [end[e - 1], end[e]) by expert e's [O, I] (`transposed`: [I, O]); return [S, O]."""
    return F.grouped_mm(rows_SI, weight_EOI if transposed else weight_EOI.transpose(1, 2), offs=end_E)


# Opaque to the compiler, which would gather element by element; each is the other's backward, without atomics.
@torch.library.custom_op("prime_rl::spread", mutates_args=())
def spread(rows_TH: Tensor, place_TK: Tensor) -> Tensor:
    """Copy each token's row to its K places [S, H]. `place_TK` (int32) is a permutation of 0 … S - 1."""
    if use_triton(rows_TH):
        from prime_rl.trainer import triton_kernels

        return triton_kernels.spread(rows_TH, place_TK)
    out_SH = rows_TH.new_empty(place_TK.numel(), rows_TH.shape[1])
    out_SH[place_TK.flatten()] = rows_TH.repeat_interleave(place_TK.shape[1], 0)
    return out_SH


@torch.library.custom_op("prime_rl::collect", mutates_args=())
def collect(rows_SH: Tensor, place_TK: Tensor) -> Tensor:
    """Sum the rows at each token's K places [T, H], rounding once."""
    if use_triton(rows_SH):
        from prime_rl.trainer import triton_kernels

        return triton_kernels.collect(rows_SH, place_TK)
    return rows_SH[place_TK].sum(1)


spread.register_fake(lambda rows_TH, place_TK: rows_TH.new_empty(place_TK.numel(), rows_TH.shape[1]))
collect.register_fake(lambda rows_SH, place_TK: rows_SH.new_empty(place_TK.shape[0], rows_SH.shape[1]))
for operator, inverse in ((spread, collect), (collect, spread)):
    operator.register_autograd(
        lambda ctx, grad, inverse=inverse: (inverse(grad.contiguous(), *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )


def choices(chosen_TK: Tensor, experts: int, tokens: Tensor) -> Tensor:
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
    choices_TE = choices(chosen_TK, router.expert_count, router.tokens)
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


def set_up_balance(lm: PreTrainedModel, config: TrainerModel, device: torch.device) -> None:
    """Have blocks write tokens per expert and, last, the auxiliary loss (0: off) into `count_F` [E + 1].

    Raises UserError if the model has no routers that can be balanced as `config` asks.
    """
    blocks, has_loss = moe_blocks(lm), "load_balancing_loss_func" in vars(sys.modules[type(lm).__module__])
    if config.moe_aux_loss and not (blocks and has_loss and type(blocks[0].router).__base__ is not nn.Linear):
        raise UserError(f"model.moe_aux_loss: {type(lm).__name__} has no routers with transformers' auxiliary loss")
    if config.moe_bias_update and not 0 < len(blocks) == len(correction_biases(blocks)):
        raise UserError(f"model.moe_bias_update: {type(lm).__name__} has no routers with a correction bias")
    for _, router, experts in blocks:
        router.count_F = experts.count_F = torch.zeros(router.expert_count + 1, device=device)
        router.loss_scale = torch.zeros((), device=device) if config.moe_aux_loss else None


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
