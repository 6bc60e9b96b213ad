"""A whole evaluation on its own: environments × policies, against servers of ours or an API; results that a killed one goes on with."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EndlessTasks
from prime_rl.envs.venv import prepare
from prime_rl.errors import UserError
from prime_rl.evals.metrics import EvalReport
from prime_rl.evals.report import Bars, Entry, number, print_table, write_report
from prime_rl.evals.runner import Denied, EvalPlan, Job, Round, tasks_of
from prime_rl.evals.servers import Servers, connect, refused_key, way_of_asking
from prime_rl.evals.store import Store, alone, check_settings, setting
from prime_rl.evals.targets import API, Target, Versions, is_lost, targets
from prime_rl.fleet.replicas import RoutedEnvPool
from prime_rl.monitor import Monitor, Status
from prime_rl.transport.commit import list_steps
from prime_rl.transport.incarnations import EVAL, drop_lease
from prime_rl.transport.protocol import BASE

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.config.eval import EvalEnv

_TRIES = 5  # at one attempt, of which all but the last failed for want of a server
_NUMBERED = re.compile(r"(.+)#[0-9]+")  # how `envs` tells tasks apart that share an id


async def run_evals(config: "EvalConfig") -> list[Entry]:
    """Evaluate every environment at every target; results in `evals/<env>/<target>`, `evals/report.md`, metrics, a table.

    Raises:
        UserError: the server does not answer, an environment cannot be loaded, a named version is not evaluated, no attempt of an environment was
            scored, or too many failed; or another evaluation is made in the same directory.
    """
    with alone(config.output_dir / "evals"):
        status = Status(config.output_dir, "eval")
        try:
            entries = await _run_evals(config, status)
        except asyncio.CancelledError:  # also while it waits: an `rl` in this directory shows what waits there
            status.done("stopped")
            if config.hold and config.weights_dir is not None:
                drop_lease(config.weights_dir.parent, EVAL)
            raise
        except BaseException as error:
            status.done(f"failed: {error}")
            raise
        status.done("finished")
        return entries


async def _run_evals(config: "EvalConfig", status: Status) -> list[Entry]:
    status.phase("waiting for the server")
    chat = await way_of_asking(config, status.waiting) == "chat"
    check_results(config, chat)
    monitor = Monitor(config.output_dir, "eval", config.monitor, config.model_dump(mode="json"))
    pool = make_pool(config, chat)
    run = Evaluation(config, pool, monitor, status, chat)
    try:
        async with AsyncExitStack() as stack:
            await pool.start(config.client.ready_timeout)
            for env in config.environments:
                plan = plan_of(config, env, chat)
                tasks = pool.tasks(env.name)
                listed = tasks_of(pool, plan) if isinstance(tasks, EndlessTasks) else tasks
                say_what_is_odd(env, [task.task_id for task in listed], plan.num_examples)
            servers = None if chat else await connect(config, stack, status)
            await run.all(servers)
    except Denied as error:
        raise UserError(f"{refused_key(config.client)}: {error}. {run.kept()}") from error
    except asyncio.CancelledError:
        logger.warning("interrupted. {}", run.kept())
        raise
    finally:
        await pool.close()
        monitor.close()
        run.report()
    if missing := run.missing():
        raise UserError(missing)
    if troubles := [trouble for entry in run.entries if (trouble := trouble_of(entry.report, config)) is not None]:
        raise UserError("; ".join(troubles))
    return run.entries


def check_results(config: "EvalConfig", chat: bool) -> None:
    """Whether earlier results can be gone on with, as far as that is known before anything starts.

    Raises:
        UserError: they were made with other settings; it names the first that differs.
    """
    if config.clean:
        return
    for env in config.environments:
        for target in [API] if chat else _with_results(config, env):
            check_settings(
                place_of(config, env, target), made_with(config, env, plan_of(config, env, chat), target), but="weights"
            )


def _with_results(config: "EvalConfig", env: "EvalEnv") -> list[Target]:
    """The versions with results that may be gone on with."""
    versions = list_steps(place_of(config, env, API).parent)
    if config.weights_dir is None:
        return []  # only the server says which
    return [Target(f"step_{version}", version) for version in versions if not config.steps or version in config.steps]


def place_of(config: "EvalConfig", env: "EvalEnv", target: Target) -> Path:
    """Where the results of an environment at a target are."""
    return config.output_dir / "evals" / env.name.replace("/", "--") / target.name


def plan_of(config: "EvalConfig", env: "EvalEnv", chat: bool) -> EvalPlan:
    """What to run: of what is not said for the environment, what is said for all."""
    sampling = env.sampling.over(config.sampling) if env.sampling else config.sampling
    attempts = env.rollouts_per_example or config.rollouts_per_example
    wanted = config.num_examples if env.num_examples is None else env.num_examples
    return EvalPlan(env.name, env.name, sampling, wanted, attempts, config.seq_len, chat)


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
    """What one command evaluates. `entries` is what there is so far."""

    def __init__(self, config: "EvalConfig", pool: EnvPool, monitor: Monitor, status: Status, chat: bool) -> None:
        self._config, self._pool, self._monitor, self._status, self._chat = config, pool, monitor, status, chat
        self._versions = Versions(config.weights_dir or Path())
        self._reported: dict[tuple[str, str], Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        return sorted(self._reported.values(), key=lambda entry: entry.target.version)

    async def all(self, servers: Servers | None) -> None:
        """Every target, one after the other. Servers that were given weights serve their base again at the end."""
        if self._config.follow and not self._config.clean:
            self._take_earlier()
        try:
            async for target in self._targets(servers):
                if servers is not None and (target.weights is not None or target.base):
                    served = await self._serve(servers, target)
                    if served is None:
                        continue
                    target = served
                await self._one(target, servers)
        finally:
            if servers is not None and self._config.weights_dir is not None:
                self._status.phase("restoring the base model")
                await servers.restore()

    def _targets(self, servers: Servers | None) -> AsyncIterator[Target]:
        if self._config.weights_dir is not None:
            return targets(self._config, self._versions, self._status.waiting)
        return _only(API if servers is None else servers.as_served())

    def _take_earlier(self) -> None:
        """Of a run that is followed: versions that an earlier command evaluated, and that were removed since, are reported as well."""
        directories = {env.name: place_of(self._config, env, API).parent for env in self._config.environments}
        evaluated = {version for directory in directories.values() for version in list_steps(directory)}
        for version in sorted(evaluated - {BASE, *list_steps(self._versions.directory)}):
            name = f"step_{version}"
            hashes = {setting(directory / name, "weights") for directory in directories.values()}
            target = Target(name, version, str(min(hashes, key=str)))
            with ExitStack() as stores:
                jobs = [self._job(env, target, stores) for env in self._config.environments] if len(hashes) == 1 else []
                if not jobs or not all(job.complete for job in jobs):
                    self._versions.skip(version, "it was removed before its evaluation was complete")
                    continue
                for job in jobs:
                    self._conclude(job, target, 0.0)
            self._versions.given[version] = target.hash

    async def _serve(self, servers: Servers, target: Target) -> Target | None:
        """The target, loaded; None where it was removed before that."""
        self._status.phase(f"loading {target.name}")
        try:
            return await servers.serve(target)
        except UserError:
            if target.weights is None or not is_lost(target.weights):
                raise
            self._versions.skip(target.version, "it was removed before the servers had loaded it")
            self._versions.given.pop(target.version)  # should it be made again
            return None

    async def _one(self, target: Target, servers: Servers | None) -> None:
        begin = time.monotonic()
        with ExitStack() as stores:
            jobs = [self._job(env, target, stores) for env in self._config.environments]
            total = sum(len(job.tasks) * job.plan.rollouts_per_example for job in jobs)
            with Bars(
                target.name, {job.plan.env: len(job.tasks) * job.plan.rollouts_per_example for job in jobs}
            ) as bars:
                for job in jobs:
                    for result in (result for attempts in job.kept() for result in attempts if result.ok):
                        bars.add(job.plan.env, result)
                if bars.done:
                    logger.info("{}: {} of {} attempts are there already", target.name, bars.done, total)
                self._status.phase(f"evaluating {target.name}: {bars.done}/{total}")

                def on_kept(job: Job, result: Any) -> None:
                    bars.add(job.plan.env, result)
                    self._status.phase(f"evaluating {target.name}: {bars.done}/{total}")

                config = self._config
                attempts = Round(
                    self._pool if servers is None else RoutedEnvPool(self._pool, servers.fleet), jobs, target.version,
                    seed=config.seed, max_concurrent=config.max_concurrent, timeout=config.rollout_timeout,
                    verify=None if servers is None else servers.verify, on_kept=on_kept, tries=_TRIES,
                )  # fmt: skip
                try:
                    await attempts.run()
                finally:
                    for job in jobs:
                        self._conclude(job, target, time.monotonic() - begin)
            for job in jobs:
                self._log(self._reported[job.plan.env, target.name])
        self.report(quiet=True)

    def _job(self, env: "EvalEnv", target: Target, stores: ExitStack) -> Job:
        config, plan = self._config, plan_of(self._config, env, self._chat)
        place = place_of(config, env, target)
        clean = config.clean or self._replaced(place, target)
        store = Store(place, made_with(config, env, plan, target), clean=clean)
        return Job(plan, tasks_of(self._pool, plan), stores.enter_context(closing(store)))

    def _replaced(self, place: Path, target: Target) -> bool:
        """Whether, while versions are followed, another one bore this number, which another incarnation of the trainer has replaced since."""
        before = setting(place, "weights")
        return self._config.follow and target.version != BASE and before not in (None, target.hash)

    def _conclude(self, job: Job, target: Target, seconds: float) -> None:
        report = EvalReport(job.plan.env, target.version, seconds, job.kept(), self._config.solved_at)
        self._reported[job.plan.env, target.name] = Entry(target, report, job.store.spent, job.complete)

    def _log(self, entry: Entry) -> None:
        metrics, prefix = entry.report.metrics(), f"eval/{entry.report.env}"
        self._monitor.log(entry.target.version, metrics)
        reward, half = (metrics.get(f"{prefix}/avg@{entry.report.attempts_per_task}{end}") for end in ("", "/ci95"))
        logger.info(
            "{}, {}: avg@{} {} ± {} | errors {} | {:.1f} s",
            entry.target.name, entry.report.env, entry.report.attempts_per_task, number(reward), number(half),
            dict(entry.report.errors), entry.report.seconds,
        )  # fmt: skip

    def missing(self) -> str | None:
        """What was asked for and not evaluated: a version that was named, or all of them but the base."""
        evaluated = {entry.target.version for entry in self.entries}
        left_out = {version: why for version, why in self._versions.skipped.items() if version not in evaluated}
        if not self._config.steps and evaluated - {BASE}:
            return None
        wanted = sorted(left_out.keys() & set(self._config.steps)) if self._config.steps else sorted(left_out)
        return "; ".join(f"version {version} was not evaluated: {left_out[version]}" for version in wanted) or None

    def kept(self) -> str:
        """For people, when it ends early."""
        count = sum(len(entry.report.scored) for entry in self.entries)
        return f"{count} scored attempts are kept in {self._config.output_dir / 'evals'}: the same command goes on from there"

    def report(self, quiet: bool = False) -> None:
        """Write what there is, and print it unless `quiet`."""
        if self.entries or self._versions.skipped:
            write_report(self.entries, self._versions.skipped, self._config, self._config.output_dir / "evals")
            if not quiet:
                print_table(self.entries, self._config)


async def _only(target: Target) -> AsyncIterator[Target]:
    yield target


def made_with(config: "EvalConfig", env: "EvalEnv", plan: EvalPlan, target: Target) -> dict[str, Any]:
    """What the results of an environment depend on. How many tasks and attempts is not of it: more of them go on from those that are there."""
    names = ("id", "args", "adapter", "python", "requirements", "max_turns", "turn_timeout", "overflow")
    environment = env.model_dump(mode="json", include=set(names))
    ours = {"client.base_url": config.client.base_urls[0]} if plan.chat else {"seq_len": config.seq_len, "renderer": config.renderer}  # fmt: skip
    return {
        "model.name": config.model.name,
        "environment": environment,
        "sampling": plan.sampling.model_dump(mode="json"),
        "seed": config.seed,
        "weights": target.hash,
        **ours,
    }


def say_what_is_odd(env: "EvalEnv", task_ids: Sequence[str], wanted: int) -> None:
    """Warn of what may not be what was meant: fewer tasks than asked for, tasks that share an id."""
    if wanted > len(task_ids):
        logger.warning("{} has {} tasks, not {}: all of them are evaluated", env.name, len(task_ids), wanted)
    known = set(task_ids)
    twice = [match[0] for task in task_ids if (match := _NUMBERED.fullmatch(task)) and match[1] in known]
    if twice:
        logger.warning(
            "{}: {} tasks share their id with an earlier one and count as tasks of their own (the first is {}): are rows repeated?",
            env.name, len(twice), twice[0],
        )  # fmt: skip


def trouble_of(report: EvalReport, config: "EvalConfig") -> str | None:
    """Why an environment's evaluation cannot be relied on; None if it can."""
    if report.error_rate <= config.max_error_rate and report.scored:
        return None
    first = next((result for attempts in report.results for result in attempts if not result.ok), None)
    where = f"{report.env} on version {report.version}"
    example = "" if first is None else f"; the first one: {first.outcome}: {first.message}"
    if not report.scored:
        return f"no episode of {where} succeeded{example}"
    return f"{report.errors.total()} of {report.rollouts} attempts of {where} failed (max_error_rate {config.max_error_rate:g}){example}"
