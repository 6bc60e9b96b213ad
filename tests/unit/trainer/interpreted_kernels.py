"""The Triton kernels on the CPU are the torch formulas. `test_lm_head.py` runs this under Triton's interpreter."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from prime_rl.trainer import lm_head, moe, recurrent_kernels, triton_kernels

Rows = tuple[Tensor, Tensor]
SIZES = [7, 4096, 5000]
"""Vocabularies: less than a block, exactly one, one and a part."""


def chunk(
    vocabulary: int, dtype: torch.dtype = torch.float32, size: int = 5, spread: float = 3.0
) -> tuple[Tensor, Rows]:
    """Logits [size, vocabulary], and labels and inverse temperatures (of temperatures 0.1 to 2) [size]."""
    draw = torch.Generator().manual_seed(vocabulary)
    logits = (spread * torch.randn(size, vocabulary, generator=draw)).to(dtype)
    labels = torch.randint(0, vocabulary, (size,), generator=draw)
    return logits, (labels, 1 / torch.linspace(0.1, 2, size))


def exactly(logits: Tensor, labels: Tensor, inv_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas in float64 for the very same logits."""
    return lm_head.stats(logits.double(), labels, inv_t.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("cap", [None, 0.1])
def test_head(cap, vocabulary, dtype):
    """Partition, log-probability and entropy equal the float64 formulas on the same logits, at temperatures from 0.1 to
    2; d logits, of what a soft-cap was applied to, does to the rounding of the logits' dtype, and lies where the logits
    were."""
    logits, rows = chunk(vocabulary, dtype)
    if cap:
        logits.mul_(cap).tanh_()
        rows = rows[0], rows[1] * 20
    log_z, logprob, entropy = exactly(logits, *rows)
    for got, want in zip(triton_kernels.stats(logits, *rows), (log_z, logprob, entropy), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-6)
    upstream = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    exact = (x.double() for x in (rows[1], log_z, entropy, *upstream))
    want = lm_head.dlogits_(logits.double(), rows[0], *exact, slope=cap)
    got = triton_kernels.dlogits_(logits, *rows, log_z.float(), entropy.float(), *upstream, slope=cap)
    assert got is logits
    # p is off by what float32 cannot say about z, which here reaches 120.
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4 + torch.finfo(dtype).eps)


def test_odd_rows():
    """The gradient of a plain sum has stride 0: all rows get it. An empty chunk is no error. A label outside the
    vocabulary is not read from whatever lies there: its log-probability is NaN."""
    logits, (labels, inv_t) = chunk(100)
    log_z, _, entropy = lm_head.stats(logits, labels, inv_t)
    rows = labels, inv_t, log_z, entropy, torch.ones(()).expand(5), torch.zeros(5)
    torch.testing.assert_close(triton_kernels.dlogits_(logits.clone(), *rows), lm_head.dlogits_(logits.clone(), *rows))
    none = [row[:0] for row in rows]
    assert [tuple(x.shape) for x in triton_kernels.stats(logits[:0], *none[:2])] == [(0,)] * 3
    assert triton_kernels.dlogits_(logits[:0], *none).shape == (0, 100)
    for label in (-1, 100, 2**40):
        labels[4] = label
        assert triton_kernels.stats(logits, labels, inv_t)[1].isnan().tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 4095, 4999])
def test_what_is_not_finite_is_never_hidden(bad, place):
    """One logit that is not finite makes its own row NaN, statistics and gradient, and no other."""
    logits, rows = chunk(5000)
    logits[2, place] = bad
    statistics = triton_kernels.stats(logits, *rows)
    for got in statistics:
        assert got.isnan().tolist() == [False, False, True, False, False]
    log_z, _, entropy = statistics
    d = triton_kernels.dlogits_(logits, *rows, log_z, entropy, torch.ones(5), torch.zeros(5))
    assert d[2].isnan().all()
    assert d[torch.arange(5) != 2].isfinite().all()


@pytest.mark.parametrize(("tokens", "k", "width"), [(7, 3, 40), (5, 2, 2048), (4, 8, 2100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spread_and_collect(tokens, k, width, dtype, monkeypatch):
    """Rows arrive where torch puts them, bit for bit; sums differ by the order of addition at most, at any width."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    torch.manual_seed(0)
    rows = torch.randn(tokens, width).to(dtype)
    place = torch.randperm(tokens * k).to(torch.int32).view(tokens, k)
    assert torch.equal(triton_kernels.spread(rows, place), moe.spread(rows, place))
    other = torch.randn(tokens * k, width).to(dtype)
    torch.testing.assert_close(triton_kernels.collect(other, place), moe.collect(other, place))


@pytest.mark.parametrize("lengths", [(70, 1, 2, 3, 50), (64, 64, 5), (1, 1, 1, 130)])
def test_convolution(lengths, monkeypatch):
    """Output and gradients are those of the formula, at every boundary of documents, programs and channels."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(triton_kernels, "STEPS", 16)
    monkeypatch.setattr(triton_kernels, "CHANNELS", 32)
    torch.manual_seed(0)
    row, weight = torch.randn(1, sum(lengths), 40, requires_grad=True), torch.randn(40, 4, requires_grad=True)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()
    want, d_out = recurrent_kernels.convolution_formula(row, weight, None, documents), torch.randn_like(row)
    torch.testing.assert_close(triton_kernels.convolution(row, weight, documents), want)
    gradients = torch.autograd.grad(want, (row, weight), d_out)
    for got, exact in zip(triton_kernels.convolution_backward(d_out, row, weight, documents), gradients, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)
