"""From hidden states to log-probability, entropy and loss, without the [tokens, vocabulary] logits ever existing.

Tokens go through the head in chunks of C rows; only a chunk's logits are alive. Statistics are float32 (float64 for float64 inputs) whatever
the compute dtype, and the gradient of the head's weight is accumulated over chunks in that precision too: in bfloat16 its error would grow
with the number of chunks. Names carry shapes: N tokens, C of a chunk, V vocabulary, H hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprob [C], entropy [C], streams [K, C]) -> (summed loss, sums [M] to be added up over all chunks for metrics).
The loss must be a sum over tokens; it is differentiated with respect to both of its first arguments."""

Stats = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
DLogits = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The precision of statistics for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stats(logits_CV: Tensor, labels_C: Tensor, inv_temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log partition, log-probability of the label and entropy of softmax(logits / temperature), each [C]."""
    z = logits_CV.to(accumulator(logits_CV.dtype)) * inv_temperature_C[:, None]
    log_z = torch.logsumexp(z, -1)
    entropy = log_z - (torch.exp(z - log_z[:, None]) * z).sum(-1)
    return log_z, z.gather(1, labels_C[:, None]).squeeze(1) - log_z, entropy


def dlogits(
    logits_CV: Tensor,
    labels_C: Tensor,
    inv_temperature_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor,
    d_logprob_C: Tensor,
    d_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient with respect to the logits [C, V]:  d logprob / dz = onehot - p,  d entropy / dz = -p (log p + entropy)."""
    log_p = logits_CV.to(accumulator(logits_CV.dtype)) * inv_temperature_C[:, None] - log_z_C[:, None]
    p = torch.exp(log_p)
    onehot = torch.arange(log_p.shape[1], device=log_p.device)[None] == labels_C[:, None]  # fuses when compiled
    d = d_logprob_C[:, None] * (onehot.to(p.dtype) - p)
    if d_entropy_C is not None:
        d = d - d_entropy_C[:, None] * p * (log_p + entropy_C[:, None])
    return (d * inv_temperature_C[:, None]).to(logits_CV.dtype)


def logprob_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    inv_temperature_N: Tensor,
    chunk: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of its distribution, both [N] and differentiable.

    Keeps no logits: backward computes each chunk's again. For losses that are not a sum of per-token terms, and for scoring.
    """
    return _LogprobEntropy.apply(hidden_NH, weight_VH, labels_N, inv_temperature_N, chunk, *_kernels(compiled))


def fused_token_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    inv_temperature_N: Tensor,
    streams_KN: Tensor,
    token_loss: TokenLoss,
    chunk: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """The loss and the metric sums of `token_loss` over all tokens, in one pass.

    The loss is evaluated inside forward and its gradients are formed there, while the chunk's logits are still alive: three matrix products
    a chunk instead of four.

    Returns:
        loss [] (differentiable in hidden and weight), sums [M] (not differentiable).
    """
    return _FusedTokenLoss.apply(
        hidden_NH, weight_VH, labels_N, inv_temperature_N, streams_KN, token_loss, chunk, *_kernels(compiled)
    )


_COMPILED: dict[str, Any] = {}


def _kernels(compiled: bool) -> tuple[Stats, DLogits]:
    if not compiled:
        return stats, dlogits
    if not _COMPILED:
        _COMPILED.update(stats=torch.compile(stats, dynamic=True), dlogits=torch.compile(dlogits, dynamic=True))
    return _COMPILED["stats"], _COMPILED["dlogits"]


def _add_outer(d_weight_VH: Tensor, d_CV: Tensor, hidden_CH: Tensor) -> None:
    """d_weight += d^T hidden."""
    if d_CV.dtype == d_weight_VH.dtype:
        d_weight_VH.addmm_(d_CV.t(), hidden_CH)
    elif d_CV.is_cuda:  # bfloat16 inputs, float32 accumulator, one matrix product without a temporary
        torch.ops.aten.addmm.dtype_out(d_weight_VH, d_CV.t(), hidden_CH, torch.float32, out=d_weight_VH)
    else:
        d_weight_VH += (d_CV.t() @ hidden_CH).to(d_weight_VH.dtype)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        inv_t: Tensor,
        chunk: int,
        stats: Stats,
        dlogits: DLogits,
    ) -> tuple[Tensor, Tensor]:
        size, dtype = hidden.shape[0], accumulator(hidden.dtype)
        log_z, logprob, entropy = (torch.empty(size, dtype=dtype, device=hidden.device) for _ in range(3))
        for start in range(0, size, chunk):
            s = slice(start, start + chunk)
            log_z[s], logprob[s], entropy[s] = stats(hidden[s] @ weight.t(), labels[s], inv_t[s])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, labels, inv_t, log_z, entropy)
        ctx.chunk, ctx.dlogits = chunk, dlogits
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, labels, inv_t, log_z, entropy = ctx.saved_tensors
        if d_logprob is None:
            d_logprob = torch.zeros_like(log_z)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=log_z.dtype, device=weight.device)
        for start in range(0, hidden.shape[0], ctx.chunk):
            s = slice(start, start + ctx.chunk)
            g_entropy = None if d_entropy is None else d_entropy[s]
            d = ctx.dlogits(hidden[s] @ weight.t(), labels[s], inv_t[s], log_z[s], entropy[s], d_logprob[s], g_entropy)
            torch.mm(d, weight, out=d_hidden[s])
            _add_outer(d_weight, d, hidden[s])
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None, None


class _FusedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        inv_t: Tensor,
        streams: Tensor,
        token_loss: TokenLoss,
        chunk: int,
        stats: Stats,
        dlogits: DLogits,
    ) -> tuple[Tensor, Tensor]:
        differentiate = any(ctx.needs_input_grad[:2])
        dtype = accumulator(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape if differentiate else (), dtype=dtype, device=weight.device)
        # An empty micro-batch runs one empty chunk, so that it returns sums of the right shape too.
        total, sums = torch.zeros((), dtype=dtype, device=hidden.device), torch.zeros((), device=hidden.device)
        for start in range(0, max(hidden.shape[0], 1), chunk):
            s = slice(start, start + chunk)
            logits = hidden[s] @ weight.t()
            log_z, logprob, entropy = stats(logits, labels[s], inv_t[s])
            with torch.enable_grad():
                leaves = logprob.detach().requires_grad_(), entropy.detach().requires_grad_()
                loss, chunk_sums = token_loss(*leaves, streams[:, s])
                g_logprob, g_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
            total, sums = total + loss.detach(), sums + chunk_sums.detach()
            if differentiate:
                g_logprob = torch.zeros_like(logprob) if g_logprob is None else g_logprob
                d = dlogits(logits, labels[s], inv_t[s], log_z, entropy, g_logprob, g_entropy)
                torch.mm(d, weight, out=d_hidden[s])
                _add_outer(d_weight, d, hidden[s])
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * d_loss).to(d_hidden.dtype), (d_weight * d_loss).to(ctx.dtype), *[None] * 7
