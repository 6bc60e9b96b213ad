"""Learning-rate schedules and gradient clipping."""

from typing import Any

import pytest
import torch
from torch import nn

from prime_rl.config.trainer import ConstantScheduler, CosineScheduler, LinearScheduler, SchedulerConfig, WSDScheduler
from prime_rl.trainer.optim import clip_gradients, learning_rate

SETTINGS: dict[str, Any] = {"warmup_steps": 2, "decay_steps": 4, "min_lr": 1.0}
RISE = [4.5, 9.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (ConstantScheduler(warmup_steps=4), [2.25, 4.5, 6.75, 9.0, 9.0, 9.0]),
        (LinearScheduler(**SETTINGS), [*RISE, 7.0, 5.0, 3.0, 1.0]),
        (WSDScheduler(**SETTINGS, shape="linear"), [*RISE, 7.0, 5.0, 3.0, 1.0]),
        (WSDScheduler(**SETTINGS, shape="sqrt"), [*RISE, 5.0, 9 - 8 * 0.5**0.5, 9 - 8 * 0.75**0.5, 1.0]),
        (WSDScheduler(**SETTINGS, shape="cosine"), [*RISE, 5 + 8**0.5, 5.0, 5 - 8**0.5, 1.0]),
        (CosineScheduler(warmup_steps=1, min_lr=1.0), [9.0, 5 + 8**0.5, 5.0, 5 - 8**0.5, 1.0]),
        (LinearScheduler(warmup_steps=0, decay_steps=0, min_lr=0.5), [9.0, 9.0, 9.0]),
        (WSDScheduler(warmup_steps=0, decay_steps=0, min_lr=0.5), [9.0, 9.0, 9.0]),
    ],
)
def test_learning_rate(scheduler: SchedulerConfig, rates: list[float]) -> None:
    """Rise to the peak without a first step of zero, stay, fall; the last step runs at min_lr, if there are steps to fall."""
    got = [learning_rate(scheduler, 9.0, step, len(rates)) for step in range(len(rates))]
    assert got == pytest.approx(rates)


@pytest.mark.parametrize(("limit", "after"), [(1.0, 1.0), (None, 5.0), (10.0, 5.0)])
def test_clip(limit: float | None, after: float) -> None:
    """The joint norm is returned as it was and limited to max_norm; None does not clip."""
    model = nn.Linear(1, 2)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0], [0.0]]), torch.tensor([0.0, 4.0])
    assert clip_gradients(model, limit).item() == pytest.approx(5.0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(after, rel=1e-5)
