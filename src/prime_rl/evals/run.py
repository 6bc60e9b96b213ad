"""The `eval` command: environments × policies, on our servers or an API. It resumes from the results there are."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from urllib.parse import urlsplit

from loguru import logger

from prime_rl.config import EvalConfig
from prime_rl.config.eval import EvalEnv
from prime_rl.config.shared import is_own_host
from prime_rl.envs.pool import EnvPool
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalPlan, EvalResults, report_table, write_report
from prime_rl.evals.runner import EvalRunner, KeyRejected, env_pool, tasks_of
from prime_rl.fleet.client import InferenceClient, ServerError
from prime_rl.fleet.logprob_check import LogprobCheck
from prime_rl.fleet.replicas import Replica, ReplicaPool, ReplicaState
from prime_rl.fleet.router import NO_VERSION, connect_all
from prime_rl.monitor import Monitor, Status
from prime_rl.monitor.status import GONE_SECONDS, TrainerWatch
from prime_rl.monitor.terminal import LiveRegion
from prime_rl.monitor.trackers import check_trackers
from prime_rl.transport.commit import CommitError, list_steps, step_dir
from prime_rl.transport.protocol import BASE
from prime_rl.transport.settings import running_processes
from prime_rl.transport.weights import WeightsManifest, no_tensors_message, weights_manifest
from prime_rl.wait import within

LINE_SECONDS = 10.0  # between two lines of progress
LOOK_SECONDS = 1.0  # between two looks at the directory of versions
RESTORE_SECONDS = 120.0
_WRITERS = ("trainer", "sft")  # processes that commit versions, by the names of their status


async def run_evals(config: EvalConfig) -> list[EvalResults]:
    """Evaluate every environment by every policy; results in `evals/<env>/<policy>`, `evals/report.json`, metrics.

    Raises:
        UserError: the server does not answer, an environment cannot be loaded, a named version is not evaluated, no
            attempt of an environment was scored, too many failed, or another evaluation runs in the same directory.
    """
    if "eval" in running_processes(config.output_dir):
        raise UserError(f"another eval is running in {config.output_dir}: wait for it, or give another --output-dir")
    check_trackers({"eval": config.monitor})
    status = Status(config.output_dir, "eval")
    try:
        results = await _run_evals(config, status)
    except BaseException as error:  # also while it waits: an `rl` in this directory shows what waits there
        status.done(f"failed: {error}" if isinstance(error, Exception) else "stopped")
        raise
    status.done("finished")
    return results


async def _run_evals(config: EvalConfig, status: Status) -> list[EvalResults]:
    status.phase("waiting for the server")
    chat = await way_of_asking(config, status.waiting) == "chat"
    monitor = Monitor(config.output_dir, "eval", config.monitor, config.model_dump(mode="json"))
    pool = env_pool(config, config.environments, chat_timeout=config.client.timeout if chat else None)
    run = Evaluation(config, pool, monitor, status)
    try:
        async with AsyncExitStack() as stack:
            if not chat:
                checks = config.logprob_check and config.weights_dir is not None
                run.fleet = ReplicaPool(connect_all(config.client, stack, LogprobCheck() if checks else None))
                for replica in await run.fleet.wait_ready(status.waiting):  # before a tokenizer of that name is sought
                    (await replica.client.served()).check_name(replica.name, config.model.name)
            await pool.start(config.client.ready_timeout)
            await run.all()
    except KeyRejected as error:
        key = f"{config.client.servers} refused the key in ${config.client.api_key_var}"
        raise UserError(f"{key}: {error}. {run.kept()}") from error
    except asyncio.CancelledError:
        logger.warning("interrupted. {}", run.kept())
        raise
    finally:
        await pool.close()
        monitor.close()
        if run.results or run.skipped:
            path = write_report(run.results, run.skipped, config)
            print(report_table(path), f"report  {path}", sep="\n")
    run.check()
    return run.results


class Evaluation:
    """What one command evaluates."""

    def __init__(self, config: EvalConfig, pool: EnvPool, monitor: Monitor, status: Status) -> None:
        self._config, self._pool, self._monitor, self._status = config, pool, monitor, status
        self._results: dict[tuple[str, str], EvalResults] = {}
        self._hashes: dict[int, str] = {}  # of the versions that were evaluated
        # All serve one policy at a time; those that do not answer wait for the next one. None: an API's chat route.
        self.fleet: ReplicaPool | None = None
        self.skipped: dict[int, str] = {}  # versions that are not evaluated, and why

    @property
    def results(self) -> list[EvalResults]:
        """All there are so far, by version."""
        return sorted(self._results.values(), key=lambda results: results.version)

    async def all(self) -> None:
        """Evaluate every policy, one after the other. Servers that were given weights serve their base at the end."""
        if self.fleet is None or self._config.weights_dir is None:
            await self._evaluate(None)
            return
        try:
            async for weights in self._policies(self._config.weights_dir):
                try:
                    await self._evaluate(weights)
                except UserError:
                    if weights is None or weights.directory.is_dir():
                        raise
                    self._skip(weights.version, "it was removed before it was evaluated")
        finally:
            self._status.phase("restoring the base model")
            logger.info("the servers load their base model again")
            loads = asyncio.gather(*(one.load(None) for one in self.fleet.replicas), return_exceptions=True)
            for error in await within(loads, subject="base model", owner="the servers", seconds=RESTORE_SECONDS):
                if error is not None:
                    logger.warning("not all servers serve their base again: {}", error)

    async def _evaluate(self, weights: WeightsManifest | None) -> None:
        """Evaluate a version, or the base (None), or what the servers or the API have."""
        version, hash_ = (BASE, "") if self.fleet is None else await self.serve(self.fleet, weights)
        policy = "api" if self.fleet is None else f"step_{version}"
        opened: list[EvalResults] = []
        try:
            for env in self._config.environments:
                opened.append(self._open(env, policy, version, hash_))
            if done := sum(len(results.made) for results in opened):
                total = sum(len(results.attempts) for results in opened)
                logger.info("{}: {} of {} attempts are there already", policy, done, total)
            await self._run(policy, opened)
        finally:
            for results in opened:
                results.close()
        if self.fleet is not None and not self.fleet.ready:
            reason = f"{self._config.client.servers} no longer serve {policy}"
            raise UserError(f"{reason}: were they started again, or given other weights by another run? {self.kept()}")
        for results in opened:
            self._monitor.log(version, results.logged())
            logger.info("{}: {}, {:.1f} s", policy, results.line(), results.seconds)
        write_report(self.results, self.skipped, self._config)

    async def serve(self, fleet: ReplicaPool, weights: WeightsManifest | None) -> tuple[int, str]:
        """Have all servers that answer load and verify a policy. Returns the version and the hash that they serve.
        Raises UserError: none answers, one of them failed to load it, or serves something else."""
        self._status.phase(f"loading version {BASE if weights is None else weights.version}")
        healthy = await fleet.wait_ready(self._status.waiting)
        await asyncio.gather(*(self._load(replica, weights) for replica in healthy))
        served = {replica.name: loaded for replica in healthy if (loaded := replica.loaded) is not None}
        policy, *others = {(one.version, one.hash) for one in served.values()}
        if others or policy[0] == NO_VERSION:
            listed = ", ".join(f"{name} version {one.version} ({one.hash[:12]})" for name, one in served.items())
            raise UserError(f"the servers do not serve the same weights: {listed}")
        for replica in fleet.replicas:
            if replica in healthy:
                fleet.move(replica, ReplicaState.READY)
            else:
                logger.warning("{} does not answer: evaluating without it", replica.name)
                fleet.move(replica, ReplicaState.QUARANTINED, "it does not answer")
        return policy

    async def _load(self, replica: Replica, weights: WeightsManifest | None) -> None:
        served = await replica.client.served()
        served.check_name(replica.name, self._config.model.name)
        if self._config.weights_dir is None:  # they are evaluated as they are
            replica.loaded = served
        else:
            await replica.load(weights)

    async def _run(self, policy: str, opened: Sequence[EvalResults]) -> None:
        """Make the attempts that are missing, as far as there are servers."""
        config, shown = self._config, time.monotonic()

        def score() -> str:
            rewards = (row["reward"] for results in opened for row in results.rows.values())
            scored = [reward for reward in rewards if reward is not None]
            return f", reward {fmean(scored):.4f}" if scored else ""

        def show(done: int, total: int) -> None:
            nonlocal shown
            self._status.phase(f"evaluating {policy}: {done}/{total}")
            region.draw_progress(done, total, f"attempts at {policy}", score)
            if time.monotonic() - shown > LINE_SECONDS:
                shown = time.monotonic()
                logger.info("{}: {}", policy, ", ".join(results.line() for results in opened))

        with LiveRegion() as region:
            await EvalRunner(
                self._pool, opened, config.seed, config.max_concurrent, config.rollout_timeout, self.fleet, show,
                superseded=lambda: self.fleet is not None and not self.fleet.ready,
            ).run()  # fmt: skip

    def _open(self, env: EvalEnv, policy: str, version: int, hash_: str) -> EvalResults:
        """Open the results of an environment by a policy. What is not set for the environment is as set for all."""
        config, chat = self._config, self.fleet is None
        directory = config.output_dir / "evals" / env.name.replace("/", "--") / policy
        sampling = config.sampling.changed(env.sampling)
        attempts = env.rollouts_per_example or config.rollouts_per_example
        wanted = config.num_examples if env.num_examples is None else env.num_examples
        plan = EvalPlan(env.name, env.name, sampling, wanted, attempts, config.seq_len, chat)
        tokens = {"seq_len": config.seq_len, "renderer": config.renderer}
        # What the results depend on. More tasks and attempts go on from those that are there.
        names = {"id", "args", "adapter", "python", "max_turns"}
        settings: dict[str, Any] = {
            "model.name": config.model.name,
            "environment": env.model_dump(mode="json", include=names),
            "sampling": sampling.model_dump(mode="json"),
            "seed": config.seed,
            "weights": hash_,
            **({"client.base_url": config.client.base_urls[0]} if chat else tokens),
        }
        results = EvalResults(plan, tasks_of(self._pool, plan), version, policy, hash_, config.solved_at)
        # While versions are followed, another incarnation of the trainer may have replaced the one with this number.
        results.open(directory, settings, config.clean, replace=config.follow and version != BASE)
        self._results[env.name, policy] = results
        return results

    def check(self) -> None:
        """Raise UserError for unreliable numbers, and if a named version, or all but the base, were not evaluated."""
        config, evaluated = self._config, {results.version for results in self.results}
        skipped = {v: why for v, why in sorted(self.skipped.items()) if v not in evaluated}
        needed = config.steps or not evaluated - {BASE}
        lines = [f"version {v} was not evaluated: {why}" for v, why in skipped.items() if needed]
        lines = lines or [why for results in self.results if (why := results.trouble(config.max_error_rate))]
        if lines:
            raise UserError("; ".join(lines))

    def kept(self) -> str:
        """For people, when it ends early."""
        count = sum(len(results.made) - len(results.failed) for results in self.results)
        directory = self._config.output_dir / "evals"
        return f"{count} scored attempts are kept in {directory}: the same command goes on from there"

    async def _policies(self, directory: Path) -> AsyncIterator[WeightsManifest | None]:
        """Yield the base (None) and the versions to evaluate, in order; with `follow` until the run has ended."""
        config = self._config
        versions = set(config.steps or _chosen(config, list_steps(directory)))
        writer = TrainerWatch(directory.parent, processes=_WRITERS)
        if config.eval_base or BASE in versions:
            yield await self._first(directory, writer)
        while True:  # bounded: by the end of the run that is followed, which says so or gives no sign for long
            # Before the look: what was committed before the last word is seen.
            ended = not config.follow or writer.ended(asked_to_stop=False)
            committed = list_steps(directory)
            if config.follow:  # the last one is evaluated whatever the interval
                versions |= {*_chosen(config, committed), *(committed[-1:] if ended else ())}
            manifests = (self._find(directory, version) for version in sorted(versions - {BASE}))
            manifest = next((manifest for manifest in manifests if manifest is not None), None)
            if manifest is not None:
                self._hashes[manifest.version] = manifest.hash
                self.skipped.pop(manifest.version, None)  # made again since it was
                yield manifest
            elif ended:
                return
            else:
                self._status.waiting("the next version", "the run that is followed", GONE_SECONDS)
                await asyncio.sleep(LOOK_SECONDS)

    async def _first(self, root: Path, writer: TrainerWatch) -> WeightsManifest | None:
        """Return version 0 where a run began with an adapter; None for the model that the servers were started with. It
        need not be the one that the run started from."""
        while True:  # bounded: by the end of the run that is followed
            committed = list_steps(root)
            manifest = weights_manifest(step_dir(root, BASE)) if BASE in committed else None
            if manifest is not None and manifest.publisher is None:
                return manifest if manifest.base is None else None
            if not self._config.follow or max(committed, default=BASE) > BASE or writer.ended(asked_to_stop=False):
                return None
            self._status.waiting("version 0", "the run that is followed", GONE_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    def _skip(self, version: int, why: str) -> None:
        """Say and remember that `version` is not evaluated, unless it is made again."""
        logger.warning("version {} is not evaluated: {}", version, why)
        self.skipped[version] = why
        self._hashes.pop(version, None)

    def _find(self, root: Path, version: int) -> WeightsManifest | None:
        """Return a committed version still to be evaluated, or again; None, and skip it, if it cannot be loaded."""
        directory, why = step_dir(root, version), ""
        try:
            manifest = weights_manifest(directory)
        except CommitError as error:
            why = f"{error}" if directory.is_dir() else "it was removed before it was its turn"
        else:
            if manifest.publisher is not None:
                why = no_tensors_message(directory)
            elif self._hashes.get(version) != manifest.hash:
                return manifest
        if why and version not in self._hashes and version not in self.skipped:
            self._skip(version, why)
        return None


def _chosen(config: EvalConfig, committed: Sequence[int]) -> list[int]:
    return [version for version in committed if version != BASE and version % (config.interval or 1) == 0]


def check_versions(config: EvalConfig) -> None:
    """Check what can be known before anything starts: the directory and the named versions exist.
    Raises UserError where they do not; it lists those that do."""
    directory = config.weights_dir
    if directory is None or config.follow:
        return
    committed = list_steps(directory)
    missing = ", ".join(str(step) for step in config.steps if step not in (BASE, *committed))
    if missing or not (config.steps or _chosen(config, committed)):
        listed = ", ".join(map(str, committed)) or "none"
        raise UserError(
            f"weights_dir: there is no version {missing or 'to evaluate'} in {directory} (there: {listed}); those of "
            "a run are in its weights/, and --follow waits for them"
        )


async def way_of_asking(config: EvalConfig, on_wait: Callable[[str, str, float], None]) -> Literal["tokens", "chat"]:
    """Return `client.type`; for "auto" what the server's answer tells: one of ours says what it serves.
    Raises UserError where nobody answers there."""
    client = config.client
    if client.type != "auto" or len(client.base_urls) != 1 or client.admin_roots:
        return "chat" if client.type == "chat" else "tokens"
    root = client.api_roots[0]
    async with InferenceClient(client, proxies=not is_own_host(urlsplit(root).hostname or "")) as engine:
        await engine.wait_ready(on_wait, "/weights")
        try:
            await engine.served()
            return "tokens"
        except ServerError:
            raise
        except UserError:  # it has no such route, or one of another kind
            if config.weights_dir is not None:
                raise
            return "chat"
