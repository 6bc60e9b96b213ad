"""One optimizer step, the same for SFT and RL: they differ in the data and in the token loss."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from prime_rl.trainer.batch import to_device
from prime_rl.trainer.lm_head import TokenLoss
from prime_rl.trainer.model import Policy
from prime_rl.trainer.optim import clip_gradients, set_learning_rate
from prime_rl.trainer.packing import HostBatch
from prime_rl.trainer.parallel import World


def forward_backward(policy: Policy, batches: Sequence[HostBatch], token_loss: TokenLoss, world: World) -> Tensor:
    """Gradients of the summed token losses of this rank's micro-batches. Every rank must pass as many of them.

    The streams must already be divided by the global counts: gradients are summed over micro-batches and ranks, never averaged.

    Returns:
        The metric sums [M] of this rank, on the device; nothing waits for the device here.
    """
    assert isinstance(policy, FSDPModule)
    total = None
    for i, host in enumerate(batches):
        # Where weights stay gathered after forward, they stay until the step's last backward.
        policy.set_reshard_after_backward(policy.frees_weights or i == len(batches) - 1)
        loss, sums = policy(to_device(host, world.device), token_loss)
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


def read_sums(world: World, sums: Tensor, norm: Tensor) -> tuple[list[float], float]:
    """Metric sums over all ranks, and the gradient norm. The one place of a step where the host waits for the device."""
    if world.size > 1:
        dist.all_reduce(sums)
    *values, norm_value = torch.cat([sums.double(), norm.double().reshape(1)]).tolist()
    return values, norm_value
