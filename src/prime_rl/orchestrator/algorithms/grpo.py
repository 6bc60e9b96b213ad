"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300; without the division by std: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import GRPO, Echo

EPSILON = 1e-6


def grpo(group: Sequence[Attempt], config: "GRPO | Echo") -> list[float]:
    """A_i = R_i - mean(R), divided by the population std(R) + 1e-6 with `std_normalize`.

    The paper divides; Dr. GRPO shows that this weighs tasks by how easy or hard they are, and common practice is split. We follow PRIME-RL, which
    does not.
    """
    advantages = centred([attempt.reward for attempt in group])
    return scaled(advantages) if config.std_normalize else advantages


def centred(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Minus their mean. Equal values give exact zeros, so that "no signal" is recognized without a tolerance."""
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = _mean(values, weights)
    return [value - mean for value in values]


def scaled(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Values of mean zero, divided by their population standard deviation + 1e-6."""
    std = sqrt(_mean([value * value for value in values], weights)) if values else 0.0
    return [value / (std + EPSILON) for value in values]


def _mean(values: Sequence[float], weights: Sequence[float] | None) -> float:
    if weights is None:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
