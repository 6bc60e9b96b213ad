"""Maximum-likelihood reinforcement learning, as PRIME-RL has it (its `max_rl`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt
from prime_rl.orchestrator.algorithms.grpo import centred

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import MaxRL


def max_rl(group: Sequence[Attempt], config: "MaxRL") -> list[float]:
    """A_i = (R_i - mean(R)) / mean(R), all zero where the mean is not positive.

    With rewards 0 and 1 the mean estimates the probability p of success, and dividing by it turns the gradient of p into that of log p.
    """
    mean = sum(attempt.reward for attempt in group) / len(group)
    if mean <= 0:
        return [0.0] * len(group)
    return [value / mean for value in centred([attempt.reward for attempt in group])]
