"""Evaluation: attempts at an environment's tasks with one policy version, and what they scored."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.orchestrator.samples import output_tokens
from prime_rl.orchestrator.seeds import request_seed

if TYPE_CHECKING:
    from prime_rl.config.shared import SamplingConfig
    from prime_rl.orchestrator.fleet import RoutedPool


_ATTEMPTS = 3  # at an episode whose worker dies


@dataclass(frozen=True)
class EvalPlan:
    """What to run for one environment: `env` names it in metrics, `worker` in the pool."""

    env: str
    worker: str
    sampling: "SamplingConfig"
    num_examples: int
    rollouts_per_example: int
    seq_len: int


@dataclass(frozen=True)
class EvalReport:
    """What one environment's evaluation gave. `results[i]` are the attempts at task i, in order."""

    env: str
    version: int
    seconds: float
    results: list[list[EpisodeResult]]

    @property
    def rollouts(self) -> int:
        return sum(len(attempts) for attempts in self.results)

    @property
    def scored(self) -> list[EpisodeResult]:
        return [result for attempts in self.results for result in attempts if result.ok]

    @property
    def errors(self) -> Counter[str]:
        """Failed attempts by reason."""
        return Counter(str(result.outcome) for attempts in self.results for result in attempts if not result.ok)

    def metrics(self) -> dict[str, float]:
        """`eval/<env>/…`; avg@k is the mean over tasks of the mean reward of k attempts, failed attempts left out and counted."""
        prefix = f"eval/{self.env}"
        scored = self.scored
        metrics = {
            f"{prefix}/rollouts": float(self.rollouts),
            f"{prefix}/errors/rate": sum(self.errors.values()) / max(self.rollouts, 1),
            f"{prefix}/time": self.seconds,
            f"{prefix}/policy_version": float(self.version),
        }
        if not scored:
            return metrics
        task_means = [
            _mean([r.reward for r in attempts if r.ok]) for attempts in self.results if any(r.ok for r in attempts)
        ]
        attempts_per_task = max(len(attempts) for attempts in self.results)
        return metrics | {
            f"{prefix}/reward/mean": _mean([result.reward for result in scored]),
            f"{prefix}/avg@{attempts_per_task}": _mean(task_means),
            f"{prefix}/is_truncated/mean": _mean([float(result.is_truncated) for result in scored]),
            f"{prefix}/num_output_tokens/mean": _mean([float(output_tokens(result)) for result in scored]),
        }


async def evaluate(
    pool: "EnvPool | RoutedPool",
    plan: EvalPlan,
    *,
    version: int,
    seed: int,
    max_concurrent: int,
    timeout: float,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Run one environment's evaluation.

    Args:
        version: The policy version the engines serve; it must not change meanwhile.
        timeout: Seconds that one episode may take.
        on_progress: Told finished and total episodes after each one.
    """
    begin = time.monotonic()
    tasks = pool.tasks(plan.worker)
    tasks = tasks if plan.num_examples < 0 else tasks[: plan.num_examples]
    room = asyncio.Semaphore(max_concurrent)  # bounded: every episode that holds a place has its deadline
    total, finished = len(tasks) * plan.rollouts_per_example, 0

    async def attempt(index: int, number: int) -> EpisodeResult:
        nonlocal finished
        sampling = plan.sampling
        async with room:
            for _ in range(_ATTEMPTS):
                result = await pool.run(
                    env=plan.worker,
                    task_index=index,
                    sampling=wire_sampling(
                        sampling, request_seed(seed, f"eval/{plan.env}/{version}/{index}", number), plan.seq_len
                    ),
                    policy_version=version,
                    episode_id=f"eval-{plan.env}-{version}-{index}-{number}",
                    deadline=time.monotonic() + timeout,
                )
                if result.outcome is not Outcome.WORKER_DIED:
                    break
        finished += 1
        if on_progress is not None:
            on_progress(finished, total)
        return result

    numbers = range(plan.rollouts_per_example)
    results = await asyncio.gather(*(attempt(task.index, number) for task in tasks for number in numbers))
    by_task = [list(results[i : i + len(numbers)]) for i in range(0, len(results), len(numbers))]
    return EvalReport(plan.env, version, time.monotonic() - begin, by_task)


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
