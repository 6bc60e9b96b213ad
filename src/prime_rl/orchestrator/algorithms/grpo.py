"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300; without the division by std: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""

from collections.abc import Sequence
from math import sqrt


def grpo_advantages(rewards: Sequence[float], std_normalize: bool = False) -> list[float]:
    """One advantage for each episode of a group: A_i = R_i - mean(R), divided by the population std(R) + 1e-6 with `std_normalize`.

    A group whose rewards are all equal gets exact zeros, so that "no signal" is recognized without a tolerance.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not std_normalize:
        return centred
    std = sqrt(sum(value * value for value in centred) / len(centred))
    return [value / (std + 1e-6) for value in centred]
