"""The one way to run an evaluation: by `eval`, during `rl` and beside `sft`.

A plan says what to run for one environment, a job which of its attempts are missing. A round runs all missing attempts of
several jobs on one policy version, within one bound on concurrency.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EndlessTasks, EpisodeResult, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals.metrics import EvalReport, reply_tokens
from prime_rl.orchestrator.tasks import request_seed

if TYPE_CHECKING:
    from prime_rl.config.shared import SamplingConfig
    from prime_rl.fleet.replicas import RoutedEnvPool

_ATTEMPTS = 3  # at an episode whose worker dies
VERIFY_SECONDS = 0.5  # between two questions what is served
FIRST_PAUSE_SECONDS = 1.0  # before an attempt that failed for want of a server is made again; doubled each time
_LAST_VERIFY_SECONDS = 20.0  # for what has ended when all is given up
_VOIDS = 3  # times that one attempt is made again because nobody can prove what sampled it


class Denied(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


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


class Results:
    """Results of one environment at one version, in memory.

    Attributes:
        results: The last result of every attempt that was made, by task id and number.
        spent: Tokens of prompts and of replies, of failed attempts too.
    """

    def __init__(self) -> None:
        self.results: dict[tuple[str, int], EpisodeResult] = {}
        self.spent = (0, 0)

    def scored(self, task_id: str, attempt: int) -> bool:
        """Return whether that attempt need not be made again: one that failed is."""
        result = self.results.get((task_id, attempt))
        return result is not None and result.ok

    def add(self, attempt: int, result: EpisodeResult, version: int) -> None:
        """Keep a result."""
        self.results[result.task_id, attempt] = result
        self.spent = self.spent[0] + result.input_tokens, self.spent[1] + result.output_tokens


@dataclass(frozen=True)
class Job:
    """One environment: what to run, on which tasks, and where results are kept."""

    plan: EvalPlan
    tasks: Sequence[TaskInfo]
    store: Results

    def missing(self) -> "Iterator[EvalAttempt]":
        """What is still to be made: of each task all attempts together, as they share their prompt."""
        for task in self.tasks:
            for number in range(self.plan.rollouts_per_example):
                if not self.store.scored(task.task_id, number):
                    yield EvalAttempt(self, task, number)

    @property
    def complete(self) -> bool:
        """Whether every attempt was made, well or not."""
        return all(len(attempts) == self.plan.rollouts_per_example for attempts in self.kept())

    def kept(self) -> list[list[EpisodeResult]]:
        """The attempts that there are, by task."""
        numbers = range(self.plan.rollouts_per_example)
        results = self.store.results
        return [
            [results[task.task_id, number] for number in numbers if (task.task_id, number) in results]
            for task in self.tasks
        ]


@dataclass(frozen=True)
class EvalAttempt:
    """One attempt at one task."""

    job: Job
    task: TaskInfo
    number: int


class Round:
    """All missing attempts of several jobs at one version.

    Args:
        max_concurrent: Attempts in flight, of all jobs.
        timeout: Seconds that one attempt may take.
        verify: Returns whether the servers have served this version all the time since the last call: what ended before
            is kept only then, else it is run again. None: keep at once.
        on_kept: Called with each attempt that is kept.
        tries: At one attempt, of which all but the last failed for want of a server.
    """

    def __init__(
        self,
        pool: "EnvPool | RoutedEnvPool",
        jobs: Sequence[Job],
        version: int,
        *,
        seed: int,
        max_concurrent: int,
        timeout: float,
        verify: Callable[[], Awaitable[bool]] | None = None,
        on_kept: Callable[[Job, EpisodeResult], None] = lambda job, result: None,
        tries: int = 1,
    ) -> None:
        self._pool, self._version, self._seed = pool, version, seed
        self._max_concurrent, self._timeout, self._tries = max_concurrent, timeout, tries
        self._verify_servers, self._on_kept = verify, on_kept
        self._todo = deque(_by_turns([job.missing() for job in jobs]))
        self._unverified: list[tuple[EvalAttempt, EpisodeResult, int]] = []
        self._period = 0  # raised when what is in flight is void
        self._voids: Counter[tuple[str, str, int]] = Counter()
        self._verifying = asyncio.Lock()  # bounded: held for questions that have deadlines

    async def run(self) -> None:
        """Run all that is missing. Whatever ends it, what was finished and verified by then is kept.

        Raises:
            Denied: the API rejected the key.
            UserError: a server was lost for good.
        """
        while self._todo:  # bounded: each attempt has its deadline, and is made again a few times at most
            try:
                await self._run_all()
            except BaseException:
                with contextlib.suppress(UserError, TimeoutError):  # what counts is why it ends
                    async with asyncio.timeout(_LAST_VERIFY_SECONDS):
                        await self._verify()
                raise
            await self._verify()

    async def _run_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                verifying = group.create_task(self._verify_periodically())
                count = min(self._max_concurrent, len(self._todo))
                workers = [group.create_task(self._work()) for _ in range(count)]
                await asyncio.wait(workers)  # bounded: each attempt has its deadline
                verifying.cancel()
        except ExceptionGroup as several:
            raise _most_telling(several) from several

    async def _work(self) -> None:
        while self._todo:
            attempted, period = self._todo.popleft(), self._period
            result = await self._attempt(attempted)
            result.task_id = attempted.task.task_id
            result.output_tokens, result.samples = reply_tokens(result), []
            self._unverified.append((attempted, result, period))
            if self._verify_servers is None:
                await self._verify()
            if result.outcome is Outcome.ENGINE_DENIED:
                raise Denied(result.message)

    async def _attempt(self, attempted: EvalAttempt) -> EpisodeResult:
        """Run one attempt, again where a worker dies. Its seed follows from what it is, not from what ran before."""
        plan, index, number = attempted.job.plan, attempted.task.index, attempted.number
        seed = request_seed(self._seed, f"eval/{plan.env}/{self._version}/{index}", number)
        sampling = chat_sampling(plan.sampling, seed) if plan.chat else wire_sampling(plan.sampling, seed, plan.seq_len)
        unavailable = deaths = 0
        while True:  # bounded: by the tries
            result = await self._pool.run(
                env=plan.worker,
                task_index=index,
                sampling=sampling,
                policy_version=self._version,
                episode_id=f"eval-{plan.env}-{self._version}-{index}-{number}",
                deadline=time.monotonic() + self._timeout,
            )
            unavailable += result.outcome is Outcome.ENGINE_UNAVAILABLE
            deaths += result.outcome is Outcome.WORKER_DIED
            if result.outcome is Outcome.WORKER_DIED and deaths < _ATTEMPTS:
                continue
            # The client of an API has tried again and again already.
            if result.outcome is not Outcome.ENGINE_UNAVAILABLE or plan.chat or unavailable >= self._tries:
                return result
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2.0 ** (unavailable - 1))

    async def _verify_periodically(self) -> None:
        while True:  # bounded: cancelled when all attempts have ended
            await asyncio.sleep(VERIFY_SECONDS)
            await self._verify()

    async def _verify(self) -> None:
        """Keep what has ended if the servers served this version all the time; else have it run again."""
        async with self._verifying:
            ended, self._unverified = self._unverified, []
            try:
                verified = self._verify_servers is None or await self._verify_servers()
            except BaseException:
                self._unverified = ended + self._unverified
                raise
            self._period += not verified
            for attempted, result, period in ended:
                if period == self._period:
                    attempted.job.store.add(attempted.number, result, self._version)
                    self._on_kept(attempted.job, result)
                else:
                    self._run_again(attempted)

    def _run_again(self, attempted: EvalAttempt) -> None:
        key = attempted.job.plan.env, attempted.task.task_id, attempted.number
        self._voids[key] += 1
        if self._voids[key] > _VOIDS:
            raise UserError(
                f"the servers' weights were changed {_VOIDS} times by others, or the servers started again, during one attempt: are they another run's?"
            )
        self._todo.append(attempted)


async def evaluate(
    pool: "EnvPool | RoutedEnvPool",
    plans: Sequence[EvalPlan],
    version: int,
    *,
    seed: int,
    max_concurrent: int,
    timeout: float,
    on_progress: Callable[[], None] = lambda: None,
) -> list[EvalReport]:
    """Run several plans at once, so that the slowest episodes of one leave the engines to the others.

    `version` must be served all the time: the caller verifies it.
    """
    jobs = [Job(plan, tasks_of(pool, plan), Results()) for plan in plans]
    begin, ended = time.monotonic(), dict.fromkeys((plan.env for plan in plans), time.monotonic())

    def on_kept(job: Job, result: EpisodeResult) -> None:
        ended[job.plan.env] = time.monotonic()
        on_progress()

    await Round(pool, jobs, version, seed=seed, max_concurrent=max_concurrent, timeout=timeout, on_kept=on_kept).run()
    return [EvalReport(job.plan.env, version, ended[job.plan.env] - begin, job.kept()) for job in jobs]


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


def _by_turns(queues: Sequence[Iterator[EvalAttempt]]) -> Iterator[EvalAttempt]:
    """One of each in turn, so that no environment waits for the end of another."""
    for several in itertools.zip_longest(*queues):
        yield from (one for one in several if one is not None)


def _most_telling(group: ExceptionGroup) -> BaseException:
    """The error that says most: a refused key, before what else the user can mend."""
    errors = sorted(group.exceptions, key=lambda error: (not isinstance(error, Denied), not isinstance(error, UserError)))  # fmt: skip
    return errors[0]
