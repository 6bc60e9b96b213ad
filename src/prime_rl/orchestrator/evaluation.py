"""Evaluations during a run: when one is due, and that each is logged once, whatever is killed meanwhile."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from prime_rl.envs.pool import EnvPool
from prime_rl.monitor import Monitor, Status, log, read_metrics
from prime_rl.orchestrator.evals import EvalPlan, EvalReport, evaluate
from prime_rl.orchestrator.plans import eval_plans, limits

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

logger = log.get("orchestrator")


class Evaluations:
    """The evaluations of one run.

    Args:
        lock: Held while what is served must not change.
    """

    def __init__(
        self, config: "OrchestratorConfig", pool: EnvPool, monitor: Monitor, status: Status, lock: asyncio.Lock
    ) -> None:
        self.config = config
        self._section = config.eval
        self._pool, self._monitor, self._status, self._lock = pool, monitor, status, lock
        self._plans = list(eval_plans(config))
        self._running: asyncio.Task[None] | None = None
        self._stopping = False
        self._logged = self._read_logged()
        complete = [version for version in self._versions() if self._complete(version)]
        self._last = max(complete, default=0)  # the version that the interval led to evaluate last

    @property
    def running(self) -> bool:
        """Whether an evaluation is being made."""
        return self._running is not None and not self._running.done()

    def owed(self, version: int) -> bool:
        """Whether `version` is to be evaluated before anything else: the base model, or what an earlier life of this process came not to do."""
        at_start = self._section is not None and self._section.at_start and version == 0 and not self._complete(0)
        return at_start or self.due(version)

    def due(self, version: int) -> bool:
        """Whether a multiple of the interval was reached or passed since the last one; the very last version has its own evaluation."""
        section = self._section
        if section is None or section.interval is None or (section.at_end and version == self.config.max_steps):
            return False
        return version // section.interval > self._last // section.interval

    def due_at_end(self, version: int) -> bool:
        """Whether the last version is still to be evaluated."""
        return self._section is not None and self._section.at_end and not self._complete(version)

    async def run(self, version: Callable[[], int]) -> None:
        """Evaluate what is served; nothing newer is served until it is done. `stop` ends it.

        Args:
            version: Asked once nothing newer can be served any more.
        """
        self._running = asyncio.create_task(self._evaluate(version))
        try:
            await self._running  # bounded: every episode has its deadline
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._running.cancel()

    def stop(self) -> None:
        """End the evaluation that is being made; it counts as not made."""
        self._stopping = True
        if self._running is not None:
            self._running.cancel()

    async def _evaluate(self, served: Callable[[], int]) -> None:
        async with self._lock:
            version = served()
            self._last = max(self._last, version)
            for plan in self._plans:
                if (plan.env, version) in self._logged:
                    continue  # an earlier life of this process has done it
                where = f"evaluating {plan.env} on version {version}"
                self._status.phase(where)
                report = await evaluate(
                    self._pool, plan, version=version, seed=self.config.seed,
                    max_concurrent=limits(self.config).max_concurrent, timeout=self.config.rollout_timeout,
                    on_progress=partial(self._tell, where),
                )  # fmt: skip
                self._log(plan, report)

    def _log(self, plan: EvalPlan, report: EvalReport) -> None:
        metrics = report.metrics()
        self._monitor.log(report.version, metrics)
        self._logged.add((plan.env, report.version))
        reward = metrics.get(f"eval/{plan.env}/reward/mean")
        logger.info(
            "eval %s on version %d | %.1f s | %s | errors %s",
            plan.env, report.version, report.seconds,
            "no episode succeeded" if reward is None else f"reward {reward:.4f}", dict(report.errors),
        )  # fmt: skip

    def _tell(self, where: str, done: int, total: int) -> None:
        self._status.phase(f"{where}: {done}/{total}")

    def _complete(self, version: int) -> bool:
        return all((plan.env, version) in self._logged for plan in self._plans)

    def _versions(self) -> set[int]:
        return {version for _, version in self._logged}

    def _read_logged(self) -> set[tuple[str, int]]:
        rows = read_metrics(self.config.output_dir / "metrics" / "orchestrator.jsonl")
        return {
            (plan.env, int(row["step"]))
            for row in rows
            for plan in self._plans
            if f"eval/{plan.env}/policy_version" in row
        }
