"""The `eval` command: environments × policies, on our servers or an API. It resumes from the results there are."""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.venv import prepare
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalPlan, EvalResults, alone, read_settings, write_report
from prime_rl.evals.runner import EvalRunner, KeyRejected, tasks_of
from prime_rl.evals.servers import EvalServers, connect, way_of_asking
from prime_rl.evals.versions import EvalPolicy, EvalVersions, is_gone
from prime_rl.monitor import Monitor, Status
from prime_rl.transport.commit import list_steps
from prime_rl.transport.incarnations import EVAL, drop_lease
from prime_rl.transport.protocol import BASE

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.config.eval import EvalEnv

LINE_SECONDS = 10.0  # between two lines of progress


async def run_evals(config: "EvalConfig") -> list[EvalResults]:
    """Evaluate every environment by every policy; results in `evals/<env>/<policy>`, `evals/report.md`, metrics.

    Raises:
        UserError: the server does not answer, an environment cannot be loaded, a named version is not evaluated, no
            attempt of an environment was scored, too many failed, or another evaluation runs in the same directory.
    """
    with alone(config.output_dir / "evals"):
        status = Status(config.output_dir, "eval")
        try:
            results = await _run_evals(config, status)
        except asyncio.CancelledError:  # also while it waits: an `rl` in this directory shows what waits there
            status.done("stopped")
            if config.hold and config.weights_dir is not None:
                drop_lease(config.weights_dir.parent, EVAL)
            raise
        except BaseException as error:
            status.done(f"failed: {error}")
            raise
        status.done("finished")
        return results


async def _run_evals(config: "EvalConfig", status: Status) -> list[EvalResults]:
    status.phase("waiting for the server")
    chat = await way_of_asking(config, status.waiting) == "chat"
    monitor = Monitor(config.output_dir, "eval", config.monitor, config.model_dump(mode="json"))
    pool = make_pool(config, chat)
    run = Evaluation(config, pool, monitor, status, chat)
    try:
        async with AsyncExitStack() as stack:
            await pool.start(config.client.ready_timeout)
            await run.all(None if chat else await connect(config, stack, status.waiting))
    except KeyRejected as error:
        variable = config.client.api_key_var
        unset = "" if os.environ.get(variable) else ", which is not set"
        raise UserError(
            f"{config.client.servers} refused the key in ${variable}{unset}: {error}. {run.kept()}"
        ) from error
    except asyncio.CancelledError:
        logger.warning("interrupted. {}", run.kept())
        raise
    finally:
        await pool.close()
        monitor.close()
        if text := run.report():
            print(text)
    run.check()
    return run.results


def make_pool(config: "EvalConfig", chat: bool) -> EnvPool:
    """The worker pool of all environments."""
    return EnvPool(
        prepare(config.environments),
        model=config.model.name,
        base_url=config.client.base_urls,
        api_key=os.environ.get(config.client.api_key_var),
        renderer=config.renderer,
        output_dir=config.output_dir,
        log_level=config.log.level,
        chat_timeout=config.client.timeout if chat else None,
    )


class Evaluation:
    """What one command evaluates."""

    def __init__(self, config: "EvalConfig", pool: EnvPool, monitor: Monitor, status: Status, chat: bool) -> None:
        self._config, self._pool, self._monitor, self._status, self._chat = config, pool, monitor, status, chat
        self._versions = EvalVersions(config)
        self._results: dict[tuple[str, str], EvalResults] = {}

    @property
    def results(self) -> list[EvalResults]:
        """All there are so far, by version."""
        return sorted(self._results.values(), key=lambda results: results.version)

    async def all(self, servers: EvalServers | None) -> None:
        """Evaluate every policy, one after the other. Servers that were given weights serve their base at the end."""
        config = self._config
        if servers is None or config.weights_dir is None:
            await self._evaluate(EvalPolicy("api", BASE) if servers is None else await servers.serve(None), servers)
            return
        if config.follow and not config.clean:  # versions may have been removed since an earlier command
            for env in config.environments:
                for version in list_steps(self._directory(env)):
                    settings = read_settings(self._directory(env) / f"step_{version}")
                    if version != BASE and settings is not None:
                        self._open(env, EvalPolicy(f"step_{version}", version, settings["weights"])).close()
        try:
            async for policy in self._versions.policies(self._status.waiting):
                self._status.phase(f"loading {policy.name}")
                try:
                    await self._evaluate(await servers.serve(policy), servers)
                except UserError:
                    if policy.weights is None or not is_gone(policy.weights):
                        raise
                    self._versions.skip(policy.version, "it was removed before it was evaluated")
        finally:
            self._status.phase("restoring the base model")
            logger.info("the servers load their base model again")
            await servers.restore()

    async def _evaluate(self, policy: EvalPolicy, servers: EvalServers | None) -> None:
        config, status = self._config, self._status
        opened: list[EvalResults] = []
        try:
            for env in config.environments:
                opened.append(self._open(env, policy))
            total = sum(len(results.attempts) for results in opened)
            done = sum(attempt in results.done for results in opened for attempt in results.attempts)
            if done:
                logger.info("{}: {} of {} attempts are there already", policy.name, done, total)
            status.phase(f"evaluating {policy.name}: {done}/{total}")
            shown = time.monotonic()

            def show() -> None:
                nonlocal done, shown
                done += 1
                status.phase(f"evaluating {policy.name}: {done}/{total}")
                if time.monotonic() - shown > LINE_SECONDS:
                    shown = time.monotonic()
                    logger.info("{}: {}", policy.name, ", ".join(results.line() for results in opened))

            await EvalRunner(
                self._pool, opened, config.seed, config.max_concurrent, config.rollout_timeout,
                on_result=show,
                fleet=None if servers is None else servers.fleet,
                bring_back=None if servers is None else servers.bring_back,
            ).run()  # fmt: skip
        finally:
            for results in opened:
                results.close()
        for results in opened:
            self._monitor.log(policy.version, results.logged())
            logger.info("{}: {}, {:.1f} s", policy.name, results.line(), results.seconds)
        self.report()

    def _directory(self, env: "EvalEnv") -> Path:
        return self._config.output_dir / "evals" / env.name.replace("/", "--")

    def _open(self, env: "EvalEnv", policy: EvalPolicy) -> EvalResults:
        """The results of an environment by a policy, in its directory. What is not set for the environment is as set
        for all."""
        config, directory = self._config, self._directory(env) / policy.name
        sampling = env.sampling.over(config.sampling) if env.sampling else config.sampling
        attempts = env.rollouts_per_example or config.rollouts_per_example
        wanted = config.num_examples if env.num_examples is None else env.num_examples
        plan = EvalPlan(env.name, env.name, sampling, wanted, attempts, config.seq_len, self._chat)
        tokens = {"seq_len": config.seq_len, "renderer": config.renderer}
        # What the results depend on. More tasks and attempts go on from those that are there.
        names = {"id", "args", "adapter", "python", "requirements", "max_turns", "turn_timeout", "overflow"}
        settings: dict[str, Any] = {
            "model.name": config.model.name,
            "environment": env.model_dump(mode="json", include=names),
            "sampling": sampling.model_dump(mode="json"),
            "seed": config.seed,
            "weights": policy.hash,
            **({"client.base_url": config.client.base_urls[0]} if self._chat else tokens),
        }
        results = EvalResults(
            plan, tasks_of(self._pool, plan), policy.version, policy.name, policy.hash, config.solved_at
        )
        # While versions are followed, another incarnation of the trainer may have replaced the one with this number.
        before = (read_settings(directory) or settings)["weights"]
        replaced = config.follow and policy.version != BASE and before != policy.hash
        results.open(directory, settings, clean=config.clean or replaced)
        self._results[env.name, policy.name] = results
        return results

    def check(self) -> None:
        """Raise UserError where the numbers cannot be relied on, or a version that was asked for was not evaluated: one
        that was named, or all of them but the base."""
        config, evaluated = self._config, {results.version for results in self.results}
        skipped = {v: why for v, why in sorted(self._versions.skipped.items()) if v not in evaluated}
        lines = [f"version {v} was not evaluated: {why}" for v, why in skipped.items()]
        if not config.steps and evaluated - {BASE}:
            lines = []
        lines = lines or [why for results in self.results if (why := results.trouble(config.max_error_rate))]
        if lines:
            raise UserError("; ".join(lines))

    def kept(self) -> str:
        """For people, when it ends early."""
        count = sum(len(results.made) - len(results.failed) for results in self.results)
        directory = self._config.output_dir / "evals"
        return f"{count} scored attempts are kept in {directory}: the same command goes on from there"

    def report(self) -> str:
        """Write what there is, and return it for people."""
        if not self.results and not self._versions.skipped:
            return ""
        return write_report(self.results, self._versions.skipped, self._config)
