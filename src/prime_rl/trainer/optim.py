"""Optimizer, gradient clipping, and the learning rate as a pure function of the step."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from prime_rl.config.trainer import AdamW, SchedulerConfig


def build_optimizer(model: nn.Module, config: "AdamW") -> torch.optim.Optimizer:
    """AdamW over the float32 masters, one fused kernel per step.

    The masters must be float32: at reinforcement-learning rates (1e-6) more than 95 % of bfloat16 weights would not move at all.
    """
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.lr,
        betas=(config.betas1, config.betas2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: "SchedulerConfig", lr: float, step: int, max_steps: int | None) -> float:
    """The learning rate of step `step` (0-based).

    Warm-up rises linearly and reaches `lr` at step `warmup_steps` - 1 (its first step is lr / warmup_steps, never zero). The last step,
    max_steps - 1, runs at `min_lr` for `linear` and `cosine`, which therefore need
    `max_steps` (the config checks it).
    """
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.type == "constant":
        return lr
    assert max_steps is not None
    decay_steps = config.decay_steps if config.type == "linear" else max_steps - config.warmup_steps
    progress = min(max((step + 1 - (max_steps - decay_steps)) / max(decay_steps, 1), 0.0), 1.0)
    weight = 1 - progress if config.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + (lr - config.min_lr) * weight


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`. Returns the norm before, [] on the device; reads nothing back."""
    limit = math.inf if max_norm is None else max_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
