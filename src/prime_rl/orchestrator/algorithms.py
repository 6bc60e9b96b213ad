"""Algorithms: from the rewards of trajectories to one advantage for each. The trainer only executes per-token streams.

Every estimator is a function of the groups of a batch, with one entry in the table at the end. An algorithm of your
own, `algorithm = { type = "custom", path = "mine.py:advantages" }`, names a function that gets the trajectories of a
group and returns an advantage for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING, Any

from prime_rl.config.orchestrator import ByReward
from prime_rl.envs.protocol import EpisodeResult, SampleTokens
from prime_rl.errors import UserError
from prime_rl.importing import load_function

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import (
        GDPO,
        GRPO,
        RAE,
        AlgorithmConfig,
        CustomAlgorithm,
        CustomFilter,
        Echo,
        LinearPenalty,
        OverlongPenalty,
        ReinforcePP,
        RewardAlgorithm,
    )

EPSILON = 1e-6
_LARGEST = 3e38  # advantages are sent with 32 bits


@dataclass(frozen=True)
class Trajectory:
    """One agent's conversation in a finished episode; all of the episode where there is no other."""

    reward: float  # finite
    output_tokens: int = 1  # sampled
    total_tokens: int = 1  # of all its token sequences
    turns: int = 1  # replies of the model
    # What each reward function of the environment gave, times the environment's weight of it.
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # other numbers that the environment reports
    is_truncated: bool = False
    agent: str = ""


Groups = Sequence[Sequence[Trajectory]]  # of a batch; each of trajectories of one agent
Estimator = Callable[[Groups, Any, dict[str, Any]], list[list[float]]]  # of groups, config and state, which it updates


def trajectories(result: EpisodeResult) -> dict[int, Trajectory]:
    """Return one trajectory for each part of an episode that has something to train, by the part's number."""
    sequences: dict[int, list[SampleTokens]] = {}
    for sequence in result.samples:
        sequences.setdefault(sequence.part, []).append(sequence)
    by_part = {}
    for number, sequences_of_part in sorted(sequences.items()):
        scores = result.parts[number] if result.parts else result
        by_part[number] = Trajectory(
            reward=scores.reward,
            output_tokens=sum(sequence.loss_mask.count(1) for sequence in sequences_of_part),
            total_tokens=sum(len(sequence.input_ids) for sequence in sequences_of_part),
            turns=scores.num_turns,
            rewards=scores.rewards,
            metrics=scores.metrics,
            is_truncated=scores.is_truncated,
            agent=sequences_of_part[0].agent,
        )
    return by_part


def advantages(
    config: "AlgorithmConfig", groups: Groups, state: Mapping[str, Any]
) -> tuple[list[list[float]], dict[str, Any]]:
    """Return one advantage for each trajectory of a batch's groups, all of one environment, and the state after them.

    A group whose episodes have several agents is a group for each of them. `state` is what the algorithm remembers of
    earlier batches. Raises UserError: an algorithm of the user's own does not give one finite number for each.
    """
    result, after = [[0.0] * len(group) for group in groups], dict(state)
    if not isinstance(config, ByReward):
        return result, after
    rows = []
    for row, group in enumerate(groups):
        by_agent: dict[str, list[int]] = {}
        for index, trajectory in enumerate(group):
            by_agent.setdefault(trajectory.agent, []).append(index)
        rows += [(row, indices) for indices in by_agent.values()]
    parts = [penalized([groups[row][index] for index in indices], config.length_penalty) for row, indices in rows]
    for (row, indices), values in zip(rows, ESTIMATORS[config.type](parts, config, after), strict=True):
        for index, value in zip(indices, values, strict=True):
            result[row][index] = value
    return result, after


def carries_signal(config: "AlgorithmConfig", group: Sequence[Trajectory]) -> bool:
    """Return whether a complete group may have an advantage other than zero, whatever else the batch will hold."""
    if not isinstance(config, ByReward) or not (config.group_relative or config.type == "custom"):
        return bool(group)
    values, _ = advantages(config, [group], {})  # normalizing over a batch leaves zeros zero
    return any(values[0])


def user_function(config: "CustomAlgorithm | CustomFilter", key: str) -> Callable[..., Any]:
    """Load a function of the user's own, once. `key`: the setting that names it, for errors.
    Raises UserError: it is not there, or does not take its arguments."""
    return _load(config.path, tuple(sorted(config.args)), f"{key}.path")


def call_user_function(config: "CustomAlgorithm | CustomFilter", kind: str, argument: Any, of: str) -> Any:
    """Call a function of the user's own with `argument`; `of` says what that is. Raises UserError where it raises."""
    function = user_function(config, kind)
    try:
        return function(argument, **config.args)
    except Exception as error:
        raise UserError(f"{kind} {config.path} raised {error!r} of {of}") from error


@cache
def _load(path: str, names: tuple[str, ...], key: str) -> Callable[..., Any]:
    return load_function(path, dict.fromkeys(names), positional=1, key=key)


# -- length penalties --------------------------------------------------------------------------------------------------


def penalized(group: Sequence[Trajectory], penalty: "LinearPenalty | OverlongPenalty | None") -> list[Trajectory]:
    if penalty is None or not group:
        return list(group)
    taken = _linear(group, penalty) if penalty.type == "linear" else [_overlong(one, penalty) for one in group]
    return [replace(one, reward=one.reward - less) for one, less in zip(group, taken, strict=True)]


def _linear(group: Sequence[Trajectory], penalty: "LinearPenalty") -> list[float]:
    """mean(R) · (w_o · out / max out + w_i · in / max in + w_t · turns / max turns), as PRIME-RL has it.

    `in` are the tokens that were not sampled. Nothing where the mean is below zero: length would be rewarded.
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


def _overlong(trajectory: Trajectory, penalty: "OverlongPenalty") -> float:
    """0 up to max_tokens - cache, then rising linearly to `scale` at max_tokens (DAPO, arXiv:2503.14476, eq. 13)."""
    beyond = trajectory.output_tokens - (penalty.max_tokens - penalty.cache)
    return penalty.scale * min(max(beyond / penalty.cache, 0.0), 1.0)


# -- estimators, with the paper that each follows ----------------------------------------------------------------------


def grpo(group: Sequence[Trajectory], config: "GRPO | Echo") -> list[float]:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300).

    A_i = R_i - mean(R), divided by the population std(R) + 1e-6 with `std_normalize`.

    The paper divides. Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) shows that this weighs tasks by how easy or hard
    they are; without `std_normalize`, as in PRIME-RL, nothing is divided.
    """
    values = centred([trajectory.reward for trajectory in group])
    return scaled([values])[0] if config.std_normalize else values


def rloo(group: Sequence[Trajectory], config: "RewardAlgorithm") -> list[float]:
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    A_i = R_i - mean of R_j over j ≠ i, which is (R_i - mean(R)) · G / (G - 1): the same direction as GRPO, without its
    bias in G.
    """
    if len(group) < 2:
        return [0.0] * len(group)  # the others were lost: nothing to compare with
    return [value * len(group) / (len(group) - 1) for value in centred([trajectory.reward for trajectory in group])]


def opo(group: Sequence[Trajectory], config: "RewardAlgorithm") -> list[float]:
    """On-policy optimization with the optimal baseline (Hao et al. 2025, arXiv:2505.23585).

    A_i = R_i - Σ l_j R_j / Σ l_j with l the sampled tokens: the baseline of least variance weighs rewards by the
    squared norm of their gradients, which grows with length.
    """
    rewards = [trajectory.reward for trajectory in group]
    if min(rewards) == max(rewards):
        return [0.0] * len(group)
    tokens = sum(trajectory.output_tokens for trajectory in group)
    baseline = sum(trajectory.output_tokens * trajectory.reward for trajectory in group) / tokens
    return [reward - baseline for reward in rewards]


def max_rl(group: Sequence[Trajectory], config: "RewardAlgorithm") -> list[float]:
    """Maximum-likelihood reinforcement learning, as PRIME-RL has it (its `max_rl`).

    A_i = (R_i - mean(R)) / mean(R), all zero where the mean is not positive. With rewards 0 and 1 the mean estimates
    the probability p of success, and dividing by it turns the gradient of p into that of log p.
    """
    mean = sum(trajectory.reward for trajectory in group) / len(group)
    if mean <= 0:
        return [0.0] * len(group)
    return [value / mean for value in centred([trajectory.reward for trajectory in group])]


def custom(group: Sequence[Trajectory], config: "CustomAlgorithm") -> list[float]:
    """Return what the user's own function gives. Raises UserError where that is not one finite number for each."""
    answer = call_user_function(config, "algorithm", list(group), f"{len(group)} trajectories")
    try:
        values = [float(value) for value in answer]
    except (TypeError, ValueError):
        values = []
    if len(values) != len(group) or not all(abs(value) <= _LARGEST for value in values):
        raise UserError(
            f"algorithm {config.path} gave {answer} for {len(group)} trajectories: one finite number for each is needed"
        )
    return values


def reinforce_pp(groups: Groups, config: "ReinforcePP", state: dict[str, Any]) -> list[list[float]]:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    A = (R - mean(R)) / (std(R) + 1e-6), mean and std over all episodes of the batch; with `group_baseline` of R minus
    its group's mean.

    The paper has mean and std over the advantages of all tokens, where long episodes weigh more; here each episode
    counts once, as its reward does. The paper takes a divergence from the reference model off the rewards of tokens;
    here it is the loss's (`loss.kl_coef`).
    """
    rewards = [[trajectory.reward for trajectory in group] for group in groups]
    if config.group_baseline:
        return scaled([centred(group) for group in rewards])
    values = iter(centred([reward for group in rewards for reward in group]))
    return scaled([[next(values) for _ in group] for group in rewards])


def gdpo(groups: Groups, config: "GDPO", state: dict[str, Any]) -> list[list[float]]:
    """Group reward-decoupled normalization (GDPO, Liu et al. 2026, arXiv:2601.05242).

    A = Σ_k w_k (r_k - mean(r_k)) / (std(r_k) + 1e-6) over the reward functions k, mean and std over the group; then
    normalized over the batch.

    Adding rewards up before they are normalized, as GRPO does, gives different combinations of them the same advantage.
    A reward that the environment gave to others of the group alone is 0. Raises UserError: it gave none of the group
    one that is to be weighed.
    """
    sums = []
    for group in groups:
        names = sorted({name for trajectory in group for name in trajectory.rewards})
        weights = config.weights or dict.fromkeys(names, 1.0)
        if not weights or not weights.keys() <= set(names):
            wanted, known = (", ".join(some) or "none" for some in (sorted(weights), names))
            raise UserError(f"gdpo needs rewards of single functions ({wanted}), and the environment gives {known}")
        total = [0.0] * len(group)
        for name, weight in weights.items():
            (values,) = scaled([centred([trajectory.rewards.get(name, 0.0) for trajectory in group])])
            total = [before + weight * value for before, value in zip(total, values, strict=True)]
        sums.append(total)
    return scaled(sums)


def rae(groups: Groups, config: "RAE", state: dict[str, Any]) -> list[list[float]]:
    """Role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv:2506.24119).

    A = R - b[agent], then b[agent] ← decay · b[agent] + (1 - decay) · R, one reward after the other; b begins at 0, and
    is the state.

    The paper moves the average first and subtracts it then; we follow PRIME-RL, whose baseline does not know the reward
    that it is taken off. It is a matter of scale: the paper's advantages are `decay` times these.
    """
    values: list[list[float]] = []
    for group in groups:
        values.append([])
        for trajectory in group:
            average = state.get(trajectory.agent, 0.0)
            values[-1].append(trajectory.reward - average)
            state[trajectory.agent] = config.decay * average + (1 - config.decay) * trajectory.reward
    return values


def centred(values: Sequence[float]) -> list[float]:
    """Subtract the mean. Equal values give exact zeros, so that "no signal" is recognized without a tolerance."""
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def scaled(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Divide values of mean zero by their population std over all groups + 1e-6. Zeros stay exact zeros."""
    every = [value for group in groups for value in group]
    std = sqrt(sum(value * value for value in every) / len(every)) if every else 0.0
    return [[value / (std + EPSILON) for value in group] for group in groups]


def each_group(estimate: Callable[[Sequence[Trajectory], Any], list[float]]) -> Estimator:
    """Make an estimator of one that looks at one group at a time."""
    return lambda groups, config, state: [estimate(group, config) for group in groups]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": each_group(grpo),
    "echo": each_group(grpo),
    "rloo": each_group(rloo),
    "opo": each_group(opo),
    "max_rl": each_group(max_rl),
    "custom": each_group(custom),
    "reinforce_pp": reinforce_pp,
    "gdpo": gdpo,
    "rae": rae,
}
