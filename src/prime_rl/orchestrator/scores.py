"""What attempts at tasks add up to: avg@k, pass@k, pass^k, and how sure that is.

A task is attempted n times, and solved c times of them. Tasks are the sample: attempts at one task share its difficulty, so that intervals are over
tasks (clustered by task, in the words of Miller 2024, "Adding error bars to evals").
"""

import math
from collections.abc import Iterable, Sequence

_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """The chance that at least one of k attempts, drawn without replacement from those made, solved the task: 1 − C(n−c, k) / C(n, k), the unbiased
    estimate of Chen et al. 2021. Needs k ≤ `attempts`."""
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, solved: int, k: int) -> float:
    """The chance that all of k attempts, drawn without replacement from those made, solved the task: C(c, k) / C(n, k), as in tau-bench (Yao et al.
    2024). Needs k ≤ `attempts`."""
    return math.comb(solved, k) / math.comb(attempts, k)


def ks(attempts: int) -> list[int]:
    """1, 2, 4, … up to the attempts made."""
    return [1 << power for power in range(attempts.bit_length())] if attempts else []


def mean(values: Iterable[float]) -> float | None:
    """None where there are none."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def interval95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of a mean over tasks, by the normal distribution: 1.96 · s / √tasks; None below two tasks."""
    center = mean(values)
    if center is None or len(values) < 2:
        return None
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    return _Z95 * math.sqrt(variance / len(values))
