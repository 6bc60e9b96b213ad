"""Triton kernels, imported where tensors are on CUDA; tested against formulas in torch (`lm_head.py`, `moe.py`).

The head's two passes over a chunk of logits: one reads all statistics, one reads and writes in place the gradient.
Statistics are float32; exponentials have base 2, as the hardware computes them. C tokens of a chunk, V vocabulary.

Rows of tokens to their places among the experts' rows and back, every row read and written once. Inductor's own gather
computes each element's index anew and took five times memory's time. T tokens, K places of each, S = T·K, H columns.
Convolutions along packed documents, tested against `recurrent_kernels.convolution_formula`: C channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # a logit no row has; finite, because lanes that hold it are multiplied by 0
BLOCK = 4096  # logits a program takes at once
WARPS = 8


@triton.jit
def _absorb(x: tl.tensor, scale: tl.tensor, top: tl.tensor, mass: tl.tensor, moment: tl.tensor) -> tl.tuple:
    """Take logits x [LANES, WIDTH] into the statistics [LANES] of z = x · scale.

    top = max z,  mass = Σ 2^(z - top),  moment = Σ 2^(z - top) (z - top).  A lane takes its new maximum once for all
    WIDTH logits, which one thread has loaded: little more than one exponential a logit, no thread waits for another.
    """
    new = tl.maximum(top, tl.max(x, 1) * scale)
    rise = top - new
    keep = tl.exp2(rise)
    z = x * scale - new[:, None]
    e = tl.exp2(z)
    moment = (moment + mass * rise) * keep + tl.sum(e * z, 1)
    return new, mass * keep + tl.sum(e, 1), moment


# Row tensors may be slices, aligned or not: telling the two apart would compile everything twice, at some later step.
@triton.jit(do_not_specialize_on_alignment=["labels", "inv_temperature", "log_z", "logprob", "entropy"])
def _stats(
    logits: tl.tensor,
    labels: tl.tensor,
    inv_temperature: tl.tensor,
    log_z: tl.tensor,
    logprob: tl.tensor,
    entropy: tl.tensor,
    V: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # C · V passes 2^31
    x = logits + row * V
    scale = tl.load(inv_temperature + row) * LOG2_E
    at = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None]
    top = tl.full([LANES], LOWEST, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    WHOLE: tl.constexpr = V // (LANES * WIDTH) * (LANES * WIDTH)
    for start in range(0, WHOLE, LANES * WIDTH):
        part = tl.load(x + start + at).to(tl.float32)
        top, mass, moment = _absorb(part, scale, top, mass, moment)
    if WHOLE < V:
        inside = WHOLE + at < V
        part = tl.load(x + WHOLE + at, mask=inside, other=0.0).to(tl.float32)
        top, mass, moment = _absorb(tl.where(inside, part, LOWEST), scale, top, mass, moment)

    peak = tl.max(top, 0)
    rise = top - peak
    keep = tl.exp2(rise)
    moment_all = tl.sum((moment + mass * rise) * keep, 0)
    mass_all = tl.sum(mass * keep, 0)
    log_mass = tl.log2(mass_all)
    h = (log_mass - moment_all / mass_all) * LN_2
    # A logit of -inf would go unnoticed in the partition; the moment it makes NaN, and so all three.
    z = tl.where(h == h, peak + log_mass, float("nan"))
    at_label = tl.load(labels + row)
    known = (at_label >= 0) & (at_label < V)  # else whatever is there would be read
    label = tl.load(x + at_label, mask=known, other=float("nan")).to(tl.float32) * scale
    tl.store(log_z + row, z * LN_2)
    tl.store(logprob + row, (label - z) * LN_2)
    tl.store(entropy + row, h)


@triton.jit(do_not_specialize_on_alignment=["labels", "inv_temperature", "log_z", "entropy", "d_logprob", "d_entropy"])
def _dlogits(
    logits: tl.tensor,
    labels: tl.tensor,
    inv_temperature: tl.tensor,
    log_z: tl.tensor,
    entropy: tl.tensor,
    d_logprob: tl.tensor,
    d_entropy: tl.tensor,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOPE: tl.constexpr,
) -> None:
    """Store BLOCK logits' d = (onehot - p) d_logprob - p (log p + entropy) d_entropy, by the temperature. With a SLOPE
    the logits are x = tanh(SLOPE · u), and d is multiplied by dx / du."""
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    inv_t = tl.load(inv_temperature + row)
    g_logprob = tl.load(d_logprob + row) * inv_t
    g_entropy = tl.load(d_entropy + row) * inv_t
    # What p is multiplied by is linear in log2 p, with factors that the whole row shares.
    offset = g_logprob + g_entropy * tl.load(entropy + row)
    slope = g_entropy * LN_2
    x = logits + row * V + at
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    log2_p = value * (inv_t * LOG2_E) - tl.load(log_z + row) * LOG2_E
    d = tl.where(at == tl.load(labels + row).to(tl.int32), g_logprob, 0.0) - tl.exp2(log2_p) * (slope * log2_p + offset)
    if SLOPE is not None:
        d *= SLOPE * (1 - value * value)
    tl.store(x, d.to(logits.dtype.element_ty), mask=inside)


def stats(logits_CV: Tensor, labels_C: Tensor, inv_temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log partition, the label's log-probability and entropy [C] float32 of softmax(logits / temperature). The
    log-probability of a label outside the vocabulary is NaN. See `lm_head.stats`."""
    assert logits_CV.is_contiguous(), "the kernels know no strides"
    size, vocabulary = logits_CV.shape
    log_z, logprob, entropy = (torch.empty(size, dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    if size:
        rows = labels_C.contiguous(), inv_temperature_C.contiguous(), log_z, logprob, entropy
        width = 16 // logits_CV.element_size()  # bytes of a thread's widest load
        _stats[(size,)](logits_CV, *rows, vocabulary, BLOCK // width, width, num_warps=WARPS)
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
    """Overwrite the logits with the gradient with respect to them; see `lm_head.dlogits_`."""
    assert logits_CV.is_contiguous(), "the kernels know no strides"
    size, vocabulary = logits_CV.shape
    if size:
        rows = labels_C, inv_temperature_C, log_z_C, entropy_C, d_logprob_C, d_entropy_C
        # The gradient of a sum is one number, expanded.
        contiguous = [row.contiguous() for row in rows]
        grid = (size * triton.cdiv(vocabulary, BLOCK),)
        _dlogits[grid](logits_CV, *contiguous, vocabulary, BLOCK, slope, num_warps=WARPS)
    return logits_CV


COLUMNS = 2048  # of a row that a program takes


# One program a token and so many columns. There may be more than 2^31 elements: addresses are int64.
@triton.jit
def _spread(
    rows: tl.tensor, positions: tl.tensor, out: tl.tensor, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + token * H + at, mask=at < H)
    for k in tl.static_range(K):
        place = tl.load(positions + token * K + k).to(tl.int64)
        tl.store(out + place * H + at, row, mask=at < H)


@triton.jit
def _collect(
    rows: tl.tensor, positions: tl.tensor, out: tl.tensor, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(positions + token * K + k).to(tl.int64)
        total += tl.load(rows + place * H + at, mask=at < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=at < H)


def spread(rows_TH: Tensor, place_TK: Tensor) -> Tensor:
    """Each token's row at its K places: [S, H]."""
    return _launch(_spread, rows_TH, place_TK, place_TK.numel())


def collect(rows_SH: Tensor, place_TK: Tensor) -> Tensor:
    """The sum of the rows at each token's K places: [T, H], added in float32 in the order of K, and rounded once."""
    return _launch(_collect, rows_SH, place_TK, len(place_TK))


def _launch(kernel: triton.JITFunction, rows: Tensor, place_TK: Tensor, count: int) -> Tensor:
    """Return the `count` rows that a kernel makes of `rows`."""
    assert rows.is_contiguous()
    assert place_TK.is_contiguous()
    (tokens, k), width = place_TK.shape, rows.shape[1]
    out = rows.new_empty(count, width)
    with torch.cuda.device(rows.device):
        kernel[tokens, triton.cdiv(width, COLUMNS)](rows, place_TK, out, width, k, COLUMNS)
    return out


STEPS, UNROLL, CHANNELS, CHANNEL_WARPS = 64, 8, 128, 1  # a program's tile, tokens × channels; fastest on an H200


@triton.jit
def _convolve(
    row: tl.tensor,
    weight: tl.tensor,
    documents: tl.tensor,
    d_out: tl.tensor,
    out: tl.tensor,
    d_weight: tl.tensor,
    T: tl.tensor,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Walk along so many tokens of so many channels, with the last three tokens in registers. Forward without `d_out`.

    Backward, each token completes the gradient of the one three before, so that tiles overlap by three tokens. The
    weights' gradient is one part for each tile.
    """
    BACKWARD: tl.constexpr = d_out is not None
    OWN: tl.constexpr = STEPS - 3 if BACKWARD else STEPS
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    first = tl.program_id(0) * OWN
    w3 = tl.load(weight + channels * 4, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(weight + channels * 4 + 1, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(weight + channels * 4 + 2, mask=inside, other=0.0).to(tl.float32)
    w0 = tl.load(weight + channels * 4 + 3, mask=inside, other=0.0).to(tl.float32)
    start = first.to(tl.int64) * C + channels
    document = tl.load(documents + first)
    seen1 = document == tl.load(documents + first - 1, mask=first > 0, other=-1)
    seen2 = document == tl.load(documents + first - 2, mask=first > 1, other=-1)
    seen3 = document == tl.load(documents + first - 3, mask=first > 2, other=-1)
    x1 = tl.load(row + start - C, mask=inside & seen1, other=0.0).to(tl.float32)
    x2 = tl.load(row + start - 2 * C, mask=inside & seen2, other=0.0).to(tl.float32)
    x3 = tl.load(row + start - 3 * C, mask=inside & seen3, other=0.0).to(tl.float32)
    none = tl.zeros([CHANNELS], tl.float32)
    dx1, dx2, dx3, dw0, dw1, dw2, dw3 = none, none, none, none, none, none, none
    for begin in range(0, STEPS, UNROLL):
        for i in tl.static_range(UNROLL):
            at = begin + i
            token = first + at
            here = start + at.to(tl.int64) * C
            exists = inside & (token < T)
            before, document = document, tl.load(documents + token, mask=token < T, other=-1)
            goes_on = document == before
            seen3, seen2, seen1 = goes_on & seen2, goes_on & seen1, goes_on  # which gradients are this document's
            x0 = tl.load(row + here, mask=exists, other=0.0).to(tl.float32)
            x1 = tl.where(goes_on, x1, 0.0)
            x2 = tl.where(goes_on, x2, 0.0)
            x3 = tl.where(goes_on, x3, 0.0)
            total = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
            gate = tl.sigmoid(total)
            if BACKWARD:
                d = tl.load(d_out + here, mask=exists, other=0.0).to(tl.float32) * gate * (1 + total * (1 - gate))
                dx3 += tl.where(seen3, d * w3, 0.0)
                complete = inside & (at > 2) & (token < T + 3)
                tl.store(out + here - 3 * C, dx3.to(out.dtype.element_ty), mask=complete)
                dx3 = dx2 + tl.where(seen2, d * w2, 0.0)
                dx2 = dx1 + tl.where(seen1, d * w1, 0.0)
                dx1 = d * w0
                d = tl.where(at < OWN, d, 0.0)
                dw0 += d * x0
                dw1 += d * x1
                dw2 += d * x2
                dw3 += d * x3
            else:
                tl.store(out + here, (total * gate).to(out.dtype.element_ty), mask=exists)
            x3, x2, x1 = x2, x1, x0
    if BACKWARD:
        part = d_weight + (tl.program_id(0) * C + channels) * 4
        tl.store(part, dw3, mask=inside)
        tl.store(part + 1, dw2, mask=inside)
        tl.store(part + 2, dw1, mask=inside)
        tl.store(part + 3, dw0, mask=inside)


def convolution(row: Tensor, weight: Tensor, documents: Tensor) -> Tensor:
    """See `recurrent_kernels.convolution_formula`, with K = 4 and SiLU."""
    out = torch.empty_like(row)
    _walk(STEPS, row, weight, documents, None, out, None)
    return out


def convolution_backward(d_out: Tensor, row: Tensor, weight: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    d_row, own = torch.empty_like(row), STEPS - 3
    d_weight = weight.new_empty(triton.cdiv(row.shape[1], own), *weight.shape, dtype=torch.float32)
    _walk(own, row, weight, documents, d_out, d_row, d_weight)
    return d_row, d_weight.sum(0).to(weight.dtype)


def _walk(own: int, row: Tensor, *rest: Tensor | None) -> None:
    _, tokens, channels = row.shape
    sizes, grid = (STEPS, UNROLL, CHANNELS), (triton.cdiv(tokens, own), triton.cdiv(channels, CHANNELS))
    with torch.cuda.device(row.device):
        _convolve[grid](row, *rest, tokens, channels, *sizes, num_warps=CHANNEL_WARPS)
