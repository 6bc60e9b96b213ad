"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt
from prime_rl.orchestrator.algorithms.grpo import centred, scaled

if TYPE_CHECKING:
    from prime_rl.config.algorithms import ReinforcePP


def reinforce_pp(groups: Sequence[Sequence[Attempt]], config: "ReinforcePP") -> list[list[float]]:
    """A = (R - mean(R)) / (std(R) + 1e-6), mean and std over all episodes of the batch; with `group_baseline` of R minus its group's mean.

    The paper takes a divergence from the reference model off the rewards of tokens. Here it is the loss's (`loss.kl_coef`).
    """
    rewards = [[attempt.reward for attempt in group] for group in groups]
    if config.group_baseline:
        return in_units_of_std([centred(group) for group in rewards])
    means = iter(centred([reward for group in rewards for reward in group]))
    return in_units_of_std([[next(means) for _ in group] for group in rewards])


def in_units_of_std(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Values of mean 0, divided by their standard deviation over all groups. Zeros stay exact zeros, which tell "no signal"."""
    values = iter(scaled([value for group in groups for value in group]))
    return [[next(values) for _ in group] for group in groups]
