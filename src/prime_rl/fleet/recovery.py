"""Bring lost replicas back, and let replicas leave.

A replica that is lost gets no work; what it alone sampled is sampled again by the others. It is probed until it answers, is given what the others
serve, is verified, and gets work again. A replica that was asked to leave (`POST /leave`) drains: it gets nothing new, finishes what is in
flight there, is verified once more and is removed. It joins again when it is restarted at the same address.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import VersionNotSent
from prime_rl.fleet.replicas import Replica, rest_seconds
from prime_rl.fleet.weight_sync import POLL_SECONDS, RunLoop, WeightSync
from prime_rl.monitor import Status
from prime_rl.transport.commit import CommitError
from prime_rl.wait import wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

_ATTEMPTS = 5  # to load what the run serves, of its only replica
_RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
_REST_SECONDS = 15.0  # at most between two attempts
_PROBE_SECONDS = 5.0  # between two looks at all replicas, and at one that drains
_SILENT_PROBES = 3  # unanswered in a row, until the others take over
_DRAIN_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 30.0


class Recovery:
    """Watches all replicas of a run. `begin` comes after `WeightSync.begin`."""

    def __init__(self, config: "OrchestratorConfig", weight_sync: WeightSync, status: Status, loop: RunLoop) -> None:
        self._config = config
        self._weight_sync, self._fleet = weight_sync, weight_sync.fleet
        self._status, self._loop = status, loop
        self._alone = len(self._fleet.replicas) == 1  # nothing takes over from it
        self._recoveries: dict[Replica, asyncio.Task[None]] = {}
        self._drains: dict[Replica, asyncio.Task[None]] = {}
        self._departed: dict[Replica, str] = {}  # replicas that have left, and the incarnation of each that did
        self._troubles: dict[Replica, str] = {}  # why each that is away is not back
        self._reported_lost: dict[
            Replica, int
        ] = {}  # the version that each that is away was found not to serve any more
        self._empty_since: float | None = None  # when the last one was lost

    def begin(self) -> None:
        """Replicas that do not answer yet get work once they do."""
        for replica in self._fleet.away:
            self._bring_back_soon(replica)

    async def close(self) -> None:
        """End all recoveries and drains."""
        tasks = [*self._recoveries.values(), *self._drains.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    async def watch(self) -> None:
        """Probe all replicas every few seconds, until it is cancelled: lose those that do not answer, drain those that are to leave, and let those
        that left join once they are restarted."""
        while True:  # bounded: the run cancels it at its end
            await asyncio.sleep(_PROBE_SECONDS)
            serving, departed = self._fleet.serving, list(self._departed)
            await asyncio.gather(*map(self._probe, serving), *map(self._rejoin, departed))
            if self._weight_sync.recovering and all(task.done() for task in self._recoveries.values()):
                self._check_hope()

    async def _probe(self, replica: Replica) -> None:
        if (
            not self._alone and not await replica.engine.answers()
        ):  # alone, its episodes fail, or the loads of versions do
            replica.silent += 1
            if replica.silent >= _SILENT_PROBES and replica.serving:
                self.recover(replica)
            return
        replica.silent = 0
        try:
            served = await replica.engine.served()
        except UserError:
            return  # whatever is wrong is found when it is verified
        if served.leaving and replica not in self._drains and replica.serving:
            task = self._drains[replica] = asyncio.create_task(self._leave(replica, served.boot))
            task.add_done_callback(self._loop.note_failure)

    # -- lost replicas -------------------------------------------------------------------------------------------------------

    def failed(self, replica: Replica) -> None:
        """An episode failed there for want of a server: others take over, and one that goes on failing rests longer and longer."""
        if not replica.draining:  # its drain probes it
            self._fleet.failed(replica)
            self.recover(replica)

    def recover(self, replica: Replica) -> None:
        """It is gone, or serves something else: it gets no work until it is back and has been verified."""
        if replica not in self._fleet:
            return  # it has left
        draining = replica.draining
        self._fleet.lose(replica)
        self._note_empty()
        if not draining:
            self._bring_back_soon(replica)

    def _note_empty(self) -> None:
        if self._weight_sync.recovering:
            self._empty_since = self._empty_since or time.monotonic()

    def _bring_back_soon(self, replica: Replica) -> None:
        present = self._recoveries.get(replica)
        if present is None or present.done():
            task = self._recoveries[replica] = asyncio.create_task(self._bring_back(replica))
            task.add_done_callback(self._loop.note_failure)

    async def _bring_back(self, replica: Replica) -> None:
        """The others go on, and take over what it had. The run ends when none has served for `ready_timeout`, or the only replica cannot be given
        what the run serves."""
        delay, penalty, failures = _RETRY_SECONDS, rest_seconds(replica.failures), 0
        while replica in self._fleet:  # bounded: `_check_hope`, and the run's end cancels it
            await self._hand_over(replica)
            if penalty:
                penalty = penalty if self._fleet.serving else min(penalty, _RETRY_SECONDS)
                logger.warning(
                    "{} gets no work for {:.0f} s{}: it failed what it was given {} times in a row",
                    replica.name, penalty, self._fleet.where(), replica.failures,
                )  # fmt: skip
                await asyncio.sleep(penalty)
                penalty = 0.0
            trouble, failed = "it does not answer", False
            if await replica.engine.answers():
                try:
                    if await self._catch_up(replica):
                        logger.info(
                            "{} serves version {}{}",
                            replica.name,
                            self._weight_sync.scheduler.version,
                            self._fleet.where(),
                        )
                        return
                    trouble = ""
                except VersionNotSent as error:
                    trouble = str(error)
                    if self._alone:
                        await self._weight_sync.await_sender(error, self._weight_sync.scheduler.version)
                        continue
                except (UserError, CommitError) as error:
                    trouble, failed, failures = str(error), True, failures + 1
                    if self._alone and failures == _ATTEMPTS:
                        raise
            if trouble and trouble != self._troubles.get(replica):
                self._troubles[replica] = trouble
                served = f" (serving{where})" if (where := self._fleet.where()) else ""
                logger.warning("{} gets no work: {}{}", replica.name, trouble, served)
            self._check_hope()
            await asyncio.sleep(delay if trouble else POLL_SECONDS)
            others_go_on = bool(self._fleet.serving)
            delay = min(2 * delay, _REST_SECONDS if others_go_on or (self._alone and failed) else _RETRY_SECONDS)

    async def _hand_over(self, replica: Replica) -> None:
        """What a replica that is away cannot prove is sampled again, if there is another one to do it."""
        if replica.unverified | replica.invalid and self._fleet.serving and not self._config.bench:
            if replica.unverified and not replica.invalid and await replica.verify():
                return
            async with self._weight_sync.shipping:
                if not replica.serving:
                    self._weight_sync.invalidate(replica, "the server is gone")
            self._loop.wake()

    async def _catch_up(self, replica: Replica) -> bool:
        """Have a healthy replica load what the others serve, and let it in. False: what they serve has changed meanwhile."""
        sync = self._weight_sync
        await sync.settled()
        if self._config.bench or sync.scheduler.must_go_back:
            self._admit(replica)  # there is nothing to verify, or `follow` loads what counts now
            return True
        version, incarnation = sync.scheduler.version, sync.scheduler.incarnation
        if replica.given is None:
            await sync.check_base(replica, 0)
        proven = replica.given is not None and await replica.verify()
        if not proven:
            await self._take_back(replica)
        if not proven or replica.invalid or (replica.given is not None and replica.given.version != version):
            await sync.load_again(replica)
        if (
            sync.moving
            or (version, incarnation) != (sync.scheduler.version, sync.scheduler.incarnation)
            or replica.invalid
        ):
            return False
        self._admit(replica)
        return True

    async def _take_back(self, replica: Replica) -> None:
        async with self._weight_sync.shipping:
            self._weight_sync.notice_incarnation()
            if replica.given is not None:
                version = replica.given.version
                if self._reported_lost.get(replica) != version:  # each attempt finds it so
                    self._reported_lost[replica] = version
                    logger.warning("{} does not serve version {} any more", replica.name, version)
                self._weight_sync.invalidate(replica, "the server lost the weights it was given")

    def _admit(self, replica: Replica) -> None:
        self._fleet.admit(replica)
        self._empty_since = None
        self._troubles.pop(replica, None)
        self._reported_lost.pop(replica, None)
        self._loop.wake()

    def _check_hope(self) -> None:
        """While none serves: one must come back in time.

        Raises:
            UserError: none did.
        """
        if self._empty_since is None:
            return
        seconds = self._config.client.ready_timeout
        self._status.waiting("a healthy server", "inference", seconds)
        if time.monotonic() - self._empty_since > seconds:
            listed = "; ".join(f"{replica.name}: {trouble}" for replica, trouble in self._troubles.items())
            raise UserError(
                f"no inference server for {seconds:.0f} s ({self._config.client.source}, client.ready_timeout): "
                f"{listed or 'all have left'}"
            )

    async def brought_back(self) -> None:
        """Wait until a replica serves, or what is served is superseded."""
        for replica in self._fleet.away:
            self._bring_back_soon(replica)
        pending = [task for task in self._recoveries.values() if not task.done()]
        client = self._config.client
        await wait_async(
            lambda: not self._weight_sync.recovering or any(task.done() for task in pending),
            subject="healthy server", owner="inference", seconds=_ATTEMPTS * (client.ready_timeout + client.timeout),
            poll=POLL_SECONDS, stop=lambda: self._weight_sync.superseded,
        )  # fmt: skip

    # -- replicas that leave -------------------------------------------------------------------------------------------------

    async def _leave(self, replica: Replica, boot: str) -> None:
        """Drain it between two updates, so that what is in flight there stays of the version that it serves; then remove it."""
        try:
            await self._weight_sync.settled()
            if replica.serving:
                self._fleet.drain(replica)
                self._note_empty()
                logger.info(
                    "{} is to leave: it gets nothing new, {} episodes in flight there go on",
                    replica.name,
                    replica.in_flight,
                )
            silent, probed = 0, time.monotonic()
            while replica.draining and replica.in_flight and silent < _SILENT_PROBES:  # bounded: by episodes' deadlines
                await asyncio.sleep(_DRAIN_POLL_SECONDS)
                if time.monotonic() - probed >= _PROBE_SECONDS:
                    silent, probed = 0 if await replica.engine.answers() else silent + 1, time.monotonic()
            await self._release(replica, boot, ask=silent < _SILENT_PROBES)
        finally:
            del self._drains[replica]

    async def _release(self, replica: Replica, boot: str, ask: bool) -> None:
        """Remove a replica. What it can prove counts, if it is there to be asked; the rest is sampled again."""
        recovery = self._recoveries.pop(replica, None)
        if recovery is not None and not recovery.done():
            recovery.cancel()
            await asyncio.wait({recovery}, timeout=_CLOSE_SECONDS)
        self._troubles.pop(replica, None)
        self._reported_lost.pop(replica, None)
        scheduler = self._weight_sync.scheduler
        async with self._weight_sync.shipping:
            finished = replica.unverified.intersection(scheduler.unverified())
            if ask and (self._config.bench or await replica.verify()):
                scheduler.verify(finished)
                self._fleet.forget(finished)
                replica.released = True
            unproven = (replica.unverified | replica.invalid) & scheduler.running_or_unverified()
            if unproven:
                replica.released = False
                self._weight_sync.invalidate(replica, "the server left")
            self._fleet.remove(replica)
            self._departed[replica] = boot
            self._note_empty()
        self._loop.wake()
        logger.info(
            "{} has left, and may be stopped: {} ({} servers left to serve)",
            replica.name,
            f"{len(unproven)} episodes that it had are made again" if unproven else "nothing of it is made again",
            len(self._fleet.serving),
        )

    async def _rejoin(self, departed: Replica) -> None:
        """Let a server that has left join again, once it was restarted."""
        try:
            served = await departed.engine.served()
        except UserError:
            return
        if served.boot != self._departed[departed] and not served.leaving:
            del self._departed[departed]
            self._bring_back_soon(self._fleet.add(departed.engine))
            logger.info("{} joins", departed.name)
