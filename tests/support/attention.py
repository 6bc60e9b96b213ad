"""Attention written out, and CPU stand-ins for two of the GPU libraries, with their own signatures and conventions.

The stand-ins let a CPU check everything of ours around a kernel: which arguments it gets, what is kept for backward,
windows, empty documents, tracing. They compute in float64, from the definition. tests/gpu/test_attention.py compares all
real kernels with `sdpa`, and so does every run before it uses one (`attention.trial`).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

Grads = tuple[Tensor, Tensor, Tensor]


def explicit(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, window: int | None) -> Tensor:
    """Token by token and head by head: softmax over the last `window` tokens of the document, itself included. Differentiable."""
    group, rows, start = q.shape[1] // k.shape[1], [], 0
    for length in lengths:
        for row in range(start, start + length):
            seen = slice(start if window is None else max(start, row - window + 1), row + 1)
            heads = [
                torch.softmax(scale * k[seen, head // group] @ q[row, head], 0) @ v[seen, head // group]
                for head in range(q.shape[1])
            ]
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def visible(tokens: int, cu_seqlens: Tensor, left: int) -> Tensor:
    """[T, T]: who looks at whom, from the definition."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    boundaries = cu_seqlens.tolist()
    for start, end in pairwise(boundaries):
        for row in range(start, end):
            mask[row, start if left < 0 else max(start, row - left) : row + 1] = True
    return mask


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    """The same as matrices, for the stand-ins."""
    q, k, v = _wide(q, k, v)
    scores = scale * torch.einsum("qhd,khd->hqk", q, k)
    scores = scores.masked_fill(~visible(q.shape[0], cu_seqlens, left), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def dense_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    left: int,
) -> Grads:
    """From out and lse, as the kernels do it, so that what was kept for backward must be right."""
    heads, dtype = k.shape[1], q.dtype
    q, k, v = _wide(q, k, v)
    scores = scale * torch.einsum("qhd,khd->hqk", q, k)
    scores = scores.masked_fill(~visible(q.shape[0], cu_seqlens, left), -torch.inf)
    weights = torch.exp(scores - lse.double()[..., None])
    d_out, out = d_out.double(), out.double()
    d_weights = torch.einsum("qhd,khd->hqk", d_out, v)
    d_scores = weights * (d_weights - (d_out * out).sum(-1).t()[..., None])
    dq = scale * torch.einsum("hqk,khd->qhd", d_scores, k)
    dk = scale * torch.einsum("hqk,qhd->khd", d_scores, q)
    dv = torch.einsum("hqk,qhd->khd", weights, d_out)
    return dq.to(dtype), _narrow(dk, heads).to(dtype), _narrow(dv, heads).to(dtype)


def _wide(q: Tensor, k: Tensor, v: Tensor) -> Grads:
    group = q.shape[1] // k.shape[1]
    return q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)


def _narrow(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, -1, x.shape[2]).sum(2)


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: the dispatcher passes as many as it can by position, and leaves out those that are the default."""
    arguments = operator.default._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def _fa_left(causal: bool, left: int, right: int) -> int:
    assert causal or right == 0, "not causal"
    return left


def _longest_is_right(cu_seqlens: Tensor, *claimed: int) -> None:
    assert cu_seqlens.dtype == torch.int32
    assert {int(cu_seqlens.diff().max())} == set(claimed)


# cuDNN: the operators of nvidia-cudnn-frontend 1.32, as it defines them. A window counts the token itself; the statistics are [T, H, 1]
# forward and [documents, H, longest, 1] backward; there is no backward for a longest length of 1.

_CUDNN = {
    "sdpa_fwd": "(Tensor q, Tensor k, Tensor v, float attn_scale, bool is_causal=False, bool causal_bottom_right=False, "
    "int window_left=-1, int window_right=-1, Tensor? sinks=None, Tensor? seq_len_q=None, Tensor? seq_len_kv=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, int max_seqlen_q=0, int max_seqlen_kv=0, bool return_lse=True) "
    "-> (Tensor, Tensor)",
    "sdpa_bwd": "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, float attn_scale, bool is_causal=False, "
    "bool causal_bottom_right=False, int window_left=-1, int window_right=-1, Tensor? sinks=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_kv=None, int max_seqlen_q=0, int max_seqlen_kv=0, bool is_deterministic=False) -> (Tensor, Tensor, Tensor)",
}


def _cudnn_left(a: dict[str, Any]) -> int:
    assert a["is_causal"]
    assert a["max_seqlen_q"] == a["max_seqlen_kv"] >= max(2, int(a["cu_seqlens_q"].diff().max()))
    assert a["window_left"] != 0, "a token looks at itself"
    return a["window_left"] - 1 if a["window_left"] > 0 else -1


@contextmanager
def cudnn() -> Iterator[None]:
    """`torch.ops.cudnn` on the CPU, and a module `cudnn` that has what ours asks it."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        a = _named(torch.ops.cudnn.sdpa_fwd, args, kwargs)
        assert a["return_lse"]
        out, lse = dense_forward(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["attn_scale"], _cudnn_left(a))
        return out.to(a["q"].dtype), lse.float().t()[..., None].contiguous()

    def backward(*args: Any, **kwargs: Any) -> Grads:
        a = _named(torch.ops.cudnn.sdpa_bwd, args, kwargs)
        lse, cu_seqlens = a["lse"], a["cu_seqlens_q"]
        assert lse.dtype == torch.float32
        assert lse.shape == (cu_seqlens.numel() - 1, a["q"].shape[1], a["max_seqlen_q"], 1)
        packed = torch.cat([lse[i, :, :n, 0] for i, n in enumerate(cu_seqlens.diff().tolist())], dim=1)
        kept = [a[name] for name in ("grad_out", "q", "k", "v", "o")]
        return dense_backward(*kept, packed, cu_seqlens, a["attn_scale"], _cudnn_left(a))

    class NotSupported(Exception):
        """The front end's error is no RuntimeError either."""

    library = torch.library.Library("cudnn", "DEF")
    for name, kernel in (("sdpa_fwd", forward), ("sdpa_bwd", backward)):
        library.define(name + _CUDNN[name])
        library.impl(name, kernel, "CPU")
    module = SimpleNamespace(cudnnGraphNotSupportedError=NotSupported, backend_version=lambda: 91900)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cudnn", module)
            yield
    finally:
        library._destroy()


# torch's own FlashAttention 2, which has no CPU kernel.


@contextmanager
def varlen() -> Iterator[None]:
    """`torch.ops.aten._flash_attention_forward` and `…_backward` on the CPU."""

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        a = _named(torch.ops.aten._flash_attention_forward, args, kwargs)
        q = a["query"]
        _longest_is_right(a["cum_seq_q"], a["max_q"], a["max_k"])
        assert (a["dropout_p"], a["return_debug_mask"]) == (0.0, False)
        left = _fa_left(a["is_causal"], a["window_size_left"], a["window_size_right"])
        out, lse = dense_forward(q, a["key"], a["value"], a["cum_seq_k"], a["scale"], left)
        return out.to(q.dtype), lse.float(), *(q.new_empty(0) for _ in range(3))

    def backward(*args: Any, **kwargs: Any) -> Grads:
        a = _named(torch.ops.aten._flash_attention_backward, args, kwargs)
        _longest_is_right(a["cum_seq_q"], a["max_q"], a["max_k"])
        left = _fa_left(a["is_causal"], a["window_size_left"], a["window_size_right"])
        kept = [a[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        return dense_backward(*kept, a["cum_seq_k"], a["scale"], left)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


STAND_INS = {"cudnn": cudnn, "varlen": varlen}
