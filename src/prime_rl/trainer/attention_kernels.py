"""The GPU kernels of packed attention, each wrapped in one operator of ours, and loading the libraries that hold them.

An operator with a fake kernel and a backward of its own traces without a graph break, and selective checkpointing can
keep its output by name. All have the form
`prime_rl::name(q, k, v, cu_seqlens, longest, scale, window, softcap, sinks) -> (out, lse)`:

    q [T, Hq, D], k and v [T, Hkv, D]: bfloat16 or float16; Hq a multiple of Hkv
    cu_seqlens [documents + 1] int32: boundaries, 0 first, T last
    longest [] int64 in host memory: tokens of the longest document (`attention.boundaries` says why it is a tensor)
    window: a token looks at that many last tokens, itself included; None: at all earlier ones of its document
    softcap: scores become softcap * tanh(score / softcap); None: they stay
    sinks [Hq]: scores of one more token that all look at, with value 0. Kernels need not know it: from an out and lse
        with sinks a backward computes the right gradients
    out [T, Hq, D]; lse [Hq, T] float32: the log of the sum of exp(score)
"""

import importlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prime_rl.errors import UserError, one_line

Grads = tuple[Tensor, ...]  # dq, dk, dv, and whatever else a library returns
Operator = Callable[..., tuple[Tensor, Tensor]]

CUDNN_LSE_BYTES = 1 << 29  # what rounding may let the padded statistics of one cuDNN backward pass grow to


class Mask(NamedTuple):
    """Who attends to whom, and how scores are scaled. `window` is None where it would hide nothing."""

    cu_seqlens: Tensor
    longest: int
    scale: float
    window: int | None
    softcap: float | None = None


def packed_operator(
    name: str,
    forward: Callable[[Tensor, Tensor, Tensor, Mask], tuple[Tensor, ...]],  # out, lse, and whatever else
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Mask], Grads],  # of d_out, q, k, v, out, lse
) -> Operator:
    """Make `prime_rl::name` of two plain functions without autograd or tracing. Inputs have a dense last dimension."""

    def call(
        function: Any, inputs: list[Tensor], scale: float, window: int | None, softcap: float | None
    ) -> list[Tensor]:
        *tensors, cu_seqlens, longest = inputs
        assert longest.is_cpu, "reading it from a GPU would wait for the GPU in every layer"
        limit = int(longest)
        # Plain causal kernels are faster than windowed ones.
        mask = Mask(cu_seqlens, limit, scale, window if window is not None and window < limit else None, softcap)
        try:
            results = function(*(x if x.stride(-1) == 1 else x.contiguous() for x in tensors), mask)
            return [x.contiguous() for x in results[: 2 if function is forward else 3]]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # libraries have errors of their own, assertions among them
            problem = f"attention {name} fails here: {one_line(error)}"
            raise UserError(f"{problem}: choose another with model.attention") from error

    @torch.library.custom_op(f"prime_rl::{name}", mutates_args=())
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        longest: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert softcap is None or name == "explicit", f"{name} does not cap scores"
        out, lse = call(forward, [q, k, v, cu_seqlens, longest], scale, window, softcap)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = (out * torch.exp(lse - total).t()[..., None]).to(out.dtype), total
        return out.contiguous(), lse.contiguous()

    @attend.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        tokens, heads, _ = q.shape
        return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(heads, tokens, dtype=torch.float32)

    @torch.library.custom_op(f"prime_rl::{name}_backward", mutates_args=())
    def differentiate(
        d_out: Tensor, kept: list[Tensor], scale: float, window: int | None, softcap: float | None
    ) -> list[Tensor]:
        return call(backward, [d_out, *kept], scale, window, softcap)

    differentiate.register_fake(lambda d_out, kept, *_: [x.new_empty(x.shape) for x in kept[:3]])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, cu_seqlens, longest, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens, longest, sinks)

    def gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        grads = differentiate(d_out, saved, ctx.scale, ctx.window, ctx.softcap)
        if sinks is not None:  # their value is 0, their weight exp(sink - lse)
            weights_HT = torch.exp(sinks.to(saved[4].dtype)[:, None] - saved[4])
            sinks = -(weights_HT * (d_out.float() * saved[3]).sum(-1).t()).sum(1).to(sinks.dtype)
        return *grads, None, None, None, None, None, sinks

    attend.register_autograd(gradients, setup_context=keep)
    return attend


def _flash_window(mask: Mask) -> dict[str, int]:
    """FlashAttention counts a window without the token itself; -1 is no limit."""
    return {"window_size_left": -1 if mask.window is None else mask.window - 1, "window_size_right": 0}


def _flash_arguments(mask: Mask) -> dict[str, Any]:
    """What FlashAttention 3 and 4 call by the same names."""
    return {
        "cu_seqlens_q": mask.cu_seqlens,
        "cu_seqlens_k": mask.cu_seqlens,
        "max_seqlen_q": mask.longest,
        "max_seqlen_k": mask.longest,
        "softmax_scale": mask.scale,
    }


# FlashAttention 4 of the package flash-attn-4: kernels in Python, compiled for the GPU when they are first called. Its
# public function is differentiated by Python code that our operator would hide from autograd; these are its two halves.


def _fa4_arguments(mask: Mask) -> dict[str, Any]:
    # A window ends at the token itself, which is what `causal` would say.
    window = {"causal": True} if mask.window is None else {"causal": False, **_flash_window(mask)}
    return {**_flash_arguments(mask), **window}


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd(q, k, v, **_fa4_arguments(mask), return_lse=True)


def _fa4_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(q, k, v, out, d_out, lse, **_fa4_arguments(mask))


def _fa3_arguments(mask: Mask) -> dict[str, Any]:
    return {**_flash_arguments(mask), "is_causal": mask.window is None, **_flash_window(mask)}


def _fa3_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    return torch.ops.flash_attn_3.fwd(q, k, v, **_fa3_arguments(mask), num_splits=1)


def _fa3_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads:
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    torch.ops.flash_attn_3.bwd(d_out, q, k, v, out, lse, *grads, **_fa3_arguments(mask))
    return grads


# torch's own FlashAttention 2. `torch.nn.attention.varlen.varlen_attn` wants the longest length as a number, which the
# compiler would specialise on; beneath it are these two, the same from torch 2.11 to 2.13. They take grouped heads.


def _varlen_mask(mask: Mask) -> tuple[Any, ...]:
    """Boundaries of queries and keys, the longest document of each, no dropout, and whether plainly causal."""
    return *[mask.cu_seqlens] * 2, *[mask.longest] * 2, 0.0, mask.window is None


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    arguments, named = (q, k, v, *_varlen_mask(mask)), {"scale": mask.scale, **_flash_window(mask)}
    return torch.ops.aten._flash_attention_forward(*arguments, return_debug_mask=False, **named)


def _varlen_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads:
    arguments, named = (d_out, q, k, v, out, lse, *_varlen_mask(mask)), {"scale": mask.scale, **_flash_window(mask)}
    random_state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    return torch.ops.aten._flash_attention_backward(*arguments, random_state, unused, **named)


# cuDNN makes a plan for every number of documents, longest length and, backward, number of tokens (to the next 64), and
# keeps 128 of them. It counts a window with the token itself.


def cudnn_plan(documents: int, longest: int, tokens: int, heads: int) -> tuple[int, int]:
    """Return the documents and longest length to make a plan for: powers of two, so that few plans serve all.

    Backward wants its statistics as float32 [documents, heads, longest]. Where rounding would take them over
    `CUDNN_LSE_BYTES` (one long document among many short ones) the length is rounded to the next 128 only, and the
    documents not at all.
    """
    number, length = 1 << (documents - 1).bit_length(), min(1 << (longest - 1).bit_length(), tokens)
    if 4 * heads * number * length > CUDNN_LSE_BYTES:
        number, length = documents, -(-longest // 128) * 128
    return number, max(length, 128)  # there is no backward for a longest length of 1


def _cudnn_arguments(mask: Mask, tokens: int, heads: int) -> dict[str, Any]:
    present = mask.cu_seqlens.numel() - 1
    documents, longest = cudnn_plan(present, mask.longest, tokens, heads)
    cu_seqlens = mask.cu_seqlens
    if documents > present:  # empty ones at the end
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(documents - present)])
    return {
        "is_causal": True,
        "window_left": -1 if mask.window is None else mask.window,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    arguments = _cudnn_arguments(mask, *q.shape[:2])
    q, k, v = (x.contiguous() for x in (q, k, v))  # for backward's sake, see there
    out, lse_TH1 = torch.ops.cudnn.sdpa_fwd(q, k, v, mask.scale, **arguments, return_lse=True)
    return out, lse_TH1[..., 0].t()


def _cudnn_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads:
    arguments = _cudnn_arguments(mask, *q.shape[:2])
    statistics = _by_document(lse, arguments["cu_seqlens_q"], arguments["max_seqlen_q"])
    # Of a q that is laid out by head, as the compiler may do, the front end silently makes a wrong dq (1.32, H200).
    tensors = *(x.contiguous() for x in (d_out, q, k, v, out)), statistics
    return torch.ops.cudnn.sdpa_bwd(*tensors, mask.scale, **arguments)


def _by_document(lse: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """[H, T] → [documents, H, longest, 1], zero behind the end of a document. Reads nothing back from the GPU."""
    starts = cu_seqlens.long()
    at = torch.arange(lse.shape[1], device=lse.device)
    document = torch.bucketize(at, starts[1:], right=True)
    padded = lse.new_zeros(cu_seqlens.numel() - 1, lse.shape[0], longest, 1)
    padded[document, :, at - starts[document], 0] = lse.t()
    return padded


# Written out in float32 or more, on any device: scores of `EXPLICIT_ROWS` queries of one document exist at a time.

EXPLICIT_ROWS = 256


def _tiles(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Rows and the keys that they see; their q, k, v [Hq, tokens, D], scores and the cap's slope [Hq, rows, keys]."""
    for start, end in pairwise(mask.cu_seqlens.tolist()):
        for first in range(start, end, EXPLICIT_ROWS):
            rows = slice(first, min(first + EXPLICIT_ROWS, end))
            keys = slice(start if mask.window is None else max(start, first + 1 - mask.window), rows.stop)
            tile = [
                x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1) for x in (q[rows], k[keys], v[keys])
            ]
            heads = [x.repeat_interleave(q.shape[1] // x.shape[0], 0) for x in tile]
            scores = mask.scale * heads[0] @ heads[1].mT
            tanh = torch.zeros_like(scores) if mask.softcap is None else torch.tanh(scores / mask.softcap)
            scores = scores if mask.softcap is None else mask.softcap * tanh
            distance = torch.arange(len(q), device=q.device)[rows, None] - torch.arange(len(q), device=q.device)[keys]
            hidden = (distance < 0) | (distance >= (mask.window or len(q)))
            yield rows, keys, [*heads, scores.masked_fill(hidden, -torch.inf), 1 - tanh * tanh]


def _explicit_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for rows, _, (_, _, value, scores, _) in _tiles(q, k, v, mask):
        out[rows], lse[:, rows] = (scores.softmax(-1) @ value).transpose(0, 1), scores.logsumexp(-1)
    return out, lse


def _explicit_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask) -> Grads:
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    for rows, keys, (query, key, value, scores, slope) in _tiles(q, k, v, mask):
        d_rows, weights = d_out[rows].transpose(0, 1).to(scores.dtype), torch.exp(scores - lse[:, rows, None])
        delta = (d_rows * out[rows].transpose(0, 1)).sum(-1, keepdim=True)
        d_scores = mask.scale * weights * (d_rows @ value.mT - delta) * slope
        dq[rows] = (d_scores @ key).transpose(0, 1)
        for gradient, heads in ((dk, d_scores.mT @ query), (dv, weights.mT @ d_rows)):
            gradient[keys] += heads.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


EXPLICIT = packed_operator("explicit", _explicit_forward, _explicit_backward)


# The fastest first
KERNELS: dict[str, Operator] = {
    "flash_attention_4": packed_operator("flash_attention_4", _fa4_forward, _fa4_backward),
    "flash_attention_3": packed_operator("flash_attention_3", _fa3_forward, _fa3_backward),
    "cudnn": packed_operator("cudnn", _cudnn_forward, _cudnn_backward),
    "varlen": packed_operator("varlen", _varlen_forward, _varlen_backward),
}


# The module that makes a library's functions callable, and what to install for it.
_LIBRARIES = {
    "flash_attention_4": ("flash_attn.cute.interface", "package flash-attn-4, extra `fa`"),
    "flash_attention_3": ("flash_attn_interface", "package flash_attn_interface, built from its source"),
    "cudnn": ("cudnn.sdpa.fwd.torch_op", "package nvidia-cudnn-frontend, extra `cuda`"),
}


def load(backend: str) -> str | None:
    """Make the library of one of `KERNELS` callable. Returns None, or why it is not: "is not installed: …"."""
    if backend not in _LIBRARIES:  # part of torch
        return None
    module, remedy = _LIBRARIES[backend]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return f"is not installed: {remedy}"
    except Exception as error:  # noqa: BLE001 libraries that were made for another torch fail in every way
        return f"cannot be loaded: {one_line(error)}"
    return None
