"""Keep the replicas on the newest version of the weights: publish → announce → stage → pause → load → resume → verify.

The trainer publishes by committing incarnations and versions to the run directory; `published_versions` reads them.
`WeightSync.follow` has every ready replica load the newest one (`POST /update_weights` stages, pauses, loads and resumes;
the client verifies). Episodes that were sampled by superseded weights, or by a replica that failed its verification,
are invalidated in the scheduler and sampled again.

A replica that does not load what the others load, does not answer, or fails its verification is quarantined: it is probed
until it answers, loads what the others serve, is verified, and gets work again. One that was asked to leave
(`POST /leave`) drains, is verified once more and leaves; it joins again when it is restarted at the same address.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.fleet.client import NoWeightsServed, ServerError, VersionNotSent
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.published_versions import PublishedVersions
from prime_rl.fleet.replicas import (
    FAILED_CHECK,
    RESTARTED,
    Replica,
    ReplicaPool,
    ReplicaState,
    backoff_seconds,
    cancel_tasks,
)
from prime_rl.monitor import Status
from prime_rl.transport.commit import CommitError
from prime_rl.transport.incarnations import read_files_request, request_files
from prime_rl.transport.protocol import BASE, continues_from, first_lease, lease_after_load, lease_before_load
from prime_rl.transport.weights import UNREACHABLE, WeightsManifest
from prime_rl.wait import wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.orchestrator.checkpoint import ResumePoint
    from prime_rl.orchestrator.orchestrator import Orchestrator
    from prime_rl.orchestrator.scheduler import Scheduler, Start

POLL_SECONDS = 0.1
PROBE_SECONDS = 5.0  # between two probes of all replicas, and of one that drains
RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
MAX_RETRY_SECONDS = 15.0  # between two attempts to bring a replica back, while others are ready
_ATTEMPTS = 5  # to load a version, by all replicas
_CHECK_SECONDS = 0.5  # between two checks of which replicas were quarantined during a load
_SILENT_PROBES = 3  # unanswered in a row, until the others take over
_DRAIN_POLL_SECONDS = 0.25

LoadError = UserError | CommitError


class WeightSync:
    """What the replicas of a run serve. `start` comes first, then `begin`, then `follow` and `watch`.

    Attributes:
        published: What the trainer has published.
        scheduler: Of the run; its version is what the replicas serve.
        version_lock: Held while the version that is served must not change.
        batch_lock: Held while finished episodes must not be invalidated.
        seconds: Spent on updates since `take_times`.
        phases: Of these, what each phase took the slowest server (`inference.service.WeightUpdate`).
    """

    scheduler: "Scheduler[Any]"

    def __init__(self, config: "OrchestratorConfig", pool: ReplicaPool, status: Status, loop: "Orchestrator") -> None:
        self.config, self.pool, self.status, self._loop = config, pool, status, loop
        self.published = PublishedVersions(config.output_dir)
        self.version_lock = asyncio.Lock()  # bounded: its holders only wait with deadlines
        self.batch_lock = asyncio.Lock()  # bounded: its holders only wait with deadlines
        self.seconds = 0.0
        self.phases: dict[str, float] = {}
        self._settled = asyncio.Event()  # cleared while the ready replicas are given another version
        self._settled.set()
        self._failures = 0  # to load, in a row
        self._unsent_since: float | None = None  # since when the trainer's publisher has not sent what was asked for
        # Quarantined and leaving replicas.
        self._recoveries: dict[Replica, asyncio.Task[None]] = {}
        self._recovery_loads: dict[Replica, int] = {}  # versions that quarantined replicas are loading
        self._drains: dict[Replica, asyncio.Task[None]] = {}
        self._departed: dict[Replica, str] = {}  # replicas that have left, and the boot of each that did

    @property
    def no_replica_ready(self) -> bool:
        """Whether no replica is ready; nothing may start."""
        return not self.pool.ready

    @property
    def newer_version_waiting(self) -> bool:
        """Whether no replica is ready and the trainer has published a newer version: replicas that come back load that."""
        return self.no_replica_ready and self._newer is not None and not self.scheduler.must_go_back

    @property
    def _newer(self) -> int | None:
        """The version that the run should go on with, if it serves an older one."""
        newest, served = self.published.newest, self.scheduler.version
        return newest if newest is not None and newest > served and not self._loop.must_keep_version(served) else None

    def begin(self, scheduler: "Scheduler[Any]") -> None:
        """`scheduler` decides from now on; replicas that do not answer yet get work once they do."""
        self.scheduler = scheduler
        for replica in self.pool.quarantined:
            self._bring_back_soon(replica)

    async def close(self) -> None:
        """End all recoveries and drains."""
        await cancel_tasks([*self._recoveries.values(), *self._drains.values()])

    def take_times(self) -> tuple[float, dict[str, float]]:
        """Return what updates took since this was asked last: altogether, and by phase."""
        seconds, phases = self.seconds, self.phases
        self.seconds, self.phases = 0.0, {}
        return seconds, phases

    # -- the first version ---------------------------------------------------------------------------------------------

    async def start(self, progress: "ResumePoint", owes: Callable[[int], bool]) -> int:
        """Have the servers that are up load the version that the run goes on from, and verify it. One of them is enough.

        Args:
            owes: Whether an evaluation of this version, the one served last, is still pending.

        Returns:
            The version: the newest, or the one served last if an evaluation of it is pending.
        """
        self.published.write_lease(first_lease(self.published.lease))
        if self.config.trainer:
            await self._await_published(progress)
        owed: Callable[[int], bool] | None = owes
        while True:  # `_may_retry` raises after a few failures
            ready = await self.pool.wait_ready(self.status.waiting)
            version, incarnation = self._first_version(owed), self.published.incarnation.number
            self._lease_before_load(incarnation, version)
            try:
                # Also where it is served already, to find a server that cannot read the directory now.
                failures = await self._load(ready, version)
                for error in failures.values():
                    if not isinstance(error, ServerError | CommitError):
                        raise error
            except (CommitError, UserError) as error:
                await self._may_retry(error, version)
                continue
            if len(failures) == len(ready):
                if any(isinstance(error, VersionNotSent) for error in failures.values()):
                    owed = None  # it is not to be had any more: the newest is
                await self._may_retry(_worst(failures.values()), version)
                continue
            for replica in ready:
                if replica in failures:
                    logger.warning("the run begins without {}: {}", replica.name, failures[replica])
                else:
                    self.pool.move(replica, ReplicaState.READY)
            self.published.write_lease(lease_after_load(incarnation, version))
            return version

    async def _await_published(self, progress: "ResumePoint") -> None:
        """Until the trainer has begun the incarnation that the run goes on with. A resumed run must not follow the incarnation that it gives up."""

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

    def _first_version(self, owes: Callable[[int], bool] | None) -> int:
        if not self.config.trainer:
            return BASE
        newest, lease = self.published.newest, self.published.lease
        assert newest is not None
        if lease is not None and owes is not None and self.published.valid(lease.version) and owes(lease.version):
            return lease.version
        return newest

    async def _check_base(self, replica: Replica) -> None:
        """Before the first load: a server that holds another base model than the trainer is not ours to overwrite.

        Raises:
            UserError: the bases differ, or their names do; or it is no server of ours.
        """
        try:
            served = await replica.client.served()
        except NoWeightsServed:
            return  # there is nothing to overwrite
        if self.config.trainer and served.version == BASE:
            base = self.published.manifest(BASE).hash
            if served.hash != base:
                raise UserError(
                    f"the server at {replica.name} serves another base model ({served.hash[:12]}) than the trainer trains "
                    f"({base[:12]}): check model.name of both"
                )
        served.check_name(replica.name, self.config.model.name)

    async def _until(self, condition: Callable[[], bool], subject: str) -> None:
        """Wait for the trainer, at most `weights_timeout`."""
        seconds = self.config.weights_timeout
        await wait_async(
            condition, subject=subject, owner="trainer", seconds=seconds, poll=POLL_SECONDS,
            on_wait=lambda _: self.status.waiting(subject, "trainer", seconds),
        )  # fmt: skip

    # -- every newer version -------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Serve every newer version as soon as the trainer commits it, until it is cancelled."""
        while True:  # bounded: the run cancels it at its end
            async with self.batch_lock:
                self.notice_incarnation()
            if self.scheduler.must_go_back:
                if not self.no_replica_ready:
                    await self._go_back()
            elif (newest := self._newer) is not None:
                await self._serve(newest)
            await asyncio.sleep(POLL_SECONDS)

    def notice_incarnation(self) -> None:
        """Refresh, and if the trainer has begun a new incarnation take back what it gave up. Call it with `batch_lock` held."""
        self.published.refresh()
        incarnation = self.published.incarnation
        if incarnation.number <= self.scheduler.incarnation:
            return
        served = self.scheduler.version
        self._drop(self.scheduler.begin_incarnation(incarnation.number, self.published.incarnations))
        back = f": back from version {served}" if self.scheduler.must_go_back else ""
        logger.warning("the trainer began incarnation {} at step {}{}", incarnation.number, incarnation.start, back)
        if not self.scheduler.must_go_back:
            self._write_lease(incarnation.number, served)
        self._loop.ledger.rewound(incarnation.start)

    async def _serve(self, version: int) -> None:
        """Have every ready replica load `version`. Where none is ready, those that come back load it; nothing starts until then."""
        async with self.version_lock:
            if self.scheduler.must_go_back or version <= self.scheduler.version:
                return  # found while this waited for the lock
            began = time.monotonic()
            self.scheduler.announce(version)
            self._lease_before_load(self.scheduler.incarnation, version)
            if self.no_replica_ready:
                logger.warning("no server is ready: those that come back serve version {}", version)
            elif not await self._load_all(version) or self.scheduler.must_go_back:
                return
            else:
                self._take_time(version, time.monotonic() - began)
            self._served(version)
        self._loop.wake.set()
        await self._loop.on_version_served(version)

    def _take_time(self, version: int, seconds: float) -> None:
        self.seconds += seconds
        reports = [replica.loaded.seconds for replica in self.pool.ready if replica.loaded is not None]
        for phase in {phase for report in reports for phase in report}:
            self.phases[phase] = self.phases.get(phase, 0.0) + max(report.get(phase, 0.0) for report in reports)
        logger.info("serving version {} after {:.2f} s{}", version, seconds, self.pool.where())

    async def _go_back(self) -> None:
        """The trainer went on from an earlier step, and gave up what is served: load the newest version of its new incarnation."""
        async with self.version_lock:
            incarnation = self.published.incarnation

            def committed() -> bool:
                self.published.refresh()
                return self.published.newest is not None and self.published.newest >= self.published.incarnation.start

            await self._until(committed, f"weights/step_{incarnation.start}")
            version = self.published.newest
            assert version is not None
            if self.published.incarnation != incarnation:
                return  # it began again meanwhile
            self._lease_before_load(incarnation.number, version)
            if await self._load_all(version) and self.scheduler.incarnation == incarnation.number:
                self.scheduler.go_back(version)
                self._write_lease(incarnation.number, version)
        self._loop.wake.set()
        if not self.scheduler.must_go_back:
            await self._loop.on_version_served(self.scheduler.version)  # it may be one that was made again meanwhile

    def _served(self, version: int) -> None:
        stale = self.scheduler.serve(version)
        self._write_lease(self.scheduler.incarnation, version)
        self.status.progress()
        self._drop(stale)

    def _lease_before_load(self, incarnation: int, version: int) -> None:
        assert self.published.lease is not None  # `start` has taken one
        self.published.write_lease(lease_before_load(self.published.lease, incarnation, version))

    def _write_lease(self, incarnation: int, version: int) -> None:
        """`version` is served: nothing older is read, but by replicas that come back."""
        self.published.write_lease(lease_after_load(incarnation, version, self._recovery_loads.values()))

    # -- one load, and its failures ------------------------------------------------------------------------------------

    async def _load_all(self, version: int) -> bool:
        """Load `version` on every ready replica; tolerate its removal or a crashing server.

        Return True if all replicas still ready serve it.
        """
        self._settled.clear()
        try:
            asked = self.pool.ready
            try:
                failures = await self._load(asked, version)
            except CommitError as removed:
                failures = dict.fromkeys(asked, removed)
            return await self._settle(asked, failures, version)
        finally:
            self._settled.set()

    async def _load(self, replicas: Sequence[Replica], version: int) -> dict[Replica, LoadError]:
        """Load `version` on all of them at once. Returns those that did not, and why.

        Raises:
            CommitError: the version is not committed (any more).
        """
        faults.point(f"update:v{version}")
        manifest = self.published.manifest(version) if self.config.trainer else None
        loads = {replica: asyncio.create_task(self._load_one(replica, manifest)) for replica in replicas}
        pending, ready = set(loads.values()), [replica for replica in loads if replica.ready]
        try:
            while pending:  # bounded: by the requests' deadlines; not of those that stop being ready while others are
                _, pending = await asyncio.wait(pending, timeout=_CHECK_SECONDS)
                if self.pool.ready:
                    pending -= {loads[replica] for replica in ready if not replica.ready}
        finally:
            for load in loads.values():
                load.cancel()
        failures: dict[Replica, LoadError] = {}
        for replica, load in loads.items():
            error = load.exception() if load.done() and not load.cancelled() else ServerError("lost meanwhile")
            if isinstance(error, UserError | CommitError):
                failures[replica] = error
            elif error is not None:
                raise error
            elif replica.invalid:
                async with self.batch_lock:
                    self.invalidate(replica, RESTARTED)
        if len(failures) < len(replicas):
            self._failures, self._unsent_since = 0, None
        faults.point(f"updated:v{version}")
        return failures

    async def _load_one(self, replica: Replica, manifest: WeightsManifest | None) -> None:
        try:
            if replica.loaded is None:
                await self._check_base(replica)
            await replica.load(manifest)
        except LogprobCheckFailed:
            self.pool.move(replica, ReplicaState.QUARANTINED, FAILED_CHECK)  # at once
            raise

    async def _settle(self, asked: Sequence[Replica], failures: Mapping[Replica, LoadError], version: int) -> bool:
        """Deal with the replicas that did not load `version`: the one place for failures of an update. Returns whether it is served.

        Raises:
            LoadError: the run cannot go on.
        """
        if len(failures) < len(asked):
            for replica, error in failures.items():
                logger.warning(
                    "{} did not load version {}, the run goes on without it: {}", replica.name, version, error
                )
                self.quarantine(replica)
            return True
        for replica in failures:
            if not await replica.verify():
                self.quarantine(replica, replica.mismatch)
        worst = _worst(failures.values())
        # A replica that comes back while the run must go back is let in without a load, so its failures are counted here.
        if self.pool.ready or self.scheduler.must_go_back or not isinstance(worst, ServerError | CommitError):
            await self._may_retry(worst, version)
        else:
            logger.warning("version {} is not served, as no server survived the update: {}", version, worst)
        return False

    async def _may_retry(self, error: LoadError, version: int) -> None:
        """After a failure to load `version`: return after a pause if another attempt may succeed, else raise `error`."""
        if isinstance(error, VersionNotSent):
            await self._await_publisher(error, version)
            return
        self._failures += 1
        self.published.refresh()
        removed = not self.published.valid(version)  # while it was read: there is another one
        if self._failures >= _ATTEMPTS or not (removed or isinstance(error, ServerError)):
            raise error
        logger.warning("version {} was not loaded, trying again: {}", version, error)
        await asyncio.sleep(RETRY_SECONDS * self._failures)

    async def _await_publisher(self, error: VersionNotSent, version: int) -> None:
        """Replicas go on as they are while the trainer owes them this version, a newer one or its next incarnation: for at most `weights_timeout`."""
        self.published.refresh()
        seconds = self.config.weights_timeout
        if time.monotonic() - self._note_unsent(version, error) > seconds:
            raise error
        self.status.waiting(f"weights/step_{version}, or a newer one,", "trainer", seconds)
        await asyncio.sleep(RETRY_SECONDS)

    def _note_unsent(self, version: int, error: VersionNotSent) -> float:
        """Returns since when. A trainer that cannot reach a server is asked once an incarnation, under `weights.transport = "auto"`, to go on with files."""
        incarnation = self.published.incarnation.number
        if UNREACHABLE in str(error):
            with suppress(CommitError):  # removed meanwhile
                publisher = self.published.manifest(version).publisher
                asked = read_files_request(self.config.output_dir, incarnation) is not None
                if publisher is not None and publisher.fallback and not asked:
                    request_files(self.config.output_dir, incarnation, str(error))
        if self._unsent_since is None:
            logger.warning("version {} was not sent, waiting for the trainer: {}", version, error)
            self._unsent_since = time.monotonic()
        return self._unsent_since

    # -- verified samples ----------------------------------------------------------------------------------------------

    async def verify(self) -> None:
        """Ask the replicas what they serve: what had finished before counts then. Those that fail are quarantined."""
        counting, wrong = await self.pool.verify(self.scheduler.unverified())
        self.scheduler.verify(counting)
        self.pool.keep(self.scheduler.running_or_unverified())
        for replica in wrong:
            self.quarantine(replica, replica.mismatch)

    def invalidate(self, replica: Replica, detail: str) -> None:
        """Have made again what a replica sampled since it was last verified. Call it with `batch_lock` held."""
        episodes = replica.unverified | replica.invalid
        running = self.scheduler.invalidate(detail, episodes)
        if len(self.pool.replicas) == 1 and self._settled.is_set():
            self.scheduler.retract()
        self.pool.forget(episodes)
        self._drop(running)

    def _drop(self, running: "Sequence[Start]") -> None:
        episodes = [each.episode for each in running]
        self.pool.forget(episodes)
        self._loop.cancel(episodes)

    # -- quarantined replicas ------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe all replicas every few seconds, until it is cancelled: quarantine those that do not answer, drain those that are to leave, and
        let those that left join once they are restarted."""
        while True:  # bounded: the run cancels it at its end
            await asyncio.sleep(PROBE_SECONDS)
            ready, departed = self.pool.ready, list(self._departed)
            await asyncio.gather(*map(self._probe, ready), *map(self._rejoin, departed))
            if self.no_replica_ready and all(task.done() for task in self._recoveries.values()):
                self._check_ready_timeout()

    async def _probe(self, replica: Replica) -> None:
        if not await replica.client.answers():
            replica.silent += 1
            if replica.silent >= _SILENT_PROBES and replica.ready:
                self.quarantine(replica, "it does not answer")
            return
        replica.silent = 0
        try:
            served = await replica.client.served()
        except UserError:
            return  # whatever is wrong is found when it is verified
        if served.leaving and replica not in self._drains and replica.ready:
            self._drains[replica] = self._watched(self._leave(replica, served.boot))

    def episode_failed(self, replica: Replica) -> None:
        """An episode failed there for want of a server: others take over, and one that goes on failing waits longer and longer for work."""
        if not replica.draining:  # its drain probes it
            self.pool.failed(replica)
            self.quarantine(replica, "an episode failed there")

    def quarantine(self, replica: Replica, reason: str = "") -> None:
        """Give it no work until it answers and is verified. One that drains does not come back."""
        if replica.state is ReplicaState.LEFT:
            return
        draining = replica.draining
        self.pool.move(replica, ReplicaState.QUARANTINED, reason)
        if not draining:
            self._bring_back_soon(replica)

    def _bring_back_soon(self, replica: Replica) -> None:
        present = self._recoveries.get(replica)
        if present is None or present.done():
            self._recoveries[replica] = self._watched(self._bring_back(replica))

    def _watched(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        task.add_done_callback(self._loop.note_failure)
        return task

    async def _bring_back(self, replica: Replica) -> None:
        """Bring a quarantined replica back: wait, reload, verify; meanwhile other replicas take over its episodes.

        Raises:
            UserError: no replica was ready for `client.ready_timeout` (`_check_ready_timeout`).
            LoadError: every replica has failed to load what the run serves `_ATTEMPTS` times.
        """
        delay, backoff = RETRY_SECONDS, backoff_seconds(replica.failures)
        while replica.state is not ReplicaState.LEFT:  # bounded: `_check_ready_timeout`, and the run's end cancels it
            if self.pool.ready:
                await self._accept_or_invalidate(replica)
            if backoff:
                backoff = backoff if self.pool.ready else min(backoff, RETRY_SECONDS)
                logger.warning(
                    "{} gets no work for {:.0f} s{}: it failed what it was given {} times in a row",
                    replica.name, backoff, self.pool.where(), replica.failures,
                )  # fmt: skip
                await asyncio.sleep(backoff)
                backoff = 0.0
            if self.newer_version_waiting:  # `follow` is about to go on with a newer version
                self._check_ready_timeout()
                await asyncio.sleep(POLL_SECONDS)
                continue
            trouble = "it does not answer"
            if await replica.client.answers():
                try:
                    if await self._catch_up(replica):
                        logger.info("{} serves version {}{}", replica.name, self.scheduler.version, self.pool.where())
                        return
                    trouble = ""
                except (UserError, CommitError) as error:
                    trouble = str(error)
                    replica.failed_loads += not isinstance(error, VersionNotSent)
                    if all(one.failed_loads >= _ATTEMPTS for one in self.pool.replicas):
                        raise
            if trouble and trouble != replica.trouble:
                replica.trouble = trouble
                where = self.pool.where()
                logger.warning("{} gets no work: {}{}", replica.name, trouble, where and f" (serving{where})")
            self._check_ready_timeout()
            await asyncio.sleep(delay if trouble else POLL_SECONDS)
            patient = self.pool.ready or replica.failed_loads
            delay = min(2 * delay, MAX_RETRY_SECONDS if patient else RETRY_SECONDS)

    async def _accept_or_invalidate(self, replica: Replica) -> bool:
        """Verify a quarantined replica: accept what it sampled, or have that sampled again. Returns whether it is verified."""
        finished = replica.unverified.intersection(self.scheduler.unverified())
        verified = replica.loaded is not None and not replica.invalid and await replica.verify()
        mismatch = replica.mismatch
        async with self.batch_lock:
            self.notice_incarnation()
            if verified and not replica.invalid:
                # A batch may wait for these, while the replica cannot load what the others serve.
                finished &= replica.unverified
                self.scheduler.verify(finished)
                self.pool.forget(finished)
            elif not replica.ready and replica.loaded is not None:
                verified = False
                self.invalidate(replica, RESTARTED if replica.invalid else mismatch)
        self._loop.wake.set()
        return verified

    async def _catch_up(self, replica: Replica) -> bool:
        """Have a healthy replica load what the others serve, and let it in. False: what they serve has changed meanwhile."""
        await self._settled.wait()  # bounded: by the requests' deadlines
        scheduler = self.scheduler
        if not scheduler.must_go_back:  # else `follow` loads what counts
            version, incarnation = scheduler.version, scheduler.incarnation
            verified = await self._accept_or_invalidate(replica)
            if not verified or (replica.loaded is not None and replica.loaded.version != version):
                await self._load_again(replica)
            changed = not self._settled.is_set() or (version, incarnation) != (scheduler.version, scheduler.incarnation)
            if changed or replica.invalid:
                return False
        self.pool.move(replica, ReplicaState.READY)
        replica.trouble = ""
        self._loop.wake.set()
        return True

    async def _load_again(self, replica: Replica) -> None:
        """Have a quarantined replica load what the others serve, which is held for it meanwhile.

        Raises:
            LoadError: it did not.
        """
        if self.scheduler.must_go_back:
            return  # `follow` loads what counts now
        version = self._recovery_loads[replica] = self.scheduler.version
        try:
            for error in (await self._load([replica], version)).values():
                raise error
        except VersionNotSent as error:
            self._note_unsent(version, error)
            raise
        finally:
            del self._recovery_loads[replica]
            if self._settled.is_set() and not self.scheduler.must_go_back:
                self._write_lease(self.scheduler.incarnation, self.scheduler.version)

    def _check_ready_timeout(self) -> None:
        """While none is ready: one must come back in time.

        Raises:
            UserError: none did.
        """
        if self.pool.empty_since is None:
            return
        # Replicas that are there, and wait for a trainer that is away, are waited for as long as the trainer.
        option, seconds = "client.base_url, client.ready_timeout", self.config.client.ready_timeout
        if self._unsent_since is not None:
            option, seconds = "weights_timeout", max(seconds, self.config.weights_timeout)
        self.status.waiting("a healthy server", "inference", seconds)
        if time.monotonic() - self.pool.empty_since > seconds:
            listed = "; ".join(f"{one.name}: {one.trouble}" for one in self.pool.replicas if one.trouble)
            raise UserError(f"no inference server for {seconds:.0f} s ({option}): {listed or 'all have left'}")

    # -- replicas that leave -------------------------------------------------------------------------------------------

    async def _leave(self, replica: Replica, boot: str) -> None:
        """Drain it between two updates, so that what is in flight there stays of the version that it serves; then let it leave."""
        try:
            await self._settled.wait()  # bounded: by the requests' deadlines
            if replica.ready:
                self.pool.move(replica, ReplicaState.DRAINING, "it is to leave")
                count = replica.in_flight
                logger.info(
                    "{} is to leave: it gets nothing new, {} episodes in flight there go on", replica.name, count
                )
            silent, probed = 0, time.monotonic()
            while replica.draining and replica.in_flight and silent < _SILENT_PROBES:  # bounded: by episodes' deadlines
                await asyncio.sleep(_DRAIN_POLL_SECONDS)
                if time.monotonic() - probed >= PROBE_SECONDS:
                    silent, probed = 0 if await replica.client.answers() else silent + 1, time.monotonic()
            await self._release(replica, boot, ask=silent < _SILENT_PROBES)
        finally:
            del self._drains[replica]

    async def _release(self, replica: Replica, boot: str, ask: bool) -> None:
        """Remove a replica. What it is verified for counts, if it is there to be asked; the others are run again."""
        if (recovery := self._recoveries.pop(replica, None)) is not None:
            await cancel_tasks([recovery])
        async with self.batch_lock:
            finished = replica.unverified.intersection(self.scheduler.unverified())
            if ask and await replica.verify():
                self.scheduler.verify(finished)
                self.pool.forget(finished)
                replica.released = True
            void = (replica.unverified | replica.invalid) & self.scheduler.running_or_unverified()
            if void:
                replica.released = False
                self.invalidate(replica, "the server left")
            self.pool.move(replica, ReplicaState.LEFT)
            self._departed[replica] = boot
        self._loop.wake.set()
        rerun = f"{len(void)} of its episodes are run again" if void else "no episodes need to be run again"
        ready = len(self.pool.ready)
        logger.info("{} has left and can be stopped; {} ({} servers remain)", replica.name, rerun, ready)

    async def _rejoin(self, departed: Replica) -> None:
        """Let a server that has left join again, once it was restarted."""
        try:
            served = await departed.client.served()
        except UserError:
            return
        if served.boot != self._departed[departed] and not served.leaving:
            del self._departed[departed]
            self._bring_back_soon(self.pool.add(departed.client))
            logger.info("{} joins", departed.name)


def _worst(errors: Iterable[LoadError]) -> LoadError:
    """The error that decides what the run does next: a rejection, which no retry mends; else a version that was not sent, which is waited for;
    else a server's error, a failed logprob check among them: that server is quarantined already. (`router._severity` is another question.)
    """
    return min(errors, key=lambda error: 1 if isinstance(error, VersionNotSent) else 2 if isinstance(error, ServerError | CommitError) else 0)  # fmt: skip
