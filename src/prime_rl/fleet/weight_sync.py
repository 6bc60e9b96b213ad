"""Keep the replicas on the newest version of the weights: publish → announce → stage → pause → load → resume → verify.

The trainer publishes by committing incarnations and versions to the run directory; `PublishedVersions` reads them.
`WeightSync.follow` has every ready replica load the newest one (`POST /update_weights` stages, pauses, loads, resumes;
the client verifies). Episodes that were sampled by superseded weights, or by a replica that failed its verification,
are invalidated in the scheduler and sampled again.

A replica that does not load what the others load, does not answer, or fails its verification is quarantined and joins
again (`_join`): it answers, what it sampled is verified or made again, it loads what the others serve, and is verified.
One that was asked to leave (`POST /leave`) drains, is verified once more and is quarantined; it joins again when it is
restarted at the same address.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.fleet.client import ServerError, VersionNotSent
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.replicas import FAILED_CHECK, LEAVING, RESTARTED, Replica, ReplicaPool, ReplicaState, cancel_tasks
from prime_rl.monitor import Status
from prime_rl.processes import backoff_seconds
from prime_rl.transport.commit import CommitError
from prime_rl.transport.incarnations import PublishedVersions
from prime_rl.transport.protocol import BASE, continues_from, first_lease, lease_after_load, lease_before_load
from prime_rl.wait import LEAST_POLL_SECONDS, wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.orchestrator.checkpoint import ResumePoint
    from prime_rl.orchestrator.orchestrator import Orchestrator
    from prime_rl.orchestrator.scheduler import Scheduler, Start

POLL_SECONDS = LEAST_POLL_SECONDS  # an idle engine waits for what is found
PROBE_SECONDS = 5.0  # between two probes of all replicas
RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
MAX_RETRY_SECONDS = 15.0  # between two attempts to bring a replica back, while others are ready
_BACKOFF_SECONDS = 1.0  # of a server whose episodes keep failing; doubled with each further failure
_MAX_BACKOFF_SECONDS = 60.0
_ATTEMPTS = 5  # to load a version, of each replica
_MISSED_PROBES = 3  # unanswered in a row, until the others take over


class WeightSync:
    """What the replicas of a run serve. `start` comes first, then `begin`, then `follow` and `watch`."""

    scheduler: "Scheduler[Any]"  # its version is what the replicas serve

    def __init__(self, config: "OrchestratorConfig", pool: ReplicaPool, status: Status, loop: "Orchestrator") -> None:
        self.config, self.pool, self.status, self._loop = config, pool, status, loop
        self.published = PublishedVersions(config.output_dir)
        # The first is held while the version that is served must not change, the second while finished episodes must
        # not be invalidated.
        self.version_lock = asyncio.Lock()  # bounded: its holders only wait with deadlines
        self.batch_lock = asyncio.Lock()  # bounded: its holders only wait with deadlines
        self.seconds = 0.0  # spent on updates since `take_times`
        self.phases: dict[str, float] = {}  # of these, by phase, the slowest server's (`service.WeightUpdate`)
        self._settled = True  # not while the ready replicas load another version
        self._loads: dict[Replica, asyncio.Task[None]] = {}  # of that version
        self._joins: dict[Replica, asyncio.Task[None]] = {}
        self._unsent_since: float | None = None  # since when the trainer's publisher has not sent what was asked for

    @property
    def newer_version_waiting(self) -> bool:
        """Whether no replica is ready and a newer version exists, which replicas that return will load."""
        return not self.pool.ready and self._newer is not None and not self.scheduler.must_go_back

    @property
    def _newer(self) -> int | None:
        """The version that the run should go on with, if it serves an older one."""
        newest, served = self.published.newest, self.scheduler.version
        return newest if newest is not None and newest > served else None

    def begin(self, scheduler: "Scheduler[Any]") -> None:
        """`scheduler` decides from now on; replicas that do not answer yet get work once they do."""
        self.scheduler = scheduler
        for replica in self.pool.replicas:
            if not replica.ready:
                self._join_soon(replica)

    async def close(self) -> None:
        """Have no further replica join."""
        await cancel_tasks(self._joins.values())

    def take_times(self) -> tuple[float, dict[str, float]]:
        """Return what updates took since this was asked last: altogether, and by phase."""
        seconds, phases = self.seconds, self.phases
        self.seconds, self.phases = 0.0, {}
        return seconds, phases

    # -- the first version ---------------------------------------------------------------------------------------------

    async def start(self, progress: "ResumePoint") -> int:
        """Have the servers that are up load the version that the run goes on from, and verify it. One is enough.

        Returns:
            The version: the newest.

        Raises:
            UserError: a server rejected it, or all of them failed to load it `_ATTEMPTS` times.
        """
        self.published.write_lease(first_lease(self.published.lease))
        if self.config.trainer:
            await self._await_published(progress)
        while True:  # bounded: by the attempts of each replica
            up = await self.pool.wait_ready(self.status.waiting)
            version = self.published.newest if self.config.trainer else BASE
            assert version is not None
            incarnation = self.published.incarnation.number
            self._lease_before_load(incarnation, version)
            # Also where it is served already, to find a server that cannot read the directory now.
            failures = await self._load(up, version)
            for error in failures.values():
                if not isinstance(error, ServerError | CommitError):
                    raise error
            for replica, error in failures.items():
                logger.warning("{} did not load version {}: {}", replica.name, version, error)
            if len(failures) < len(up):
                for replica in up:
                    if replica not in failures:
                        self.pool.move(replica, ReplicaState.READY)
                self._lease_after_load(incarnation, version)
                return version
            self._count_failures(failures, version, up)
            await asyncio.sleep(RETRY_SECONDS * max(1, *(replica.failed_loads for replica in up)))
            self.published.refresh()

    async def _await_published(self, progress: "ResumePoint") -> None:
        """Wait until the trainer has opened the incarnation that the run goes on with.

        A resumed run must not follow the incarnation that it supersedes.
        """

        def begun() -> bool:
            self.published.refresh()
            newest = self.published.newest
            if newest is None or progress.recovered:
                return newest is not None
            resumed = not progress.resumed or continues_from(progress.version, self.published.incarnations)
            return newest >= progress.version and resumed

        subject = f"weights/step_{progress.version}"
        if progress.resumed:
            subject += f", of an incarnation that goes on from step {progress.version},"
        await self._until(begun, "version of the weights" if progress.recovered else subject)

    async def _until(self, condition: Callable[[], bool], subject: str) -> None:
        """Wait for the trainer, at most `weights_timeout`."""
        seconds = self.config.weights_timeout

        def met() -> bool:
            if not (done := condition()):
                self.status.waiting(subject, "trainer", seconds)
            return done

        await wait_async(met, subject=subject, owner="trainer", seconds=seconds, poll=POLL_SECONDS)

    # -- every other version -------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Serve every newer version as soon as the trainer commits it, until it is cancelled."""
        while True:  # bounded: the run cancels it at its end
            async with self.batch_lock:
                self.notice_incarnation()
            if self.scheduler.must_go_back or self._newer is not None:
                await self._serve()
            await asyncio.sleep(POLL_SECONDS)

    def notice_incarnation(self) -> None:
        """Refresh, and if the trainer has opened a new incarnation take back what that superseded.

        Call it with `batch_lock` held.
        """
        self.published.refresh()
        incarnation = self.published.incarnation
        if incarnation.number <= self.scheduler.incarnation:
            return
        served = self.scheduler.version
        self._drop(self.scheduler.begin_incarnation(incarnation.number, self.published.incarnations))
        back = f": back from version {served}" if self.scheduler.must_go_back else ""
        logger.warning("the trainer began incarnation {} at step {}{}", incarnation.number, incarnation.start, back)
        if not self.scheduler.must_go_back:
            self._lease_after_load(incarnation.number, served)

    async def _serve(self) -> None:
        """Have every ready replica load the newest version: a newer one, or where what is served was superseded the
        newest of its new incarnation. Where none is ready, those that join load it; nothing starts until then."""
        scheduler, published = self.scheduler, self.published

        def committed() -> bool:
            published.refresh()
            return published.newest is not None and published.newest >= published.incarnation.start

        async with self.version_lock:
            incarnation, back = published.incarnation, scheduler.must_go_back
            if back:
                await self._until(committed, f"weights/step_{incarnation.start}")
            elif self._newer is None:
                return  # found while this waited for the lock
            version, began = published.newest, time.monotonic()
            assert version is not None
            if not back:
                scheduler.announce(version)
            self._lease_before_load(incarnation.number, version)
            if not self.pool.ready:
                logger.warning("no server is ready: those that come back serve version {}", version)
            elif not await self._load_ready(version) and self.pool.ready:
                return  # they go on with what they have
            if scheduler.must_go_back is not back or published.incarnation != incarnation:
                return  # the trainer began again meanwhile
            if back:
                scheduler.go_back(version)
            else:
                self._take_time(version, time.monotonic() - began)
                self._drop(scheduler.serve(version))
            self._lease_after_load(incarnation.number, version)
            self.status.progress()
        self._loop.wake.set()
        await self._loop.on_version_served(version)

    def _take_time(self, version: int, seconds: float) -> None:
        reports = [replica.loaded.seconds for replica in self.pool.ready if replica.loaded is not None]
        if not reports:
            return
        self.seconds += seconds
        for phase in {phase for report in reports for phase in report}:
            self.phases[phase] = self.phases.get(phase, 0.0) + max(report.get(phase, 0.0) for report in reports)
        logger.info("serving version {} after {:.2f} s{}", version, seconds, self.pool.where())

    def _lease_before_load(self, incarnation: int, version: int) -> None:
        assert self.published.lease is not None  # `start` has taken one
        self.published.write_lease(lease_before_load(self.published.lease, incarnation, version))

    def _lease_after_load(self, incarnation: int, served: int) -> None:
        reading = [replica.loading for replica in self.pool.replicas if replica.loading is not None]
        self.published.write_lease(lease_after_load(incarnation, served, reading))

    # -- one load, and its failures ------------------------------------------------------------------------------------

    async def _load_ready(self, version: int) -> bool:
        """Load `version` on every ready replica, and quarantine those that do not. Returns whether one serves it.

        Those that were not sent the version serve on where no other loaded it either.
        """
        self._settled = False
        try:
            asked = self.pool.ready
            failures = await self._load(asked, version)
            loaded = len(failures) < len(asked)
            for replica, error in failures.items():
                if loaded or not isinstance(error, VersionNotSent):
                    logger.warning("{} did not load version {}: {}", replica.name, version, error)
                    self.quarantine(replica)
            self._count_failures(failures, version, self.pool.replicas)
            if not loaded:
                await asyncio.sleep(RETRY_SECONDS)
            return loaded
        finally:
            self._settled = True

    async def _load(self, replicas: Sequence[Replica], version: int) -> dict[Replica, UserError]:
        """Load `version` on all of them at once. Returns those that did not, and why."""
        faults.point(f"update:v{version}")
        self._loads = {replica: asyncio.create_task(self._load_one(replica, version)) for replica in replicas}
        loads = dict(self._loads)
        try:
            await asyncio.wait(loads.values())  # bounded: by the requests' deadlines; `quarantine` cancels a load
        finally:
            self._loads = {}
            for load in loads.values():
                load.cancel()
        failures: dict[Replica, UserError] = {}
        for replica, load in loads.items():
            error = ServerError("lost meanwhile") if load.cancelled() else load.exception()
            if isinstance(error, UserError):
                failures[replica] = error
            elif error is not None:
                raise error
        faults.point(f"updated:v{version}")
        return failures

    async def _load_one(self, replica: Replica, version: int) -> None:
        """Have a replica load `version` and verify it. Raises UserError if it did not, or serves another model name."""
        manifest = self.published.manifest(version) if self.config.trainer else None
        try:
            if replica.loaded is None:
                with suppress(ServerError):  # a load repairs a server without usable weights
                    (await replica.client.served()).check_name(replica.name, self.config.model.name)
            await replica.load(manifest)
        except LogprobCheckFailed:
            self.pool.move(replica, ReplicaState.QUARANTINED, FAILED_CHECK)  # at once
            raise
        self._unsent_since = None
        if replica.invalid:
            async with self.batch_lock:
                self.invalidate(replica, RESTARTED)

    def _count_failures(self, failures: Mapping[Replica, UserError], version: int, among: Sequence[Replica]) -> None:
        """Count failed loads, not those of a version not yet sent: replicas wait `weights_timeout` for it or a newer.
        Raises UserError: each of `among` has failed to load `_ATTEMPTS` times, or nothing was sent for too long."""
        for replica, error in failures.items():
            if isinstance(error, VersionNotSent):
                seconds = self.config.weights_timeout
                if self._unsent_since is None:
                    logger.warning("version {} was not sent, waiting for the trainer: {}", version, error)
                    self._unsent_since = time.monotonic()
                if time.monotonic() - self._unsent_since > seconds:
                    raise error
                self.status.waiting(f"weights/step_{version}, or a newer one,", "trainer", seconds)
                continue
            replica.failed_loads += 1
            if all(one.failed_loads >= _ATTEMPTS for one in among):
                raise error

    # -- verified samples ----------------------------------------------------------------------------------------------

    async def verify(self) -> None:
        """Ask the replicas what they serve: what had finished before counts then. Those that fail are quarantined."""
        counting, wrong = await self.pool.verify(self.scheduler.unverified())
        self.scheduler.verify(counting)
        self.pool.keep(self.scheduler.running_or_unverified())
        for replica in wrong:
            self.quarantine(replica, replica.mismatch)

    async def _accept_or_invalidate(self, replica: Replica) -> bool:
        """Verify a replica that is not ready: accept what it sampled, or have that sampled again.

        Returns whether it is verified.
        """
        finished = replica.unverified.intersection(self.scheduler.unverified())
        verified = not replica.invalid and await replica.verify()
        async with self.batch_lock:
            self.notice_incarnation()
            if verified and not replica.invalid:
                # A batch may wait for these, while the replica cannot load what the others serve.
                finished &= replica.unverified
                self.scheduler.verify(finished)
                self.pool.forget(finished)
            elif not replica.ready and replica.loaded is not None:
                self.invalidate(replica, RESTARTED if replica.invalid else replica.mismatch)
                verified = False
        self._loop.wake.set()
        return verified

    def invalidate(self, replica: Replica, detail: str) -> None:
        """Have made again what a replica sampled since it was last verified. Call it with `batch_lock` held."""
        episodes = replica.unverified | replica.invalid
        running = self.scheduler.invalidate(detail, episodes)
        if len(self.pool.replicas) == 1 and self._settled:
            self.scheduler.retract()
        self.pool.forget(episodes)
        self._drop(running)

    def _drop(self, running: "Sequence[Start]") -> None:
        episodes = [each.episode for each in running]
        self.pool.forget(episodes)
        self._loop.cancel(episodes)

    # -- quarantined replicas ------------------------------------------------------------------------------------------

    def quarantine(self, replica: Replica, reason: str = "") -> None:
        """Give it no work until it has joined again. A draining replica is released by its next probe."""
        if replica.draining:
            return
        self.pool.move(replica, ReplicaState.QUARANTINED, reason)
        if (load := self._loads.get(replica)) is not None:
            load.cancel()
        self._join_soon(replica)

    def episode_failed(self, replica: Replica) -> None:
        """Note that an episode failed on a replica for want of a server: others take over.

        A replica that goes on failing gets no work for longer and longer.
        """
        if not replica.draining:
            self.pool.failed(replica)
            self.quarantine(replica, "an episode failed there")

    def _join_soon(self, replica: Replica) -> None:
        present = self._joins.get(replica)
        if present is None or present.done():
            self._joins[replica] = self._loop.tasks.create_task(self._join(replica))

    async def _join(self, replica: Replica) -> None:
        """Bring a quarantined replica back; meanwhile other replicas take over its episodes.
        Raises UserError as `_count_failures`, and where no replica was ready for `client.ready_timeout`."""
        # None after the first failed episode, which may be of a restart.
        rest = backoff_seconds(max(replica.failures - 1, 0), _BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS)
        delay, rested = RETRY_SECONDS, time.monotonic() + (rest if self.pool.ready else min(rest, RETRY_SECONDS))
        while replica.state is ReplicaState.QUARANTINED:  # bounded: `_check_ready_timeout`; the run's end cancels it
            trouble = "it does not answer"
            answers = await replica.client.answers()
            if answers or self.pool.ready:
                verified = await self._accept_or_invalidate(replica)
            if answers and time.monotonic() < rested:
                trouble = f"it failed what it was given {replica.failures} times in a row"
            elif answers and (served := await replica.served()) is not None and served.leaving:
                trouble = LEAVING
            elif answers:
                version = self.scheduler.version
                try:
                    if await self._catch_up(replica, verified):
                        logger.info("{} serves version {}{}", replica.name, version, self.pool.where())
                        return
                    trouble = ""
                except UserError as error:
                    trouble = str(error)
                    if not (isinstance(error, VersionNotSent) and self.pool.ready):  # others serve: it may wait
                        self._count_failures({replica: error}, version, self.pool.replicas)
            if trouble and trouble != replica.quarantine_reason:
                replica.quarantine_reason = trouble
                where = self.pool.where()
                logger.warning("{} gets no work: {}{}", replica.name, trouble, where and f" (serving{where})")
            self._check_ready_timeout()
            await asyncio.sleep(delay if trouble else POLL_SECONDS)
            slow_retry = self.pool.ready or replica.failed_loads
            delay = min(2 * delay, MAX_RETRY_SECONDS if slow_retry else RETRY_SECONDS)

    async def _catch_up(self, replica: Replica, verified: bool) -> bool:
        """Have a healthy replica load what the others serve, and let it in. False: what they serve is changing.
        Raises UserError where it did not load it."""
        scheduler = self.scheduler
        version, incarnation = scheduler.version, scheduler.incarnation
        if scheduler.must_go_back or not self._settled:
            return False
        # The same version of an incarnation that was superseded is other weights.
        manifest = self.published.manifest(version) if self.config.trainer else None
        if not verified or (replica.loaded is not None and manifest is not None and not replica.loaded.holds(manifest)):
            await self._load_one(replica, version)
        changed = scheduler.must_go_back or (version, incarnation) != (scheduler.version, scheduler.incarnation)
        if changed or not self._settled:
            return False
        self.pool.move(replica, ReplicaState.READY)
        replica.quarantine_reason = ""
        self._loop.wake.set()
        return True

    def _check_ready_timeout(self) -> None:
        """While none is ready: one must come back in time. Raises UserError: none did."""
        if self.pool.empty_since is None or self.scheduler.must_go_back:
            return  # the second is waited for with a deadline of its own
        option, seconds = "client.base_url, client.ready_timeout", self.config.client.ready_timeout
        if self._unsent_since is not None:  # they are there, and wait for the trainer
            option, seconds = "weights_timeout", max(seconds, self.config.weights_timeout)
        self.status.waiting("a healthy server", "inference", seconds)
        if time.monotonic() - self.pool.empty_since > seconds:
            listed = "; ".join(
                f"{one.name}: {one.quarantine_reason}" for one in self.pool.replicas if one.quarantine_reason
            )
            raise UserError(f"no inference server for {seconds:.0f} s ({option}): {listed}")

    # -- probes, and replicas that leave -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe all replicas every few seconds, until cancelled.

        Those that do not answer are quarantined, those that are to leave are drained.
        """
        while True:  # bounded: the run cancels it at its end
            await asyncio.sleep(PROBE_SECONDS)
            await asyncio.gather(
                *map(self._probe, self.pool.ready),
                *map(self._drain, [replica for replica in self.pool.replicas if replica.draining]),
            )
            self._check_ready_timeout()

    async def _probe(self, replica: Replica) -> None:
        if not await replica.client.answers():
            replica.missed_probes += 1
            if replica.missed_probes >= _MISSED_PROBES and replica.ready:
                self.quarantine(replica, "it does not answer")
            return
        replica.missed_probes = 0
        served = await replica.served()
        # Between two updates: what is in flight there stays of the version that it serves.
        if served is not None and served.leaving and replica.ready and self._settled:
            self.pool.move(replica, ReplicaState.DRAINING, LEAVING)
            count = replica.in_flight
            logger.info("{} is to leave: it gets nothing new, {} episodes in flight there go on", replica.name, count)

    async def _drain(self, replica: Replica) -> None:
        """Quarantine a draining replica until it restarts, once its samples are verified or else made again."""
        verified = await self._accept_or_invalidate(replica)
        if verified and (replica.in_flight or replica.unverified & self.scheduler.running_or_unverified()):
            return
        self.pool.move(replica, ReplicaState.QUARANTINED, LEAVING)
        self.pool.forget(replica.unverified | replica.invalid)
        replica.quarantine_reason = LEAVING
        self._join_soon(replica)
        self._loop.wake.set()
        rerun = "" if verified else ", and what it had is run again"
        logger.info("{} has left and can be stopped ({} servers remain){}", replica.name, len(self.pool.ready), rerun)
