"""Attention written out, a kernel for the CPU made of it, and a model to call attention by.

The kernel lets a CPU check what of ours is around every kernel: which arguments it gets, what is kept for backward,
windows, tracing. tests/gpu/test_attention.py compares all real kernels with `sdpa`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.trainer import attention
from prime_rl.trainer.attention_kernels import Grads, Mask, packed_operator


def pack(lengths: Sequence[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Boundaries, and the longest length."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), torch.tensor(max(lengths))


def boundaries(lengths: Sequence[int], device: str = "cpu") -> dict[str, Tensor]:
    return attention.boundaries(pack(lengths, device)[0], max(lengths))


def with_gradients(kernel: Callable[..., Tensor], inputs: Any, d_out: Tensor, *mask: Any) -> tuple[Tensor, ...]:
    """Return out and the gradients of q, k and v (`inputs`) for `d_out`; `mask`: the kernel's other arguments."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = kernel(*leaves, *mask)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by token and head over the document's last `window` tokens, itself included, and the head's sink."""
    group, rows, start = q.shape[1] // k.shape[1], [], 0
    for length in lengths:
        for row in range(start, start + length):
            seen, heads = slice(start if window is None else max(start, row - window + 1), row + 1), []
            for head in range(q.shape[1]):
                x = scale * k[seen, head // group] @ q[row, head]
                x = x if softcap is None else softcap * torch.tanh(x / softcap)
                x = x if sinks is None else torch.cat([x, sinks[head : head + 1]])
                heads.append(torch.softmax(x, 0)[: seen.stop - seen.start] @ v[seen, head // group])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def scores(q: Tensor, k: Tensor, of: Mask) -> Tensor:
    """[H, T, T] in float64, -inf where a token does not look."""
    mask = torch.zeros(len(q), len(q), dtype=torch.bool)
    for start, end in pairwise(of.cu_seqlens.tolist()):
        for row in range(start, end):
            mask[row, start if of.window is None else max(start, row + 1 - of.window) : row + 1] = True
    return (of.scale * torch.einsum("qhd,khd->hqk", q.double(), wide(k, q))).masked_fill(~mask, -torch.inf)


def wide(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of every query head, in float64."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    assert (mask.cu_seqlens.dtype, mask.longest) == (torch.int32, int(mask.cu_seqlens.diff().max()))
    x_HTT = scores(q, k, mask)
    return torch.einsum("hqk,khd->qhd", x_HTT.softmax(-1), wide(v, q)).to(q.dtype), x_HTT.logsumexp(-1).float()


def _backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads:
    """From out and lse, as the kernels do it, so that what was kept for backward must be right."""
    d_out = d_out.double()
    weights = torch.exp(scores(q, k, mask) - lse.double()[..., None])
    d_weights = torch.einsum("qhd,khd->hqk", d_out, wide(v, q))
    d_scores = mask.scale * weights * (d_weights - (d_out * out).sum(-1).t()[..., None])
    dq = torch.einsum("hqk,khd->qhd", d_scores, wide(k, q))
    dk, dv = torch.einsum("hqk,qhd->khd", d_scores, q.double()), torch.einsum("hqk,qhd->khd", weights, d_out)
    dk, dv = (x.view(x.shape[0], k.shape[1], -1, x.shape[2]).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


STAND_IN = packed_operator("stand_in", _forward, _backward)


def make_model(size: int = 32, head_dim: int = 8, vocabulary: int = 64, **settings: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": vocabulary, "hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 2}
    config = Qwen3Config(**shape, head_dim=head_dim, num_attention_heads=4, num_key_value_heads=2, **settings)
    lm = Qwen3ForCausalLM(config).train()
    lm.set_attn_implementation(attention.NAME)
    return lm


def hidden_and_gradient(lm: Qwen3ForCausalLM, lengths: Sequence[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.arange(sum(lengths), device=device)[None] * 7 % lm.config.vocab_size
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    lm.zero_grad()
    mask = boundaries(lengths, device)
    hidden = lm.model(input_ids=ids, position_ids=positions, use_cache=False, **mask).last_hidden_state
    # Not the sum of squares: the last norm has made that the same for all weights.
    draw = torch.Generator(device).manual_seed(1)
    torch.randn(hidden.shape, device=device, generator=draw).mul(hidden).sum().backward()
    gradient = lm.model.embed_tokens.weight.grad
    assert gradient is not None
    return hidden.detach(), gradient.clone()
