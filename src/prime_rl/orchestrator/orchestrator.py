"""The orchestrator's loop: keep the fleet full within the staleness bound, cut batches, commit them, follow new weights, run evals.

`core.py` decides what may start, what is a batch and what is too old; here is the I/O around it.
"""

import asyncio
import signal
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.monitor import Monitor, Status, log, read_metrics
from prime_rl.orchestrator.ckpt import Incarnation, resume_progress
from prime_rl.orchestrator.core import Batch, Core, Drop, Start, Task
from prime_rl.orchestrator.engine import Engine
from prime_rl.orchestrator.evals import evaluate, wire_sampling
from prime_rl.orchestrator.metrics import Tally, step_metrics
from prime_rl.orchestrator.plans import eval_plans, limits, make_pool
from prime_rl.orchestrator.policy import ServedPolicy
from prime_rl.orchestrator.samples import Scored, score_batch
from prime_rl.orchestrator.seeds import request_seed
from prime_rl.orchestrator.tasks import task_stream
from prime_rl.transport.commit import CommitError, clean_stages
from prime_rl.transport.rollouts import write_batch

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

logger = log.get("orchestrator")

_POLL_SECONDS = 0.1
_HEARTBEAT_SECONDS = 1.0
_QUIET_SECONDS = 15.0
_MAX_EMPTY_BATCHES = 10
_ERROR_WINDOW = 256
_LEAST_OUTCOMES_FOR_ERROR_RATE = 16
_RETRIED = {Outcome.WORKER_DIED, Outcome.ENGINE_UNAVAILABLE}


class Orchestrator:
    """One run's orchestrator. `run()` is its life."""

    def __init__(
        self, config: "OrchestratorConfig", pool: EnvPool, engine: Engine, status: Status, monitor: Monitor
    ) -> None:
        self.config = config
        self.pool = pool
        self.engine = engine
        self.status = status
        self.monitor = monitor
        self.rollouts_dir = config.output_dir / "rollouts"
        self.policy = ServedPolicy(config.output_dir, engine)
        self.sampling = {
            env.name: env.sampling.over(config.sampling) if env.sampling else config.sampling
            for env in config.environments
        }
        self.progress = resume_progress(config.output_dir, config.ckpt, config.max_steps)
        self.started = self.stopping = False
        self.tally = Tally()
        self.core: Core[EpisodeResult]
        self._wake = asyncio.Event()
        self._serving = asyncio.Lock()  # held while what is served must not change
        self._shipping = asyncio.Lock()  # held while finished episodes must not be given up
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outcomes: deque[Outcome | None] = deque(maxlen=max(_ERROR_WINDOW, config.batch_size))
        self._last_error = ""
        self._empty_batches = 0
        self._step_began = time.monotonic()
        self._last_landing = time.monotonic()
        self._gated_since: float | None = None
        self._failure: BaseException | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._evaluated = 0  # the last version that the interval led to evaluate
        self._evaluation: asyncio.Task[None] | None = None
        self._stale_before = 0

    async def run(self) -> None:
        """From start-up to the end of the run.

        Raises:
            UserError: the run cannot go on; the message says why.
        """
        await self._start()
        follower = asyncio.create_task(self._follow_weights())
        try:
            if self.config.eval and self.config.eval.at_start and not self.progress.resumed:
                await self._evaluate()
            self._step_began = time.monotonic()
            while not self.core.done and not self.stopping:
                self._launch()
                await self._next_event(follower)
                while not (self.core.done or self._recovering) and await self._ship():
                    pass
            await self._finish(follower)
        finally:
            follower.cancel()
            await self._cancel_running()
            await asyncio.gather(follower, return_exceptions=True)

    def stop(self) -> None:
        """Stop issuing work, cancel what is in flight, evaluations too, and end."""
        self.stopping = True
        if self._evaluation is not None:
            self._evaluation.cancel()
        self._wake.set()

    # -- start-up ------------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self.config
        clean_stages(self.rollouts_dir)
        self.status.phase("starting environments and waiting for the server")
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pool.start(config.client.ready_timeout))
            group.create_task(self.engine.wait_ready(self.status.waiting))
        version = await self._first_version()
        self.started = True
        tasks = {
            env.name: [Task(env.name, task.index, task.task_id) for task in self.pool.tasks(env.name)]
            for env in config.environments
        }
        ratios = {env.name: env.ratio for env in config.environments}
        self.core = Core(
            limits(config),
            task_stream(tasks, ratios, config.seed, skip=self.progress.groups_opened),
            step=self.progress.step,
            version=version,
            groups_opened=self.progress.groups_opened,
        )
        logger.info(
            "ready: %s, %d rollouts a step in groups of %d, async level %d, from step %d on version %d",
            ", ".join(f"{name} ({len(rows)} tasks)" for name, rows in tasks.items()),
            config.batch_size, config.rollouts_per_example, config.async_level, self.core.step, version,
        )  # fmt: skip

    async def _first_version(self) -> int:
        """The version that training goes on from; the server serves it afterwards, and has proven it."""
        version, resumed = self.progress.version, self.progress.resumed
        if self.config.bench:
            return version
        start = time.monotonic()
        while not self.policy.ready(version, resumed):
            self._wait_for_trainer(f"weights/step_{version}", start)
            await asyncio.sleep(_POLL_SECONDS)
        self.policy.life = self.policy.new_life() or self.policy.life
        await self.policy.check_base(version)
        # Even a server that has this version already is given it: one that cannot reach the directory is found now, not after a step.
        await self.policy.load(version)
        return version

    def _wait_for_trainer(self, subject: str, since: float) -> None:
        """Say what is waited for; raises UserError when the trainer has owed it for too long."""
        self.status.waiting(subject, "trainer", self.config.weights_timeout)
        if time.monotonic() - since > self.config.weights_timeout:
            raise UserError(f"no {subject} from trainer after {self.config.weights_timeout:.0f} s (weights_timeout)")

    # -- episodes ------------------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        if self._recovering:
            return
        while not self.stopping and (start := self.core.next_start()) is not None:
            task = asyncio.create_task(self._run_episode(start))
            task.add_done_callback(self._note_failure)
            if not self._running:
                self._last_landing = time.monotonic()
            self._running[start.episode] = task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """An episode's fault is a result; an exception is the run's: the loop raises it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._wake.set()

    async def _run_episode(self, start: Start) -> None:
        sampling = self.sampling[start.task.env]
        result = await self.pool.run(
            env=start.task.env,
            task_index=start.task.index,
            sampling=wire_sampling(
                sampling, request_seed(self.config.seed, str(start.group), start.number), self.config.seq_len
            ),
            policy_version=start.version,
            episode_id=f"{start.group}.{start.number}.{start.attempt}",
            deadline=time.monotonic() + self.config.rollout_timeout,
        )
        self._land(start, result)
        if result.outcome is Outcome.ENGINE_UNAVAILABLE:
            self._recover()

    def _land(self, start: Start, result: EpisodeResult) -> None:
        del self._running[start.episode]
        self._last_landing = time.monotonic()
        self._wake.set()
        if result.ok:
            self._outcomes.append(None)
            self.tally.finish(result)
            self.core.finish(start.episode, result)
            return
        drop = Drop.TIMEOUT if result.outcome is Outcome.TIMEOUT else Drop.ERRORED
        self.tally.fail(drop)
        if not self.core.fail(start.episode, drop, retry=result.outcome in _RETRIED):
            self._outcomes.append(result.outcome)  # one that is issued again is not lost
        fault = f"{result.outcome}: {result.message}"
        if fault != self._last_error:  # a fault that repeats is said once
            self._last_error = fault
            logger.warning("episode %d.%d of %s failed: %s", start.group, start.number, start.task.env, fault)

    def _check_error_rate(self) -> None:
        failed = Counter(str(reason) for reason in self._outcomes if reason is not None)
        enough = len(self._outcomes) >= min(_LEAST_OUTCOMES_FOR_ERROR_RATE, self.config.batch_size)
        if enough and failed.total() > self.config.max_error_rate * len(self._outcomes):
            raise UserError(
                f"{failed.total()} of the last {len(self._outcomes)} episodes failed ({dict(failed)}), more than max_error_rate "
                f"{self.config.max_error_rate}; the last one: {self._last_error}"
            )

    async def _cancel_running(self) -> None:
        running = [*self._running.values(), *([self._recovery] if self._recovery else [])]
        self._running = {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _cancel(self, start: Start, reason: Drop) -> None:
        self._running.pop(start.episode).cancel()
        self.core.fail(start.episode, reason)

    async def _next_event(self, follower: asyncio.Task[None]) -> None:
        """Sleep until an episode ends or new weights are served; wakes up now and then to say that it lives."""
        began = time.monotonic()
        gated = not self._running
        try:
            async with asyncio.timeout(_HEARTBEAT_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        if follower.done():
            follower.result()
        if self._failure is not None:
            raise self._failure
        if gated and not self._serving.locked() and not self._recovering:
            # Nothing is in flight and nothing may start: only the trainer can free the run.
            self.tally.seconds_gated += time.monotonic() - began
            self._gated_since = self._gated_since or began
            self._wait_for_trainer(f"weights/step_{self.core.version + 1}", self._gated_since)
        elif not gated:
            self._gated_since = None
            self._tell()
        self._check_error_rate()

    def _tell(self) -> None:
        """What the orchestrator does while episodes are in flight, or what keeps it waiting for unusually long."""
        quiet = time.monotonic() - self._last_landing
        if self.policy.loading is not None:
            subject = f"version {self.policy.loading} to be loaded"
            self.status.waiting(subject, f"inference at {self.engine.root}", self.config.client.timeout)
        elif quiet > _QUIET_SECONDS:
            subject = f"one of {self.core.in_flight} episodes to end"
            self.status.waiting(subject, "inference and environments", self.config.rollout_timeout)
        else:
            self.status.phase("making rollouts")

    # -- batches -------------------------------------------------------------------------------------------------------------

    async def _ship(self) -> bool:
        """Commit a batch if there is one. Returns whether there may be another."""
        async with self._shipping:
            batch = self.core.ready_batch()
            if batch is None:
                return False
            temperatures = {name: sampling.temperature for name, sampling in self.sampling.items()}
            scored = score_batch(batch, self.config, temperatures)
            if not scored.samples:
                self._discard(batch)
                return True
            if not self.config.bench:
                if not await self.policy.proven():
                    self._recover()  # what it sampled may come from other weights than it was given
                    return False
                extra = {"groups_opened": self.core.groups_opened}
                await asyncio.to_thread(write_batch, self.rollouts_dir, batch.step, scored.samples, extra)
            self.core.advance(batch, scored.trained_episodes)
        self.core.check_conservation()
        self._empty_batches = 0
        self._report(batch, scored)
        return True

    def _discard(self, batch: Batch[EpisodeResult]) -> None:
        self.core.discard(batch)
        self.tally.discarded_batches += 1
        self._empty_batches += 1
        logger.warning("step %d: every group's rewards were equal; collecting another batch", batch.step)
        if self._empty_batches >= _MAX_EMPTY_BATCHES:
            raise UserError(
                f"{_MAX_EMPTY_BATCHES} batches in a row carried no learning signal (all rewards of each group were equal): the task is too "
                "easy, too hard, or its reward is broken"
            )

    def _report(self, batch: Batch[EpisodeResult], scored: Scored) -> None:
        now = time.monotonic()
        metrics = step_metrics(batch, scored, self.tally, now - self._step_began)
        stale, self._stale_before = self.core.dropped[Drop.STALE] - self._stale_before, self.core.dropped[Drop.STALE]
        metrics["off_policy/dropped"] = float(stale)
        self._step_began, self.tally = now, Tally()
        self.monitor.log(batch.step, metrics)
        self.status.step(self.core.step)
        logger.info(
            "step %d | %.1f s | reward %.4f | %d samples, %d tokens | filtered %.0f%% | off-policy %.1f | errors %.1f%%",
            batch.step, metrics["time/step"], metrics["reward/mean"], metrics["progress/samples"], metrics["progress/tokens"],
            100 * metrics["filtered/zero_advantage"], metrics["off_policy/mean"], 100 * metrics["errors/rate"],
        )  # fmt: skip

    # -- weights -------------------------------------------------------------------------------------------------------------

    async def _follow_weights(self) -> None:
        """Serve every newer version as soon as the trainer commits it."""
        while not self.config.bench:
            if (life := self.policy.new_life()) is not None:
                await self._begin_life(life)
            version = self.policy.newest()
            if version is not None and version > self.core.version and not self._recovering:
                await self._serve(version)
            await asyncio.sleep(_POLL_SECONDS)

    async def _serve(self, version: int) -> None:
        async with self._serving:
            began = time.monotonic()
            self.core.announce(version)
            try:
                await self.policy.load(version)
            except (UserError, CommitError):
                # The trainer may have pruned this version while it was loaded: then there is a newer one. Or the server is gone.
                if not await self.policy.proven():
                    self._recover()
                elif self.policy.newest() == version:
                    raise
                return
            self.tally.seconds_update += time.monotonic() - began
            self._gated_since = None
            self.core.serve(version)
            logger.info("serving version %d after %.2f s", version, time.monotonic() - began)
            for start in self.core.stale():
                self._cancel(start, Drop.STALE)
        if self._evaluation_due(version):
            self._evaluated = version
            await self._evaluate()
        self._wake.set()

    async def _begin_life(self, life: Incarnation) -> None:
        """The trainer went on from an earlier step: its later versions, and what they sampled, are given up."""
        async with self._serving:
            logger.warning(
                "the trainer began a new life at step %d: what its earlier one sampled is dropped", life.start
            )
            start = time.monotonic()
            while not self.policy.ready(life.start, resumed=False):
                self._wait_for_trainer(f"weights/step_{life.start}", start)
                await asyncio.sleep(_POLL_SECONDS)
            self.policy.life = life
            await self.policy.load(life.start)
            await self._restart_from(life.start)
        self._wake.set()

    async def _restart_from(self, version: int) -> None:
        async with self._shipping:
            for start in self.core.restart_from(version):
                self._cancel(start, Drop.UNPROVEN)

    @property
    def _recovering(self) -> bool:
        return self._recovery is not None and not self._recovery.done()

    def _recover(self) -> None:
        """The server is gone, or serves something else: nothing starts until it is back and has proven what it serves."""
        if not self._recovering:
            self._recovery = asyncio.create_task(self._bring_back())
            self._recovery.add_done_callback(self._note_failure)

    async def _bring_back(self) -> None:
        await self.engine.wait_ready(self.status.waiting)
        async with self._serving:
            if await self.policy.proven():
                return
            logger.warning("the server does not serve version %d any more: loading it again", self.core.version)
            await self.policy.load(self.core.version)
            await self._restart_from(self.core.version)
        self._wake.set()

    # -- evals and the end ---------------------------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        """Evaluate what is served; nothing newer is served until it is done. A stop ends it."""
        self._evaluation = asyncio.create_task(self._evaluate_all())
        try:
            await self._evaluation
        except asyncio.CancelledError:
            if not self.stopping:
                raise
        finally:
            self._evaluation.cancel()
            self._gated_since = None

    def _evaluation_due(self, version: int) -> bool:
        """Whether a multiple of the interval was reached or passed since the last one; the very last version has its own evaluation."""
        section = self.config.eval
        if section is None or section.interval is None or (section.at_end and version == self.config.max_steps):
            return False
        return version // section.interval > self._evaluated // section.interval

    async def _evaluate_all(self) -> None:
        async with self._serving:
            version = self.core.version
            for plan in eval_plans(self.config):
                where = f"evaluating {plan.env} on version {version}"
                self.status.phase(where)
                report = await evaluate(
                    self.pool, plan, version=version, seed=self.config.seed,
                    max_concurrent=limits(self.config).max_concurrent, timeout=self.config.rollout_timeout,
                    on_progress=partial(self._tell_progress, where),
                )  # fmt: skip
                metrics = report.metrics()
                self.monitor.log(version, metrics)
                reward = metrics.get(f"eval/{plan.env}/reward/mean")
                shown = "no episode succeeded" if reward is None else f"reward {reward:.4f}"
                logger.info(
                    "eval %s on version %d | %.1f s | %s | errors %s",
                    plan.env,
                    version,
                    report.seconds,
                    shown,
                    dict(report.errors),
                )

    def _tell_progress(self, where: str, done: int, total: int) -> None:
        self.status.phase(f"{where}: {done}/{total}")

    async def _finish(self, follower: asyncio.Task[None]) -> None:
        for start in self.core.abandon():
            self._cancel(start, Drop.CANCELLED)
        self.core.check_conservation()
        if self.config.bench:
            return
        # The run ends with its last version served: for the final evaluation, and for whoever uses a server that stays up.
        last = min(
            self.core.step, self.config.max_steps or self.core.step
        )  # a resumed run may have batches beyond its end
        while self.core.version < last and not self.stopping:
            await self._next_event(follower)
        if self.config.eval and self.config.eval.at_end and not self.stopping:
            await self._evaluate()


async def orchestrate(config: "OrchestratorConfig") -> None:
    """Run the orchestrator to its end, or until SIGINT or SIGTERM asks it to stop (the second signal stops at once)."""
    status = Status(config.output_dir, "orchestrator")
    monitor = Monitor(config.output_dir, "orchestrator", config.monitor, config.model_dump(mode="json"))
    pool = make_pool(config)
    try:
        async with Engine(config.client) as engine:
            orchestrator = Orchestrator(config, pool, engine, status, monitor)
            current = asyncio.current_task()
            assert current is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, _on_signal, orchestrator, current)
            await orchestrator.run()
        status.done("stopped" if orchestrator.stopping else "finished")
        if config.bench:
            print(bench_table(read_metrics(config.output_dir / "metrics" / "orchestrator.jsonl")))
    except* UserError as group:
        status.done(f"failed: {group.exceptions[0]}")
        raise UserError(str(_first(group))) from group
    finally:
        await pool.close()
        monitor.close()


def bench_table(rows: list[dict[str, float]]) -> str:
    """Throughput of generation: the mean over steps but the first, which warms the engine up."""
    timed = rows[1:] or rows
    seconds = sum(row["time/step"] for row in timed) / len(timed)
    tokens = sum(row["perf/throughput"] * row["time/step"] for row in timed) / len(timed)
    rollouts = sum(row["progress/samples"] for row in timed) / len(timed)
    return (
        f"{'steps':>8}{'rollouts/s':>14}{'tokens/s':>12}{'step time s':>14}\n"
        f"{len(timed):>8}{rollouts / seconds:>14.1f}{tokens / seconds:>12.0f}{seconds:>14.3f}"
    )


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _on_signal(orchestrator: Orchestrator, task: "asyncio.Task[None]") -> None:
    if orchestrator.stopping or not orchestrator.started:
        task.cancel()  # nothing has been made that could be lost
        return
    logger.info("stopping: nothing new is issued (a second signal stops at once)")
    orchestrator.stop()
