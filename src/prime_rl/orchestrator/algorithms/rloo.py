"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt
from prime_rl.orchestrator.algorithms.grpo import centred

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import RLOO


def rloo(group: Sequence[Attempt], config: "RLOO") -> list[float]:
    """A_i = R_i - mean of R_j over j ≠ i, which is (R_i - mean(R)) · G / (G - 1): the same direction as GRPO, without its bias in G."""
    if len(group) < 2:
        return [0.0] * len(group)  # the others were lost: nothing to compare with
    return [value * len(group) / (len(group) - 1) for value in centred([attempt.reward for attempt in group])]
