"""Keeping the servers on the newest version of the trainer's present history, and bringing back those that are gone.

The trainer says what there is by committing lives and versions; here they are followed. What was sampled by weights that do not count, because
the trainer gave them up or a server cannot prove them, is taken back in the core and made again. A server that is lost takes with it what it alone
sampled: the others go on.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from prime_rl import faults
from prime_rl.envs.protocol import EpisodeResult
from prime_rl.errors import UserError
from prime_rl.monitor import Status, log
from prime_rl.orchestrator.ckpt import Progress
from prime_rl.orchestrator.core import Core, Drop, Start
from prime_rl.orchestrator.engine import EngineTrouble
from prime_rl.orchestrator.fleet import Fleet, Replica
from prime_rl.orchestrator.history import History
from prime_rl.transport.commit import CommitError
from prime_rl.transport.protocol import Life, first_lease, goes_on_from, lease_to_hold, lease_to_load
from prime_rl.wait import wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

logger = log.get("orchestrator")

POLL_SECONDS = 0.1
_ATTEMPTS = 5  # to load a version that may be removed, or to bring a server back
_RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
_REST_SECONDS = 60.0  # before a server that failed them all is tried again, while others serve
_CLOSE_SECONDS = 30.0
_WATCH_SECONDS = 5.0
_SILENT_TIMES = 3  # that a server does not answer before the others take over what it had

LoadError = UserError | CommitError


class Shell(Protocol):
    """What serving tells the loop."""

    def forget(self, starts: Sequence[Start]) -> None:
        """These were in flight, and the core has given them up: cancel them."""

    def began_life(self, life: Life) -> None:
        """The trainer began a new life."""

    async def serves(self, version: int) -> None:
        """A newer version is served."""

    def wake(self) -> None:
        """Something may start now."""

    def note_failure(self, task: "asyncio.Task[None]") -> None:
        """A task ended; its exception is the run's."""


class Serving:
    """What the servers serve. `begin` comes before `follow`.

    Attributes:
        lock: Held while what is served must not change.
        shipping: Held while finished episodes must not be given up.
        seconds: Spent on updates since somebody took them.
    """

    def __init__(self, config: "OrchestratorConfig", fleet: Fleet, status: Status, shell: Shell) -> None:
        self.config = config
        self.fleet = fleet
        self.status = status
        self.history = History(config.output_dir)
        self.lock = asyncio.Lock()  # bounded: every wait of its holders is
        self.shipping = asyncio.Lock()  # bounded: every wait of its holders is
        self.seconds = 0.0
        self.core: Core[EpisodeResult]
        self._failures = 0  # to load, in a row
        self._shell = shell
        self._moving = False  # what is served is being changed
        self._reading: dict[Replica, int] = {}  # versions that are loaded by servers that come back
        self._recoveries: dict[Replica, asyncio.Task[None]] = {}

    # -- the first version ---------------------------------------------------------------------------------------------------

    async def start(self, progress: Progress, owes: Callable[[int], bool]) -> int:
        """Have the servers that are up load the version that the run goes on from, and prove it. One of them is enough.

        Args:
            owes: Whether something has still to be done on the version that was served last.

        Returns:
            The version: the newest, or the one served last if it owes something.
        """
        self.history.hold(first_lease(self.history.lease))
        await self._await_history(progress)
        while True:  # `_may_retry` raises after a few failures
            ready = await self.fleet.wait_ready(self.status.waiting, self.config.client.ready_timeout)
            version, life = self._choose(owes), self.history.life.number
            self._lease_to_load(life, version)
            try:
                for replica in ready:
                    await self._check_base(replica, version)
                # Even a server that has this version already is given it: one that cannot reach the directory is found now.
                failures = await self._load(ready, version)
            except (CommitError, UserError) as error:
                await self._may_retry(error, version)
                continue
            if len(failures) == len(ready):
                await self._may_retry(next(iter(failures.values())), version)
                continue
            for replica in ready:
                if replica not in failures:
                    self.fleet.admit(replica)
            self.history.hold(lease_to_hold(life, version))
            return version

    def begin(self, core: Core[EpisodeResult]) -> None:
        """What `core` decides is served from now on; servers that are not there yet join as they come."""
        self.core = core
        for replica in self.fleet.away:
            logger.info("%s is not there yet: the run begins without it", replica.name)
            self._watch_over(replica)

    async def _check_base(self, replica: Replica, version: int) -> None:
        """Before anything is loaded: a server that holds another base model than the trainer is not ours to overwrite.

        Raises:
            UserError: the bases differ.
        """
        served = await replica.engine.served()
        base = self.history.manifest(version).hash
        if version == served.version == 0 and served.hash != base:
            raise UserError(
                f"the server at {replica.name} serves another base model ({served.hash[:12]}) than the trainer trains "
                f"({base[:12]}): check model.name of both"
            )

    async def _await_history(self, progress: Progress) -> None:
        """Until the trainer has begun the life that the run goes on with. A resumed run must not follow the life that it gives up."""

        def begun() -> bool:
            self.history.look()
            newest = self.history.newest
            if newest is None or progress.recovered:
                return newest is not None
            return newest >= progress.version and (
                not progress.resumed or goes_on_from(progress.version, self.history.lives)
            )

        subject = f"weights/step_{progress.version}"
        if progress.resumed:
            subject += f", of a life that goes on from step {progress.version},"
        await self._until(begun, "version of the weights" if progress.recovered else subject)

    def _choose(self, owes: Callable[[int], bool]) -> int:
        newest, lease = self.history.newest, self.history.lease
        assert newest is not None
        if lease is not None and self.history.valid(lease.version) and owes(lease.version):
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
                self.notice_life()
            newest = self.history.newest
            if not self.recovering:
                if self.core.must_go_back:
                    await self._go_back()
                elif newest is not None and newest > self.core.version:
                    await self._serve(newest)
            await asyncio.sleep(POLL_SECONDS)

    def notice_life(self) -> None:
        """Look, and if the trainer has begun a new life take back what it gave up. Call it with `shipping` held."""
        self.history.look()
        life = self.history.life
        if life.number <= self.core.life:
            return
        served = self.core.version
        self._give_up(self.core.begin_life(life.number, self.history.lives))
        back = f": back from version {served}" if self.core.must_go_back else ""
        logger.warning("the trainer began life %d at step %d%s", life.number, life.start, back)
        if not self.core.must_go_back:
            self._hold(life.number, served)
        self._shell.began_life(life)

    async def _go_back(self) -> None:
        """The trainer went on from an earlier step: what is served was given up."""
        async with self.lock:
            life = self.history.life

            def there() -> bool:
                self.history.look()
                return self.history.newest is not None and self.history.newest >= self.history.life.start

            await self._until(there, f"weights/step_{life.start}")
            version = self.history.newest
            assert version is not None
            if self.history.life != life:
                return  # it began again meanwhile
            self._lease_to_load(life.number, version)
            if await self._move(version) and self.core.life == life.number:
                self.core.go_back(version)
                self._hold(life.number, version)
        self._shell.wake()

    async def _serve(self, version: int) -> None:
        async with self.lock:
            if self.recovering or self.core.must_go_back:
                return  # found while this waited for the lock
            began = time.monotonic()
            self.core.announce(version)
            self._lease_to_load(self.core.life, version)
            if not await self._move(version) or self.core.must_go_back:
                return
            self.seconds += time.monotonic() - began
            self.core.serve(version)
            self._hold(self.core.life, version)
            self.status.progress()
            logger.info("serving version %d after %.2f s%s", version, time.monotonic() - began, self._where())
            stale = self.core.stale()
            for start in stale:
                self.core.fail(start.episode, Drop.STALE, "beyond max_off_policy_steps")
            self._give_up(stale)
        self._shell.wake()
        await self._shell.serves(version)

    async def _move(self, version: int) -> bool:
        """Have every serving server load a version, which may be removed meanwhile, or which one of them may not survive. Returns whether it
        is served: by all that are left."""
        self._moving = True
        try:
            return await self._try(version)
        finally:
            self._moving = False

    async def _try(self, version: int) -> bool:
        asked = self.fleet.serving
        failures = await self._load(asked, version)
        if len(failures) < len(asked):
            for replica, error in failures.items():
                logger.warning(
                    "%s did not load version %d, the run goes on without it: %s", replica.name, version, error
                )
                self.recover(replica)
            return True
        for replica in list(failures):
            if not await replica.proven():
                self.recover(replica)
        if self.fleet.serving:
            await self._may_retry(next(iter(failures.values())), version)
        return False

    async def _load(self, replicas: Sequence[Replica], version: int) -> dict[Replica, LoadError]:
        """All of them at once. Returns those that did not load it, and why.

        Raises:
            CommitError: the version is not committed (any more).
        """
        faults.point(f"update:v{version}")
        manifest = self.history.manifest(version)
        found = await asyncio.gather(*(replica.load(manifest) for replica in replicas), return_exceptions=True)
        failures: dict[Replica, LoadError] = {}
        for replica, outcome in zip(replicas, found, strict=True):
            if isinstance(outcome, (UserError, CommitError)):
                failures[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            elif not outcome:
                async with self.shipping:
                    self._doubt(replica, "the server was started again")
        if len(failures) < len(replicas):
            self._failures = 0
        faults.point(f"updated:v{version}")
        return failures

    async def _may_retry(self, error: LoadError, version: int) -> None:
        """After a failure to load `version`: return after a pause if another attempt may succeed, else raise `error`."""
        self._failures += 1
        self.history.look()
        gone = not self.history.valid(version)  # removed while it was read: there is another one
        if self._failures >= _ATTEMPTS or not (gone or isinstance(error, EngineTrouble)):
            raise error
        logger.warning("version %d was not loaded, trying again: %s", version, error)
        await asyncio.sleep(_RETRY_SECONDS * self._failures)

    def _lease_to_load(self, life: int, version: int) -> None:
        assert self.history.lease is not None  # `start` has taken one
        self.history.hold(lease_to_load(self.history.lease, life, version))

    def _hold(self, life: int, version: int) -> None:
        """`version` is served: nothing older is read, but by servers that come back."""
        self.history.hold(lease_to_hold(life, version, self._reading.values()))

    # -- what counts -----------------------------------------------------------------------------------------------------------

    async def prove(self) -> bool:
        """Ask the servers what they serve: what had finished before counts then. One that cannot say so is brought back.

        Returns:
            Whether all could.
        """
        counting, wrong = await self.fleet.prove(self.core.unproven())
        self.core.prove(counting)
        self.fleet.keep(self.core.without_proof())
        for replica in wrong:
            self.recover(replica)
        return not wrong

    def _doubt(self, replica: Replica, detail: str) -> None:
        """What a server sampled since it last proved itself is made again. Call it with `shipping` held."""
        episodes = set(replica.unproven)
        flying = self.core.doubt(detail, episodes)
        if len(self.fleet.replicas) == 1 and not self._moving:
            self.core.retract()
        self.fleet.forget(episodes)
        self._give_up(flying)

    def _give_up(self, starts: Sequence[Start]) -> None:
        self.fleet.forget([start.episode for start in starts])
        self._shell.forget(starts)

    def _where(self) -> str:
        """For the log, where there are several servers."""
        count = len(self.fleet.replicas)
        return f" on {len(self.fleet.serving)} of {count} servers" if count > 1 else ""

    # -- a server that is gone -------------------------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        """Whether no server serves; nothing may start."""
        return not self.fleet.serving

    def recover(self, replica: Replica) -> None:
        """It is gone, or serves something else: it gets no work until it is back and has proven what it serves."""
        self.fleet.lose(replica)
        self._watch_over(replica)

    def _watch_over(self, replica: Replica) -> None:
        present = self._recoveries.get(replica)
        if present is None or present.done():
            task = self._recoveries[replica] = asyncio.create_task(self._bring_back(replica))
            task.add_done_callback(self._shell.note_failure)

    async def _bring_back(self, replica: Replica) -> None:
        if not (self.recovering or self.config.bench or await replica.proven()):
            async with self.shipping:  # the others take over what it had
                self._doubt(replica, "the server is gone")
            self._shell.wake()
        failures, said = 0, ""
        while True:  # bounded: where the run depends on it, failures end it
            try:
                await replica.engine.wait_ready(self.status.waiting if self.recovering else _say_nothing)
            except UserError:
                if self.recovering:
                    raise
                continue
            try:
                if await self._catch_up(replica):
                    break
            except (UserError, CommitError) as error:
                failures += 1
                if self.recovering and failures >= _ATTEMPTS:
                    raise
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s was not brought back, trying again: %s", replica.name, error)
                await asyncio.sleep(_RETRY_SECONDS * failures if failures < _ATTEMPTS else _REST_SECONDS)
        if where := self._where():
            logger.info("%s serves version %d%s", replica.name, self.core.version, where)
        self._shell.wake()

    async def _catch_up(self, replica: Replica) -> bool:
        """Have a healthy server load what the others serve, and let it in. False: what they serve has changed meanwhile."""
        await self._still()
        if self.config.bench or self.core.must_go_back:
            self.fleet.admit(replica)  # there is nothing to prove, or `follow` loads what counts now
            return True
        version, life = self.core.version, self.core.life
        if replica.given is None:
            await self._check_base(replica, 0)
        if replica.given is None or replica.given.version != version or not await replica.proven():
            await self._load_again(replica)
        if self._moving or (version, life) != (self.core.version, self.core.life):
            return False
        self.fleet.admit(replica)
        return True

    async def _load_again(self, replica: Replica) -> None:
        async with self.shipping:
            self.notice_life()
            if replica.given is not None:
                logger.warning("%s does not serve version %d: loading it", replica.name, self.core.version)
            self._doubt(replica, "the server lost the weights it was given")
        if self.core.must_go_back:
            return  # `follow` loads what counts now
        version = self._reading[replica] = self.core.version
        try:
            for error in (await self._load([replica], version)).values():
                raise error
        finally:
            del self._reading[replica]
            if not (self._moving or self.core.must_go_back):
                self._hold(self.core.life, self.core.version)

    async def _still(self) -> None:
        """Until nothing is being changed."""
        while self._moving:  # bounded: by the requests' deadlines
            await asyncio.sleep(POLL_SECONDS)

    async def watch(self) -> None:
        """Among several servers: one that does not answer any more is lost, and the others take over what it had. Until it is cancelled."""
        silent = dict.fromkeys(self.fleet.replicas, 0)
        while len(self.fleet.replicas) > 1:  # bounded: the run cancels it at its end
            await asyncio.sleep(_WATCH_SECONDS)
            asked = self.fleet.serving
            answers = await asyncio.gather(*(replica.engine.answers() for replica in asked))
            for replica, answered in zip(asked, answers, strict=True):
                silent[replica] = 0 if answered else silent[replica] + 1
                if silent[replica] >= _SILENT_TIMES and replica.serving:
                    logger.warning("%s does not answer: the others take over", replica.name)
                    self.recover(replica)

    async def brought_back(self) -> None:
        """Wait until a server serves, and every one that was lost is back or given up for now."""
        for replica in self.fleet.away:
            self._watch_over(replica)
        pending = [task for task in self._recoveries.values() if not task.done()]
        if pending and self.recovering:
            timeout = _ATTEMPTS * (self.config.client.ready_timeout + self.config.client.timeout)
            await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """End the recoveries, if there are any."""
        tasks = list(self._recoveries.values())
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(_CLOSE_SECONDS):
            await asyncio.gather(*tasks, return_exceptions=True)


def _say_nothing(subject: str, owner: str, seconds: float) -> None:
    """Nobody waits for a server that is away while others serve."""
