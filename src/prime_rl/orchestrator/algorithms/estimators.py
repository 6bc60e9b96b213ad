"""Advantage estimators: from the rewards of attempts to one advantage for each, with the paper that each follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import (
        GDPO,
        GRPO,
        OPO,
        RAE,
        RLOO,
        Echo,
        LinearPenalty,
        MaxRL,
        OverlongPenalty,
        ReinforcePP,
    )

EPSILON = 1e-6


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


def penalized(group: Sequence[Attempt], penalty: "LinearPenalty | OverlongPenalty | None") -> list[Attempt]:
    """The attempts with what `penalty` leaves of their rewards."""
    if penalty is None or not group:
        return list(group)
    taken = _linear(group, penalty) if penalty.type == "linear" else [_overlong(one, penalty) for one in group]
    return [replace(one, reward=one.reward - less) for one, less in zip(group, taken, strict=True)]


def _linear(group: Sequence[Attempt], penalty: "LinearPenalty") -> list[float]:
    """mean(R) · (w_o · out / max out + w_i · in / max in + w_t · turns / max turns), as PRIME-RL has it; in: tokens that were not sampled.

    Nothing where the mean is below zero: length would be rewarded.
    """
    mean = max(sum(one.reward for one in group) / len(group), 0.0)
    shares = [0.0] * len(group)
    for weight, lengths in (
        (penalty.output, [one.output_tokens for one in group]),
        (penalty.input, [one.total_tokens - one.output_tokens for one in group]),
        (penalty.turns, [one.turns for one in group]),
    ):
        longest = max(lengths)
        if longest:
            shares = [share + weight * length / longest for share, length in zip(shares, lengths, strict=True)]
    return [mean * share for share in shares]


def _overlong(attempt: Attempt, penalty: "OverlongPenalty") -> float:
    """0 up to max_tokens - cache, then rising linearly to `scale` at max_tokens (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13)."""
    beyond = attempt.output_tokens - (penalty.max_tokens - penalty.cache)
    return penalty.scale * min(max(beyond / penalty.cache, 0.0), 1.0)


def grpo(group: Sequence[Attempt], config: "GRPO | Echo") -> list[float]:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300; without the division by std: Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783).

    A_i = R_i - mean(R), divided by the population std(R) + 1e-6 with `std_normalize`.

    The paper divides; Dr. GRPO shows that this weighs tasks by how easy or hard they are, and common practice is split. We follow PRIME-RL, which
    does not.
    """
    advantages = centred([attempt.reward for attempt in group])
    return scaled(advantages) if config.std_normalize else advantages


def centred(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Minus their mean. Equal values give exact zeros, so that "no signal" is recognized without a tolerance."""
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = _mean(values, weights)
    return [value - mean for value in values]


def scaled(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Values of mean zero, divided by their population standard deviation + 1e-6."""
    std = sqrt(_mean([value * value for value in values], weights)) if values else 0.0
    return [value / (std + EPSILON) for value in values]


def _mean(values: Sequence[float], weights: Sequence[float] | None) -> float:
    if weights is None:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def rloo(group: Sequence[Attempt], config: "RLOO") -> list[float]:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    A_i = R_i - mean of R_j over j ≠ i, which is (R_i - mean(R)) · G / (G - 1): the same direction as GRPO, without its bias in G.
    """
    if len(group) < 2:
        return [0.0] * len(group)  # the others were lost: nothing to compare with
    return [value * len(group) / (len(group) - 1) for value in centred([attempt.reward for attempt in group])]


def opo(group: Sequence[Attempt], config: "OPO") -> list[float]:
    """On-policy optimization with the optimal baseline (Hao et al. 2025, arXiv:2505.23585).

    A_i = R_i - Σ l_j R_j / Σ l_j with l the sampled tokens.

    The baseline of least variance weighs rewards by the squared norm of their gradients, which grows with length.
    """
    rewards = [attempt.reward for attempt in group]
    if min(rewards) == max(rewards):
        return [0.0] * len(group)
    tokens = sum(attempt.output_tokens for attempt in group)
    baseline = sum(attempt.output_tokens * attempt.reward for attempt in group) / tokens
    return [reward - baseline for reward in rewards]


def max_rl(group: Sequence[Attempt], config: "MaxRL") -> list[float]:
    """Maximum-likelihood reinforcement learning, as PRIME-RL has it (its `max_rl`).

    A_i = (R_i - mean(R)) / mean(R), all zero where the mean is not positive.

    With rewards 0 and 1 the mean estimates the probability p of success, and dividing by it turns the gradient of p into that of log p.
    """
    mean = sum(attempt.reward for attempt in group) / len(group)
    if mean <= 0:
        return [0.0] * len(group)
    return [value / mean for value in centred([attempt.reward for attempt in group])]


def reinforce_pp(groups: Sequence[Sequence[Attempt]], config: "ReinforcePP") -> list[list[float]]:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    A = (R - mean(R)) / (std(R) + 1e-6), mean and std over all episodes of the batch; with `group_baseline` of R minus its group's mean.

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


def gdpo(groups: Sequence[Sequence[Attempt]], config: "GDPO") -> list[list[float]]:
    """Group reward-decoupled normalization (GDPO, Liu et al. 2026, arXiv:2601.05242).

    A = Σ_k w_k (r_k - mean(r_k)) / (std(r_k) + 1e-6) over the reward functions k, mean and std over the group; then normalized over the batch.

    Adding rewards up before they are normalized, as GRPO does, gives different combinations of them the same advantage. Every attempt has all
    rewards: `lacks` tells of those that have not.
    """
    return in_units_of_std([_gdpo_group(group, config.weights) for group in groups])


def _gdpo_group(group: Sequence[Attempt], weights: dict[str, float]) -> list[float]:
    names = weights or dict.fromkeys(sorted(set.intersection(*(set(attempt.rewards) for attempt in group))), 1.0)
    total = [0.0] * len(group)
    for name, weight in names.items():
        values = scaled(centred([attempt.rewards[name] for attempt in group]))
        total = [before + weight * value for before, value in zip(total, values, strict=True)]
    return total


def lacks(attempt: Attempt, config: "GDPO") -> str:
    """What the algorithm needs and the attempt does not have, "" where it has all."""
    known = ", ".join(sorted(attempt.rewards)) or "none"
    if not attempt.rewards:
        return "gdpo needs rewards of single functions, and the environment gives none"
    missing = sorted(config.weights.keys() - attempt.rewards.keys())
    return f"gdpo needs a reward {missing[0]!r}, and the environment gives {known}" if missing else ""


def rae(
    groups: Sequence[Sequence[Attempt]], config: "RAE", baselines: Mapping[str, float]
) -> tuple[list[list[float]], dict[str, float]]:
    """Role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv:2506.24119).

    A = R - b[agent], then b[agent] ← decay · b[agent] + (1 - decay) · R, one reward after the other.

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
