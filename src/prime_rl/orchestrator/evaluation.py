"""Evaluations during a run: when one is due, and that each is logged once, whatever is killed meanwhile."""

import asyncio
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.evals.results import EvalPlan, EvalResults
from prime_rl.evals.runner import EvalRunner, tasks_of
from prime_rl.fleet.weight_sync import WeightSync
from prime_rl.monitor import Monitor, Status, read_metrics
from prime_rl.transport.protocol import valid

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.shared import EnvConfig


class Evaluations:
    """The evaluations of one run. Each attempt's server is verified to have served the version it is logged for."""

    def __init__(
        self,
        config: "OrchestratorConfig",
        pool: EnvPool,
        monitor: Monitor,
        status: Status,
        weight_sync: WeightSync,
    ) -> None:
        self.config = config
        self._section = config.eval
        self._pool = pool
        self._monitor, self._status = monitor, status
        self._weight_sync = weight_sync
        self._plans = list(map(self._plan, eval_environments(config)))
        self._running: asyncio.Task[None] | None = None
        self._stopping = False
        # The incarnation of the trainer in which each environment and version was evaluated.
        self._logged = {
            (plan.env, int(row["step"])): int(row[key])
            for row in read_metrics(config.output_dir / "metrics" / "orchestrator.jsonl")
            for plan in self._plans
            if (key := f"eval/{plan.env}/policy_incarnation") in row
        }

    def _plan(self, env: "EnvConfig") -> EvalPlan:
        config, section = self.config, self._section
        assert section is not None
        base = section.sampling.over(config.sampling)
        sampling, worker = env.sampling.over(base) if env.sampling else base, eval_worker(env.name)
        return EvalPlan(env.name, worker, sampling, section.num_examples, section.rollouts_per_example, config.seq_len)

    def check_tasks(self) -> None:
        """Refuse an endless environment without `num_examples` before anything is trained. Raises UserError."""
        for plan in self._plans:
            tasks_of(self._pool, plan)

    @property
    def running(self) -> bool:
        """Whether an evaluation is being made."""
        return self._running is not None and not self._running.done()

    def owed(self, version: int) -> bool:
        """Whether `version` is to be evaluated before anything else.

        That is the base model, or an evaluation that a previous process did not finish.
        """
        at_start = self._section is not None and self._section.at_start and version == 0 and not self._complete(0)
        return at_start or self.due(version)

    def due(self, version: int) -> bool:
        """Whether a multiple of the interval was reached or passed since the last one.

        The very last version has its own evaluation.
        """
        section = self._section
        if section is None or section.interval is None or (section.at_end and version == self.config.max_steps):
            return False
        last = max((version for _, version in self._logged if self._complete(version)), default=0)
        return version // section.interval > last // section.interval

    def due_at_end(self, version: int) -> bool:
        """Whether the last version is still to be evaluated."""
        return self._section is not None and self._section.at_end and not self._complete(version)

    async def run(self) -> None:
        """Evaluate what is served; nothing newer is served until it is done.

        `stop` ends it, and so does the end of the version's incarnation. After `stop` no evaluation begins.
        """
        if self._stopping:
            return
        self._running = asyncio.create_task(self._evaluate())
        try:
            await self._running  # bounded: every episode has its deadline
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._stopping or (current is not None and current.cancelling()):
                raise  # not `stop`, or not `stop` alone: whoever evaluates is to end as well
        finally:
            self._running.cancel()

    def stop(self) -> None:
        """End the evaluation that is being made, which counts as not made, and begin no other."""
        self._stopping = True
        if self._running is not None:
            self._running.cancel()

    async def _evaluate(self) -> None:
        weight_sync = self._weight_sync
        async with weight_sync.version_lock:
            version = weight_sync.scheduler.version
            plans = [plan for plan in self._plans if not self._is_logged(plan.env, version)]
            every = [EvalResults(plan, tasks_of(self._pool, plan), version) for plan in plans]
            phase = f"evaluating {', '.join(plan.env for plan in plans)} on version {version}"
            await EvalRunner(
                self._pool, every, seed=self.config.seed, max_concurrent=self.config.most_in_flight,
                timeout=self.config.rollout_timeout, fleet=weight_sync.pool,
                on_lost=lambda replica: weight_sync.quarantine(replica, "it failed its verification"),
                superseded=self._superseded,
                show=lambda done, total: self._status.phase(f"{phase}: {done}/{total}"),
            ).run()  # fmt: skip
            if self._superseded() or not all(results.complete for results in every):
                logger.warning("version {} is superseded: its evaluation is not complete", version)
                return
            for results in every:
                self._log(results)

    def _superseded(self) -> bool:
        return self._weight_sync.newer_version_waiting or self._weight_sync.scheduler.must_go_back

    def _log(self, results: EvalResults) -> None:
        env, incarnation = results.plan.env, self._weight_sync.scheduler.incarnation
        metrics = {**results.logged(), f"eval/{env}/policy_incarnation": float(incarnation)}
        self._monitor.log(results.version, metrics)
        self._logged[env, results.version] = incarnation
        reward = metrics.get(f"eval/{env}/reward/mean")
        logger.info(
            "eval {} on version {} | {:.1f} s | {} | errors {}",
            env, results.version, results.seconds,
            "no episode succeeded" if reward is None else f"reward {reward:.4f}", results.errors,
        )  # fmt: skip

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


def eval_worker(name: str) -> str:
    """The pool's name of an evaluation environment, which may bear the same name as a training one."""
    return f"{name}-eval"
