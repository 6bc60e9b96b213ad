"""Mixture-of-experts blocks of families that use transformers' experts interface: float32 routing, grouped products.

Blocks and routers stay transformers' own modules. The experts' forward is `mix`, registered as `NAME`; every call of a
router goes through `route`. A router's choice is replaced there (`router_replay`): `Choice` sees the scores [T, E] and
the experts [T, K] chosen by them; scores of others, gathered instead, go on through the router's own formula. Letters:
T tokens, K experts of each, S = T·K, E experts, I width of an expert's hidden layer, J of its first product (2·I with a
gate), H hidden size.
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
from prime_rl.trainer.lm_head import has_kernels
from prime_rl.trainer.report import Named

NAME = "prime_rl_grouped"
# The operators whose outputs checkpointed blocks keep: choosing experts again from logits that another kernel rounded
# otherwise would assign kept rows to other experts.
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
    blocks = sparse_blocks(lm)
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
        if is_dense(experts):  # they are passed tokens times the router's weights
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


def sparse_blocks(model: nn.Module) -> list[SparseBlock]:
    """The model's blocks of experts of the interface, which marks them, or of dense ones, from first to last."""
    parts = [(module, dict(module.named_children())) for module in model.modules()]
    blocks = [
        SparseBlock(each, of.get("gate", of.get("router")), of["experts"]) for each, of in parts if "experts" in of
    ]
    known = (each for each in blocks if "is_transposed" in vars(each.experts) or is_dense(each.experts))
    return [each for each in known if each.router is not None]


def is_dense(experts: nn.Module) -> bool:
    """Whether all compute every token, times a weight that is 0 where they were not chosen (Llama 4)."""
    return [*signature(experts.forward).parameters] == ["hidden_states"]


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are computed in float32, whatever the dtype."""
    return [parameter for block in sparse_blocks(model) for parameter in block.router.parameters()]


def shard_routers(lm: PreTrainedModel, mesh: DeviceMesh) -> list[FSDPModule]:
    """Make all routers one FSDP unit that computes in float32, before the layers become units. None in a dense model.

    Whoever calls the model must gather it (`unshard`): its hooks are removed, so that nothing of FSDP lies inside a
    compiled block. It stays gathered until the end of backward, where FSDP reduces what its hooks have not seen. One
    float32 gather and one reduction a micro-batch (50 MB of the 30B model) in place of one per layer.
    """
    routers = [block.router for block in sparse_blocks(lm)]
    if not routers:
        return []
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(routers, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    state = routers[0]._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    return routers[:1]


def experts_per_token(lm: PreTrainedModel) -> int:
    """Return K, by the names that families have for it; 1 in a dense model, all where all compute every token."""
    text, blocks = lm.config.get_text_config(), sparse_blocks(lm)
    if blocks and is_dense(blocks[0].experts):
        return int(blocks[0].experts.num_experts)
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1


class Choice(TorchFunctionMode):
    """Replaces the K experts that a router chooses by `replayed_TK`. Results, unlike checkpoints', may be changed."""

    def __init__(self, experts: int, replayed_TK: Tensor | None) -> None:
        super().__init__()
        self.experts, self.replayed_TK = experts, replayed_TK
        self.limited: Any = None  # scores that were masked outside of some groups, and all of them

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

    Logits rounded to bfloat16 would tie experts with one another and choose others than the sampling engine.
    """
    # Compiled, nothing is changed in place, and a block may enter a mode only if `router_replay.set_up` has allowed it.
    if torch.compiler.is_compiling() and router.replayed is None:
        return balanced(router, forward(router, hidden_TH.float(), *bias))
    with Choice(router.expert_count, router.replayed):
        return balanced(router, forward(router, hidden_TH.float(), *bias))


@cache  # with a forward of each router's own, layers would not share a graph
def _routed(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"forward": lambda router, *inputs: route(kind.forward, router, *inputs)})


def mix(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return every token's weighted sum over its experts [T, H].

    Rows are sorted by expert: each projection is one grouped matrix product; nothing waits for the device. The weights
    multiply the hidden layer, not the output: the same sum on fewer columns; backward keeps no outputs of experts.
    """
    count, (tokens, k) = experts.num_experts, chosen_TK.shape
    if experts.count_F is not None:  # written, not added: backward may compute a block again
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
    """Multiply rows [end[e - 1], end[e]) by expert e's matrix ([O, I], [I, O]): [S, O]. `end_E`: int32, constant."""
    return F.grouped_mm(rows_SI, weight_EOI if transposed else weight_EOI.transpose(1, 2), offs=end_E)


# Opaque to the compiler, which would gather element by element; each is the other's backward, without atomics.
@torch.library.custom_op("prime_rl::spread", mutates_args=())
def spread(rows_TH: Tensor, place_TK: Tensor) -> Tensor:
    """Each token's row at its K places [S, H]. `place_TK` (int32) names every place from 0 to S - 1 once."""
    if has_kernels(rows_TH):
        from prime_rl.trainer import triton_kernels

        return triton_kernels.spread(rows_TH, place_TK)
    out_SH = rows_TH.new_empty(place_TK.numel(), rows_TH.shape[1])
    out_SH[place_TK.flatten()] = rows_TH.repeat_interleave(place_TK.shape[1], 0)
    return out_SH


@torch.library.custom_op("prime_rl::collect", mutates_args=())
def collect(rows_SH: Tensor, place_TK: Tensor) -> Tensor:
    """The sum of the rows at each token's K places [T, H], rounded once."""
    if has_kernels(rows_SH):
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
    """Whether a token goes to an expert [T, E] bool, of the first `tokens` [] tokens: the others are padding."""
    is_real_TK = (torch.arange(len(chosen_TK), device=chosen_TK.device) < tokens)[:, None].expand_as(chosen_TK)
    return is_real_TK.new_zeros(len(chosen_TK), experts).scatter(1, chosen_TK, is_real_TK)


def balanced(router: Any, out: Any) -> Any:
    """What a router returned. In backward its weights also bring in the auxiliary loss:  E · Σ_e load_e / T · P_e.

    P is the mean of softmax(logits) over the T tokens of a micro-batch; loads have no gradient. With equal loads it is
    K, as in transformers' `load_balancing_loss_func` for one layer: K times Switch Transformer's (arXiv:2101.03961).
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


# The same weights, whose backward pass is that of the loss, too.
with_loss: Any = torch.library.custom_op(
    "prime_rl::with_loss", lambda weight, _: weight.clone(), mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
with_loss.register_fake(lambda weight, _: torch.empty_like(weight))
with_loss.register_autograd(lambda ctx, grad_TK: (grad_TK, grad_TK.new_ones(())))


def set_up_balance(lm: PreTrainedModel, config: TrainerModel, device: torch.device) -> None:
    """Have each block count its experts' tokens, and last, if asked for, the auxiliary loss: `count_F` [E + 1].

    Raises UserError if the model has no routers that can be balanced as `config` asks.
    """
    blocks, has_loss = sparse_blocks(lm), "load_balancing_loss_func" in vars(sys.modules[type(lm).__module__])
    if config.moe_aux_loss and not (blocks and has_loss and type(blocks[0].router).__base__ is not nn.Linear):
        raise UserError(f"model.moe_aux_loss: {type(lm).__name__} has no routers with transformers' auxiliary loss")
    if config.moe_bias_update and not 0 < len(blocks) == len(correction_biases(blocks)):
        raise UserError(f"model.moe_bias_update: {type(lm).__name__} has no routers with a correction bias")
    for _, router, experts in blocks:
        router.count_F = experts.count_F = torch.zeros(router.expert_count + 1, device=device)
        router.loss_scale = torch.zeros((), device=device) if config.moe_aux_loss else None


def named(blocks: Sequence[SparseBlock], names: Named, sums: list[float]) -> Mapping[str, float]:
    """The metrics of a step's sums: first the blocks' `count_F`, all of one size, then those that `names` names."""
    if not blocks:
        return names(sums)
    count = len(blocks) * len(blocks[0].experts.count_F)
    count_MF = torch.tensor(sums[:count]).view(len(blocks), -1)
    load_ME, loss = count_MF[:, :-1], count_MF[:, -1].sum()
    peak_M, unused = load_ME.amax(1) / load_ME.mean(1), (load_ME == 0).float().mean()
    own = {"load_max/mean": peak_M.mean(), "load_max/max": peak_M.max(), "unused_experts": unused, "aux_loss": loss}
    return {**names(sums[count:]), **{f"moe/{name}": value.item() for name, value in own.items()}}


def correction_biases(blocks: Sequence[SparseBlock]) -> list[Tensor]:
    """What routers add to their E scores to choose by, where it is a buffer."""
    buffers = [(block.router.expert_count, *each) for block in blocks for each in block.module.named_buffers()]
    return [each for count, name, each in buffers if name.endswith("bias") and each.numel() == count]


@torch.no_grad()
def update_biases(blocks: Sequence[SparseBlock], sums: Tensor, rate: float) -> None:
    """Raise by `rate` the correction biases of experts below the mean load, lower the others (arXiv:2412.19437)."""
    for number, bias in enumerate(correction_biases(blocks) if rate else ()):
        load_E = sums.narrow(0, number * (bias.numel() + 1), bias.numel())
        bias.add_((load_E.mean() - load_E).sign().view_as(bias), alpha=rate)
