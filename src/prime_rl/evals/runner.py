"""Run the attempts of an evaluation: for `eval`, which `sft` starts beside itself, and during `rl`.

A runner makes all missing attempts at several environments by one policy version, so that the slowest episodes of one
environment leave the servers to the others.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, FirstTasks, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalPlan, EvalResults
from prime_rl.fleet.replicas import Replica, ReplicaPool, least_loaded_healthy
from prime_rl.orchestrator.admission import output_tokens
from prime_rl.orchestrator.tasks import request_seed
from prime_rl.wait import WaitTimeout, wait_async

if TYPE_CHECKING:
    from prime_rl.config.shared import SamplingConfig

_WORKER_DEATHS = 3  # in one attempt, of which the last is its outcome
_ROUNDS = 5  # of an attempt over all servers, of which all but the last failed for want of one
FIRST_PAUSE_SECONDS = 1.0  # after the first round; doubled each time
LOOK_SECONDS = 10.0  # between two looks at a server that has an attempt
_SILENT_LOOKS = 3  # in a row, without an answer: the server hangs
_LOST = "did not answer, was started again, or was given other weights by others: is it another run's?"


class KeyRejected(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


@dataclass(eq=False)
class EvalRunner:
    """Makes all attempts that are missing in `results`. What has ended is kept at once, whatever ends the rest.

    Args:
        max_concurrent: Attempts in flight, at all environments.
        timeout: Seconds that one attempt may take.
        fleet: Servers of this version. An attempt goes to one of them, and is kept once that one is verified to have
            served the version all the time; else it is made again. None: an API, which environments ask without us.
        bring_back: Called with a server that failed its verification.
        superseded: Whether the version is no longer to be evaluated.
        on_result: Called after each attempt that is kept.
    """

    pool: EnvPool
    results: Sequence[EvalResults]
    seed: int
    max_concurrent: int
    timeout: float
    fleet: ReplicaPool | None = None
    bring_back: Callable[[Replica], Coroutine[Any, Any, None]] | None = None
    superseded: Callable[[], bool] = lambda: False
    on_result: Callable[[], None] = lambda: None
    _group: asyncio.TaskGroup = field(init=False, default_factory=asyncio.TaskGroup)

    async def run(self) -> None:
        """Run all that is missing.

        Raises:
            KeyRejected: the API rejected the key.
            UserError: a server was lost for good.
        """
        # One of each environment in turn, so that none waits for the end of another.
        turns = itertools.zip_longest(*(_missing(results) for results in self.results))
        todo = deque(attempt for turn in turns for attempt in turn if attempt is not None)
        begin = time.monotonic()
        try:
            async with self._group:
                for _ in range(min(self.max_concurrent, len(todo))):
                    self._group.create_task(self._work(todo, begin))
        except ExceptionGroup as several:
            kinds = (KeyRejected, UserError, Exception)  # a rejected key first, then what else the user can mend
            raise min(several.exceptions, key=lambda one: [not isinstance(one, kind) for kind in kinds]) from several

    async def _work(self, todo: deque[tuple[EvalResults, TaskInfo, int]], begin: float) -> None:
        while todo and not self.superseded():  # bounded: each attempt is
            results, task, number = todo.popleft()
            result = await self._attempt(results, task.index, number)
            if result.outcome is Outcome.ENGINE_UNAVAILABLE and self.superseded():
                return  # it was not waited for
            result.task_id = task.task_id
            result.output_tokens = result.output_tokens or output_tokens(result)
            results.seconds = time.monotonic() - begin
            results.add(number, result)
            self.on_result()
            if result.outcome is Outcome.ENGINE_DENIED:
                raise KeyRejected(result.message)

    async def _attempt(self, results: EvalResults, index: int, number: int) -> EpisodeResult:
        """Make one attempt, again where a worker dies or a server fails. Its seed follows from what it is, not from
        what ran before."""
        plan, version = results.plan, results.version
        seed = request_seed(self.seed, f"eval/{plan.env}/{version}/{index}", number)
        sampling = chat_sampling(plan.sampling, seed) if plan.chat else wire_sampling(plan.sampling, seed, plan.seq_len)
        run = partial(
            self.pool.run, env=plan.worker, task_index=index, sampling=sampling, policy_version=version,
            episode_id=f"eval-{plan.env}-{version}-{index}-{number}",
        )  # fmt: skip
        deaths, rounds, tried = 0, 0, set[Replica]()
        while True:  # bounded: by the deaths of workers and the rounds
            if self.fleet is None:
                result = await run(deadline=time.monotonic() + self.timeout)
            else:
                result = await self._run_on_server(run, self.fleet, tried)
            if result.outcome is Outcome.WORKER_DIED and (deaths := deaths + 1) < _WORKER_DEATHS:
                continue
            # The client of an API has tried again and again already.
            if result.outcome is not Outcome.ENGINE_UNAVAILABLE or self.fleet is None:
                return result
            if tried.issuperset(self.fleet.ready):
                rounds += 1
                if rounds == _ROUNDS or self.superseded():
                    return result
                tried.clear()
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2.0 ** (rounds - 1))

    async def _run_on_server(
        self, run: Callable[..., Coroutine[Any, Any, EpisodeResult]], fleet: ReplicaPool, tried: set[Replica]
    ) -> EpisodeResult:
        """Run an attempt on the least loaded server, one that was not tried if there is such."""
        try:
            replica = await wait_async(
                lambda: least_loaded_healthy([one for one in fleet.ready if one not in tried] or fleet.ready),
                subject="server that serves", owner="inference", seconds=self.timeout, stop=self.superseded,
            )  # fmt: skip
        except WaitTimeout as error:
            return _unavailable(str(error))
        if replica is None:
            return _unavailable("superseded")
        tried.add(replica)
        with fleet.busy(replica):
            loaded = replica.loaded
            result = await _unless_silent(replica, run(server=replica.name, deadline=time.monotonic() + self.timeout))
            verified = result is not None and await replica.verify()
        if not verified and self.bring_back is not None:
            self._group.create_task(self.bring_back(replica))
        if result is None or result.outcome is Outcome.ENGINE_UNAVAILABLE:
            if not replica.failures:  # many may fail together here
                fleet.failed(replica)
        elif not verified or replica.loaded is not loaded:  # it was lost, and perhaps given the weights again
            return _unavailable(f"{replica.name} {_LOST}")
        elif result.ok:
            fleet.succeeded(replica)
        return result or _unavailable(f"{replica.name} does not answer")


async def _unless_silent(replica: Replica, attempt: Coroutine[Any, Any, EpisodeResult]) -> EpisodeResult | None:
    """Await an attempt; None, and it is cancelled, where the server does not answer meanwhile, again and again."""
    task, silent = asyncio.ensure_future(attempt), 0
    try:
        while silent < _SILENT_LOOKS:  # bounded: the attempt has its deadline
            await asyncio.wait([task], timeout=LOOK_SECONDS)
            if task.done():
                return task.result()
            silent = 0 if await replica.client.answers() else silent + 1
        return None
    finally:
        task.cancel()


def _unavailable(message: str) -> EpisodeResult:
    return EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE, message)


def _missing(results: EvalResults) -> list[tuple[EvalResults, TaskInfo, int]]:
    tasks = {task.task_id: task for task in results.tasks}
    return [(results, tasks[id_], number) for id_, number in results.attempts if (id_, number) not in results.done]


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
    wire = wire_sampling(sampling, seed, seq_len=0)
    return {name: value for name, value in wire.items() if name in ("temperature", "top_p", "seed") or value > 0}
