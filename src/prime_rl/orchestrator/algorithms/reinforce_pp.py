"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt
from prime_rl.orchestrator.algorithms.grpo import centred, scaled

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import ReinforcePP


def reinforce_pp(groups: Sequence[Sequence[Attempt]], config: "ReinforcePP") -> list[list[float]]:
    """A = (R - mean(R)) / (std(R) + 1e-6), mean and std over all episodes of the batch; with `group_baseline` of R minus its group's mean.

    The paper has mean and std over the advantages of all tokens, where long episodes weigh more: `per_token`. Implementations are split; by default each
    episode counts once, as its reward does. With `group_baseline` the mean that is taken off is the group's alone, also then: equal rewards give zeros.

    The paper takes a divergence from the reference model off the rewards of tokens. Here it is the loss's (`loss.kl_coef`).
    """
    rewards = [[attempt.reward for attempt in group] for group in groups]
    tokens = [attempt.output_tokens for group in groups for attempt in group] if config.per_token else None
    if config.group_baseline:
        return in_units_of_std([centred(group) for group in rewards], tokens)
    means = iter(centred([reward for group in rewards for reward in group], tokens))
    return in_units_of_std([[next(means) for _ in group] for group in rewards], tokens)


def in_units_of_std(groups: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> list[list[float]]:
    """Values of mean 0, divided by their standard deviation over all groups. Zeros stay exact zeros, which tell "no signal"."""
    values = iter(scaled([value for group in groups for value in group], weights))
    return [[next(values) for _ in group] for group in groups]
