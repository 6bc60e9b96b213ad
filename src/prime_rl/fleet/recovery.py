"""Who is away, and how it comes back.

A server that is lost gets no work; what it alone sampled is made again by the others. It is looked at until it answers, is given what the others
serve, proves it, and gets work again. One that joins comes the same way; one that leaves is let go when nothing is in flight there.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import VersionNotSent
from prime_rl.fleet.replicas import Replica, rest_seconds
from prime_rl.fleet.weight_sync import POLL_SECONDS, WeightSync
from prime_rl.monitor import Status
from prime_rl.transport.commit import CommitError
from prime_rl.wait import wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

_ATTEMPTS = 5  # to bring back the only server
_RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
_REST_SECONDS = 15.0  # at most between two looks at a server that is away, while others serve
_CLOSE_SECONDS = 30.0
_WATCH_SECONDS = 5.0
_SILENT_TIMES = 3  # that a server does not answer before the others take over what it had


class Shell(Protocol):
    """What recovery tells the loop."""

    def wake(self) -> None:
        """Something may start now."""

    def note_failure(self, task: "asyncio.Task[None]") -> None:
        """A task ended; its exception is the run's."""


class Recovery:
    """Brings lost servers back, and lets servers join and leave. It asks `serving` what is served, and has it load that; `serving` knows nothing of
    it. `begin` comes after `WeightSync.begin`.
    """

    def __init__(self, config: "OrchestratorConfig", serving: WeightSync, status: Status, shell: Shell) -> None:
        self._config = config
        self._serving, self._fleet = serving, serving.fleet
        self._status, self._shell = status, shell
        self.begun = False
        # The run depends on this server: nobody takes over from it, and nobody joins.
        self._alone = len(self._fleet.replicas) == 1 and config.client.discover is None
        self._recoveries: dict[Replica, asyncio.Task[None]] = {}
        self._troubles: dict[Replica, str] = {}  # why each that is away is not back
        self._doubted: dict[Replica, int] = {}  # the version that each that is away was found not to serve any more
        self._empty_since: float | None = None  # when the last one was lost

    def begin(self) -> None:
        """Servers that are not there yet join as they come."""
        self.begun = True
        for replica in self._fleet.away:
            self._watch_over(replica)

    def failed(self, replica: Replica) -> None:
        """An episode failed there for want of a server: others take over, and one that goes on failing rests longer and longer."""
        if not replica.draining:  # whoever drains it looks whether it is still there
            self._fleet.failed(replica)
            self.recover(replica)

    def recover(self, replica: Replica) -> None:
        """It is gone, or serves something else: it gets no work until it is back and has proven what it serves."""
        if replica not in self._fleet:
            return  # it has left
        leaving = replica.draining  # whoever drains it lets it go
        self._fleet.lose(replica)
        self._note_empty()
        if not leaving:
            self._watch_over(replica)

    def join(self, replica: Replica) -> None:
        """A server that was added to the fleet: it is given what the others serve, proves it, and gets work."""
        if self.begun:  # else `begin` does it
            self._watch_over(replica)

    def drain(self, replica: Replica) -> bool:
        """A replica is to leave: `release` it once nothing is in flight there. Returns whether it drains: only one that serves does, and not while an
        update is under way."""
        if not replica.serving or self._serving.moving:
            return False
        self._fleet.drain(replica)
        self._note_empty()
        return True

    async def release(self, replica: Replica, ask: bool) -> int:
        """A server leaves the fleet for good. What it can prove counts, if it is there to be asked; the rest is made again.

        Returns:
            How many episodes are made again.
        """
        recovery = self._recoveries.pop(replica, None)
        if recovery is not None and not recovery.done():
            recovery.cancel()
            await asyncio.wait({recovery}, timeout=_CLOSE_SECONDS)
        self._troubles.pop(replica, None)
        self._doubted.pop(replica, None)
        core = self._serving.core
        async with self._serving.shipping:
            if replica not in self._fleet:
                return 0  # released meanwhile
            finished = replica.unproven.intersection(core.unproven())
            if ask and (self._config.bench or await replica.proven()):
                core.prove(finished)
                self._fleet.forget(finished)
                replica.released = True
            lost = (replica.unproven | replica.tainted) & core.without_proof()
            if lost:
                replica.released = False
                self._serving.doubt(replica, "the server left")
            self._fleet.remove(replica)
            self._note_empty()
        self._shell.wake()
        return len(lost)

    def _note_empty(self) -> None:
        if self._serving.recovering:
            self._empty_since = self._empty_since or time.monotonic()

    def _watch_over(self, replica: Replica) -> None:
        present = self._recoveries.get(replica)
        if present is None or present.done():
            work = self._bring_the_only_one_back(replica) if self._alone else self._bring_back(replica)
            task = self._recoveries[replica] = asyncio.create_task(work)
            task.add_done_callback(self._shell.note_failure)

    def _admit(self, replica: Replica) -> None:
        self._fleet.admit(replica)
        self._empty_since = None
        self._troubles.pop(replica, None)
        self._doubted.pop(replica, None)
        self._shell.wake()

    async def _bring_the_only_one_back(self, replica: Replica) -> None:
        """The run depends on it: it is waited for, and after a few failures the run ends."""
        attempt = 0
        while attempt < _ATTEMPTS:  # bounded: the last attempt raises, and so does `await_sender`
            await replica.engine.wait_ready(self._status.waiting)
            try:
                while not await self._catch_up(replica):  # bounded: by the requests' deadlines
                    await asyncio.sleep(POLL_SECONDS)
                return
            except VersionNotSent as error:
                await self._serving.await_sender(error, self._serving.core.version)
            except (UserError, CommitError):
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise
                await asyncio.sleep(_RETRY_SECONDS * attempt)

    async def _bring_back(self, replica: Replica) -> None:
        """The others go on, and take over what it had. The run ends when none has served for `ready_timeout`."""
        rest, penalty = _RETRY_SECONDS, rest_seconds(replica.failures)
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
            trouble = "it does not answer"
            if await replica.engine.answers():
                try:
                    if await self._catch_up(replica):
                        version = self._serving.core.version
                        logger.info("{} serves version {}{}", replica.name, version, self._fleet.where())
                        return
                    trouble = ""
                except (UserError, CommitError) as error:
                    trouble = str(error)
            if trouble and trouble != self._troubles.get(replica):
                self._troubles[replica] = trouble
                served = f" (serving{where})" if (where := self._fleet.where()) else ""
                logger.warning("{} gets no work: {}{}", replica.name, trouble, served)
            self._check_hope()
            await asyncio.sleep(rest if trouble else POLL_SECONDS)
            rest = min(2 * rest, _REST_SECONDS if self._fleet.serving else _RETRY_SECONDS)

    async def _hand_over(self, replica: Replica) -> None:
        """What a server that is away cannot prove is made again, if there is another one to do it."""
        if replica.unproven | replica.tainted and self._fleet.serving and not self._config.bench:
            if replica.unproven and not replica.tainted and await replica.proven():
                return
            async with self._serving.shipping:
                if not replica.serving:
                    self._serving.doubt(replica, "the server is gone")
            self._shell.wake()

    def check_hope_of_joining(self) -> None:
        """While none serves and none is being brought back: somebody must join in time.

        Raises:
            UserError: nobody did.
        """
        if self._serving.recovering and all(task.done() for task in self._recoveries.values()):
            self._check_hope()

    def _check_hope(self) -> None:
        """While none serves: somebody must come back in time.

        Raises:
            UserError: nobody did.
        """
        seconds = self._config.client.ready_timeout
        if self._empty_since is None:
            return
        self._status.waiting("a healthy server", "inference", seconds)
        if time.monotonic() - self._empty_since > seconds:
            listed = "; ".join(f"{replica.name}: {trouble}" for replica, trouble in self._troubles.items())
            raise UserError(
                f"no inference server for {seconds:.0f} s ({self._config.client.source}, client.ready_timeout): "
                f"{listed or 'all have left'}"
            )

    async def _catch_up(self, replica: Replica) -> bool:
        """Have a healthy server load what the others serve, and let it in. False: what they serve has changed meanwhile."""
        serving = self._serving
        while serving.moving:  # bounded: by the requests' deadlines
            await asyncio.sleep(POLL_SECONDS)
        if self._config.bench or serving.core.must_go_back:
            self._admit(replica)  # there is nothing to prove, or `follow` loads what counts now
            return True
        version, incarnation = serving.core.version, serving.core.incarnation
        if replica.given is None:
            await serving.check_base(replica, 0)
        proven = replica.given is not None and await replica.proven()
        if not proven:
            await self._take_back(replica)
        if not proven or replica.tainted or (replica.given is not None and replica.given.version != version):
            await serving.load_again(replica)
        if (
            serving.moving
            or (version, incarnation) != (serving.core.version, serving.core.incarnation)
            or replica.tainted
        ):
            return False
        self._admit(replica)
        return True

    async def _take_back(self, replica: Replica) -> None:
        async with self._serving.shipping:
            self._serving.notice_incarnation()
            if replica.given is not None:
                version = replica.given.version
                if self._doubted.get(replica) != version:  # each attempt finds it so
                    self._doubted[replica] = version
                    logger.warning("{} does not serve version {} any more", replica.name, version)
                self._serving.doubt(replica, "the server lost the weights it was given")

    async def watch(self) -> None:
        """Among several servers: one that does not answer any more is lost, and the others take over what it had. Until it is cancelled."""
        while not self._alone:  # bounded: the run cancels it at its end
            await asyncio.sleep(_WATCH_SECONDS)
            asked = self._fleet.serving
            answers = await asyncio.gather(*(replica.engine.answers() for replica in asked))
            for replica, answered in zip(asked, answers, strict=True):
                replica.silent = 0 if answered else replica.silent + 1
                if replica.silent >= _SILENT_TIMES and replica.serving:
                    self.recover(replica)

    async def brought_back(self) -> None:
        """Wait until a server serves, or what is served is superseded."""
        for replica in self._fleet.away:
            self._watch_over(replica)
        pending = [task for task in self._recoveries.values() if not task.done()]
        client = self._config.client
        subject, seconds = "healthy server", _ATTEMPTS * (client.ready_timeout + client.timeout)
        await wait_async(
            lambda: not self._serving.recovering or any(task.done() for task in pending),
            subject=subject, owner="inference", seconds=seconds, poll=POLL_SECONDS,
            stop=lambda: self._serving.superseded,
        )  # fmt: skip

    async def close(self) -> None:
        """End the recoveries, if there are any."""
        tasks = list(self._recoveries.values())
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(_CLOSE_SECONDS):
            await asyncio.gather(*tasks, return_exceptions=True)
