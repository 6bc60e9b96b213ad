"""What an algorithm sees of an episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Attempt:
    """One conversation of one agent in a finished episode; all of the episode where there is no other.

    Args:
        reward: Finite.
        output_tokens: Sampled tokens.
        total_tokens: Of all its token sequences.
        turns: Replies of the model.
        rewards: What each reward function of the environment gave, times the environment's weight of it.
        metrics: Other numbers that the environment reports.
    """

    reward: float
    output_tokens: int = 1
    total_tokens: int = 1
    turns: int = 1
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    agent: str = ""
