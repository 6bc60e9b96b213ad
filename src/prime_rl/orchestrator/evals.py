"""Evaluation: attempts at an environment's tasks with one policy version, and what they scored."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EndlessTasks, EpisodeResult, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.orchestrator.samples import output_tokens
from prime_rl.orchestrator.tasks import request_seed

if TYPE_CHECKING:
    from prime_rl.config.shared import SamplingConfig
    from prime_rl.fleet.replicas import RoutedEnvPool

_ATTEMPTS = 3  # at an episode whose worker dies
_ROUNDING = 1e-9  # of a reward that is a sum of weighted ones


@dataclass(frozen=True)
class EvalPlan:
    """What to run for one environment: `env` names it in metrics, `worker` in the pool. `chat`: by the chat route of an API, which gives no tokens."""

    env: str
    worker: str
    sampling: "SamplingConfig"
    num_examples: int
    rollouts_per_example: int
    seq_len: int
    chat: bool = False


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


async def evaluate(
    pool: "EnvPool | RoutedEnvPool",
    plan: EvalPlan,
    *,
    version: int,
    seed: int,
    room: asyncio.Semaphore,
    timeout: float,
    on_progress: Callable[[], None] = lambda: None,
) -> EvalReport:
    """Run one environment's evaluation.

    Args:
        version: The policy version the engines serve; it must not change meanwhile.
        room: Its places are the episodes that may be in flight, of all environments that share it.
        timeout: Seconds that one episode may take.
        on_progress: Told after each episode.
    """
    begin = time.monotonic()

    async def one(index: int, number: int) -> EpisodeResult:
        async with room:  # bounded: every episode that holds a place has its deadline
            result = await attempt(pool, plan, index, number, version=version, seed=seed, timeout=timeout)
        on_progress()
        return result

    numbers = range(plan.rollouts_per_example)
    tasks = tasks_of(pool, plan)
    results = await asyncio.gather(*(one(task.index, number) for task in tasks for number in numbers))
    by_task = [list(results[i : i + len(numbers)]) for i in range(0, len(results), len(numbers))]
    return EvalReport(plan.env, version, time.monotonic() - begin, by_task)


def tasks_of(pool: "EnvPool | RoutedEnvPool", plan: EvalPlan) -> Sequence[TaskInfo]:
    """Those that are to be attempted.

    Raises:
        UserError: the environment is endless, and no number of tasks is set.
    """
    tasks = pool.tasks(plan.worker)
    if isinstance(tasks, EndlessTasks):
        if plan.num_examples < 0:
            raise UserError(f"environment {plan.env!r} is endless: set num_examples, the number of tasks to evaluate")
        return [tasks[index] for index in range(plan.num_examples)]
    return tasks if plan.num_examples < 0 else tasks[: plan.num_examples]


async def attempt(
    pool: "EnvPool | RoutedEnvPool", plan: EvalPlan, index: int, number: int, *, version: int, seed: int, timeout: float
) -> EpisodeResult:
    """Attempt `number` at task `index`, again where a worker dies. Its seed follows from what it is, not from what ran before."""
    own = request_seed(seed, f"eval/{plan.env}/{version}/{index}", number)
    sampling = chat_sampling(plan.sampling, own) if plan.chat else wire_sampling(plan.sampling, own, plan.seq_len)
    for _ in range(_ATTEMPTS):
        result = await pool.run(
            env=plan.worker,
            task_index=index,
            sampling=sampling,
            policy_version=version,
            episode_id=f"eval-{plan.env}-{version}-{index}-{number}",
            deadline=time.monotonic() + timeout,
        )
        if result.outcome is not Outcome.WORKER_DIED:
            break
    return result


def reply_tokens(result: EpisodeResult) -> int:
    """Tokens of all replies: as the engine counts them, else those that were sampled."""
    return result.output_tokens or output_tokens(result)


def wire_sampling(sampling: "SamplingConfig", seed: int, seq_len: int) -> dict[str, float | int]:
    """Sampling parameters as the engine takes them. Every field is sent, so that no server-side default applies.

    Without `max_tokens` a reply is bounded by `seq_len`; the engine bounds prompt and reply by its context besides.
    """
    wire: dict[str, float | int] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "max_tokens": sampling.max_tokens or seq_len,
    }
    if sampling.seeded:
        wire["seed"] = seed
    return wire


def chat_sampling(sampling: "SamplingConfig", seed: int) -> dict[str, float | int]:
    """Sampling parameters for APIs that know OpenAI's alone: what is no parameter of theirs is sent only where it says something."""
    wire: dict[str, float | int] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.max_tokens is not None:
        wire["max_tokens"] = sampling.max_tokens
    if sampling.top_k > 0:
        wire["top_k"] = sampling.top_k
    if sampling.min_p > 0:
        wire["min_p"] = sampling.min_p
    if sampling.min_tokens > 0:
        wire["min_tokens"] = sampling.min_tokens
    if sampling.seeded:
        wire["seed"] = seed
    return wire


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def interval95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of a mean over tasks, by the normal distribution: 1.96 · s / √tasks; None below two tasks."""
    center = mean(values)
    if center is None or len(values) < 2:
        return None
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    return _Z95 * math.sqrt(variance / len(values))
