"""The head on the GPU: its kernels and products give what float64 gives, never compile twice and keep no logits."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from prime_rl.config.trainer import GRPOLoss
from prime_rl.trainer import lm_head
from prime_rl.trainer.lm_head import fused_token_loss, logprob_entropy
from prime_rl.trainer.loss import STREAMS, make_loss

GPU = torch.device("cuda")
VOCABULARY = 151_936
GRPO = make_loss(GRPOLoss())

Head = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def random_head():
    """Hidden states [1000, 1024] and weight [V, 1024], drawn on the CPU, whose logits have variance 1."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1000, 1024, generator=draw), torch.randn(VOCABULARY, 1024, generator=draw) / 32
    return hidden.to(GPU), weight.to(GPU)


def inputs(random_head: tuple[Tensor, Tensor], tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Head, Tensor]:
    """The head's first `tokens` tokens, and their streams. Temperatures are 2/3 to 2."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    streams = torch.rand(len(STREAMS), tokens, generator=draw) / max(tokens, 1)
    streams[1:4] = torch.randn(3, tokens, generator=draw)
    streams[1], streams[2], streams[3] = (
        -12 + 0.3 * streams[1],
        1 + streams[2],
        -12 + 0.3 * streams[3],
    )  # log 1/V is -12
    hidden, weight = random_head[0][:tokens].to(dtype, copy=True), random_head[1].to(dtype, copy=True)
    inv_t = torch.rand(tokens, generator=draw) + 0.5
    return (hidden.requires_grad_(), weight.requires_grad_(), labels.to(GPU), inv_t.to(GPU)), streams.to(GPU)


def ratio_and_entropy(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """A policy gradient with an entropy bonus, without a clip, which rounding could switch for a whole token."""
    loss = -(((logprob - streams[1]).exp() * streams[2] + 0.1 * entropy) * streams[4]).sum()
    return loss, torch.cat([loss.detach()[None], loss.new_zeros(lm_head.MAXIMA)])


def exact(head: Head) -> tuple[Head, Tensor, Tensor]:
    """float64 leaves with the same numbers, and their log-probability and entropy from the whole logits."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in head[:2])
    logp = torch.log_softmax(hidden @ weight.t() * head[3].double()[:, None], -1)
    return (hidden, weight, *head[2:]), logp.gather(1, head[2][:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("chunk", [96, 4096])
@pytest.mark.parametrize("mode", ["one pass", "two passes"])
@pytest.mark.parametrize(
    ("dtype", "tokens", "limits"), [(torch.bfloat16, 1000, (1e-3, 1e-2)), (torch.float32, 100, (1e-5, 1e-5))], ids=str
)
def test_against_float64(dtype, tokens, limits, mode, chunk, random_head):
    """Loss and gradients are within limits of float64 on the same inputs, entropy's gradient included. bfloat16 rounds
    a logit of 4 by up to 0.008: a token's probability ratio, and with it all of its gradient, is off by up to that
    share. float32's kernels take other widths."""
    head, streams = inputs(random_head, tokens, dtype)
    if mode == "one pass":
        loss, _ = fused_token_loss(*head, streams, ratio_and_entropy, chunk, compiled=True)
    else:
        loss, _ = ratio_and_entropy(*logprob_entropy(*head, chunk), streams)
    leaves, logprob, entropy = exact(head)
    want = ratio_and_entropy(logprob, entropy, streams.double())[0]
    assert error(loss.detach(), want.detach()) < limits[0]
    gradients = torch.autograd.grad(loss, head[:2]), torch.autograd.grad(want, leaves[:2])
    for got, gradient in zip(*gradients, strict=True):
        assert got.dtype == dtype
        assert error(got, gradient) < limits[1]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)], ids=str)
def test_a_capped_head_with_a_scale_and_a_bias(dtype, limit, random_head):
    """Loss and gradients, that of the bias included, are those of float64's logits, scaled and capped."""
    head, streams = inputs(random_head, 100, dtype)
    bias = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4)).to(GPU, dtype).requires_grad_()
    form = lm_head.HeadForm(scale=2.0, cap=5.0)
    loss, _ = fused_token_loss(*head, streams, ratio_and_entropy, 96, compiled=True, bias_V=bias, form=form)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (*head[:2], bias)]
    logits = 5 * torch.tanh(2 * (leaves[0] @ leaves[1].t() + leaves[2]) / 5)
    logp = torch.log_softmax(logits * head[3].double()[:, None], -1)
    logprob, entropy = logp.gather(1, head[2][:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    want = ratio_and_entropy(logprob, entropy, streams.double())[0]
    gradients = torch.autograd.grad(loss, [*head[:2], bias]), torch.autograd.grad(want, leaves)
    for got, gradient in zip((loss.detach(), *gradients[0]), (want.detach(), *gradients[1]), strict=True):
        assert error(got, gradient) < limit


def test_rows_beyond_32_bits():
    """A chunk of more than 2^31 logits: its last row is what it is alone, statistics and gradient."""
    size = 2**31 // VOCABULARY + 10
    row = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)).to(GPU, torch.bfloat16)
    logits = torch.zeros(size, VOCABULARY, device=GPU, dtype=torch.bfloat16)
    logits[-1] = row
    labels, inv_t, one = torch.full((size,), 5, device=GPU), torch.ones(size, device=GPU), torch.ones((), device=GPU)
    got, want = lm_head.stats(logits, labels, inv_t), lm_head.stats(row[None].clone(), labels[:1], inv_t[:1])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[-1], b[0])
    d = lm_head.dlogits_(logits, labels, inv_t, got[0], got[2], one.expand(size), one.expand(size))
    alone = lm_head.dlogits_(row[None], labels[:1], inv_t[:1], want[0], want[2], one.expand(1), one.expand(1))
    assert torch.equal(d[-1], alone[0])


def test_nothing_is_compiled_twice(random_head, monkeypatch):
    """After the first micro-batch, others of any length and alignment compile no kernel and no graph."""
    import triton

    torch._dynamo.reset()
    lm_head._differentiated.cache_clear()
    compiled = []

    def step(tokens: int) -> None:
        head, streams = inputs(random_head, tokens)
        fused_token_loss(*head, streams, GRPO, 96, compiled=True)[0].backward()
        sum(logprob_entropy(*head, 33)).sum().backward()

    step(300)
    graphs = counters["stats"]["unique_graphs"]
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kw: compiled.append(kw["repr"]))
    for tokens in (96, 1000, 97, 1, 0, 551):
        step(tokens)
    assert compiled == []
    assert counters["stats"]["unique_graphs"] == graphs
