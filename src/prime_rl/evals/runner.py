"""Run the attempts of an evaluation: for `eval`, which `sft` starts beside itself, and during `rl`.

A plan says what to run for one environment; a job is a plan with its tasks and results. A runner makes all missing
attempts of several jobs by one policy version, so that the slowest episodes of one environment leave the engines to the
others.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, FirstTasks, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalResults
from prime_rl.orchestrator.admission import output_tokens
from prime_rl.orchestrator.tasks import request_seed

if TYPE_CHECKING:
    from prime_rl.config.shared import SamplingConfig
    from prime_rl.fleet.replicas import RoutedEnvPool

_WORKER_DEATHS = 3  # in one attempt, of which the last is its outcome
VERIFY_SECONDS = 0.5  # between two verifications
FIRST_PAUSE_SECONDS = 1.0  # before an attempt without a server is made again; doubled each time
_LAST_VERIFY_SECONDS = 20.0  # for what has ended when the evaluation is ended early
_VOIDS = 5  # times in a row, nothing being kept, that attempts are made again because the servers' weights changed


class KeyRejected(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


@dataclass(frozen=True)
class EvalPlan:
    """What to run for one environment: `env` names it in metrics, `worker` in the pool. `chat`: by an API's chat route."""

    env: str
    worker: str
    sampling: "SamplingConfig"
    num_examples: int
    rollouts_per_example: int
    seq_len: int
    chat: bool = False


@dataclass(frozen=True)
class EvalJob:
    """One environment: what to run, on which tasks, and the results so far."""

    plan: EvalPlan
    tasks: Sequence[TaskInfo]
    results: EvalResults


@dataclass(frozen=True)
class EvalAttempt:
    """One attempt at one task."""

    job: EvalJob
    task: TaskInfo
    number: int


class EvalRunner:
    """Makes all missing attempts of several jobs.

    Args:
        max_concurrent: Attempts in flight, of all jobs.
        timeout: Seconds that one attempt may take.
        verify: Returns whether the servers have served this version all the time since the last call: what ended before
            is kept only then, else it is made again. None: keep at once.
        on_result: Called with each attempt that is kept.
        tries: At one attempt, of which all but the last failed for want of a server.
    """

    def __init__(
        self,
        pool: "EnvPool | RoutedEnvPool",
        jobs: Sequence[EvalJob],
        version: int,
        *,
        seed: int,
        max_concurrent: int,
        timeout: float,
        verify: Callable[[], Awaitable[bool]] | None = None,
        on_result: Callable[[EvalJob], None] = lambda job: None,
        tries: int = 1,
    ) -> None:
        self._pool, self._version, self._seed = pool, version, seed
        self._max_concurrent, self._timeout, self._tries = max_concurrent, timeout, tries
        self._verify_servers, self._on_result = verify, on_result
        missing = [_missing(job) for job in jobs]
        # One of each environment in turn, so that none waits for the end of another.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*missing))
        self._todo = deque(attempt for attempt in turns if attempt is not None)
        self._unverified: list[tuple[EvalAttempt, EpisodeResult, int]] = []
        self._period = 0  # raised when what is in flight is void
        self._voids = 0  # periods in a row of which nothing was kept
        self._begin = time.monotonic()

    async def run(self) -> None:
        """Run all that is missing. Whatever ends it, what was finished and verified by then is kept.

        Raises:
            KeyRejected: the API rejected the key.
            UserError: a server was lost for good.
        """
        while self._todo:  # bounded: each attempt has its deadline, and is made again a few times at most
            try:
                await self._run_all()
            except BaseException:
                with contextlib.suppress(UserError, TimeoutError):  # the first error counts
                    async with asyncio.timeout(_LAST_VERIFY_SECONDS):
                        await self._verify()
                raise
            await self._verify()

    async def _run_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                verifying = group.create_task(self._verify_periodically())
                workers = [group.create_task(self._work()) for _ in range(min(self._max_concurrent, len(self._todo)))]
                await asyncio.wait(workers)  # bounded: each attempt has its deadline
                verifying.cancel()
        except ExceptionGroup as several:
            kinds = (KeyRejected, UserError, Exception)  # a rejected key first, then what else the user can mend
            raise min(
                several.exceptions, key=lambda error: [not isinstance(error, kind) for kind in kinds]
            ) from several

    async def _work(self) -> None:
        while self._todo:
            attempt, period = self._todo.popleft(), self._period
            result = await self._attempt(attempt)
            result.task_id = attempt.task.task_id
            result.output_tokens = result.output_tokens or output_tokens(result)
            result.samples = []
            self._unverified.append((attempt, result, period))
            if self._verify_servers is None:
                await self._verify()
            if result.outcome is Outcome.ENGINE_DENIED:
                raise KeyRejected(result.message)

    async def _attempt(self, attempt: EvalAttempt) -> EpisodeResult:
        """Run one attempt, again where a worker dies. Its seed follows from what it is, not from what ran before."""
        plan, index, number = attempt.job.plan, attempt.task.index, attempt.number
        seed = request_seed(self._seed, f"eval/{plan.env}/{self._version}/{index}", number)
        sampling = chat_sampling(plan.sampling, seed) if plan.chat else wire_sampling(plan.sampling, seed, plan.seq_len)
        outcomes: Counter[Outcome] = Counter()
        while True:  # bounded: by the tries
            result = await self._pool.run(
                env=plan.worker,
                task_index=index,
                sampling=sampling,
                policy_version=self._version,
                episode_id=f"eval-{plan.env}-{self._version}-{index}-{number}",
                deadline=time.monotonic() + self._timeout,
            )
            outcomes[result.outcome] += 1
            count = outcomes[result.outcome]
            if result.outcome is Outcome.WORKER_DIED and count < _WORKER_DEATHS:
                continue
            # The client of an API has tried again and again already.
            if result.outcome is not Outcome.ENGINE_UNAVAILABLE or plan.chat or count >= self._tries:
                return result
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2.0 ** (count - 1))

    async def _verify_periodically(self) -> None:
        while True:  # bounded: cancelled when all attempts have ended
            await asyncio.sleep(VERIFY_SECONDS)
            await self._verify()

    async def _verify(self) -> None:
        """Keep what has ended if the servers served this version all the time; else have it made again."""
        ended, self._unverified = self._unverified, []
        try:
            verified = self._verify_servers is None or await self._verify_servers()
        except BaseException:
            self._unverified = ended + self._unverified
            raise
        if not verified:
            self._period += 1
            self._voids += 1
            if self._voids > _VOIDS:
                raise UserError(
                    f"the servers' weights were changed {_VOIDS} times in a row by others, or the servers started again: are "
                    "they another run's?"
                )
        for attempt, result, period in ended:
            if period == self._period:
                self._voids = 0
                attempt.job.results.seconds = time.monotonic() - self._begin
                attempt.job.results.add(attempt.number, result)
                self._on_result(attempt.job)
                continue
            self._todo.append(attempt)


def new_job(pool: "EnvPool | RoutedEnvPool", plan: EvalPlan, version: int) -> EvalJob:
    """Return a job with results in memory."""
    tasks = tasks_of(pool, plan)
    ids = [task.task_id for task in tasks]
    return EvalJob(plan, tasks, EvalResults(plan.env, f"step_{version}", version, ids, plan.rollouts_per_example))


def _missing(job: EvalJob) -> list[EvalAttempt]:
    tasks = {task.task_id: task for task in job.tasks}
    return [EvalAttempt(job, tasks[key[0]], key[1]) for key in job.results.keys if key not in job.results.done]


def tasks_of(pool: "EnvPool | RoutedEnvPool", plan: EvalPlan) -> Sequence[TaskInfo]:
    """Return the tasks that are to be attempted; warn where there are fewer than asked for.

    Raises:
        UserError: the environment is endless, and no number of tasks is set.
    """
    tasks = pool.tasks(plan.worker)
    if plan.num_examples < 0 and isinstance(tasks, FirstTasks):
        raise UserError(f"environment {plan.env!r} is endless: set num_examples, the number of tasks to evaluate")
    if plan.num_examples > len(tasks):
        logger.warning("{} has {} tasks, not {}: all of them are evaluated", plan.env, len(tasks), plan.num_examples)
    return tasks if plan.num_examples < 0 else tasks[: plan.num_examples]


def wire_sampling(sampling: "SamplingConfig", seed: int, seq_len: int) -> dict[str, float | int]:
    """Sampling parameters as the engine takes them. Every field is sent, so that no server-side default applies.

    Without `max_tokens` a reply is bounded by `seq_len`; the engine bounds prompt and reply by its context besides.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "min_tokens")
    wire: dict[str, float | int] = {name: getattr(sampling, name) for name in names}
    wire["max_tokens"] = sampling.max_tokens or seq_len
    return wire | ({"seed": seed} if sampling.seeded else {})


def chat_sampling(sampling: "SamplingConfig", seed: int) -> dict[str, float | int]:
    """Sampling parameters for APIs that know OpenAI's alone: others are sent only where they are set."""
    names = ("top_k", "min_p", "min_tokens")
    wire: dict[str, float | int] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    wire |= {name: value for name in names if (value := getattr(sampling, name)) > 0}
    wire |= {} if sampling.max_tokens is None else {"max_tokens": sampling.max_tokens}
    return wire | ({"seed": seed} if sampling.seeded else {})
