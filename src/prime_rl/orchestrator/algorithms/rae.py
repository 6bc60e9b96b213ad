"""Role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv:2506.24119)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import RAE


def rae(
    groups: Sequence[Sequence[Attempt]], config: "RAE", baselines: Mapping[str, float]
) -> tuple[list[list[float]], dict[str, float]]:
    """A = R - b[agent], then b[agent] ← decay · b[agent] + (1 - decay) · R, one reward after the other.

    The paper moves the average first and subtracts it then; we follow PRIME-RL, whose baseline does not know the reward that it is taken off.
    It is a matter of scale: the paper's advantages are `decay` times these.

    Args:
        baselines: The average of each agent, 0 where there is none yet.

    Returns:
        The advantages, and the baselines after them.
    """
    averages = dict(baselines)
    advantages: list[list[float]] = []
    for group in groups:
        advantages.append([])
        for attempt in group:
            average = averages.get(attempt.agent, 0.0)
            advantages[-1].append(attempt.reward - average)
            averages[attempt.agent] = config.decay * average + (1 - config.decay) * attempt.reward
    return advantages, averages
