"""Algorithms: from a group's episodes to per-token streams. The trainer executes the streams and knows no algorithm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.grpo import grpo_advantages

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import GRPO

__all__ = ["group_advantages", "grpo_advantages"]


def group_advantages(config: "GRPO", rewards: Sequence[float]) -> list[float]:
    """One advantage for each of a group's episodes, by the configured algorithm."""
    return grpo_advantages(rewards, config.std_normalize)
