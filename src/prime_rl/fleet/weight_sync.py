"""Keep the replicas on the newest version of the weights: publish → announce → stage → pause → load → resume → verify.

The trainer publishes by committing incarnations and versions to the run directory; `PublishedVersions` reads them, `WeightSync.follow` has every
serving replica load the newest one. Episodes that were sampled by weights that do not count, because the trainer gave them up or a replica failed
its verification, are invalidated in the scheduler and sampled again. A replica that does not load what the others load, or fails its
verification, is lost: `recovery.py` brings it back.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from loguru import logger

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.fleet.client import NoWeightsServed, ServerError, VersionNotSent
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.replicas import Replica, ReplicaPool
from prime_rl.monitor import Status
from prime_rl.transport.commit import CommitError
from prime_rl.transport.incarnations import (
    Seen,
    ask_for_files,
    call_for_files,
    drop_lease,
    read_incarnations,
    read_lease,
    read_versions,
    write_lease,
)  # fmt: skip
from prime_rl.transport.protocol import (
    BASE,
    Incarnation,
    Lease,
    current_incarnation,
    first_lease,
    goes_on_from,
    lease_to_hold,
    lease_to_load,
    newest_version,
    valid,
)  # fmt: skip
from prime_rl.transport.weights import UNREACHABLE, WeightsManifest, version_dir, weights_manifest
from prime_rl.wait import wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

POLL_SECONDS = 0.1
_ATTEMPTS = 5  # to load a version that may be removed
_RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
_LOOK_SECONDS = 0.5  # between two looks at who was lost while it loads

LoadError = UserError | CommitError


class PublishedVersions:
    """Incarnations and versions at the last look, and the orchestrator's lease."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.weights_dir = output_dir / "weights"
        self.incarnations: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.lease = read_lease(output_dir)
        self._seen: Seen = {}

    @property
    def incarnation(self) -> Incarnation:
        """The trainer's present incarnation, at the last look."""
        return current_incarnation(self.incarnations)

    @property
    def newest(self) -> int | None:
        """The newest version of the present history, at the last look."""
        return newest_version(self.versions, self.incarnations)

    def look(self) -> None:
        """Read what stands in the run directory. Versions first: a version is never seen without the incarnation that made it."""
        self.versions = read_versions(self.weights_dir, self._seen)
        self.incarnations = read_incarnations(self.output_dir)

    def valid(self, version: int) -> bool:
        """Whether `version` is committed and belongs to the present history, at the last look."""
        return version in self.versions and valid(version, self.versions[version], self.incarnations)

    def manifest(self, version: int) -> WeightsManifest:
        """What a version consists of.

        Raises:
            CommitError: it is not committed (any more).
        """
        return weights_manifest(version_dir(self.weights_dir, version))

    def hold(self, lease: Lease) -> None:
        """Tell the trainer what may still be read, so that it does not remove it."""
        if lease != self.lease:
            write_lease(self.output_dir, lease)
            self.lease = lease

    def release(self) -> None:
        """Nothing is read any more."""
        drop_lease(self.output_dir)
        self.lease = None


class RunningEpisode(Protocol):
    """An episode in flight."""

    @property
    def episode(self) -> str: ...


class EpisodeScheduler(Protocol):
    """The part of the orchestrator's scheduler that depends on what is served."""

    @property
    def version(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def must_go_back(self) -> bool: ...
    def announce(self, version: int) -> None: ...
    def serve(self, version: int) -> None: ...
    def retract(self) -> None: ...
    def begin_incarnation(self, incarnation: int, incarnations: Mapping[int, int]) -> Sequence[RunningEpisode]: ...
    def go_back(self, version: int) -> None: ...
    def unverified(self) -> list[str]: ...
    def verify(self, episodes: Iterable[str]) -> None: ...
    def running_or_unverified(self) -> set[str]: ...
    def invalidate(self, detail: str, episodes: set[str]) -> Sequence[RunningEpisode]: ...


class RunStart(Protocol):
    """Where the run goes on; see `orchestrator.checkpoint.ResumePoint`."""

    @property
    def version(self) -> int: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def recovered(self) -> bool: ...


class RunLoop(Protocol):
    """Callbacks of the orchestrator's loop."""

    def cancel(self, episodes: Sequence[str]) -> None:
        """Cancel these; the scheduler has given them up."""

    def drop_stale(self) -> list[str]:
        """Fail what is in flight and is beyond `max_off_policy_steps` now. Returns it."""

    def began_incarnation(self, incarnation: Incarnation) -> None:
        """The trainer began a new incarnation."""

    async def serves(self, version: int) -> None:
        """A newer version is served."""

    def keeps(self, version: int) -> bool:
        """Whether `version` must still be served when the run is resumed, so that no newer one may be served."""

    def replica_lost(self, replica: Replica) -> None:
        """It is gone, or serves something else: it is to get no work from now on."""

    def wake(self) -> None:
        """Something may start now."""

    def note_failure(self, task: "asyncio.Task[None]") -> None:
        """A task ended; its exception is the run's."""


def _worst(errors: Iterable[LoadError]) -> LoadError:
    """The one that decides: a refusal, which another attempt will not mend, before what the trainer owes, before trouble."""

    def weight(error: LoadError) -> int:
        return 1 if isinstance(error, VersionNotSent) else 2 if isinstance(error, ServerError | CommitError) else 0

    return min(errors, key=weight)


class WeightSync:
    """What the servers serve. `begin` comes before `follow`.

    Attributes:
        scheduler: What it decides is served, from `begin` on.
        lock: Held while what is served must not change.
        shipping: Held while finished episodes must not be given up.
        seconds: Spent on updates since somebody took them.
        parts: Of these, what each part took the slowest server (`inference.service.WeightUpdate`).
    """

    def __init__(self, config: "OrchestratorConfig", fleet: ReplicaPool, status: Status, loop: RunLoop) -> None:
        self.config = config
        self.fleet = fleet
        self.status = status
        self.history = PublishedVersions(config.output_dir)
        self.lock = asyncio.Lock()  # bounded: every wait of its holders is
        self.shipping = asyncio.Lock()  # bounded: every wait of its holders is
        self.seconds = 0.0
        self.parts: dict[str, float] = {}
        self.scheduler: EpisodeScheduler
        self._failures = 0  # to load, in a row
        self._failed_updates = 0  # in a row, after which no server was left; loads of earlier versions do not count
        self._unsent: tuple[int, float] | None = (
            None  # a version that was not sent, since when; none as new was loaded since
        )
        self._wanted: int | None = None  # the version that a server that comes back was not sent last
        self._loop = loop
        self._settled = asyncio.Event()
        self._settled.set()
        self._reading: dict[Replica, int] = {}  # versions that are loaded by servers that come back

    @property
    def moving(self) -> bool:
        """Whether the servers that serve are given another version at this moment."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait until no version is being loaded by the servers that serve."""
        await self._settled.wait()  # bounded: by the requests' deadlines

    @property
    def recovering(self) -> bool:
        """Whether no server serves; nothing may start."""
        return not self.fleet.serving

    @property
    def superseded(self) -> bool:
        """Whether no server serves, and none can be given what was served: the run is about to go on with a newer version."""
        return self.history.newest is not None and self._is_superseded(self.history.newest)

    # -- the first version ---------------------------------------------------------------------------------------------------

    async def start(self, progress: RunStart, owes: Callable[[int], bool]) -> int:
        """Have the servers that are up load the version that the run goes on from, and prove it. One of them is enough.

        Args:
            owes: Whether something has still to be done on the version that was served last.

        Returns:
            The version: the newest, or the one served last if it owes something.
        """
        self.history.hold(first_lease(self.history.lease))
        if self.config.trainer:
            await self._await_history(progress)
        owed: Callable[[int], bool] | None = owes
        while True:  # `_may_retry` raises after a few failures
            ready = await self.fleet.wait_ready(self.status.waiting, self.config.client.ready_timeout)
            version, incarnation = self._choose(owed), self.history.incarnation.number
            self._lease_to_load(incarnation, version)
            try:
                failures = await self._check_bases(ready, version)
                # Even a server that has this version already is given it: one that cannot reach the directory is found now.
                failures |= await self._load([replica for replica in ready if replica not in failures], version)
            except (CommitError, UserError) as error:
                await self._may_retry(error, version)
                continue
            if len(failures) == len(ready):
                failure = _worst(failures.values())
                if any(isinstance(error, VersionNotSent) for error in failures.values()):
                    owed = None  # it is not to be had any more: the newest is
                await self._may_retry(failure, version)
                continue
            for replica in ready:
                if replica not in failures:
                    self.fleet.admit(replica)
            for replica, failure in failures.items():
                logger.warning("the run begins without {}: {}", replica.name, failure)
            self.history.hold(lease_to_hold(incarnation, version))
            return version

    def begin(self, scheduler: EpisodeScheduler) -> None:
        """What `scheduler` decides is served from now on."""
        self.scheduler = scheduler

    async def _check_bases(self, replicas: Sequence[Replica], version: int) -> dict[Replica, LoadError]:
        """Returns the servers that failed to say what they serve.

        Raises:
            UserError: one is not ours: it holds another base model, refuses the key, or has no such route.
        """
        outcomes = await asyncio.gather(
            *(self.check_base(replica, version) for replica in replicas), return_exceptions=True
        )
        failures: dict[Replica, LoadError] = {}
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, ServerError):
                failures[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failures

    async def check_base(self, replica: Replica, version: int) -> None:
        """Before anything is loaded: a server that holds another base model than the trainer is not ours to overwrite.

        Raises:
            UserError: the bases differ, or their names do.
        """
        try:
            served = await replica.engine.served()
        except NoWeightsServed:
            return  # there is nothing to overwrite
        if self.config.trainer:
            base = self.history.manifest(version).hash
            if version == served.version == 0 and served.hash != base:
                raise UserError(
                    f"the server at {replica.name} serves another base model ({served.hash[:12]}) than the trainer trains "
                    f"({base[:12]}): check model.name of both"
                )
        served.check_name(replica.name, self.config.model.name)

    async def _await_history(self, progress: RunStart) -> None:
        """Until the trainer has begun the incarnation that the run goes on with. A resumed run must not follow the incarnation that it gives up."""

        def begun() -> bool:
            self.history.look()
            newest = self.history.newest
            if newest is None or progress.recovered:
                return newest is not None
            return newest >= progress.version and (
                not progress.resumed or goes_on_from(progress.version, self.history.incarnations)
            )

        subject = f"weights/step_{progress.version}"
        if progress.resumed:
            subject += f", of an incarnation that goes on from step {progress.version},"
        await self._until(begun, "version of the weights" if progress.recovered else subject)

    def _choose(self, owes: Callable[[int], bool] | None) -> int:
        if not self.config.trainer:
            return BASE
        newest, lease = self.history.newest, self.history.lease
        assert newest is not None
        if lease is not None and owes is not None and self.history.valid(lease.version) and owes(lease.version):
            return lease.version
        return newest

    async def _until(self, condition: Callable[[], bool], subject: str) -> None:
        """Wait for the trainer, at most `weights_timeout`."""
        seconds = self.config.weights_timeout
        await wait_async(
            condition, subject=subject, owner="trainer", seconds=seconds, poll=POLL_SECONDS,
            on_wait=lambda _: self.status.waiting(subject, "trainer", seconds),
        )  # fmt: skip

    # -- following -----------------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Serve every newer version as soon as the trainer commits it, until it is cancelled."""
        while True:  # bounded: the run cancels it at its end
            async with self.shipping:
                self.notice_incarnation()
            newest = self.history.newest
            if newest is not None and self._is_superseded(newest):  # none serves
                await self._go_on_with(newest)
            elif not self.recovering:
                if self.scheduler.must_go_back:
                    await self._go_back()
                elif (
                    newest is not None
                    and newest > self.scheduler.version
                    and not self._loop.keeps(self.scheduler.version)
                ):
                    await self._serve(newest)
            await asyncio.sleep(POLL_SECONDS)

    def notice_incarnation(self) -> None:
        """Look, and if the trainer has begun a new incarnation take back what it gave up. Call it with `shipping` held."""
        self.history.look()
        incarnation = self.history.incarnation
        if incarnation.number <= self.scheduler.incarnation:
            return
        served = self.scheduler.version
        self._give_up(self.scheduler.begin_incarnation(incarnation.number, self.history.incarnations))
        back = f": back from version {served}" if self.scheduler.must_go_back else ""
        logger.warning("the trainer began incarnation {} at step {}{}", incarnation.number, incarnation.start, back)
        if not self.scheduler.must_go_back:
            self._hold(incarnation.number, served)
        self._loop.began_incarnation(incarnation)

    async def _go_back(self) -> None:
        """The trainer went on from an earlier step: what is served was given up."""
        async with self.lock:
            incarnation = self.history.incarnation

            def committed() -> bool:
                self.history.look()
                return self.history.newest is not None and self.history.newest >= self.history.incarnation.start

            await self._until(committed, f"weights/step_{incarnation.start}")
            version = self.history.newest
            assert version is not None
            if self.history.incarnation != incarnation:
                return  # it began again meanwhile
            self._lease_to_load(incarnation.number, version)
            if await self._move(version) and self.scheduler.incarnation == incarnation.number:
                self.scheduler.go_back(version)
                self._hold(incarnation.number, version)
        self._loop.wake()
        if not self.scheduler.must_go_back:
            await self._loop.serves(self.scheduler.version)  # it may be one that was made again meanwhile

    async def _go_on_with(self, version: int) -> None:
        """None serves, and what was served is nowhere to be had any more: the run goes on with the newest version. Servers that come back are given
        that; until then nothing starts."""
        async with self.lock:
            if not self._is_superseded(version):
                return  # found while this waited for the lock
            logger.warning(
                "version {} cannot be had any more: the run goes on with version {}", self.scheduler.version, version
            )
            self.scheduler.announce(version)
            self._lease_to_load(self.scheduler.incarnation, version)
            self._note_served(version)
        await self._loop.serves(version)

    def _is_superseded(self, newest: int) -> bool:
        unavailable = self.recovering and not self.scheduler.must_go_back and self._unsent is not None
        return unavailable and newest > self.scheduler.version == self._wanted

    async def _serve(self, version: int) -> None:
        async with self.lock:
            if self.recovering or self.scheduler.must_go_back or version <= self.scheduler.version:
                return  # found while this waited for the lock
            began = time.monotonic()
            self.scheduler.announce(version)
            self._lease_to_load(self.scheduler.incarnation, version)
            if not await self._move(version) or self.scheduler.must_go_back:
                return
            self._count(time.monotonic() - began)
            logger.info("serving version {} after {:.2f} s{}", version, time.monotonic() - began, self.fleet.where())
            self._note_served(version)
        self._loop.wake()
        await self._loop.serves(version)

    def _note_served(self, version: int) -> None:
        self.scheduler.serve(version)
        self._hold(self.scheduler.incarnation, version)
        self.status.progress()
        stale = self._loop.drop_stale()
        self.fleet.forget(stale)
        self._loop.cancel(stale)

    def _count(self, seconds: float) -> None:
        self.seconds += seconds
        reports = [replica.given.seconds for replica in self.fleet.serving if replica.given is not None]
        for part in {part for parts in reports for part in parts}:
            self.parts[part] = self.parts.get(part, 0.0) + max(parts.get(part, 0.0) for parts in reports)

    def take_times(self) -> tuple[float, dict[str, float]]:
        """What updates took since this was asked last: altogether, and in parts."""
        taken = self.seconds, self.parts
        self.seconds, self.parts = 0.0, {}
        return taken

    async def _move(self, version: int) -> bool:
        """Have every serving server load a version, which may be removed meanwhile, or which one of them may not survive. Returns whether it
        is served: by all that are left."""
        self._settled.clear()
        try:
            return await self._try(version)
        finally:
            self._settled.set()

    async def _try(self, version: int) -> bool:
        asked = self.fleet.serving
        try:
            failures = await self._load(asked, version)
        except CommitError as gone:  # removed meanwhile
            failures = dict.fromkeys(asked, gone)
        if len(failures) < len(asked):
            for replica, error in failures.items():
                logger.warning(
                    "{} did not load version {}, the run goes on without it: {}", replica.name, version, error
                )
                self._loop.replica_lost(replica)
            self._failed_updates = 0
            return True
        for replica in list(failures):
            if not await replica.verify():
                self._loop.replica_lost(replica)
        worst = _worst(failures.values())
        server_failed = isinstance(worst, ServerError | CommitError) and not isinstance(worst, VersionNotSent)
        if self.fleet.serving or not server_failed:
            await self._may_retry(worst, version)
        else:
            self._count_failed_update(failures.values(), version)
        return False

    def _count_failed_update(self, errors: Iterable[LoadError], version: int) -> None:
        """Servers that are lost over an update come back with the version before it and are given the newest once more, but not for ever; less
        often where they compute something else than the trainer."""
        error = next((error for error in errors if isinstance(error, LogprobCheckFailed)), None)
        self._failed_updates += 1
        if self._failed_updates >= (_ATTEMPTS if error else 2 * _ATTEMPTS):
            raise error or _worst(errors)
        logger.warning("version {} is not served, trying again: {}", version, error or _worst(errors))

    async def _load(self, replicas: Sequence[Replica], version: int) -> dict[Replica, LoadError]:
        """All of them at once. Returns those that did not load it, and why.

        Raises:
            CommitError: the version is not committed (any more).
        """
        faults.point(f"update:v{version}")
        manifest = self.history.manifest(version) if self.config.trainer else None
        loads = {replica: asyncio.create_task(replica.load(manifest)) for replica in replicas}
        try:
            await self._until_loaded(loads)
        finally:
            for load in loads.values():
                load.cancel()
        failures: dict[Replica, LoadError] = {}
        for replica, load in loads.items():
            failure = load.exception() if load.done() and not load.cancelled() else ServerError("lost meanwhile")
            if isinstance(failure, UserError | CommitError):
                failures[replica] = failure
            elif failure is not None:
                raise failure
            elif replica.invalid:
                async with self.shipping:
                    self.invalidate(replica, "the server was started again")
        if len(failures) < len(replicas):
            self._failures = 0
            if self._unsent is not None and version >= self._unsent[0]:
                self._unsent = None
        faults.point(f"updated:v{version}")
        return failures

    async def load_again(self, replica: Replica) -> None:
        """Have a server that is away load what the others serve; what they read is held for it meanwhile.

        Raises:
            LoadError: it did not.
        """
        if self.scheduler.must_go_back:
            return  # `follow` loads what counts now
        version = self._reading[replica] = self.scheduler.version
        try:
            for error in (await self._load([replica], version)).values():
                raise error
        except VersionNotSent as error:
            self._wanted = version
            self._note_unsent(version, error)
            raise
        finally:
            del self._reading[replica]
            if not (self.moving or self.scheduler.must_go_back):
                self._hold(self.scheduler.incarnation, self.scheduler.version)

    async def _until_loaded(self, loads: "Mapping[Replica, asyncio.Task[None]]") -> None:
        """Until all have ended, but for those of servers that stop serving meanwhile, while others serve."""
        pending, served = set(loads.values()), [replica for replica in loads if replica.serving]
        while pending:  # bounded: by the requests' deadlines
            _, pending = await asyncio.wait(pending, timeout=_LOOK_SECONDS)
            if self.fleet.serving:
                pending -= {loads[replica] for replica in served if not replica.serving}

    async def _may_retry(self, error: LoadError, version: int) -> None:
        """After a failure to load `version`: return after a pause if another attempt may succeed, else raise `error`."""
        if isinstance(error, VersionNotSent):
            await self.await_sender(error, version)
            return
        self._failures += 1
        self.history.look()
        gone = not self.history.valid(version)  # removed while it was read: there is another one
        if self._failures >= _ATTEMPTS or not (gone or isinstance(error, ServerError)):
            raise error
        logger.warning("version {} was not loaded, trying again: {}", version, error)
        await asyncio.sleep(_RETRY_SECONDS * self._failures)

    async def await_sender(self, error: VersionNotSent, version: int) -> None:
        """Servers go on as they are while the trainer owes them this version, a newer one or its next incarnation: for at most `weights_timeout`."""
        self.history.look()
        seconds = self.config.weights_timeout
        if time.monotonic() - self._note_unsent(version, error) > seconds:
            raise error
        self.status.waiting(f"weights/step_{version}, or a newer one,", "trainer", seconds)
        await asyncio.sleep(_RETRY_SECONDS)

    def _ask_for_files(self, error: VersionNotSent, version: int) -> None:
        """Under `weights.transport = "auto"`, once for every incarnation of the trainer: it goes on with files."""
        incarnation = self.history.incarnation.number
        with suppress(CommitError):  # removed meanwhile
            publisher = self.history.manifest(version).publisher
            if (
                publisher is not None
                and publisher.fallback
                and call_for_files(self.config.output_dir, incarnation) is None
            ):
                ask_for_files(self.config.output_dir, incarnation, str(error))

    def _note_unsent(self, version: int, error: VersionNotSent) -> float:
        """Returns since when."""
        if UNREACHABLE in str(error):
            self._ask_for_files(error, version)
        if self._unsent is None:
            logger.warning("version {} was not sent, waiting for the trainer: {}", version, error)
        before, since = self._unsent or (version, time.monotonic())
        self._unsent = (max(before, version), since)
        return since

    def _lease_to_load(self, incarnation: int, version: int) -> None:
        assert self.history.lease is not None  # `start` has taken one
        self.history.hold(lease_to_load(self.history.lease, incarnation, version))

    def _hold(self, incarnation: int, version: int) -> None:
        """`version` is served: nothing older is read, but by servers that come back."""
        self.history.hold(lease_to_hold(incarnation, version, self._reading.values()))

    # -- what counts -----------------------------------------------------------------------------------------------------------

    async def verify(self) -> None:
        """Ask the servers what they serve: what had finished before counts then. One that cannot say so is lost."""
        counting, wrong = await self.fleet.verify(self.scheduler.unverified())
        self.scheduler.verify(counting)
        self.fleet.keep(self.scheduler.running_or_unverified())
        for replica in wrong:
            self._loop.replica_lost(replica)

    def invalidate(self, replica: Replica, detail: str) -> None:
        """What a server sampled since it last proved itself is made again. Call it with `shipping` held."""
        replica.losses += 1
        episodes = replica.unverified | replica.invalid
        running = self.scheduler.invalidate(detail, episodes)
        if len(self.fleet.replicas) == 1 and not self.moving:
            self.scheduler.retract()
        self.fleet.forget(episodes)
        self._give_up(running)

    def _give_up(self, running: Sequence[RunningEpisode]) -> None:
        episodes = [each.episode for each in running]
        self.fleet.forget(episodes)
        self._loop.cancel(episodes)
