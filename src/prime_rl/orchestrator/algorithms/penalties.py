"""Rewards that fall with length."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from prime_rl.orchestrator.algorithms.attempt import Attempt

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import LinearPenalty, OverlongPenalty


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
