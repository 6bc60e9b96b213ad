"""Mixture-of-experts blocks of transformers' experts interface: found, and computed in grouped matrix products.

Blocks, routers and experts stay transformers' own modules, with other forwards. Letters: T tokens, K experts per token,
S = T·K, E experts, I width of an expert's hidden layer, J of its first product (2·I with a gate), H hidden size.
"""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from prime_rl.errors import UserError
from prime_rl.trainer import routing
from prime_rl.trainer.lm_head import use_triton


def set_up(lm: PreTrainedModel, name: str) -> None:
    """Have a model's experts computed by `mix`, its routers called by `routing.route`. Does nothing in a dense model.

    Experts that compute every token (Llama 4) stay as they are. Raises UserError if the model has others that do not go
    through transformers' interface.
    """
    blocks = moe_blocks(lm)
    known = {block.experts for block in blocks}
    for path, module in lm.named_modules():
        if path.endswith(".experts") and module not in known:
            kind = type(module).__name__
            raise UserError(f"model {name} cannot be trained: {kind} is not part of transformers' experts interface")
    if any("is_transposed" in vars(experts) for experts in known):
        ALL_EXPERTS_FUNCTIONS.register("prime_rl_grouped", mix)
        lm.set_experts_implementation("prime_rl_grouped")
    for block, router, experts in blocks:
        experts.lora = None  # `lora.ExpertsLoRA`, if they have adapters
        block.eval()  # no jitter, no sampling of experts
        if runs_all(experts):  # they are passed tokens times the router's weights
            logger.warning("{}: all experts compute every token, which is slow", type(experts).__name__)
            router.register_forward_hook(lambda _, inputs, out: tuple(each.to(inputs[0].dtype) for each in out))
        routing.set_up(router, experts)


def moe_blocks(model: nn.Module) -> list[routing.SparseBlock]:
    """Return the MoE blocks, first to last: experts of the interface (`is_transposed`), or that compute every token."""
    blocks = []
    for module in model.modules():
        parts = dict(module.named_children())
        router, experts = parts.get("gate", parts.get("router")), parts.get("experts")
        if router is not None and experts is not None and ("is_transposed" in vars(experts) or runs_all(experts)):
            blocks.append(routing.SparseBlock(module, router, experts))
    return blocks


def runs_all(experts: nn.Module) -> bool:
    """Return whether every expert computes every token, scaled by its weight or 0 (Llama 4)."""
    return [*signature(experts.forward).parameters] == ["hidden_states"]


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the routers' parameters: float32 in any compute dtype."""
    return [parameter for block in moe_blocks(model) for parameter in block.router.parameters()]


def experts_per_token(lm: PreTrainedModel) -> int:
    """Return K from the config, whatever its name there; 1 without experts, E where all compute every token."""
    text, blocks = lm.config.get_text_config(), moe_blocks(lm)
    if blocks and runs_all(blocks[0].experts):
        return int(blocks[0].experts.num_experts)
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1


def mix(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return every token's weighted sum over its experts [T, H].

    Rows are sorted by expert: each projection is one grouped matrix product, without a device sync. The weights scale
    the hidden layer, not the output: the same sum (cheaper if I < H), and backward keeps no expert outputs.
    """
    count, (tokens, k) = experts.num_experts, chosen_TK.shape
    if experts.count_F is not None:  # assigned, not added: backward may recompute a block
        experts.count_F[:-1] = routing.multi_hot(chosen_TK, count, experts.tokens).sum(0)
    sorted_S, order_S = chosen_TK.flatten().to(torch.int32).sort(stable=True)
    numbers = torch.arange(count, device=sorted_S.device, dtype=torch.int32)
    end_E = torch.searchsorted(sorted_S, numbers, right=True, out_int32=True)
    place_S = torch.arange(tokens * k, device=order_S.device, dtype=torch.int32)
    place_TK = torch.empty_like(place_S).scatter_(0, order_S, place_S).view(tokens, k)

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    weights, lora, spread_SH = (getattr(experts, first), experts.down_proj), experts.lora, spread(hidden_TH, place_TK)
    if lora is not None and lora.merged is not None:
        weights, lora = lora.merged_weights(), None
    rows_SJ = grouped_linear(spread_SH, weights[0], end_E, experts.is_transposed)
    if lora is not None:
        rows_SJ = rows_SJ + lora.gate_up(spread_SH, end_E)
    if experts.has_bias:
        rows_SJ = rows_SJ + getattr(experts, f"{first}_bias")[sorted_S]
    weight_S1 = weight_TK.flatten().gather(0, order_S)[:, None]
    if experts.has_gate and type(experts)._apply_gate is _default_apply_gate:
        gate_SI, up_SI = rows_SJ.chunk(2, dim=-1)
        active_SI = experts.act_fn(gate_SI.float()) * up_SI.float()
    else:
        active_SI = (experts._apply_gate if experts.has_gate else experts.act_fn)(rows_SJ.float())
    hidden_SI = (active_SI * weight_S1).to(hidden_TH.dtype)
    out_SH = grouped_linear(hidden_SI, weights[1], end_E, experts.is_transposed)
    out_TH = collect(out_SH if lora is None else out_SH + lora.down(hidden_SI, end_E), place_TK)
    if experts.has_bias:  # a dense product, without atomics in backward
        weight_TE = weight_TK.new_zeros(tokens, count).scatter(1, chosen_TK, weight_TK)
        out_TH = out_TH + weight_TE.to(hidden_TH.dtype) @ experts.down_proj_bias
    return out_TH


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
