"""Compiled blocks take any packing: after the first shapes have been seen nothing is compiled again."""

import functools

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from conftest import make_tiny_model
from prime_rl.config.trainer import DefaultLoss, GSPOLoss, LossConfig
from prime_rl.trainer.lm_head import fused_token_loss
from prime_rl.trainer.loss import STREAMS, SequenceLoss, cross_entropy, make_loss
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.packing import Document, MicroBatch, collate
from prime_rl.trainer.parallel import local_part
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.router_replay import Routers, set_up
from prime_rl.trainer.training_loop import forward_backward, optimizer_step, warm_up
from support import trainer as support


def packs(streams: int, routers: Routers | None = None) -> list[list[MicroBatch]]:
    """Steps of two micro-batches: many documents and one, long and short, trained in full, in part and not at all, and
    one of padding only; with `routers` most have experts that an engine chose."""
    rng = np.random.default_rng(0)

    def documents(count: int) -> list[Document]:
        lengths = [int(length) for length in rng.integers(2, 60, count)]
        return [
            Document(
                rng.integers(0, support.VOCABULARY, n),
                rng.uniform(size=n) < rng.uniform(),
                1.0,
                np.abs(rng.standard_normal((streams, n))).astype(np.float32),
                None if routers is None or n < 9 else np.full((2, n - 1, 2), [3, 1], dtype=np.int16),
            )
            for n in lengths
        ]

    counts = [(7, 4), (5, 9), (1, 3), (2, 1), (0, 12), (6, 6), (1, 1), (20, 2), (3, 0), (0, 1), (11, 5)]
    return [[collate(documents(count), streams, routers=routers) for count in step] for step in counts]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("replays", [False, True])
def test_experts_are_not_compiled_again(replays, world, make_policy, tmp_path):
    """Contract: once two steps were made nothing compiles again, for no number of tokens, documents and loss tokens,
    nor for the experts that are replayed. (Dense models: `test_warm_up`.)"""
    settings = {"dtype": "bfloat16", "activation_checkpointing": "attention"}
    policy = make_policy(make_tiny_model(tmp_path, experts=4), compile=True, **settings)
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    routers = set_up(policy.lm.model.layers, "m") if replays else None
    for batches in packs(1, routers):
        forward_backward(policy, batches, cross_entropy, world)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert set(graphs[1:]) == {graphs[-1]}, graphs
    assert not counters["graph_break"]


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("loss", [DefaultLoss(), GSPOLoss()], ids=lambda loss: loss.type)
def test_warm_up(loss, world, make_policy, tied_model, tmp_path):
    """Contract: a made-up batch of the run's shapes compiles all that its steps and the scoring of versions need,
    whatever is packed. Weights, states of the optimizer and the next step's gradients are the same bits as without."""
    loss_of, config = make_loss(loss), support.make_config(tmp_path, tied_model, loss=loss)
    document = [collate(support.random_documents((20, 30), len(STREAMS)), len(STREAMS))]
    found = []
    for warmed in (False, True):
        policy = make_policy(tied_model, compile=True)
        optimizer = build_optimizer(policy, config.optim)
        torch._dynamo.reset()
        counters.clear()
        if warmed:
            warm_up(policy, loss_of, config, world, support.VOCABULARY)
            assert all(parameter.grad is None for parameter in policy.parameters())
        compiled = counters["stats"]["unique_graphs"]
        # Kernels of a number of tokens and of any round otherwise.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            forward_backward(policy, document, loss_of, world)
        optimizer_step(policy, optimizer, 1e-3, 1.0)
        states = [state for parameter in policy.parameters() for state in optimizer.state[parameter].values()]
        found.append([local_part(each) for each in (*policy.parameters(), *states)])
    assert len(found[0]) > 20
    assert all(map(torch.equal, *found))

    assert compiled > 0, "nothing was compiled"
    scorer = ReferenceScorer(policy, world, support.VOCABULARY, torch.float32, torch.bfloat16)
    for batches in packs(len(STREAMS)):
        forward_backward(policy, batches, loss_of, world)
        optimizer_step(policy, optimizer, 1e-3, 1.0)
        scorer.score(compiled=True)
        assert counters["stats"]["unique_graphs"] == compiled


def of_ones_own(logprob: Tensor, old: Tensor, advantage: Tensor, *, bound: float) -> tuple[Tensor, Tensor]:
    ratio = (logprob - old).exp()
    return -ratio * advantage, ratio > bound


LOSSES = [
    {"type": "default"},
    {"type": "grpo", "kl_coef": 0.1},
    {"type": "ppo_clip", "kl_coef": 0.1, "kl_estimator": "k1"},
    {"type": "reinforce", "importance": "mask"},
    {"type": "custom", "path": f"{__name__}:of_ones_own", "args": {"bound": 1.5}},
]


@pytest.mark.parametrize("values", LOSSES, ids=lambda values: "-".join(map(str, values.values())))
def test_every_loss_is_one_graph(values, monkeypatch):
    """Contract: with its derivative and metrics a loss of tokens is traced once, without a break, for chunks of any
    length, one token or none included, sliced or whole; the graph gives the numbers of eager."""
    torch._dynamo.reset()
    graphs = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    loss_of = make_loss(TypeAdapter(LossConfig).validate_python(values))
    assert not isinstance(loss_of, SequenceLoss)
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(13, 5, generator=draw, requires_grad=True)
    for count in (64, 7, 1, 65, 0, 200, 2):
        hidden = torch.randn(count, 5, generator=draw, requires_grad=True)
        labels = torch.randint(0, 13, (count,), generator=draw)
        streams = torch.rand(len(STREAMS) + 1, count + 1, generator=draw)[1:, 1:]
        streams[STREAMS.index("mask")] = 1
        streams[STREAMS.index("logprobs")] -= 3
        head = hidden, weight, labels, torch.rand(count, generator=draw) + 0.5, streams, loss_of, 64
        torch.testing.assert_close(fused_token_loss(*head, True), fused_token_loss(*head, False))
    assert graphs.frame_count == 1
