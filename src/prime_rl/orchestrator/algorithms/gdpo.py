"""Group reward-decoupled normalization (GDPO, Liu et al. 2026, arXiv:2601.05242)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.errors import UserError
from prime_rl.orchestrator.algorithms.attempt import Attempt
from prime_rl.orchestrator.algorithms.grpo import centred, scaled
from prime_rl.orchestrator.algorithms.reinforce_pp import normalized

if TYPE_CHECKING:
    from prime_rl.config.algorithms import GDPO


def gdpo(groups: Sequence[Sequence[Attempt]], config: "GDPO") -> list[list[float]]:
    """A = Σ_k w_k (r_k - mean(r_k)) / (std(r_k) + 1e-6) over the reward functions k, mean and std over the group; then normalized over the batch.

    Adding rewards up before they are normalized, as GRPO does, gives different combinations of them the same advantage.

    Raises:
        UserError: an episode has no value of a reward function that `weights` name.
    """
    summed = [_group(group, config.weights) for group in groups]
    return normalized(summed) if config.batch_normalize else summed


def _group(group: Sequence[Attempt], weights: dict[str, float]) -> list[float]:
    names = weights or dict.fromkeys(sorted({name for attempt in group for name in attempt.rewards}), 1.0)
    total = [0.0] * len(group)
    for name, weight in names.items():
        values = scaled(centred([_value(attempt, name) for attempt in group]))
        total = [before + weight * value for before, value in zip(total, values, strict=True)]
    return total


def _value(attempt: Attempt, name: str) -> float:
    if name not in attempt.rewards:
        there = ", ".join(sorted(attempt.rewards)) or "none"
        raise UserError(f"algorithm gdpo: an episode has no reward {name!r} (there is: {there})")
    return attempt.rewards[name]
