"""On-policy optimization with the optimal baseline (Hao et al. 2025, arXiv:2505.23585)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import OPO


def opo(group: Sequence[Attempt], config: "OPO") -> list[float]:
    """A_i = R_i - Σ l_j R_j / Σ l_j with l the sampled tokens.

    The baseline of least variance weighs rewards by the squared norm of their gradients, which grows with length.
    """
    rewards = [attempt.reward for attempt in group]
    if min(rewards) == max(rewards):
        return [0.0] * len(group)
    tokens = sum(attempt.output_tokens for attempt in group)
    baseline = sum(attempt.output_tokens * attempt.reward for attempt in group) / tokens
    return [reward - baseline for reward in rewards]
