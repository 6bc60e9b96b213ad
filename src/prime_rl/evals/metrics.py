"""What an evaluation measured: rewards by task and attempt, and the metrics that follow from them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prime_rl.envs.protocol import EpisodeResult
from prime_rl.orchestrator.admission import output_tokens

_ROUNDING = 1e-9  # of a reward that is a sum of weighted ones
_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class EvalReport:
    """What one environment's evaluation gave. `results[i]` are the attempts at task i, in order.

    Attempts that failed say nothing about the policy: they are left out of every mean, and counted. A task without a scored attempt is left out as well.

    Args:
        solved_at: The reward from which an attempt has solved its task.
    """

    env: str
    version: int
    seconds: float
    results: list[list[EpisodeResult]]
    solved_at: float = 1.0

    @property
    def rollouts(self) -> int:
        return sum(len(attempts) for attempts in self.results)

    @property
    def attempts_per_task(self) -> int:
        return max((len(attempts) for attempts in self.results), default=0)

    @property
    def scored(self) -> list[EpisodeResult]:
        return [result for attempts in self.scored_by_task for result in attempts]

    @property
    def scored_by_task(self) -> list[list[EpisodeResult]]:
        """Of the tasks that have any."""
        kept = ([result for result in attempts if result.ok] for attempts in self.results)
        return [attempts for attempts in kept if attempts]

    @property
    def errors(self) -> Counter[str]:
        """Failed attempts by reason."""
        return Counter(str(result.outcome) for attempts in self.results for result in attempts if not result.ok)

    @property
    def error_rate(self) -> float:
        return self.errors.total() / max(self.rollouts, 1)

    @property
    def task_means(self) -> list[float]:
        """The mean reward of each task's scored attempts."""
        return [_mean([result.reward for result in attempts]) for attempts in self.scored_by_task]

    def passes(self, chance: Callable[[int, int, int], float], k: int) -> list[float]:
        """`scores.pass_at_k` or `scores.pass_hat_k` of each task that has k scored attempts."""
        counts = [(len(attempts), self._solved(attempts)) for attempts in self.scored_by_task]
        return [chance(attempts, solved, k) for attempts, solved in counts if attempts >= k]

    def metrics(self) -> dict[str, float]:
        """`eval/<env>/…`; avg@k is the mean over tasks of the mean reward of k attempts. `ci95` is half the width of its interval."""
        prefix = f"eval/{self.env}"
        scored, k = self.scored, self.attempts_per_task
        metrics = {
            f"{prefix}/rollouts": float(self.rollouts),
            f"{prefix}/errors/rate": self.error_rate,
            f"{prefix}/time": self.seconds,
            f"{prefix}/policy_version": float(self.version),
        }
        if not scored:
            return metrics
        metrics |= {
            f"{prefix}/reward/mean": _mean([result.reward for result in scored]),
            f"{prefix}/avg@{k}": _mean(self.task_means),
            f"{prefix}/is_truncated/mean": _mean([float(result.is_truncated) for result in scored]),
            f"{prefix}/num_output_tokens/mean": _mean([float(reply_tokens(result)) for result in scored]),
        }
        if (half := interval95(self.task_means)) is not None:
            metrics[f"{prefix}/avg@{k}/ci95"] = half
        for power in ks(k):
            for name, chance in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
                if values := self.passes(chance, power):
                    metrics[f"{prefix}/{name}{power}"] = _mean(values)
        return metrics

    def _solved(self, attempts: Sequence[EpisodeResult]) -> int:
        return sum(result.reward >= self.solved_at - _ROUNDING for result in attempts)


def reply_tokens(result: EpisodeResult) -> int:
    """Tokens of all replies: as the engine counts them, else those that were sampled."""
    return result.output_tokens or output_tokens(result)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def interval95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of a mean over tasks, by the normal distribution: 1.96 · s / √tasks; None below two tasks."""
    center = mean(values)
    if center is None or len(values) < 2:
        return None
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    return _Z95 * math.sqrt(variance / len(values))
