"""The head: chunked log-probability, entropy and loss equal those of the full logits, and so do their gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prime_rl.trainer.lm_head import fused_token_loss, logprob_entropy

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int, dtype: torch.dtype = torch.float64, vocabulary: int = 13, width: int = 5) -> Inputs:
    draw = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=draw, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden, weight, labels, torch.rand(tokens, generator=draw, dtype=dtype) + 0.5


def full(hidden: Tensor, weight: Tensor, labels: Tensor, inv_t: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.t() * inv_t[:, None], -1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def ppo_with_entropy(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    ratio = (logprob - streams[0]).exp()
    loss = -(torch.minimum(ratio * streams[1], ratio.clamp(0.8, 1.2) * streams[1]) + 0.1 * entropy).sum()
    return loss, torch.stack([loss.detach(), entropy.sum().detach()])


@pytest.mark.parametrize(
    "pick", [lambda a, b: (a, b), lambda a, b: a, lambda a, b: b], ids=["both", "logprob", "entropy"]
)
def test_gradcheck(pick: Callable[[Tensor, Tensor], object]) -> None:
    """float64 gradients in both outputs, together and alone, agree with finite differences."""
    hidden, weight, labels, inv_t = inputs(7)
    assert torch.autograd.gradcheck(lambda h, w: pick(*logprob_entropy(h, w, labels, inv_t, 3)), (hidden, weight))


def test_gradcheck_of_the_fused_loss() -> None:
    """float64 gradients of a loss that uses log-probability and entropy agree with finite differences."""
    hidden, weight, labels, inv_t = inputs(7)
    streams = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    streams[0] -= 2.5
    assert torch.autograd.gradcheck(
        lambda h, w: fused_token_loss(h, w, labels, inv_t, streams, ppo_with_entropy, 3)[0], (hidden, weight)
    )


@pytest.mark.parametrize("chunk", [1, 4, 20, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_equals_full_logits(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    """Values and gradients equal log_softmax over the whole [tokens, vocabulary] matrix, whatever the chunk."""
    args = inputs(20, dtype, vocabulary=101, width=16)
    want = full(*args)
    upstream = torch.randn(2, 20, dtype=dtype, generator=torch.Generator().manual_seed(2))
    want_grads = torch.autograd.grad((torch.stack(want) * upstream).sum(), args[:2])
    got = logprob_entropy(*args, chunk)
    got_grads = torch.autograd.grad((torch.stack(got) * upstream).sum(), args[:2])
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("chunk", [3, 64])
def test_fused_equals_two_pass(chunk: int) -> None:
    """The one-pass loss, its gradients and its sums equal the same loss on the two-pass head."""
    args = inputs(20)
    streams = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) - 1
    want, want_sums = ppo_with_entropy(*full(*args), streams)
    got, got_sums = fused_token_loss(*args, streams, ppo_with_entropy, chunk)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_sums, want_sums)
    pairs = zip(torch.autograd.grad(3 * got, args[:2]), torch.autograd.grad(3 * want, args[:2]), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


def test_bfloat16_statistics_are_float32() -> None:
    """bfloat16 inputs give float32 outputs close to the float64 result on the same bfloat16 numbers."""
    hidden, weight, labels, inv_t = inputs(50, torch.bfloat16, vocabulary=512, width=32)
    logprob, entropy = logprob_entropy(hidden, weight, labels, inv_t.float(), 16)
    assert logprob.dtype == entropy.dtype == torch.float32
    # The logits themselves are bfloat16 (as the engine's are): compare with statistics of exactly those, in float64.
    logits = (hidden @ weight.t()).double() * inv_t.double()[:, None]
    logp = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logprob.double(), logp.gather(1, labels[:, None]).squeeze(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-4, rtol=1e-5)


def test_no_tokens() -> None:
    """A micro-batch without loss tokens gives a zero loss, sums of the usual shape and zero gradients, and still runs backward."""
    hidden, weight, labels, inv_t = inputs(0)
    loss, sums = fused_token_loss(hidden, weight, labels, inv_t, torch.zeros(2, 0).double(), ppo_with_entropy, 4)
    loss.backward()
    assert loss.item() == 0
    assert sums.tolist() == [0, 0]
    assert weight.grad is not None
    assert not weight.grad.any()
