"""The orchestrator's loop: keep the fleet full within the staleness bound, commit batches, run evaluations.

`scheduler.py` decides what may start, what is a batch and what is too old; `ledger.py` stores what became of every
episode; the fleet's `WeightSync` follows the trainer and brings failed servers back. A killed orchestrator resumes from
the run directory (`checkpoint.py`, `ledger.restore`).
"""

import asyncio
import gc
import math
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.config.orchestrator import OPSD
from prime_rl.config.shared import ORCHESTRATOR_STEPS
from prime_rl.envs.pool import EnvPool, Sampler
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import NEVER_WORKED, UserError
from prime_rl.evals.runner import EVAL_WORKER, Evaluations, env_pool, eval_environments, wire_sampling
from prime_rl.fleet.logprob_check import LogprobCheck
from prime_rl.fleet.replicas import Replica, ReplicaPool, cancel_tasks
from prime_rl.fleet.router import ServerClient, connect_all
from prime_rl.fleet.weight_sync import WeightSync
from prime_rl.monitor import Monitor, Status
from prime_rl.monitor.limits import KEPT
from prime_rl.monitor.run_directory import RunDirectory
from prime_rl.monitor.status import TrainerWatch
from prime_rl.orchestrator import membership
from prime_rl.orchestrator.checkpoint import PART, JointCheckpoints, OrchestratorState, resume_point
from prime_rl.orchestrator.ledger import Counts, Ledger, batch_extra, restore
from prime_rl.orchestrator.metrics import Tally, rewards_of, step_extras, step_metrics
from prime_rl.orchestrator.samples import Admission, ScoredBatch, filter_reason, output_tokens, score_batch
from prime_rl.orchestrator.scheduler import Batch, Batched, Drop, Group, Limits, Scheduler, Start, Task
from prime_rl.orchestrator.tasks import Pools, request_seed, task_stream
from prime_rl.orchestrator.teachers import Teachers
from prime_rl.processes import ECHO_SECONDS
from prime_rl.transport import checkpoints, tenants
from prime_rl.transport.commit import clean_stages
from prime_rl.transport.rollouts import write_batch
from prime_rl.transport.settings import LEDGER, suggestions
from prime_rl.wait import WaitTimeout

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

_WAKE_SECONDS = 1.0
FLUSH_SECONDS = 1.0  # between two flushes of the ledger within a step
_LAUNCHED_AT_ONCE = 64  # ten thousand in one turn of the event loop would hold it up for a third of a second
FULL_COLLECTION_SECONDS = 600.0  # between two full garbage collections
_ERROR_WINDOW = 256
_LEAST_OUTCOMES_FOR_ERROR_RATE = 16
_ENDLESS = 1_000_000  # steps
_RETRIED = {Outcome.WORKER_DIED, Outcome.ENGINE_UNAVAILABLE, Outcome.TEACHER_UNAVAILABLE}


class Orchestrator:
    """One incarnation of the orchestrator. Await `run` once."""

    def __init__(
        self,
        config: "OrchestratorConfig",
        pool: EnvPool,
        engines: Sequence[ServerClient],
        status: Status,
        monitor: Monitor,
        teachers: Teachers | None = None,
    ) -> None:
        """`engines`: clients of all servers; `teachers`: started, and known to `pool` (None: the run has none)."""
        self.config = config
        self.pool = pool
        self.teachers = teachers or Teachers(config)
        self.status = status
        self.monitor = monitor
        self.rollouts_dir = config.output_dir / "rollouts"
        self.sampling = {env.name: config.sampling.changed(env.sampling) for env in config.environments}
        self.admission = Admission(config)
        self.progress = resume_point(config)
        self.fleet = ReplicaPool(engines, slack=config.rollouts_per_example)
        self.weight_sync = WeightSync(config, self.fleet, status, self)
        self.evaluations = Evaluations(config, pool, monitor, status, self.weight_sync)
        self.checkpoints = JointCheckpoints(config.output_dir, config.ckpt)
        self.run_directory = RunDirectory(config.output_dir, KEPT)
        self.ledger: Ledger
        self.pools: dict[str, Pools]  # by the environments that have difficulty pools
        self.tasks: asyncio.TaskGroup  # of the run; one that fails ends it. Failed episodes are results, not exceptions
        self.started = self.stopping = False
        self.tally = Tally()
        self.scheduler: Scheduler[EpisodeResult]
        self.wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._outcomes: deque[Outcome | None] = deque(maxlen=max(_ERROR_WINDOW, config.batch_size))
        self._last_error = ""
        self._step_began = self._last_end = time.monotonic()
        self._gated_since: float | None = None
        self._algorithm_state = self.progress.state.algorithm  # after the last committed batch
        self._saving = asyncio.Lock()  # bounded: its holders write, and ask the engines, which has a timeout

    async def run(self) -> None:
        """From start-up to the end of the run. Raises UserError, which says why the run cannot continue."""
        self.ledger = Ledger(self.config.output_dir / LEDGER)
        try:
            if self.progress.fresh and (issued := self.ledger.counts().issued):
                ways = suggestions(self.config.output_dir, saved=False)
                raise UserError(f"{self.ledger.path} has {issued} episodes of an earlier run: {ways}")
            async with asyncio.TaskGroup() as self.tasks:
                await self._start()
                if self.evaluations.due(self.scheduler.version):
                    await self.evaluations.run()
                background = [self.weight_sync.follow(), self.weight_sync.watch(), self._keep_ledger()]
                self._background += [self.tasks.create_task(work) for work in background]
                await self._loop()
                await self._finish()
                await cancel_tasks(self._background)
                await self.weight_sync.close()
                self.weight_sync.published.write_lease(None)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            with suppress(UserError):  # the disk may be full
                self.ledger.flush()  # `rl audit` counts what ended since the last flush, too
            self.ledger.close()

    async def _loop(self) -> None:
        self._step_began = time.monotonic()
        while not (self.scheduler.done or self.stopping):  # bounded: each event has a deadline
            if self._launch():
                self.wake.set()  # more may start, once these have begun
                await asyncio.sleep(0)
            await self._next_event()
            while not self.scheduler.done and self.fleet.ready and await self._commit_next_batch():
                pass

    def stop(self) -> None:
        """Issue nothing more, cancel what is in flight, evaluations too, and end. A resumed run starts it again."""
        self.stopping = True
        if self.config.tenant is not None:
            tenants.leave(self.config.output_dir)
        self.evaluations.stop()
        self.wake.set()

    # -- start-up -----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self.config
        clean_stages(self.rollouts_dir)
        if config.tenant is not None:
            self._background = [self.tasks.create_task(self._watch_membership())]
        self.status.phase("starting environments and waiting for the server")
        checkpoints.clean(self.checkpoints.root, PART)  # what an earlier incarnation left half-done
        environments = self.tasks.create_task(self.pool.start(config.client.ready_timeout))
        version = await self.weight_sync.start(self.progress)  # servers may still be loading
        await environments  # bounded: by the same timeout
        self.evaluations.check_tasks()
        self.started = True
        self._make_scheduler(version)
        await self._check_ledger()
        self.status.ready()
        logger.info(
            "ready: {}, {} rollouts a step in groups of {}, async level {}, from step {} on version {}",
            self._environments(), config.batch_size, config.rollouts_per_example, config.async_level,
            self.scheduler.step, version,
        )  # fmt: skip

    def _environments(self) -> str:
        return ", ".join(f"{env.name} ({len(self.pool.tasks(env.name)):,} tasks)" for env in self.config.environments)

    def _make_scheduler(self, version: int) -> None:
        config, published = self.config, self.weight_sync.published
        tasks = {
            env.name: [Task(env.name, index, task_id) for index, task_id in enumerate(self.pool.tasks(env.name))]
            for env in config.environments
        }
        curricula = {env: curriculum for env in tasks if (curriculum := config.curriculum_of(env)) is not None}
        self.pools = {env: Pools(tasks[env], curricula[env], f"{config.seed}/{env}") for env in curricula}
        ratios = {env.name: env.ratio for env in config.environments}
        stream = task_stream(tasks, ratios, config.seed, self.pools)
        # Without a trainer sampling may run ahead of it by the whole run.
        level = config.async_level if config.trainer else config.max_steps or _ENDLESS
        limits = Limits(
            batch_size=config.batch_size,
            group_size=config.rollouts_per_example,
            async_level=level,
            max_off_policy_steps=max(config.max_off_policy_steps, level),
            max_concurrent=config.most_in_flight,
            max_steps=config.max_steps,
        )
        self.scheduler = Scheduler(
            limits,
            stream,
            step=self.progress.step,
            version=version,
            incarnation=published.incarnation.number,
            emit=self.ledger.record,
            gate=self._gate,
        )
        self.weight_sync.begin(self.scheduler)
        newest = version if published.newest is None else published.newest
        restore(self.scheduler, self.ledger, self.rollouts_dir, self.progress, stream, newest, self.pools)
        self.tally.before = self.ledger.counts()
        self.scheduler.begin_incarnation(published.incarnation.number, published.incarnations)

    def _gate(self, group: Group[EpisodeResult]) -> str | None:
        if (reason := self.admission.gate(group)) is not None:
            self.tally.turned_away.append((group, reason))
        return reason

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _launch(self) -> bool:
        """Start episodes that may start, but not too many at once. Returns whether more may."""
        if self.stopping or not self.fleet.ready:
            return False
        for _ in range(_LAUNCHED_AT_ONCE):
            if (start := self.scheduler.next_start(time.monotonic())) is None:
                return False
            replica = None
            if start.task.env not in self.teachers.samplers:
                replica = self.fleet.place(start.group, retry=start.attempt > 0)
                assert replica is not None  # one serves, or nothing starts
                self.fleet.start(start.episode, replica)
            task = self.tasks.create_task(self._run_episode(start, replica))
            if replica is not None:
                task.add_done_callback(partial(lambda replica, _: self.fleet.end(replica), replica))
            if not self._running:
                self._count_idle(time.monotonic())
            self._running[start.episode] = task
        return True

    async def _run_episode(self, start: Start, replica: Replica | None) -> None:
        """Run an episode on `replica`, or with the environment's teacher as the sampler (None)."""
        env = start.task.env
        seed = request_seed(self.config.seed, str(start.group), start.number)
        sampler = self.teachers.samplers.get(env)
        sampling = wire_sampling(self.sampling[env], seed, self.config.seq_len)
        if self.config.router_replay and sampler is None:  # a teacher's experts are not the trainer's
            sampling["routed_experts_prompt_start"] = 0
        async with nullcontext() if sampler is None else sampler.slots:
            result = await self.pool.run(
                env=env,
                task_index=start.task.index,
                sampling=sampling,
                policy_version=start.version,
                episode_id=start.episode,
                timeout=self.config.rollout_timeout,
                server=None if replica is None else replica.name,
            )
        answered = result.outcome
        if replica is not None:
            await self.teachers.score(env, result, replica.name)
        self._end_episode(start, result)
        if replica is not None and answered is Outcome.OK:
            replica.failures = 0
        elif replica is not None and answered is Outcome.ENGINE_UNAVAILABLE:
            self.weight_sync.episode_failed(replica)

    def _end_episode(self, start: Start, result: EpisodeResult) -> None:
        del self._running[start.episode]
        self._last_end = time.monotonic()
        self.status.progress()
        self.wake.set()
        if result.ok:
            result.filtered = filter_reason(self.config.filters_of(start.task.env), result, self.config.seq_len)
            self._outcomes.append(None)
            self.tally.finished += 1
            self.tally.output_tokens += output_tokens(result)
            self.scheduler.finish(start.episode, result)
            if start.task.env in self.teachers.samplers:
                self.scheduler.verify([start.episode])
            return
        self.fleet.forget([start.episode])
        drop = Drop.TIMEOUT if result.outcome is Outcome.TIMEOUT else Drop.ERRORED
        if not self.scheduler.fail(start.episode, drop, str(result.outcome), retry=result.outcome in _RETRIED):
            self._outcomes.append(result.outcome)  # one that is issued again is not lost
        fault = f"{result.outcome}: {result.message}"
        if fault != self._last_error:  # once, if it repeats
            self._last_error = fault
            logger.warning("episode {}.{} of {} failed: {}", start.group, start.number, start.task.env, fault)

    def _check_error_rate(self) -> None:
        failed = Counter(str(reason) for reason in self._outcomes if reason is not None)
        enough = len(self._outcomes) >= min(_LEAST_OUTCOMES_FOR_ERROR_RATE, self.config.batch_size)
        if enough and failed.total() > self.config.max_error_rate * len(self._outcomes):
            kinds = ", ".join(f"{count} {reason}" for reason, count in failed.items())
            count = f"{failed.total()} of the last {len(self._outcomes)} episodes failed ({kinds})"
            most = f"more than max_error_rate {self.config.max_error_rate}"
            never = self.scheduler.step == 0 and None not in self._outcomes and failed.keys() <= {"errored", "invalid"}
            raise UserError(f"{NEVER_WORKED + ': ' if never else ''}{count}, {most}; the last one: {self._last_error}")

    # -- called by `WeightSync` ---------------------------------------------------------------------------------------

    def cancel(self, episodes: Sequence[str]) -> None:
        """Cancel episodes that the scheduler has dropped."""
        for episode in episodes:
            if episode in self._running:  # else the run ends, and has cancelled it
                self._running.pop(episode).cancel()

    async def on_version_served(self, version: int) -> None:
        """Take note that a newer version is served, and evaluate it if that is due."""
        self._gated_since = None
        if self.evaluations.due(version):
            await self.evaluations.run()
            self._gated_since = None

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _next_event(self) -> None:
        """Sleep until an episode ends, new weights are served or a group is due, for a second at most."""
        began, gated = time.monotonic(), not self._running
        until_due = (self.scheduler.opens_at or began) - began  # not positive: something else holds the group back
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_WAKE_SECONDS, until_due if until_due > 0 else _WAKE_SECONDS)):
                await self.wake.wait()
        self.wake.clear()
        if gated and not self.weight_sync.version_lock.locked() and self.fleet.ready:
            # Nothing is in flight and nothing may start: only the trainer can free the run.
            self._gated_since = self._gated_since or began
            last_word = self.stopping or self._served_to_the_end
            subject = "final status" if last_word else f"weights/step_{self.scheduler.version + 1}"
            seconds = self.config.weights_timeout
            self.status.waiting(subject, "trainer", seconds)
            if time.monotonic() - self._gated_since > seconds:
                raise WaitTimeout(subject, "trainer", seconds)
        elif not gated:
            self._gated_since = None
            if self.evaluations.running:
                pass  # they show their own
            elif (loading := self.fleet.loading) is None:
                self.status.phase(f"making rollouts of {self._environments()}")
            else:
                servers, subject = ", ".join(one.name for one in self.fleet.ready), f"version {loading} to be loaded"
                self.status.waiting(subject, f"inference at {servers}", self.config.client.timeout)
        self._check_error_rate()

    # -- batches ------------------------------------------------------------------------------------------------------

    async def _commit_next_batch(self) -> bool:
        """Commit a batch if there is one. Returns whether there may be another."""
        async with self.weight_sync.batch_lock:
            if not self.scheduler.batch_ended:
                return False
            self.weight_sync.notice_incarnation()
            await self.weight_sync.verify()  # episodes of a server that fails are made again; the others are judged
            batch = self.scheduler.ready_batch()
            if batch is None:
                return False
            temperatures = {name: sampling.temperature for name, sampling in self.sampling.items()}
            # It takes seconds in a large run.
            scored = await asyncio.to_thread(score_batch, batch, self.config, temperatures, self._algorithm_state)
            if not scored.samples:
                self.scheduler.discard(batch)
                self.tally.turned_away += [(group, "no_signal") for group in batch.groups]
                self.admission.note_empty_batch(batch.step, {*scored.filtered.values()})
                return True
            batched = batch.committed(scored.trained, scored.filtered)
            metrics = await self._commit(batch, scored, batched)
            self.scheduler.advance(batched)
        self.status.step(self.scheduler.step)
        logger.info(
            "step {}{} | {:.1f} s | reward {:.4f} | {:.0f} samples, {:.0f} tokens | off-policy {:.1f} | "
            "errors {:.1%}",
            batch.step, "" if self.config.max_steps is None else f"/{self.config.max_steps}", metrics["time/step"],
            metrics["reward/mean"], metrics["progress/samples"], metrics["progress/tokens"], metrics["off_policy/mean"],
            metrics["errors/rate"],
        )  # fmt: skip
        return True

    async def _commit(self, batch: Batch[EpisodeResult], scored: ScoredBatch, batched: Batched) -> dict[str, float]:
        """Write a batch with the state after it; its episodes are flushed to the ledger first. Returns its metrics.

        They are logged before the commit: after a crash a row may be written again, but none is missing.
        """
        opened = self.scheduler.groups_opened
        counts = await self._check_ledger()
        now = time.monotonic()
        if not self._running:
            self._count_idle(now)
        tally, self.tally = self.tally, Tally(counts)  # groups that complete from now on are of the next step
        seconds, self._step_began = now - self._step_began, now
        groups = sorted([*(group for group, _ in tally.turned_away), *batch.groups], key=lambda group: group.number)
        for group in groups:
            if group.finished and (pools := self.pools.get(group.task.env)) is not None:
                pools.observe(group.task.index, fmean(rewards_of(group)))
        self.admission.empty_batches = 0
        updates, several = self.weight_sync.take_times(), len(self.config.environments) > 1
        metrics = step_metrics(batch, scored, tally, counts, seconds=seconds, updates=updates, several=several)
        metrics["workers/cpu"] = self.pool.busiest
        for env, pools in self.pools.items():
            metrics |= {f"curriculum/{env}/pool/{name}": share for name, share in pools.shares().items()}
        metrics |= self.fleet.tenant_metrics()
        if (limit := self.run_directory.limit()) is not None:
            metrics[limit.metric] = limit.share
        self.monitor.log(batch.step, metrics, lambda: step_extras(batch, scored))
        self._algorithm_state = scored.state
        curriculum = {env: pools.state() for env, pools in self.pools.items()}
        state = OrchestratorState(batch.step + 1, self.config.seed, opened, scored.state, curriculum)
        extra = batch_extra(batched) | {"state": asdict(state)}
        await asyncio.to_thread(write_batch, self.rollouts_dir, batch.step, scored.samples, extra)
        return metrics

    def _count_idle(self, now: float) -> None:
        """Count the time since the last episode of this step ended: nothing was in flight."""
        self.tally.seconds_idle += now - max(self._last_end, self._step_began)
        self._last_end = now

    async def _check_ledger(self) -> Counts:
        """Write the events recorded so far and check that no episode is lost. Returns the counts."""
        held = self.scheduler.held
        await asyncio.to_thread(self.ledger.flush, self.ledger.unwritten)
        return await asyncio.to_thread(self.ledger.check, held)

    # -- between steps ------------------------------------------------------------------------------------------------

    async def _keep_ledger(self) -> None:
        """Save what has finished, complete checkpoints. Until it is cancelled."""
        while True:  # bounded: the run cancels it at its end
            await self._save()
            await asyncio.sleep(FLUSH_SECONDS)

    async def _watch_membership(self) -> None:
        """Raise UserError once the trainer trains this tenant no longer, unless it has left. Until it is cancelled."""
        while not self.stopping:  # bounded: the run cancels it at its end
            membership.check(self.config.output_dir)
            await asyncio.sleep(_WAKE_SECONDS)

    async def _save(self) -> None:
        async with self._saving:
            async with self.weight_sync.batch_lock:
                if self.scheduler.unverified() and self.fleet.ready:
                    await self.weight_sync.verify()
                    self.wake.set()  # where a group was rejected another may start
                await asyncio.to_thread(self.ledger.flush, self.ledger.unwritten)
            await asyncio.to_thread(self.checkpoints.join, dict(self.weight_sync.published.incarnations))

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Continue until the trainer has ended and, if the run has reached its end, the last version is served.

        One that is stopped keeps what it has for a resumed one.
        """
        if self.scheduler.done:
            self.scheduler.abandon()
        await cancel_tasks(self._running.values())
        self._running.clear()
        self._gated_since = None
        watch = TrainerWatch(self.config.output_dir)
        while self.config.trainer:  # bounded: `_next_event` has a deadline
            # The trainer saves once more, and its part is joined before this process ends. Or it begins anew.
            if watch.ended(asked_to_stop=self.stopping) and (self.stopping or self._served_to_the_end):
                break
            await self._next_event()
        else:
            logger.info("no trainer: {} batches committed on the base model (version 0)", self.scheduler.step)
        await self._save()
        async with self.weight_sync.batch_lock:
            await self._check_ledger()

    @property
    def _served_to_the_end(self) -> bool:
        """Whether the last version is served and no longer evaluated: users of a server that stays up find it there."""
        last = min(self.scheduler.step, self.config.max_steps or self.scheduler.step)  # of batches beyond the end
        served = self.scheduler.version >= last and not self.scheduler.must_go_back
        return served and not self.evaluations.running


# -- the process -----------------------------------------------------------------------------------------------------


async def orchestrate(config: "OrchestratorConfig") -> None:
    """Run the orchestrator to its end, or until SIGINT or SIGTERM asks it to stop (the second signal stops at once)."""
    limit_gc()
    status, current = Status(config.output_dir, "orchestrator"), asyncio.current_task()
    assert current is not None
    try:
        async with AsyncExitStack() as stack:
            monitor = Monitor(config.output_dir, "orchestrator", config.monitor, config.model_dump(mode="json"))
            stack.callback(monitor.close)
            stack.callback(asyncio.create_task(collect_periodically(), name="garbage collector").cancel)
            orchestrator: Orchestrator | None = None
            asked_at = -math.inf

            def on_signal() -> None:
                nonlocal asked_at
                if time.monotonic() - asked_at < ECHO_SECONDS:
                    return
                asked_at = time.monotonic()
                if orchestrator is None or orchestrator.stopping or not orchestrator.started:
                    current.cancel()
                    return
                logger.info("stopping: nothing new is issued (a second signal stops at once)")
                orchestrator.stop()

            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, on_signal)
            if config.tenant is not None:
                stack.callback(tenants.leave, config.output_dir)
                await membership.join(config, status)
            teachers = Teachers(config)
            stack.push_async_callback(teachers.close)
            await teachers.start(status.waiting)
            pool = make_pool(config, teachers)
            stack.push_async_callback(pool.close)
            servers = connect_all(config.client, stack, LogprobCheck() if config.logprob_check else None)
            run_config = config
            if config.bench:  # a run of a few steps without a trainer, of which the metrics alone are kept
                scratch = Path(stack.enter_context(TemporaryDirectory(prefix="prime-rl-bench-")))
                alone = {"output_dir": scratch, "trainer": False, "max_steps": ORCHESTRATOR_STEPS, "ckpt": None}
                run_config = config.model_copy(update={**alone, "recover": False})
            orchestrator = Orchestrator(run_config, pool, servers, status, monitor, teachers)
            await orchestrator.run()
        outcome = "stopped" if orchestrator.stopping else "finished"
        if config.tenant is not None:
            more = "the same command goes on" if orchestrator.stopping else "a larger max_steps goes on"
            logger.info(
                "{} at step {}; {}; weights in {}",
                outcome,
                orchestrator.scheduler.step,
                more,
                config.output_dir / "weights",
            )
        status.done(outcome)
    except asyncio.CancelledError:
        logger.info("stopped at once: episodes in flight are issued again when the run is resumed")
        status.done("stopped")
        raise
    except UserError as error:
        status.done(f"failed: {error}")
        raise


def limit_gc() -> None:
    """Have the garbage collector look at young objects alone: `collect_periodically` does the rest.

    Reference counting frees nearly everything here. By Python's own rule the collector scans all objects more often the
    larger the fleet, and holds up the event loop each time. How long, and what it finds: benchmarks/simulate_fleet.py.
    """
    gc.collect()
    gc.freeze()  # modules, functions, settings: never garbage
    gc.set_threshold(5_000, 10, 1_000_000_000)  # Python's own: 700, 10, 10; the last is, in effect, never


async def collect_periodically() -> None:
    """Collect all garbage now and then: cycles that had grown old before they were garbage."""
    while True:  # bounded: cancelled at the end of the run
        await asyncio.sleep(FULL_COLLECTION_SECONDS)
        gc.collect()


def make_pool(config: "OrchestratorConfig", teachers: Teachers) -> EnvPool:
    """Make the worker pool of all training and evaluation environments.

    Evaluations always sample from the policy, even where a teacher samples the training data.
    """
    algorithms = {env.name: config.algorithm_of(env.name) for env in config.environments}
    evals = [env.model_copy(update={"name": EVAL_WORKER.format(env.name)}) for env in eval_environments(config)]
    return env_pool(
        config,
        [*config.environments, *evals],
        samplers={name: Sampler(one.root, one.model, one.api_key) for name, one in teachers.samplers.items()},
        demonstrations={name: shown for name, shown in algorithms.items() if isinstance(shown, OPSD)},
    )
