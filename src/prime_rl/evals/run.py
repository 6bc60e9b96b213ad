"""The `eval` command: environments × policies, on our servers or an API. It resumes from the results there are."""

import asyncio
import os
import time
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.venv import prepare
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalResults, alone, read_settings, write_report
from prime_rl.evals.runner import EvalJob, EvalPlan, EvalRunner, KeyRejected, new_job
from prime_rl.evals.servers import EvalServers, connect, rejected_key, way_of_asking
from prime_rl.evals.versions import API, EvalPolicy, EvalVersions, is_gone
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
            await run.all(None if chat else await connect(config, stack, status))
    except KeyRejected as error:
        raise UserError(f"{rejected_key(config.client)}: {error}. {run.kept()}") from error
    except asyncio.CancelledError:
        logger.warning("interrupted. {}", run.kept())
        raise
    finally:
        await pool.close()
        monitor.close()
        run.report(quiet=False)
    if missing := run.missing():
        raise UserError(missing)
    if troubles := [trouble for results in run.results if (trouble := results.trouble(config.max_error_rate))]:
        raise UserError("; ".join(troubles))
    return run.results


def directory_of(config: "EvalConfig", env: "EvalEnv", policy: EvalPolicy) -> Path:
    """Where the results of an environment by a policy are."""
    return config.output_dir / "evals" / env.name.replace("/", "--") / policy.name


def plan_of(config: "EvalConfig", env: "EvalEnv", chat: bool) -> EvalPlan:
    """What to run: what is not set for the environment is as set for all."""
    sampling = env.sampling.over(config.sampling) if env.sampling else config.sampling
    attempts = env.rollouts_per_example or config.rollouts_per_example
    wanted = config.num_examples if env.num_examples is None else env.num_examples
    return EvalPlan(env.name, env.name, sampling, wanted, attempts, config.seq_len, chat)


def settings_of(config: "EvalConfig", env: "EvalEnv", plan: EvalPlan, policy: EvalPolicy) -> dict[str, Any]:
    """What the results of an environment depend on. More tasks and attempts go on from those that are there."""
    names = {"id", "args", "adapter", "python", "requirements", "max_turns", "turn_timeout", "overflow"}
    tokens = {"seq_len": config.seq_len, "renderer": config.renderer}
    return {
        "model.name": config.model.name,
        "environment": env.model_dump(mode="json", include=names),
        "sampling": plan.sampling.model_dump(mode="json"),
        "seed": config.seed,
        "weights": policy.hash,
        **({"client.base_url": config.client.base_urls[0]} if plan.chat else tokens),
    }


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
        if self._config.follow and not self._config.clean:
            self._take_earlier()
        try:
            if servers is None or self._config.weights_dir is None:
                await self._evaluate(API if servers is None else servers.as_served(), servers)
                return
            async for policy in self._versions.policies(self._status.waiting):
                await self._evaluate(policy, servers)
        finally:
            if servers is not None and self._config.weights_dir is not None:
                self._status.phase("restoring the base model")
                await servers.restore()

    def _take_earlier(self) -> None:
        """Report, too, what an earlier command evaluated of a followed run: versions may have been removed since."""
        committed = self._versions.committed()
        for env in self._config.environments:
            directory = directory_of(self._config, env, API).parent
            for version in list_steps(directory):
                settings = read_settings(directory / f"step_{version}")
                if version == BASE or settings is None:
                    continue
                with ExitStack() as stack:
                    policy = EvalPolicy(f"step_{version}", version, settings["weights"])
                    results = self._job(env, policy, stack).results
                if results.complete:
                    self._results[env.name, policy.name] = results
                    if version not in committed:
                        self._versions.hashes[version] = policy.hash
                elif version not in committed:
                    self._versions.skip(version, "it was removed before its evaluation was complete")

    async def _evaluate(self, policy: EvalPolicy, servers: EvalServers | None) -> None:
        config, status = self._config, self._status
        if servers is not None and config.weights_dir is not None:
            status.phase(f"loading {policy.name}")
            try:
                policy = await servers.serve(policy)
            except UserError:
                if policy.weights is None or not is_gone(policy.weights):
                    raise
                self._versions.skip(policy.version, "it was removed before the servers had loaded it")
                self._versions.hashes.pop(policy.version)  # should it be made again
                return
        with ExitStack() as stack:
            jobs = [self._job(env, policy, stack) for env in config.environments]
            self._results |= {(job.plan.env, policy.name): job.results for job in jobs}
            total = sum(len(job.results.keys) for job in jobs)
            done = sum(key in job.results.done for job in jobs for key in job.results.keys)
            if done:
                logger.info("{}: {} of {} attempts are there already", policy.name, done, total)
            status.phase(f"evaluating {policy.name}: {done}/{total}")
            shown = time.monotonic()

            def show(job: EvalJob) -> None:
                nonlocal done, shown
                done += 1
                status.phase(f"evaluating {policy.name}: {done}/{total}")
                if time.monotonic() - shown > LINE_SECONDS:
                    shown = time.monotonic()
                    logger.info("{}: {}", policy.name, ", ".join(job.results.progress() for job in jobs))

            await EvalRunner(
                self._pool, jobs, policy.version,
                seed=config.seed, max_concurrent=config.max_concurrent, timeout=config.rollout_timeout,
                on_result=show,
                fleet=None if servers is None else servers.fleet,
                bring_back=None if servers is None else servers.bring_back,
            ).run()  # fmt: skip
        for results in (job.results for job in jobs):
            self._monitor.log(policy.version, results.logged())
            text, errors = f"{policy.name}, {results.env}: {results.average()}", dict(results.errors)
            logger.info("{} | errors {} | {:.1f} s", text, errors, results.seconds)
        self.report()

    def _job(self, env: "EvalEnv", policy: EvalPolicy, stack: ExitStack) -> EvalJob:
        """The job of an environment by a policy, with its results open."""
        config, directory = self._config, directory_of(self._config, env, policy)
        plan = plan_of(config, env, self._chat)
        job = new_job(self._pool, plan, policy.version, policy.name, hash=policy.hash, solved_at=config.solved_at)
        # While versions are followed, another incarnation of the trainer may have replaced the one with this number.
        before = (read_settings(directory) or {}).get("weights", policy.hash)
        replaced = config.follow and policy.version != BASE and before != policy.hash
        job.results.open(directory, settings_of(config, env, plan, policy), clean=config.clean or replaced)
        stack.enter_context(closing(job.results))
        return job

    def missing(self) -> str | None:
        """What was asked for and not evaluated: a version that was named, or all of them but the base."""
        config, evaluated = self._config, {results.version for results in self.results}
        if not config.steps and evaluated - {BASE}:
            return None
        skipped = {v: why for v, why in sorted(self._versions.skipped.items()) if v not in evaluated}
        lines = [
            f"version {v} was not evaluated: {why}" for v, why in skipped.items() if v in (config.steps or skipped)
        ]
        return "; ".join(lines) or None

    def kept(self) -> str:
        """For people, when it ends early."""
        count = sum(len(results.scored) for results in self.results)
        directory = self._config.output_dir / "evals"
        return f"{count} scored attempts are kept in {directory}: the same command goes on from there"

    def report(self, quiet: bool = True) -> None:
        """Write what there is, and print it unless `quiet`."""
        if self.results or self._versions.skipped:
            text = write_report(self.results, self._versions.skipped, self._config)
            if not quiet:
                print(text)
