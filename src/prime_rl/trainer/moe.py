"""Mixture-of-experts blocks of the Qwen3-MoE family: a float32 router, grouped matrix products.

transformers' block is replaced by ours, which keeps its modules, hence the names of the parameters, but only reads their
weights. Letters: T tokens, K experts of each, S = T·K, E experts, I rows of an expert's hidden layer, H hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from prime_rl.errors import UserError
from prime_rl.trainer.lm_head import has_kernels

KEPT = {torch.ops.aten.topk.default}
"""The operators whose outputs checkpointed blocks keep: choosing experts again from logits that another kernel rounded
otherwise would assign kept rows to other experts."""


class SparseBlock(nn.Module):
    """In place of transformers' block: each token goes to its K experts, whose outputs are summed with the router's weights."""

    def __init__(self, block: Qwen3MoeSparseMoeBlock) -> None:
        super().__init__()
        self.experts, self.gate = block.experts, block.gate

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_TH = hidden_states.flatten(0, 1)
        weight_TK, chosen_TK = route(hidden_TH, self.gate.weight, self.gate.top_k, self.gate.norm_topk_prob)
        experts = self.experts
        out_TH = mix(hidden_TH, weight_TK, chosen_TK, experts.gate_up_proj, experts.down_proj, experts.act_fn)
        return out_TH.view_as(hidden_states)


def replace_blocks(lm: PreTrainedModel, name: str) -> None:
    """Put a SparseBlock in place of every block of experts.

    Raises:
        UserError: the model has experts of another family.
    """
    for module in list(lm.modules()):
        for child, block in list(module.named_children()):
            if isinstance(block, Qwen3MoeSparseMoeBlock):
                setattr(module, child, SparseBlock(block))
    known = {parameter for block in sparse_blocks(lm) for parameter in block.experts.parameters()}
    unknown = (key for key, each in lm.named_parameters() if each.ndim == 3 and each not in known)
    if any(key.endswith("_proj") for key in unknown):
        raise UserError(
            f"model {name} ({type(lm).__name__}) has experts of a family that the trainer does not know; it knows Qwen3-MoE"
        )


def sparse_blocks(model: nn.Module) -> list[SparseBlock]:
    """The model's blocks of experts, from first to last; none in a dense model."""
    return [module for module in model.modules() if isinstance(module, SparseBlock)]


def shard_routers(lm: PreTrainedModel, mesh: DeviceMesh) -> list[FSDPModule]:
    """Make all routers one FSDP unit that computes in float32, before the layers become units. None in a dense model.

    Whoever calls the model must gather it (`unshard`): blocks read the router's matrix without calling its module, so
    that FSDP's hooks do not run and nothing of FSDP lies inside a compiled block. It stays gathered until the end of
    backward, where FSDP reduces what its hooks have not seen. One float32 gather and one reduction a micro-batch (50 MB
    of the 30B model) in place of one per layer.
    """
    gates: list[nn.Module] = [block.gate for block in sparse_blocks(lm)]
    if not gates:
        return []
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(gates, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    assert isinstance(gates[0], FSDPModule)
    return [gates[0]]


def route(hidden_TH: Tensor, weight_EH: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of every token and their probabilities, in float32 whatever the blocks compute in.

    Rounding the logits to bfloat16 would tie experts with one another and make another choice than the engine that sampled.

    Returns:
        Weights [T, K] (with `normalized` they sum to 1) and experts [T, K].
    """
    probability_TE = F.linear(hidden_TH.float(), weight_EH.float()).softmax(-1)
    weight_TK, chosen_TK = probability_TE.topk(k, dim=-1)
    return weight_TK / weight_TK.sum(-1, keepdim=True) if normalized else weight_TK, chosen_TK


def mix(
    hidden_TH: Tensor, weight_TK: Tensor, chosen_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, activation: Any
) -> Tensor:
    """Every token's weighted sum over its experts [T, H].

    Rows are sorted by expert, so that each projection is one grouped matrix product; nothing waits for the device. The weights multiply the
    hidden layer rather than the output: the same sum, on fewer columns, and backward needs no outputs of experts to be kept.
    """
    experts, (tokens, k) = gate_up_EJH.shape[0], chosen_TK.shape
    sorted_S, order_S = chosen_TK.flatten().to(torch.int32).sort(stable=True)
    numbers = torch.arange(experts, device=sorted_S.device, dtype=torch.int32)
    end_E = torch.searchsorted(sorted_S, numbers, right=True, out_int32=True)
    place_S = torch.arange(tokens * k, device=order_S.device, dtype=torch.int32)
    place_TK = torch.empty_like(place_S).scatter_(0, order_S, place_S).view(tokens, k)

    gate_SI, up_SI = grouped_linear(spread(hidden_TH, place_TK), gate_up_EJH, end_E).chunk(2, dim=-1)
    weight_S1 = weight_TK.flatten().gather(0, order_S)[:, None]
    hidden_SI = (activation(gate_SI.float()) * up_SI.float() * weight_S1).to(hidden_TH.dtype)
    return collect(grouped_linear(hidden_SI, down_EHI, end_E), place_TK)


def grouped_linear(rows_SI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """Rows [end[e - 1], end[e]) times expert e's matrix: [S, O]. No gradient for `end_E` (int32)."""
    return F.grouped_mm(rows_SI, weight_EOI.transpose(1, 2), offs=end_E)


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


@spread.register_fake
def _(rows_TH: Tensor, place_TK: Tensor) -> Tensor:
    return rows_TH.new_empty(place_TK.numel(), rows_TH.shape[1])


@collect.register_fake
def _(rows_SH: Tensor, place_TK: Tensor) -> Tensor:
    return rows_SH.new_empty(place_TK.shape[0], rows_SH.shape[1])


def _save_positions(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


spread.register_autograd(
    lambda ctx, grad_SH: (collect(grad_SH.contiguous(), *ctx.saved_tensors), None), setup_context=_save_positions
)
collect.register_autograd(
    lambda ctx, grad_TH: (spread(grad_TH.contiguous(), *ctx.saved_tensors), None), setup_context=_save_positions
)
