"""What recurrent layers compute along a row, for all its documents at once, in place of functions of transformers.

Each takes the function that it stands for, which computes where no documents are handed on, then its arguments. States
are computed by flash-linear-attention, convolutions by our kernel or, of other forms, in torch's operations. Letters:
T tokens, H heads, C channels, K taps, V a value's size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

CHUNK = 64  # tokens that the library's kernels take together


def _convolve(
    alone: Any, row_1CT: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **named: Any
) -> Tensor:
    if (documents := named.get("seq_idx")) is None or activation not in (None, "silu"):
        return alone(row_1CT, weight, bias, activation=activation, **named)
    row_1TC = row_1CT.transpose(1, 2)
    if row_1TC.is_cuda and weight.shape[1] == 4 and bias is None and activation:
        return convolution(row_1TC.contiguous(), weight.contiguous(), documents[0]).transpose(1, 2)
    return convolution_formula(row_1TC, weight, bias, documents[0], activation).transpose(1, 2)


def convolution_formula(
    row_1TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, documents_T: Tensor, activation: Any = "silu"
) -> Tensor:
    """Each channel's weighted sum of a token and those before it in its document."""
    total_1TC = row_1TC.float() * weight_CK[:, -1].float() + (0.0 if bias_C is None else bias_C.float())
    for back in range(1, weight_CK.shape[1]):
        before_1TC = pad(row_1TC, (0, 0, back, 0))[:, : len(documents_T)]
        seen_T1 = pad(documents_T, (back, 0), value=-1)[: len(documents_T), None] == documents_T[:, None]
        total_1TC = total_1TC + torch.where(seen_T1, before_1TC, 0).float() * weight_CK[:, -1 - back].float()
    return (silu(total_1TC) if activation else total_1TC).to(row_1TC.dtype)


def _mix(alone: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: Any) -> Any:
    """The gated delta rule from a zero state for every document, of rows [1, T, H, …]."""
    if (chunks := named.get("chunk_indices")) is None:
        return alone(q, k, v, g=g, beta=beta, **named)
    if named.get("use_qk_l2norm_in_kernel"):
        q, k = ((x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(v.dtype) for x in (q, k))
    row = (x.contiguous() for x in (q, k, v, g.float(), beta))
    return delta_rule(*row, named["cu_seqlens"], chunks)[0], None


AT_ONCE: dict[str, Any] = {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _mix}


@torch.library.custom_op("prime_rl::convolution", mutates_args=())
def convolution(row: Tensor, weight: Tensor, documents: Tensor) -> Tensor:
    from prime_rl.trainer import triton_kernels

    return triton_kernels.convolution(row, weight, documents)


@torch.library.custom_op("prime_rl::convolution_backward", mutates_args=())
def _convolution_backward(d_out: Tensor, row: Tensor, weight: Tensor, documents: Tensor) -> list[Tensor]:
    from prime_rl.trainer import triton_kernels

    return list(triton_kernels.convolution_backward(d_out, row, weight, documents))


convolution.register_fake(lambda row, *_: row.new_empty(row.shape))
_convolution_backward.register_fake(lambda d_out, *row: [x.new_empty(x.shape) for x in row[:2]])
convolution.register_autograd(
    lambda ctx, d_out: (*_convolution_backward(d_out.contiguous(), *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("prime_rl::delta_rule", mutates_args=())
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [1, T, H, V], and for backward decays [1, T, H] and systems [1, T, H, CHUNK]."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    named = {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
    decay, out, systems, *_ = chunk_gated_delta_rule_fwd(q, k, v, g, beta, q.shape[-1] ** -0.5, None, False, **named)
    return out.contiguous(), decay.contiguous(), systems.contiguous()


@torch.library.custom_op("prime_rl::delta_rule_backward", mutates_args=())
def _delta_rule_backward(d_out: Tensor, kept: list[Tensor]) -> list[Tensor]:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    q, k, v, _, beta, cu_seqlens, chunk_indices, decay, systems = kept
    row, named = (q, k, v, decay, beta, systems), {"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices}
    dq, dk, dv, d_beta, dg, *_ = chunk_gated_delta_rule_bwd(*row, q.shape[-1] ** -0.5, None, d_out, None, **named)
    return [d_x.to(x.dtype).contiguous() for d_x, x in zip((dq, dk, dv, dg, d_beta), kept, strict=False)]


delta_rule.register_fake(
    lambda q, k, v, g, *_: (torch.empty_like(v), torch.empty_like(g), k.new_empty(*g.shape, CHUNK))
)
_delta_rule_backward.register_fake(lambda d_out, kept: [x.new_empty(x.shape) for x in kept[:5]])
delta_rule.register_autograd(
    lambda ctx, d_out, *_: (*_delta_rule_backward(d_out.contiguous(), list(ctx.saved_tensors)), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output[1:]),
)
KEPT = {torch.ops.prime_rl.delta_rule.default}  # operators whose output selective checkpointing keeps
