"""Do dropped episodes differ from the issued ones, in length or in reward? A permutation test on groups.

Attempts at one task are alike, so single episodes are not exchangeable. The null hypothesis is: which episodes of a group are dropped, and of which
group, has nothing to do with their values. Under it every group's number of drops could as well have been another group's (of the same size), and
the drops could lie anywhere within the group. The statistic is the sum of the dropped values; p is the share of random reassignments whose sum
lies as far from its expectation as the one found (two-sided, the found one counted). Exact for any distribution of the values.

Where a dropped episode has no value of its own (it timed out, it failed) every episode is given the mean of its group's other, finished ones.
That sees a drop that prefers certain tasks, not one that prefers the long attempts at a task: what was lost cannot be measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.99
PERMUTATIONS = 9_999
MIN_DROPPED = 20
MIN_GROUPS = 5
_SEED = 0
_FIRST_PERMUTATIONS = 999
_HOPELESS = 0.05  # p after the first permutations above which the rest cannot make it significant
_MAX_GROUPS = 500  # with drops, and as many without: both kinds are sampled apart, which the null hypothesis allows
_BATCH = 2_000_000  # values permuted at once

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GroupValues:
    """One group's episodes: `values` (NaN where an episode has none of its own) and which of them were `dropped` for the reason asked about."""

    values: Floats
    dropped: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """Means of the dropped and of all issued episodes; `p` is None where there are too few. `siblings`: group means stand in for single values."""

    dropped: int
    dropped_mean: float
    issued_mean: float
    siblings: bool
    p: float | None


def difference(groups: Sequence[GroupValues]) -> Difference:
    """Compare the dropped episodes of one reason with all issued ones."""
    if any(np.isnan(group.values[group.dropped]).any() for group in groups):
        return _by_siblings(groups)
    return _by_own_values(groups)


def significant(p_values: Sequence[float | None], confidence: float = CONFIDENCE) -> list[bool]:
    """Holm's step-down procedure: with probability `confidence` no true null hypothesis among all of them is rejected."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    rejected = [False] * len(p_values)
    for rank, (p, i) in enumerate(order):
        if p > (1 - confidence) / (len(order) - rank):
            break
        rejected[i] = True
    return rejected


def _by_own_values(groups: Sequence[GroupValues]) -> Difference:
    known = [~np.isnan(group.values) for group in groups]
    values = [group.values[mask] for group, mask in zip(groups, known, strict=True)]
    dropped = [group.dropped[mask] for group, mask in zip(groups, known, strict=True)]
    counts = np.array([mask.sum() for mask in dropped])
    count = int(counts.sum())
    everything = np.concatenate([*values, np.empty(0)])
    found = np.concatenate([row[mask] for row, mask in zip(values, dropped, strict=True)])
    p = None
    if _enough(counts):
        chosen = _case_control(counts)
        rows = [values[i] for i in chosen]
        total = float(sum(values[i][dropped[i]].sum() for i in chosen))
        p = _p_value(_Places(rows, counts[chosen]), total)
    return Difference(count, _mean(found), _mean(everything), False, p)


def _by_siblings(groups: Sequence[GroupValues]) -> Difference:
    count = int(sum(group.dropped.sum() for group in groups))
    others = [group.values[~group.dropped & ~np.isnan(group.values)] for group in groups]
    usable = [i for i, rest in enumerate(others) if len(rest)]
    means = np.array([others[i].mean() for i in usable])
    counts = np.array([groups[i].dropped.sum() for i in usable], dtype=np.int64)
    sizes = np.array([len(groups[i].values) for i in usable])
    p = None
    if _enough(counts):
        chosen = _case_control(counts)
        p = _p_value(_Groups(means[chosen], counts[chosen]), float((means * counts)[chosen].sum()))
    dropped_mean = float((means * counts).sum() / counts.sum()) if counts.sum() else float("nan")
    issued_mean = float((means * sizes).sum() / sizes.sum()) if len(means) else float("nan")
    return Difference(count, dropped_mean, issued_mean, True, p)


def _enough(counts: npt.NDArray[np.int64]) -> bool:
    return int(counts.sum()) >= MIN_DROPPED and int((counts > 0).sum()) >= MIN_GROUPS


def _case_control(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Indices of at most `_MAX_GROUPS` groups with drops and as many without, in order."""
    rng = np.random.default_rng(_SEED)
    kinds = [np.flatnonzero(counts > 0), np.flatnonzero(counts == 0)]
    return np.sort(np.concatenate([rng.permutation(kind)[:_MAX_GROUPS] for kind in kinds]))


class _Groups:
    """Reassigns the numbers of drops to the groups, each of which counts with one value."""

    def __init__(self, means: Floats, counts: npt.NDArray[np.int64]) -> None:
        self.means, self.counts = means, counts
        self.expected = float(counts.sum() * means.mean())
        self.size = len(means)

    def draw(self, rng: np.random.Generator, times: int) -> Floats:
        """Sums over the dropped in `times` reassignments."""
        shuffled = rng.permuted(np.broadcast_to(self.counts, (times, self.size)), axis=1)
        return np.asarray(shuffled @ self.means, dtype=np.float64)


class _Places:
    """Reassigns the numbers of drops among groups of equal size, and the drops' places within each."""

    def __init__(self, values: Sequence[Floats], counts: npt.NDArray[np.int64]) -> None:
        lengths = np.array([len(row) for row in values])
        self.strata = [
            (np.stack([values[i] for i in np.flatnonzero(lengths == size)]), counts[lengths == size])
            for size in np.unique(lengths[lengths > 0])
        ]
        self.expected = float(sum(numbers.mean() * rows.mean(axis=1).sum() for rows, numbers in self.strata))
        self.size = int(lengths.sum())

    def draw(self, rng: np.random.Generator, times: int) -> Floats:
        """Sums over the dropped in `times` reassignments."""
        total = np.zeros(times)
        for rows, numbers in self.strata:
            drops = numbers[numbers > 0]
            order = rng.permuted(np.broadcast_to(np.arange(len(rows)), (times, len(rows))), axis=1)
            shuffled = rng.permuted(rows[order[:, : len(drops)]], axis=2)  # only the groups that get drops
            first = np.arange(rows.shape[1]) < drops[:, None]
            total += np.where(first, shuffled, 0.0).sum(axis=(1, 2))
        return total


def _p_value(null: _Groups | _Places, found: float) -> float:
    rng = np.random.default_rng(_SEED)
    # Sums in another order differ in the last digits: a tie must count as a tie.
    threshold = abs(found - null.expected) - 1e-9 * (abs(found) + abs(null.expected))
    extreme = done = 0
    for goal in (_FIRST_PERMUTATIONS, PERMUTATIONS):
        while done < goal:
            times = min(goal - done, max(1, _BATCH // null.size))
            extreme += int((np.abs(null.draw(rng, times) - null.expected) >= threshold).sum())
            done += times
        if (extreme + 1) / (done + 1) > _HOPELESS:
            break
    return (extreme + 1) / (done + 1)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")
