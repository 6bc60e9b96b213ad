"""Run the attempts of an evaluation: for `eval`, which `sft` starts beside itself, and during `rl`.

A runner makes all missing attempts at several environments by one policy version, so that the slowest episodes of one
environment leave the servers to the others.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
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

_TRIES = 5  # of an attempt whose worker died or whose server failed
PAUSE_SECONDS = 1.0  # before the second try; doubled each time


class KeyRejected(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


@dataclass(eq=False)
class EvalRunner:
    """Makes all attempts that are missing in `results`. What has ended is kept at once, whatever ends the rest.

    Args:
        max_concurrent: Attempts in flight, at all environments.
        timeout: Seconds that one attempt may take.
        show: Called with the number of attempts that are made, and of all.
        fleet: Servers of this version. An attempt goes to one of them, and is kept once that one is verified to have
            served the version all the time; else it is made again. None: an API, which environments ask without us.
        on_lost: Called with a server that failed its verification; it must not be ready any more afterwards.
        superseded: Whether the version cannot be, or is no longer to be, evaluated: the runner ends.
    """

    pool: EnvPool
    results: Sequence[EvalResults]
    seed: int
    max_concurrent: int
    timeout: float
    show: Callable[[int, int], None] = lambda done, total: None
    fleet: ReplicaPool | None = None
    on_lost: Callable[[Replica], None] = lambda replica: None
    superseded: Callable[[], bool] = lambda: False

    async def run(self) -> None:
        """Run all that is missing.

        Raises:
            KeyRejected: the API rejected the key.
        """
        # One of each environment in turn, so that none waits for the end of another.
        turns = itertools.zip_longest(*map(_missing, self.results))
        todo = deque(attempt for turn in turns for attempt in turn if attempt is not None)
        self._begin, self._total = time.monotonic(), sum(len(results.attempts) for results in self.results)
        self._done = self._total - len(todo)
        self.show(self._done, self._total)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.max_concurrent, len(todo))):
                    group.create_task(self._work(todo))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _work(self, todo: deque[tuple[EvalResults, TaskInfo, int]]) -> None:
        while todo and not self.superseded():  # bounded: each attempt is, and a server that is lost gives none
            results, task, number = missing = todo.popleft()
            result = await self._attempt(results, task.index, number)
            if result is None:
                todo.append(missing)
                continue
            result.task_id = task.task_id
            result.output_tokens = result.output_tokens or output_tokens(result)
            results.seconds = time.monotonic() - self._begin
            results.add(number, result)
            self._done += 1
            self.show(self._done, self._total)
            if result.outcome is Outcome.ENGINE_DENIED:
                raise KeyRejected(result.message)

    async def _attempt(self, results: EvalResults, index: int, number: int) -> EpisodeResult | None:
        """Make one attempt; None where it counts for nothing. Its seed follows from what it is, not from what ran
        before."""
        plan, version = results.plan, results.version
        seed = request_seed(self.seed, f"eval/{plan.env}/{version}/{index}", number)
        sampling = chat_sampling(plan.sampling, seed) if plan.chat else wire_sampling(plan.sampling, seed, plan.seq_len)
        run = partial(
            self.pool.run, env=plan.worker, task_index=index, sampling=sampling, policy_version=version,
            episode_id=f"eval-{plan.env}-{version}-{index}-{number}",
        )  # fmt: skip
        # The client of an API has tried again and again already.
        retried = {Outcome.WORKER_DIED, *([] if self.fleet is None else [Outcome.ENGINE_UNAVAILABLE])}
        for pauses in range(_TRIES):
            if pauses:
                await asyncio.sleep(PAUSE_SECONDS * 2.0 ** (pauses - 1))
            if self.superseded():
                return None
            if self.fleet is None:
                result: EpisodeResult | None = await run(deadline=time.monotonic() + self.timeout)
            else:
                result = await self._run_on_server(run, self.fleet)
            if result is None or result.outcome not in retried:
                break
        return result

    async def _run_on_server(
        self, run: Callable[..., Coroutine[Any, Any, EpisodeResult]], fleet: ReplicaPool
    ) -> EpisodeResult | None:
        """Run an attempt on the least loaded server that has not failed the last one. None: the server was lost."""
        try:
            replica = await wait_async(
                lambda: least_loaded_healthy(fleet.ready),
                subject="server that serves", owner="inference", seconds=self.timeout, stop=self.superseded,
            )  # fmt: skip
        except WaitTimeout as error:
            return EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE, str(error))
        if replica is None:
            return None
        with fleet.busy(replica):
            loaded = replica.loaded
            result = await run(server=replica.name, deadline=time.monotonic() + self.timeout)
            verified = await replica.verify()
        if not verified:
            self.on_lost(replica)
            return None
        if replica.loaded is not loaded:  # it was lost, and given the weights again
            return None
        if result.outcome is not Outcome.ENGINE_UNAVAILABLE:
            fleet.succeeded(replica)
        elif not replica.failures:  # many may fail together here
            fleet.failed(replica)
        return result


def _missing(results: EvalResults) -> list[tuple[EvalResults, TaskInfo, int]]:
    tasks = {task.task_id: task for task in results.tasks}
    return [(results, tasks[id_], number) for id_, number in results.attempts if (id_, number) not in results.rows]


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
