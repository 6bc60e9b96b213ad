"""Run the attempts of an evaluation: for `eval`, which `sft` starts beside itself, and during `rl`.

A plan says what to run for one environment; a job is a plan with its tasks and results. A runner makes all missing
attempts of several jobs by one policy version, so that the slowest episodes of one environment leave the engines to the
others.
"""

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, FirstTasks, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalResults
from prime_rl.fleet.replicas import Replica, ReplicaPool, soundest
from prime_rl.orchestrator.admission import output_tokens
from prime_rl.orchestrator.tasks import request_seed
from prime_rl.wait import WaitTimeout, wait_async

if TYPE_CHECKING:
    from prime_rl.config.shared import SamplingConfig

_WORKER_DEATHS = 3  # in one attempt, of which the last is its outcome
_TRIES = 5  # at one attempt, of which all but the last failed for want of a server
FIRST_PAUSE_SECONDS = 1.0  # before an attempt without a server is made again; doubled each time
_LOST = "did not answer, was started again, or was given other weights by others: is it another run's?"


class KeyRejected(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


@dataclass(frozen=True)
class EvalPlan:
    """What to run for one environment: `env` names it in metrics, `worker` in the pool. `chat`: by an API's route."""

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
    """Makes all missing attempts of several jobs. What has ended is kept at once, whatever ends the rest.

    Args:
        max_concurrent: Attempts in flight, of all jobs.
        timeout: Seconds that one attempt may take.
        fleet: Servers of this version. An attempt goes to one of them, and is kept once that one is verified to have
            served the version all the time; else it is made again. None: an API, which environments ask without us.
        bring_back: Called with a server that failed its verification.
        superseded: Whether the version is no longer to be evaluated.
        on_result: Called with each attempt that is kept.
    """

    def __init__(
        self,
        pool: EnvPool,
        jobs: Sequence[EvalJob],
        version: int,
        *,
        seed: int,
        max_concurrent: int,
        timeout: float,
        fleet: ReplicaPool | None = None,
        bring_back: Callable[[Replica], Coroutine[Any, Any, None]] | None = None,
        superseded: Callable[[], bool] = lambda: False,
        on_result: Callable[[EvalJob], None] = lambda job: None,
    ) -> None:
        self._pool, self._version, self._seed = pool, version, seed
        self._max_concurrent, self._timeout = max_concurrent, timeout
        self._fleet, self._bring_back, self._superseded = fleet, bring_back, superseded
        self._on_result = on_result
        # One of each environment in turn, so that none waits for the end of another.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*map(_missing, jobs)))
        self._todo = deque(attempt for attempt in turns if attempt is not None)
        self._group = asyncio.TaskGroup()
        self._begin = time.monotonic()

    async def run(self) -> None:
        """Run all that is missing.

        Raises:
            KeyRejected: the API rejected the key.
            UserError: a server was lost for good.
        """
        try:
            async with self._group:
                for _ in range(min(self._max_concurrent, len(self._todo))):
                    self._group.create_task(self._work())
        except ExceptionGroup as several:
            kinds = (KeyRejected, UserError, Exception)  # a rejected key first, then what else the user can mend
            raise min(
                several.exceptions, key=lambda error: [not isinstance(error, kind) for kind in kinds]
            ) from several

    async def _work(self) -> None:
        while self._todo and not self._superseded():  # bounded: each attempt is
            attempt = self._todo.popleft()
            result, results = await self._attempt(attempt), attempt.job.results
            if result.outcome is Outcome.ENGINE_UNAVAILABLE and self._superseded():
                return  # it was not waited for
            result.task_id = attempt.task.task_id
            result.output_tokens = result.output_tokens or output_tokens(result)
            result.samples = []
            results.seconds = time.monotonic() - self._begin
            results.add(attempt.number, result)
            self._on_result(attempt.job)
            if result.outcome is Outcome.ENGINE_DENIED:
                raise KeyRejected(result.message)

    async def _attempt(self, attempt: EvalAttempt) -> EpisodeResult:
        """Make one attempt, again where a worker dies or no server is there. Its seed follows from what it is, not from
        what ran before."""
        plan, index, number = attempt.job.plan, attempt.task.index, attempt.number
        seed = request_seed(self._seed, f"eval/{plan.env}/{self._version}/{index}", number)
        sampling = chat_sampling(plan.sampling, seed) if plan.chat else wire_sampling(plan.sampling, seed, plan.seq_len)
        run = partial(
            self._pool.run, env=plan.worker, task_index=index, sampling=sampling, policy_version=self._version,
            episode_id=f"eval-{plan.env}-{self._version}-{index}-{number}",
        )  # fmt: skip
        outcomes: Counter[Outcome] = Counter()
        while True:  # bounded: by the tries
            if self._fleet is None:
                result = await run(deadline=time.monotonic() + self._timeout)
            else:
                result = await self._run_on_server(run, self._fleet)
            outcomes[result.outcome] += 1
            count = outcomes[result.outcome]
            if result.outcome is Outcome.WORKER_DIED and count < _WORKER_DEATHS:
                continue
            # The client of an API has tried again and again already.
            final = plan.chat or count >= _TRIES or self._superseded()
            if result.outcome is not Outcome.ENGINE_UNAVAILABLE or final:
                return result
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2.0 ** (count - 1))

    async def _run_on_server(self, run: Callable[..., Awaitable[EpisodeResult]], fleet: ReplicaPool) -> EpisodeResult:
        """Run an attempt on the least loaded server. What fails for want of it is tried once with each other one."""
        result = EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE)
        tried: set[Replica] = set()
        while not (tried and tried.issuperset(fleet.ready)):  # bounded: each server is tried once
            try:
                replica = await wait_async(
                    lambda: soundest([one for one in fleet.ready if one not in tried] or fleet.ready),
                    subject="server that serves", owner="inference", seconds=self._timeout, stop=self._superseded,
                )  # fmt: skip
            except WaitTimeout as error:
                result.message = str(error)
                break
            if replica is None:
                break
            with fleet.busy(replica):
                loaded = replica.loaded
                result = await run(server=replica.name, deadline=time.monotonic() + self._timeout)
                verified = await replica.verify()
            if not verified and self._bring_back is not None:
                self._group.create_task(self._bring_back(replica))
            tried.add(replica)
            if result.outcome is Outcome.ENGINE_UNAVAILABLE:
                if not replica.failures:  # many may fail together here
                    fleet.failed(replica)
            elif verified and replica.loaded is loaded:
                if result.ok:
                    fleet.succeeded(replica)
                break
            else:  # it was lost, and perhaps given the weights again
                result = EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE, f"{replica.name} {_LOST}")
        return result


def new_job(pool: EnvPool, plan: EvalPlan, version: int, policy: str = "", **settings: Any) -> EvalJob:
    """Return a job with results in memory; `settings` are theirs."""
    tasks, name = tasks_of(pool, plan), policy or f"step_{version}"
    ids = [task.task_id for task in tasks]
    return EvalJob(plan, tasks, EvalResults(plan.env, name, version, ids, plan.rollouts_per_example, **settings))


def _missing(job: EvalJob) -> list[EvalAttempt]:
    tasks = {task.task_id: task for task in job.tasks}
    return [EvalAttempt(job, tasks[key[0]], key[1]) for key in job.results.keys if key not in job.results.done]


def tasks_of(pool: EnvPool, plan: EvalPlan) -> Sequence[TaskInfo]:
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
