"""Group reward-decoupled normalization (GDPO, Liu et al. 2026, arXiv:2601.05242)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt
from prime_rl.orchestrator.algorithms.grpo import centred, scaled
from prime_rl.orchestrator.algorithms.reinforce_pp import in_units_of_std

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import GDPO


def gdpo(groups: Sequence[Sequence[Attempt]], config: "GDPO") -> list[list[float]]:
    """A = Σ_k w_k (r_k - mean(r_k)) / (std(r_k) + 1e-6) over the reward functions k, mean and std over the group; then normalized over the batch.

    Adding rewards up before they are normalized, as GRPO does, gives different combinations of them the same advantage. Every attempt has all
    rewards: `lacks` tells of those that have not.
    """
    summed = [_group(group, config.weights) for group in groups]
    return in_units_of_std(summed) if config.batch_normalize else summed


def _group(group: Sequence[Attempt], weights: dict[str, float]) -> list[float]:
    names = weights or dict.fromkeys(sorted(set.intersection(*(set(attempt.rewards) for attempt in group))), 1.0)
    total = [0.0] * len(group)
    for name, weight in names.items():
        values = scaled(centred([attempt.rewards[name] for attempt in group]))
        total = [before + weight * value for before, value in zip(total, values, strict=True)]
    return total


def lacks(attempt: Attempt, config: "GDPO") -> str:
    """What the algorithm needs and the attempt does not have, "" where it has all."""
    there = ", ".join(sorted(attempt.rewards)) or "none"
    if not attempt.rewards:
        return "gdpo needs rewards of single functions, and the environment tells none"
    missing = sorted(config.weights.keys() - attempt.rewards.keys())
    return f"gdpo needs a reward {missing[0]!r}, and the environment tells {there}" if missing else ""
