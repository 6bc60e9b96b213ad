"""One optimizer step, the same for SFT and RL, which differ in the data and in the token loss; and the warm-up that compiles it."""

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from prime_rl.config import TrainerConfig
from prime_rl.errors import UserError
from prime_rl.trainer import moe
from prime_rl.trainer.canary import CanaryScorer
from prime_rl.trainer.lm_head import TokenLoss
from prime_rl.trainer.loss import STREAMS, SequenceLoss
from prime_rl.trainer.model import Policy
from prime_rl.trainer.optim import build_optimizer, clip_gradients, set_learning_rate
from prime_rl.trainer.packing import Document, HostBatch, collate, pinned, to_device
from prime_rl.trainer.parallel import World


def forward_backward(
    policy: Policy, batches: Sequence[HostBatch], loss_of: TokenLoss | SequenceLoss, world: World
) -> Tensor:
    """Gradients of the summed losses of this rank's micro-batches. Every rank must pass as many of them.

    The streams must already be divided by the global counts: gradients are summed over micro-batches and ranks, never averaged.

    Returns:
        The metric sums [M] of this rank, on the device; nothing waits for the device here.
    """
    total = None
    for i, host in enumerate(batches):
        is_last = i == len(batches) - 1
        for unit in policy.units:
            # Where weights stay gathered after forward, they stay until the step's last backward.
            unit.set_reshard_after_backward(policy.frees_weights or is_last, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)  # replicas exchange what all micro-batches add up to
        loss, sums = policy(to_device(host, world.device), loss_of)
        loss.backward()
        total = sums if total is None else total + sums
    assert total is not None, "a step has at least one micro-batch on every rank"
    return total


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, lr: float, max_norm: float | None) -> Tensor:
    """Clip, update, clear the gradients. Returns the gradient norm before clipping, [] on the device."""
    norm = clip_gradients(policy, max_norm)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


Moment = float | torch.cuda.Event


def runs_ahead(device: torch.device) -> bool:
    """Whether the host only enqueues what the device does."""
    return device.type == "cuda"


def now(device: torch.device) -> Moment:
    """A moment on the device's own time line, which the host may be ahead of: an event on a GPU, else the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Moment, end: Moment) -> float:
    """Seconds between two moments of one device, which has passed both."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1e3


class Outcome:
    """What step `step` tells: metric sums and gradient norm, on their way from the device to the host. Nothing waits for them before `read`.

    Args:
        sums: Of this rank; they are added up over the ranks.
        moments: When the device began, had the gradients, and had changed the weights.
    """

    def __init__(
        self, step: int, world: World, sums: Tensor, norm: Tensor, moments: tuple[Moment, Moment, Moment]
    ) -> None:
        self.step, self.moments = step, moments
        if world.size > 1:
            dist.all_reduce(sums)
        numbers = torch.cat([sums.double(), norm.double().reshape(1)])
        self._there: torch.cuda.Event | None = None
        if world.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event(blocking=True)
            self._there.record()
        else:
            self._numbers = numbers

    def read(self) -> tuple[list[float], float]:
        """The sums over all ranks, and the gradient norm. The one place of a step where the host waits for the device; any thread may.

        Raises:
            UserError: the gradient norm is not finite: what the step made must not be saved.
        """
        if self._there is not None:
            self._there.synchronize()
        *values, norm = self._numbers.tolist()
        if not math.isfinite(norm):
            raise UserError(f"step {self.step}: the gradient norm is {norm}: nothing of this step is committed")
        return values, norm


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
