"""The head: chunked log-probability, entropy and loss equal those of the full logits, and so do their gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prime_rl.config.trainer import DefaultLoss, GRPOLoss
from prime_rl.trainer.lm_head import MAXIMA, PLAIN, HeadForm, fused_token_loss, logprob_entropy, stats
from prime_rl.trainer.loss import STREAMS, cross_entropy, make_loss

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int, dtype: torch.dtype = torch.float64, vocabulary: int = 13, width: int = 5) -> Inputs:
    draw = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=draw, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden, weight, labels, torch.rand(tokens, generator=draw, dtype=dtype) + 0.5


def full(
    hidden: Tensor, weight: Tensor, labels: Tensor, inv_t: Tensor, bias: Tensor | None = None, form: HeadForm = PLAIN
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.t() + (0 if bias is None else bias)) * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    logp = torch.log_softmax(logits * inv_t[:, None], -1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def ppo_with_entropy(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    ratio, advantage = (logprob - streams[1]).exp(), streams[2]
    loss = -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.1 * entropy).sum()
    return loss, torch.cat([torch.stack([loss.detach(), entropy.sum().detach()]), loss.new_zeros(MAXIMA)])


FORMS = [PLAIN, HeadForm(scale=0.0625), HeadForm(cap=2.5), HeadForm(8.0, 30.0)]


@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("token_loss", "dtype", "tolerance"),
    [
        (ppo_with_entropy, torch.float32, 2e-5),
        *((loss, torch.float64, 1e-12) for loss in (ppo_with_entropy, make_loss(DefaultLoss()), make_loss(GRPOLoss()))),
    ],
)
def test_scale_cap_and_bias_equal_those_of_full_logits(form, biased, chunk, token_loss, dtype, tolerance):
    """Values and gradients of hidden states, weight and bias, in one pass and in two, whatever the chunk, are those of
    the whole [tokens, vocabulary] matrix of logits that were scaled and capped before the temperature; so are the sums,
    and what a loss detaches stays detached."""
    head = inputs(20, dtype, vocabulary=101, width=16)
    bias = torch.linspace(-1, 1, 101, dtype=dtype, requires_grad=True) if biased else None
    leaves = [*head[:2], *([] if bias is None else [bias])]
    draw = torch.Generator().manual_seed(2)
    streams = torch.rand(len(STREAMS), 20, dtype=dtype, generator=draw)
    of_full, of_chunks = full(*head, bias, form), logprob_entropy(*head, chunk, bias_V=bias, form=form)
    torch.testing.assert_close(torch.stack(of_chunks), torch.stack(of_full), atol=tolerance, rtol=tolerance)
    streams[1] = of_full[0].detach() + 0.5 * torch.randn(20, dtype=dtype, generator=draw)
    streams[2:4] = torch.randn(2, 20, dtype=dtype, generator=draw)
    want, two = (token_loss(*values, streams) for values in (of_full, of_chunks))
    token_stats = torch.empty(2, 20, dtype=dtype)
    one = fused_token_loss(*head, streams, token_loss, chunk, bias_V=bias, form=form, stats_2N=token_stats)
    torch.testing.assert_close(token_stats, torch.stack(of_full), atol=tolerance, rtol=tolerance)
    want_grads = torch.autograd.grad(3 * want[0], leaves)
    for loss, sums in (one, two):
        got = loss, sums, *torch.autograd.grad(3 * loss, leaves)
        for a, b in zip(got, (*want, *want_grads), strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_no_tokens():
    """A micro-batch without loss tokens gives a zero loss, the usual shapes, zero gradients, and runs backward."""
    hidden, weight, labels, inv_t = inputs(0)
    loss, sums = fused_token_loss(hidden, weight, labels, inv_t, torch.zeros(3, 0).double(), ppo_with_entropy, 4)
    loss.backward()
    assert (loss.item(), sums.tolist()) == (0, (2 + MAXIMA) * [0])
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_hidden(bad):
    """A logit that is not finite makes its row NaN, and the loss. A certain label is no such thing."""
    logits = torch.randn(4, 13, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2, 5] = bad, 1e4
    rows = torch.tensor([0, 1, 5, 3]), torch.ones(4)
    for got in stats(logits, *rows):
        assert got.isnan().tolist() == [False, True, False, False]
    assert stats(logits, *rows)[1][2] == 0
    hidden, weight, labels, inv_t = inputs(6)
    hidden.data[4, 0] = bad
    loss, sums = fused_token_loss(hidden, weight, labels, inv_t, torch.ones(1, 6).double(), cross_entropy, 4)
    assert loss.isnan()
    assert sums[:-MAXIMA].isnan().all()


def test_kernels_under_the_interpreter():
    """Every test of interpreted_kernels.py passes, in a process: Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", Path(__file__).with_name("interpreted_kernels.py"), "-W", "ignore"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
