"""Compile what the steps of a run need, on made-up micro-batches of its shapes, before there is anything to train on."""

import numpy as np
import torch
from torch import nn

from prime_rl.config import TrainerConfig
from prime_rl.trainer import moe
from prime_rl.trainer.batch import pinned
from prime_rl.trainer.canary import CanaryScorer
from prime_rl.trainer.lm_head import TokenLoss
from prime_rl.trainer.loss import STREAMS, SequenceLoss
from prime_rl.trainer.model import Policy
from prime_rl.trainer.optim import build_optimizer, clip_gradients
from prime_rl.trainer.packing import Document, HostBatch, collate
from prime_rl.trainer.parallel import World
from prime_rl.trainer.step import forward_backward

_DOCUMENTS = 3


def warm_up(
    policy: Policy,
    loss: TokenLoss | SequenceLoss,
    config: TrainerConfig,
    world: World,
    vocabulary: int,
    multiple_of: int,
) -> None:
    """Compile blocks, loss, update and the scoring of versions. Every rank calls it, where anything is compiled.

    Weights, states of the optimizer and random numbers stay as they are. Blocks are compiled for the longest micro-batch, then, since another number
    of tokens follows, once for any: those that the run packs later compile nothing. Both are as long as `seq_len` allows, so that what does not fit
    into memory fails here as it would in a step.

    Args:
        multiple_of: Micro-batches are padded to a multiple of so many tokens.
    """
    longest = -(-config.seq_len // multiple_of) * multiple_of
    batches = [_batch(tokens, vocabulary) for tokens in (longest, max(longest - multiple_of, 2))]
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        forward_backward(policy, pinned(batches, world.device), loss, world)
        clip_gradients(policy, config.optim.max_norm)
        policy.zero_grad(set_to_none=True)
        moe.load_sums(policy)  # discarded: these tokens are of no step
        _update_something(config, world)
        if config.weights.canary:
            CanaryScorer(policy, world, vocabulary, torch.float32, torch.float32).score(
                as_exported=False, compiled=True
            )


def _batch(tokens: int, vocabulary: int) -> HostBatch:
    """Random tokens in a few documents. No token has a weight, hence no gradient."""
    draw = np.random.default_rng(0)
    lengths = [len(part) for part in np.array_split(np.arange(tokens), min(_DOCUMENTS, tokens))]
    documents = [
        Document(
            draw.integers(0, vocabulary, length),
            np.ones(length, dtype=np.bool_),
            1.0,
            np.zeros((len(STREAMS), length), dtype=np.float32),
        )
        for length in lengths
    ]
    return collate(documents, len(STREAMS))


def _update_something(config: TrainerConfig, world: World) -> None:
    """One update of a small matrix by an optimizer of its own: the rule is compiled for any number of rows."""
    model = nn.Linear(256, 32, bias=False, device="meta").to_empty(device=world.device)
    nn.init.zeros_(model.weight)
    optimizer = build_optimizer(model, config.optim)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
