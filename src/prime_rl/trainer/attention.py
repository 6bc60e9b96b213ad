"""Causal attention over packed documents, registered with transformers, on the fastest kernel that the machine has.

Documents lie one after the other in one sequence of T tokens; `cu_seqlens` [D + 1] are their boundaries (0 first, T
last). No mask function is registered under our name, so transformers builds no mask at all; positions come from
`position_ids`, boundaries from `cu_seqlens` only.
"""

from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.config.trainer import Attention
from prime_rl.errors import UserError
from prime_rl.trainer.attention_kernels import EXPLICIT, KERNELS, load
from prime_rl.trainer.attention_needs import Needs
from prime_rl.trainer.parallel import World, agree, on_main

NAME = "prime_rl_packed"

_HOPPER = (9, 0)
# The largest heads for which `auto` takes a backend; for larger ones some GPUs have no kernel, or none for backward.
_SURE_HEAD_DIM = {"flash_attention_4": 128, "flash_attention_3": 256, "cudnn": 128, "varlen": 256}


def set_up(wanted: Attention, needs: Needs, dtype: torch.dtype, world: World) -> set[Any]:
    """Choose a backend, the same on every rank, say which, and `register` it. Raises UserError, which says why, if the
    wanted backend cannot run in `dtype` here."""
    capability = capability_of(world.device)
    backend, line = on_main(world, lambda: choose(wanted, capability, dtype, needs))
    agree(world, lambda: choose(backend, capability, dtype, needs))
    if world.is_main:
        logger.info("{}", line)
    return register(backend)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None of other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def choose(wanted: str, capability: tuple[int, int] | None, dtype: torch.dtype, needs: Needs) -> tuple[str, str]:
    """Return the backend that `wanted` means here (`auto`: the fastest that is installed and does what is needed), and
    a line that names it and says why each faster one was passed over. Raises UserError if the named backend cannot run;
    it says what to install or use."""
    if wanted != "auto":
        if (reason := why_not(wanted, capability, dtype, needs)) is not None:
            raise UserError(f"model.attention {wanted} {reason}; `auto` takes the fastest that runs here")
        return wanted, f"attention: {wanted}"
    passed_over: list[str] = []
    for backend in ("sdpa", "explicit") if capability is None else (*KERNELS, "sdpa", "explicit"):
        reason = why_not(backend, capability, dtype, needs)
        if reason is None and needs.head_dim > _SURE_HEAD_DIM.get(backend, needs.head_dim):
            reason = f"may have no kernel for heads of size {needs.head_dim}"
        if reason is None:
            break
        passed_over.append(f"{backend} {reason}")
    return backend, f"attention: {backend}" + (f" ({'; '.join(passed_over)})" if passed_over else "")


def why_not(backend: str, capability: tuple[int, int] | None, dtype: torch.dtype, needs: Needs) -> str | None:
    """Why a backend cannot run, as the rest of a sentence that begins with its name. None: it can."""
    if backend == "explicit":
        return None
    if backend == "sdpa":
        return "caps no scores" if needs.softcap else "has no attention sinks" if needs.sinks else None
    if capability is None:
        return "needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"does not compute in {str(dtype).removeprefix('torch.')}"
    if backend == "flash_attention_3" and capability != _HOPPER:
        return "needs a Hopper GPU: compute capability 9.0, not {}.{}".format(*capability)
    least = (8, 0) if backend == "varlen" else _HOPPER
    if capability < least:
        return "needs compute capability {}.{} or more, not {}.{}".format(*least, *capability)
    if needs.head_dim > 256 or needs.head_dim % 8:
        return f"has no kernel for heads of size {needs.head_dim}"
    return "caps no scores" if needs.softcap else load(backend)


def boundaries(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Tensor]:
    """The arguments of every layer that describe the documents, such that compiled blocks serve every pack.

    A number would become a constant of the compiled block, and the next one a new compilation: the longest length is a
    tensor, in host memory because kernels are launched by it. The number of documents is marked as dynamic.
    """
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return {"cu_seqlens": cu_seqlens, "max_seqlen": torch.tensor(max_seqlen, device="cpu")}


def register(backend: str) -> set[Any]:
    """Make `backend`, whose library is loaded, the attention of every model that uses `NAME`. Returns the operators
    whose output selective checkpointing keeps, so that backward computes no attention again."""
    operator = KERNELS.get(backend, EXPLICIT)

    def packed(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert cu_seqlens is not None, "the trainer passes document boundaries to every layer"
        assert max_seqlen is not None, "and the length of the longest document with them"
        assert not dropout, "examined"
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [1, H, T, D] -> [T, H, D]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if backend == "sdpa" and not torch.compiler.is_compiling():  # a graph knows no documents
            assert softcap is s_aux is None, "sdpa has neither"
            return sdpa(q, k, v, cu_seqlens, scale, sliding_window)[None], None
        size, value_size = q.shape[-1], v.shape[-1]
        if size != value_size and operator is not EXPLICIT:  # kernels want one size: zeros change no score and no sum
            q, k, v = (F.pad(x, (0, max(size, value_size) - x.shape[-1])) for x in (q, k, v))
        out = operator(q, k, v, cu_seqlens, max_seqlen, scale, sliding_window, softcap, s_aux)[0]
        return (out if out.shape[-1] == value_size else out[..., :value_size])[None], None

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed)
    if backend != "sdpa":
        return {getattr(torch.ops.prime_rl, backend).default}
    aten = torch.ops.aten
    return {
        torch.ops.prime_rl.explicit.default,  # where blocks are compiled
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
    }


def sdpa(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None) -> Tensor:
    """torch's scaled_dot_product_attention, one document after the other: exact at the boundaries by construction.

    Costs the sum of the documents' squares. One CPU core at 2048 tokens, forward and backward: 32 documents 11 ms
    against 213 ms with a [T, T] mask, one document 118 against 204. On a GPU reading the boundaries waits for it.
    """
    outs, lengths = [], cu_seqlens.diff().tolist()
    parts = (x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v))  # [1, H, tokens, D]
    for length, q, k, v in zip(lengths, *parts, strict=True):
        mask = None
        if window is not None and window < length:
            at = torch.arange(length, device=q.device)
            mask = (at <= at[:, None]) & (at > at[:, None] - window)
        outs.append(F.scaled_dot_product_attention(q, k, v, mask, 0.0, mask is None, scale=scale, enable_gqa=True))
    out = torch.cat(outs, dim=2)[0]
    return out.transpose(0, 1).contiguous()  # as from transformers' functions: some models take a view of it
