"""Run the attempts of an evaluation: for `eval`, which `sft` starts beside itself, and during `rl`.

A runner makes all missing attempts at several environments by one policy version, so that the slowest episodes of one
environment leave the servers to the others. `Evaluations` says when one is due in a run, and logs each once.
"""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, FirstTasks, Outcome
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalPlan, EvalResults
from prime_rl.fleet.replicas import Replica, ReplicaPool, ReplicaState, least_loaded_healthy
from prime_rl.monitor import Monitor, Status, read_metrics
from prime_rl.orchestrator.samples import output_tokens
from prime_rl.orchestrator.tasks import request_seed
from prime_rl.processes import backoff_seconds
from prime_rl.transport.protocol import BASE, valid
from prime_rl.wait import WaitTimeout, wait_async

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig, OrchestratorConfig
    from prime_rl.config.shared import EnvConfig, SamplingConfig
    from prime_rl.fleet.weight_sync import WeightSync

_TRIES = 5  # of an attempt whose worker died or whose server failed
EVAL_WORKER = "{}-eval"  # the pool's name of an evaluation environment: a training one may have the same name
PAUSE_SECONDS = 1.0  # before the second try; doubled each time


class KeyRejected(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


@dataclass(eq=False)
class EvalRunner:
    """Makes all attempts that are missing in `results`. What has ended is kept at once, whatever ends the rest.

    An attempt goes to a server of `fleet`, and is kept once that one is verified to have served the version all the
    time; else it is made again.
    """

    pool: EnvPool
    results: Sequence[EvalResults]
    seed: int
    max_concurrent: int  # attempts in flight, at all environments
    timeout: float  # seconds that one attempt may take
    fleet: ReplicaPool | None = None  # servers of this version. None: an API, which environments ask without us
    show: Callable[[int, int], None] = lambda done, total: None  # numbers of attempts
    quarantine: Callable[[Replica, str], None] | None = None  # of one that fails its verification (None: `fleet`'s)
    superseded: Callable[[], bool] = lambda: False  # the version cannot, or need not, be evaluated: the runner ends

    async def run(self) -> None:
        """Run all that is missing. Raises KeyRejected where the API rejected the key."""
        # One of each environment in turn, so that none waits for the end of another.
        turns = itertools.zip_longest(*map(_missing, self.results))
        todo = deque(attempt for turn in turns for attempt in turn if attempt is not None)
        self._begin, self._total = time.monotonic(), sum(len(results.attempts) for results in self.results)
        self._done = self._total - len(todo)
        self.show(self._done, self._total)
        try:
            async with asyncio.TaskGroup() as group:
                count = min(self.max_concurrent, len(todo))
                self._workers = [group.create_task(self._work(todo)) for _ in range(count)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from several

    def cancel(self) -> None:
        """End it, without the attempts that are being made."""
        for worker in self._workers:
            worker.cancel()

    async def _work(self, todo: deque[tuple[EvalResults, int, int]]) -> None:
        while todo and not self.superseded():  # bounded: each attempt is, and a server that is lost gives none
            results, index, number = missing = todo.popleft()
            result = await self._attempt(results, index, number)
            if result is None:
                todo.append(missing)
                continue
            result.task_id = results.tasks[index]
            result.output_tokens = result.output_tokens or output_tokens(result)
            results.seconds = time.monotonic() - self._begin
            results.add(number, result)
            self._done += 1
            self.show(self._done, self._total)
            if result.outcome is Outcome.ENGINE_DENIED:
                raise KeyRejected(result.message)

    async def _attempt(self, results: EvalResults, index: int, number: int) -> EpisodeResult | None:
        """Make one attempt; None where it counts for nothing. Its seed follows from what it is, not what ran before."""
        plan, version = results.plan, results.version
        seed = request_seed(self.seed, f"eval/{plan.env}/{version}/{index}", number)
        sampling = wire_sampling(plan.sampling, seed, 0 if plan.chat else plan.seq_len)
        if plan.chat:  # APIs know OpenAI's parameters alone: others are sent only where they are set
            known = ("temperature", "top_p", "seed")
            sampling = {name: value for name, value in sampling.items() if name in known or value > 0}
        run = partial(
            self.pool.run, env=plan.worker, task_index=index, sampling=sampling, policy_version=version,
            episode_id=f"eval-{plan.env}-{version}-{index}-{number}",
        )  # fmt: skip
        # The client of an API has tried again and again already.
        retried = {Outcome.WORKER_DIED, *([] if self.fleet is None else [Outcome.ENGINE_UNAVAILABLE])}
        for failures in range(_TRIES):
            await asyncio.sleep(backoff_seconds(failures, PAUSE_SECONDS, self.timeout))
            if self.superseded():
                return None
            if self.fleet is None:
                result: EpisodeResult | None = await run(timeout=self.timeout)
            else:
                result = await self._run_on_server(run, self.fleet)
            if result is None or result.outcome not in retried:
                break
        return result

    async def _run_on_server(
        self, run: Callable[..., Coroutine[Any, Any, EpisodeResult]], fleet: ReplicaPool
    ) -> EpisodeResult | None:
        """Run an attempt on the least loaded server that has not failed the last one; None if it was lost."""
        try:
            await wait_async(
                lambda: least_loaded_healthy(fleet.ready) is not None or self.superseded(),
                subject="server that serves", owner="inference", seconds=self.timeout,
            )  # fmt: skip
        except WaitTimeout as error:
            return EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE, str(error))
        if (replica := least_loaded_healthy(fleet.ready)) is None:
            return None
        with fleet.busy(replica):
            loaded = replica.loaded
            result = await run(server=replica.name, timeout=self.timeout)
            verified = await replica.verify()
        if not verified:
            reason = "it failed its verification"
            if self.quarantine is None:
                fleet.move(replica, ReplicaState.QUARANTINED, reason)
            else:
                self.quarantine(replica, reason)
            return None
        if replica.loaded is not loaded:  # it was lost, and given the weights again
            return None
        if result.outcome is not Outcome.ENGINE_UNAVAILABLE:
            replica.failures = 0
        elif not replica.failures:  # many may fail together here
            fleet.failed(replica)
        return result


def _missing(results: EvalResults) -> list[tuple[EvalResults, int, int]]:
    indices = {task_id: index for index, task_id in enumerate(results.tasks)}
    return [(results, indices[id_], number) for id_, number in results.attempts if (id_, number) not in results.rows]


def env_pool(config: "EvalConfig | OrchestratorConfig", environments: "Sequence[EnvConfig]", **more: Any) -> EnvPool:
    return EnvPool(
        environments,
        model=config.model.name,
        base_url=config.client.base_urls[0],
        api_key=os.environ.get(config.client.api_key_var),
        renderer=config.renderer,
        output_dir=config.output_dir,
        log_level=config.log.level,
        **more,
    )


def tasks_of(pool: EnvPool, plan: EvalPlan) -> Sequence[str]:
    """Return the ids of the tasks that are to be attempted; warn where there are fewer than asked for.
    Raises UserError: the environment is endless, and no number of tasks is set."""
    tasks = pool.tasks(plan.worker)
    if plan.num_examples < 0 and isinstance(tasks, FirstTasks):
        raise UserError(f"environment {plan.env!r} is endless: set num_examples, the number of tasks to evaluate")
    if plan.num_examples > len(tasks):
        logger.warning("{} has {} tasks, not {}: all of them are evaluated", plan.env, len(tasks), plan.num_examples)
    return tasks if plan.num_examples < 0 else tasks[: plan.num_examples]


def wire_sampling(sampling: "SamplingConfig", seed: int, seq_len: int) -> dict[str, float | int]:
    """Sampling parameters as the engine takes them. Every field is sent, so that no server-side default applies.
    Without `max_tokens` a reply is bounded by `seq_len`; the engine bounds prompt and reply by its context besides."""
    names = ("temperature", "top_p", "top_k", "min_p", "min_tokens")
    wire: dict[str, float | int] = {name: getattr(sampling, name) for name in names}
    wire["max_tokens"] = sampling.max_tokens or seq_len
    return wire | ({"seed": seed} if sampling.seeded else {})


class Evaluations:
    """The evaluations of one run. Each attempt's server is verified to have served the version it is logged for."""

    def __init__(
        self, config: "OrchestratorConfig", pool: EnvPool, monitor: Monitor, status: Status, weight_sync: "WeightSync"
    ) -> None:
        self.config, self._section = config, config.eval
        self._pool, self._monitor, self._status, self._weight_sync = pool, monitor, status, weight_sync
        self._plans: list[EvalPlan] = []
        if (section := config.eval) is not None:
            for env in eval_environments(config):
                sampling = config.sampling.changed(section.sampling).changed(env.sampling)
                counts = section.num_examples, section.rollouts_per_example
                self._plans.append(EvalPlan(env.name, EVAL_WORKER.format(env.name), sampling, *counts, config.seq_len))
        self._runner: EvalRunner | None = None
        self.running = self._stopping = False
        # The incarnation of the trainer in which each environment and version was evaluated.
        self._logged = {
            (plan.env, int(row["step"])): int(row[key])
            for row in read_metrics(config.output_dir / "metrics" / "orchestrator.jsonl")
            for plan in self._plans
            if (key := f"eval/{plan.env}/policy_incarnation") in row
        }

    def check_tasks(self) -> None:
        """Refuse an endless environment without `num_examples` before anything is trained. Raises UserError."""
        for plan in self._plans:
            tasks_of(self._pool, plan)

    def due(self, version: int) -> bool:
        """Whether `version` is to be evaluated before a newer one is served: the base (`at_start`), the last one
        (`at_end`), or one with which a multiple of the interval is reached or passed."""
        section = self._section
        if section is None or self._complete(version):
            return False
        if (version == BASE and section.at_start) or (version == self.config.max_steps and section.at_end):
            return True
        last = max((version for _, version in self._logged if self._complete(version)), default=0)
        return section.interval is not None and version // section.interval > last // section.interval

    async def run(self) -> None:
        """Evaluate what is served; nothing newer is served until it is done. `stop` ends it, and so does the end of the
        version's incarnation. After `stop` no evaluation begins."""
        self.running, weight_sync = True, self._weight_sync
        try:
            async with weight_sync.version_lock:
                if not self._stopping:
                    await self._evaluate(weight_sync.scheduler.version)
        finally:
            self.running = False

    def stop(self) -> None:
        """End the evaluation that is being made, which counts as not made, and begin no other."""
        self._stopping = True
        if self._runner is not None:
            self._runner.cancel()

    async def _evaluate(self, version: int) -> None:
        weight_sync = self._weight_sync
        plans = [plan for plan in self._plans if not self._is_logged(plan.env, version)]
        every = [EvalResults(plan, tasks_of(self._pool, plan), version) for plan in plans]
        phase = f"evaluating {', '.join(plan.env for plan in plans)} on version {version}"
        self._runner = EvalRunner(
            self._pool, every, seed=self.config.seed, max_concurrent=self.config.most_in_flight,
            timeout=self.config.rollout_timeout, fleet=weight_sync.pool,
            show=lambda done, total: self._status.phase(f"{phase}: {done}/{total}"),
            quarantine=weight_sync.quarantine, superseded=self._superseded,
        )  # fmt: skip
        await self._runner.run()
        if self._superseded() or not all(results.complete for results in every):
            logger.warning("the evaluation of version {} is not complete", version)
            return
        for results in every:
            env, incarnation = results.plan.env, weight_sync.scheduler.incarnation
            self._logged[env, version] = incarnation
            self._monitor.log(version, results.logged() | {f"eval/{env}/policy_incarnation": float(incarnation)})
            logger.info("eval on version {} | {:.1f} s | {}", version, results.seconds, results.line())

    def _superseded(self) -> bool:
        return self._weight_sync.newer_version_waiting or self._weight_sync.scheduler.must_go_back

    def _complete(self, version: int) -> bool:
        return all(self._is_logged(plan.env, version) for plan in self._plans)

    def _is_logged(self, env: str, version: int) -> bool:
        """Whether it is logged for the current lineage; a version retrained after a rollback is another policy."""
        incarnation = self._logged.get((env, version))
        return incarnation is not None and valid(version, incarnation, self._weight_sync.published.incarnations)


def eval_environments(config: "OrchestratorConfig") -> "list[EnvConfig]":
    """What is evaluated: the environments named for it, else the training ones with `split` set to "eval"."""
    if config.eval is None:
        return []
    if config.eval.environments:
        return config.eval.environments
    return [env.model_copy(update={"args": {**env.args, "split": "eval"}}) for env in config.environments]
