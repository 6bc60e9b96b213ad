"""From hidden states to log-probability, entropy and loss, without materializing [tokens, vocabulary] logits.

Tokens go through the head in chunks of C rows; only a chunk's logits exist, in one buffer for all chunks. Statistics
and the accumulated gradient of the head's weight are float32 (float64 for float64 inputs): in bfloat16 the gradient's
error would grow with the number of chunks. Names carry shapes: N tokens, C of a chunk, V vocabulary, H hidden.

A model's forward may scale and soft-cap its logits (`HeadForm`). The outer factor, scale or cap, goes into the
inverse temperature: a chunk holds x = hidden weight^T + bias, or with a cap x = tanh(slope · that).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprob [C], entropy [C], streams [K, C]) -> (summed loss, metric sums [M], the last MAXIMA of which are maxima).
A sum over tokens, differentiated with respect to its first two arguments and compiled into one graph."""

MAXIMA = 4


@dataclass(frozen=True)
class HeadForm:
    """How a model makes logits of u = hidden weight^T + bias:  logits = scale · u,  or  cap · tanh(scale · u / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @property
    def slope(self) -> float | None:
        """The factor of u inside the tanh; None without a cap."""
        return None if self.cap is None else self.scale / self.cap

    def fold(self, inv_temperature_N: Tensor) -> Tensor:
        """Scale inverse temperature by the outer factor."""
        factor = self.scale if self.cap is None else self.cap
        return inv_temperature_N if factor == 1 else inv_temperature_N * factor


PLAIN = HeadForm()


def merge_sums(sums: Sequence[Tensor]) -> Tensor:
    """Merge [M] by adding, the last `MAXIMA` by maximum."""
    rows_RM = torch.stack(list(sums))
    return torch.cat([rows_RM[:, :-MAXIMA].sum(0), rows_RM[:, -MAXIMA:].amax(0)])


def stats(logits_CV: Tensor, labels_C: Tensor, inv_temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log partition, log-probability of the label and entropy of softmax(logits / temperature), each [C].

    All are NaN for a row with a NaN or infinite logit, even -inf: it is an error that no loss may hide.
    """
    if use_triton(logits_CV):
        from prime_rl.trainer import triton_kernels

        return triton_kernels.stats(logits_CV, labels_C, inv_temperature_C)
    log_p = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) * inv_temperature_C[:, None]
    log_z = torch.logsumexp(log_p, -1)
    log_p -= log_z[:, None]
    entropy = -(torch.exp(log_p) * log_p).sum(-1)  # 0 · -inf is NaN
    log_z = torch.where(entropy.isnan(), torch.nan, log_z)
    logprob = torch.where(entropy.isnan(), torch.nan, log_p.gather(1, labels_C[:, None]).squeeze(1))
    return log_z, logprob, entropy


def dlogits_(
    logits_CV: Tensor,
    labels_C: Tensor,
    inv_temperature_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor,
    d_logprob_C: Tensor,
    d_entropy_C: Tensor,
    slope: float | None = None,
) -> Tensor:
    """Overwrite the logits [C, V] with the gradient with respect to them, and return them.

    d logprob / dz = onehot - p,  d entropy / dz = -p (log p + entropy),  where z = logits / temperature.
    With `slope` the logits are x = tanh(slope · u), and the gradient is with respect to u: dx / du = slope (1 - x²).
    """
    rows = labels_C, inv_temperature_C, log_z_C, entropy_C, d_logprob_C, d_entropy_C
    if use_triton(logits_CV):
        from prime_rl.trainer import triton_kernels

        return triton_kernels.dlogits_(logits_CV, *rows, slope)
    dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    log_p = logits_CV.to(dtype) * inv_temperature_C[:, None] - log_z_C[:, None]
    p = torch.exp(log_p)
    d = p * -(d_logprob_C[:, None] + d_entropy_C[:, None] * (log_p + entropy_C[:, None]))
    d.scatter_add_(1, labels_C[:, None], d_logprob_C[:, None])
    d = d * inv_temperature_C[:, None]
    return logits_CV.copy_(d if slope is None else d * slope * (1 - logits_CV.to(d.dtype).square()))


def use_triton(tensor: Tensor) -> bool:
    """Return whether our Triton kernels (float32) can compute it."""
    return tensor.is_cuda and tensor.dtype != torch.float64


def logprob_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    inv_temperature_N: Tensor,
    chunk: int,
    *,
    bias_V: Tensor | None = None,
    form: HeadForm = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy of its distribution, both [N] and differentiable.

    Keeps no logits: backward recomputes each chunk's (four matrix products). For scoring and sequence losses.
    """
    inv_t = form.fold(inv_temperature_N)
    return _LogprobEntropy.apply(hidden_NH, weight_VH, bias_V, labels_N, inv_t, chunk, form.slope)


def fused_token_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    inv_temperature_N: Tensor,
    streams_KN: Tensor,
    token_loss: TokenLoss,
    chunk: int,
    compiled: bool = False,
    *,
    bias_V: Tensor | None = None,
    form: HeadForm = PLAIN,
    stats_2N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `token_loss` of all tokens: loss [], differentiable once in hidden, weight and bias, and metric sums [M].

    Gradients are computed in forward, while a chunk's logits exist: three matrix products per chunk, not four. With
    `compiled`, `token_loss` and its gradient are compiled, once for all sizes: in eager mode their many operations on
    [C] cost more than the logits. Log-probabilities and entropies are written into `stats_2N`, if it is given.
    """
    inv_t = form.fold(inv_temperature_N)
    return _FusedTokenLoss.apply(
        hidden_NH, weight_VH, bias_V, labels_N, inv_t, streams_KN, token_loss, chunk, compiled, form.slope, stats_2N
    )


def _chunked_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, slope: float | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield each chunk's rows and their x, valid until the next chunk is made.

    Without tokens, one empty chunk is yielded, so that results have the right shape when added up.
    """
    size = hidden.shape[0]
    room = torch.empty(min(chunk, size), weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    for start in range(0, max(size, 1), chunk):
        s = slice(start, min(start + chunk, size))
        logits = torch.mm(hidden[s], weight.t(), out=room[: s.stop - s.start])
        if bias is not None:
            logits += bias
        yield s, logits if slope is None else logits.mul_(slope).tanh_()


def _make_gradients(hidden: Tensor, *trained: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Allocate d hidden [N, H] and, zeroed, at least in float32, d weight [V, H] and d bias [V] of what is trained."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    d_weight, d_bias = (None if each is None else torch.zeros_like(each, dtype=dtype) for each in trained)
    return torch.empty_like(hidden), d_weight, d_bias


def _backward(
    d_CV: Tensor,
    hidden_CH: Tensor,
    weight: Tensor,
    d_hidden_CH: Tensor,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """Compute from d, the logits' gradient:  d_hidden = d weight,  d_weight += d^T hidden,  d_bias += Σ d."""
    torch.mm(d_CV, weight, out=d_hidden_CH)
    if not len(d_CV):
        return
    if d_bias is not None:
        d_bias += d_CV.sum(0, dtype=d_bias.dtype)
    if d_weight is None:
        return
    if d_CV.dtype == d_weight.dtype:
        d_weight.addmm_(d_CV.t(), hidden_CH)
    elif d_CV.is_cuda:  # bfloat16 inputs, float32 accumulator, one matrix product without a temporary
        torch.ops.aten.addmm.dtype_out(d_weight, d_CV.t(), hidden_CH, torch.float32, out=d_weight)
    else:
        d_weight += (d_CV.t() @ hidden_CH).to(d_weight.dtype)


@functools.cache
def _differentiated(token_loss: TokenLoss, compiled: bool) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """Return one function for `token_loss` and its gradients, which compiles to one graph without autograd outside.

    It maps a token loss's arguments to (loss, sums, d logprob [C], d entropy [C]).
    """
    both = torch.func.grad_and_value(token_loss, argnums=(0, 1), has_aux=True)

    def run(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (d_logprob, d_entropy), (loss, sums) = both(logprob, entropy, streams)
        return loss, sums, d_logprob, d_entropy

    if not compiled:
        return run
    graph = torch.compile(run, fullgraph=True)

    def run_compiled(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # A slice's strides would be compiled in, and its base's size with them.
        streams = streams.clone(memory_format=torch.contiguous_format)
        for tensor in (logprob, entropy, streams):
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
        return graph(logprob, entropy, streams)

    return run_compiled


def _trained(ctx: Any, *parameters: Tensor | None) -> list[Tensor | None]:
    """Weight and bias, the second and third input, where they need a gradient."""
    return [each if needed else None for each, needed in zip(parameters, ctx.needs_input_grad[1:3], strict=True)]


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, inv_t: Tensor, chunk: int, slope: Any
    ) -> tuple[Tensor, Tensor]:
        size, dtype = hidden.shape[0], torch.promote_types(hidden.dtype, torch.float32)
        log_z, logprob, entropy = (torch.empty(size, dtype=dtype, device=hidden.device) for _ in range(3))
        for s, logits in _chunked_logits(hidden, weight, bias, chunk, slope):
            log_z[s], logprob[s], entropy[s] = stats(logits, labels[s], inv_t[s])
        ctx.save_for_backward(hidden, weight, bias, labels, inv_t, log_z, entropy)
        ctx.chunk, ctx.slope = chunk, slope
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprob: Tensor, d_entropy: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, bias, labels, inv_t, log_z, entropy = ctx.saved_tensors
        d_hidden, d_weight, d_bias = _make_gradients(hidden, *_trained(ctx, weight, bias))
        for s, logits in _chunked_logits(hidden, weight, bias, ctx.chunk, ctx.slope):
            d = dlogits_(logits, labels[s], inv_t[s], log_z[s], entropy[s], d_logprob[s], d_entropy[s], ctx.slope)
            _backward(d, hidden[s], weight, d_hidden[s], d_weight, d_bias)
        return *(None if each is None else each.to(weight.dtype) for each in (d_hidden, d_weight, d_bias)), *[None] * 4


class _FusedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        inv_t: Tensor,
        streams: Tensor,
        token_loss: TokenLoss,
        chunk: int,
        compiled: bool,
        slope: float | None,
        stats_2N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        d_hidden, d_weight, d_bias = _make_gradients(hidden, *_trained(ctx, weight, bias))
        losses, sums = [], []
        for s, logits in _chunked_logits(hidden, weight, bias, chunk, slope):
            log_z, logprob, entropy = stats(logits, labels[s], inv_t[s])
            if stats_2N is not None:
                stats_2N[0, s], stats_2N[1, s] = logprob, entropy
            loss_of = _differentiated(token_loss, compiled and len(logprob) > 1)  # Dynamo specializes sizes 0 and 1
            loss, chunk_sums, d_logprob, d_entropy = loss_of(logprob, entropy, streams[:, s])
            losses.append(loss)
            sums.append(chunk_sums)
            d = dlogits_(logits, labels[s], inv_t[s], log_z, entropy, d_logprob, d_entropy, slope)
            _backward(d, hidden[s], weight, d_hidden[s], d_weight, d_bias)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight.dtype
        all_sums = merge_sums(sums)
        ctx.mark_non_differentiable(all_sums)
        return torch.stack(losses).sum(0), all_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        # In training d_loss is 1, but checking would wait for the device. Multiplying is free: the cast runs anyway.
        scaled = [
            None if gradient is None else torch.mul(gradient, d_loss, out=torch.empty_like(gradient, dtype=ctx.dtype))
            for gradient in ctx.saved_tensors
        ]
        return *scaled, *[None] * 8
