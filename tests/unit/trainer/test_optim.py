"""Learning-rate schedules and gradient clipping."""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import nn

from prime_rl.config.trainer import ConstantScheduler, CosineScheduler, LinearScheduler, SchedulerConfig, WSDScheduler
from prime_rl.trainer.optim import clip_gradients, learning_rate


def test_constant_with_warmup() -> None:
    """Warm-up works for the constant schedule, starts above zero and needs no end."""
    rates = [learning_rate(ConstantScheduler(warmup_steps=4), 8.0, step, None) for step in range(6)]
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear() -> None:
    """Rise, plateau, fall; the last step runs at min_lr."""
    scheduler = LinearScheduler(warmup_steps=2, decay_steps=4, min_lr=1.0)
    rates = [learning_rate(scheduler, 9.0, step, 8) for step in range(8)]
    assert rates == [4.5, 9.0, 9.0, 9.0, 7.0, 5.0, 3.0, 1.0]


def test_cosine() -> None:
    """Half a cosine from the peak after warm-up to min_lr at the last step, half-way in the middle."""
    scheduler = CosineScheduler(warmup_steps=1, min_lr=0.0)
    rates = [learning_rate(scheduler, 1.0, step, 9) for step in range(9)]
    assert rates[0] == 1.0
    assert rates[4] == pytest.approx(0.5)
    assert rates[8] == pytest.approx(0.0, abs=1e-12)
    assert all(a > b for a, b in pairwise(rates[1:]))


@pytest.mark.parametrize(
    ("shape", "fall"),
    [
        ("linear", [7.0, 5.0, 3.0, 1.0]),
        ("sqrt", [5.0, 9 - 8 * 0.5**0.5, 9 - 8 * 0.75**0.5, 1.0]),
        ("cosine", [5 + 8**0.5, 5.0, 5 - 8**0.5, 1.0]),
    ],
)
def test_wsd(shape: Literal["linear", "sqrt", "cosine"], fall: list[float]) -> None:
    """Rise, stable, fall in the shape asked for; the last step runs at min_lr."""
    scheduler = WSDScheduler(warmup_steps=2, decay_steps=4, shape=shape, min_lr=1.0)
    rates = [learning_rate(scheduler, 9.0, step, 8) for step in range(8)]
    assert rates == pytest.approx([4.5, 9.0, 9.0, 9.0, *fall])


@pytest.mark.parametrize("scheduler", [LinearScheduler, WSDScheduler])
def test_without_decay_the_rate_stays(scheduler: Callable[..., SchedulerConfig]) -> None:
    rates = [learning_rate(scheduler(warmup_steps=0, decay_steps=0, min_lr=0.5), 2.0, step, 3) for step in range(3)]
    assert rates == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("limit", "after"), [(1.0, 1.0), (None, 5.0), (10.0, 5.0)])
def test_clip(limit: float | None, after: float) -> None:
    """The joint norm is returned as it was and limited to max_norm; None does not clip."""
    model = nn.Linear(1, 2)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0], [0.0]]), torch.tensor([0.0, 4.0])
    assert clip_gradients(model, limit).item() == pytest.approx(5.0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(after, rel=1e-5)
