"""Keeping the engines on the newest version of the trainer's present history, and bringing them back when they are gone.

The trainer says what there is by committing lives and versions; here they are followed. What was sampled by weights that do not count, because
the trainer gave them up or a server cannot prove them, is taken back in the core and made again.
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
from prime_rl.orchestrator.engine import Engine, EngineTrouble
from prime_rl.orchestrator.policy import ServedPolicy
from prime_rl.transport.commit import CommitError
from prime_rl.transport.protocol import Lease, Life, first_lease, goes_on_from, lease_to_load
from prime_rl.wait import wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

logger = log.get("orchestrator")

POLL_SECONDS = 0.1
_ATTEMPTS = 5  # to load a version that may be removed, or to bring a server back
_RETRY_SECONDS = 1.0  # before the second attempt; then twice that, and so on
_CLOSE_SECONDS = 30.0


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
    """What the engines serve. `core` is set before `follow`.

    Attributes:
        lock: Held while what is served must not change.
        shipping: Held while finished episodes must not be given up.
        seconds: Spent on updates since somebody took them.
    """

    def __init__(self, config: "OrchestratorConfig", engine: Engine, status: Status, shell: Shell) -> None:
        self.config = config
        self.engine = engine
        self.status = status
        self.policy = ServedPolicy(config.output_dir, engine)
        self.lock = asyncio.Lock()  # bounded: every wait of its holders is
        self.shipping = asyncio.Lock()  # bounded: every wait of its holders is
        self.seconds = 0.0
        self._failures = 0  # to load, in a row
        self.core: Core[EpisodeResult]
        self._shell = shell
        self._recovery: asyncio.Task[None] | None = None

    # -- the first version ---------------------------------------------------------------------------------------------------

    async def start(self, progress: Progress, owes: Callable[[int], bool]) -> int:
        """Have the server load the version that the run goes on from, and prove it.

        Args:
            owes: Whether something has still to be done on the version that was served last.

        Returns:
            The version: the newest, or the one served last if it owes something.
        """
        self.policy.hold(first_lease(self.policy.lease))
        await self._await_history(progress)
        while True:  # `_may_retry` raises after a few failures
            version, life = self._choose(owes), self.policy.life.number
            self._lease_to_load(life, version)
            try:
                await self.policy.check_base(version)
                # Even a server that has this version already is given it: one that cannot reach the directory is found now.
                await self._load(version)
            except (CommitError, UserError) as error:
                await self._may_retry(error, version)
                await self.engine.wait_ready(self.status.waiting)
            else:
                self.policy.hold(Lease(life, version))
                return version

    async def _await_history(self, progress: Progress) -> None:
        """Until the trainer has begun the life that the run goes on with. A resumed run must not follow the life that it gives up."""

        def begun() -> bool:
            self.policy.look()
            newest = self.policy.newest
            if newest is None or progress.recovered:
                return newest is not None
            return newest >= progress.version and (
                not progress.resumed or goes_on_from(progress.version, self.policy.lives)
            )

        subject = f"weights/step_{progress.version}"
        if progress.resumed:
            subject += f", of a life that goes on from step {progress.version},"
        await self._until(begun, "version of the weights" if progress.recovered else subject)

    def _choose(self, owes: Callable[[int], bool]) -> int:
        newest, lease = self.policy.newest, self.policy.lease
        assert newest is not None
        if lease is not None and self.policy.valid(lease.version) and owes(lease.version):
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
            newest = self.policy.newest
            if not self.recovering:
                if self.core.must_go_back:
                    await self._go_back()
                elif newest is not None and newest > self.core.version:
                    await self._serve(newest)
            await asyncio.sleep(POLL_SECONDS)

    def notice_life(self) -> None:
        """Look, and if the trainer has begun a new life take back what it gave up. Call it with `shipping` held."""
        self.policy.look()
        life = self.policy.life
        if life.number <= self.core.life:
            return
        served = self.core.version
        self._shell.forget(self.core.begin_life(life.number, self.policy.lives))
        back = f": back from version {served}" if self.core.must_go_back else ""
        logger.warning("the trainer began life %d at step %d%s", life.number, life.start, back)
        if not self.core.must_go_back:
            self.policy.hold(Lease(life.number, served))
        self._shell.began_life(life)

    async def _go_back(self) -> None:
        """The trainer went on from an earlier step: what is served was given up."""
        async with self.lock:
            life = self.policy.life

            def there() -> bool:
                self.policy.look()
                return self.policy.newest is not None and self.policy.newest >= self.policy.life.start

            await self._until(there, f"weights/step_{life.start}")
            version = self.policy.newest
            assert version is not None
            if self.policy.life != life:
                return  # it began again meanwhile
            self._lease_to_load(life.number, version)
            if await self._try(version) and self.core.life == life.number:
                self.core.go_back(version)
                self.policy.hold(Lease(life.number, version))
        self._shell.wake()

    async def _serve(self, version: int) -> None:
        async with self.lock:
            if self.recovering or self.core.must_go_back:
                return  # found while this waited for the lock
            began = time.monotonic()
            self.core.announce(version)
            self._lease_to_load(self.core.life, version)
            if not await self._try(version) or self.core.must_go_back:
                return
            self.seconds += time.monotonic() - began
            self.core.serve(version)
            self.policy.hold(Lease(self.core.life, version))
            self.status.progress()
            logger.info("serving version %d after %.2f s", version, time.monotonic() - began)
            stale = self.core.stale()
            for start in stale:
                self.core.fail(start.episode, Drop.STALE, "beyond max_off_policy_steps")
            self._shell.forget(stale)
        self._shell.wake()
        await self._shell.serves(version)

    async def _try(self, version: int) -> bool:
        """Load a version that may be removed meanwhile, or that the server may not survive. Returns whether it is served."""
        try:
            same = await self._load(version)
        except (UserError, CommitError) as error:
            if not await self.policy.proven():
                self.recover()
            else:
                await self._may_retry(error, version)
            return False
        if not same:
            async with self.shipping:
                self._shell.forget(self.core.doubt("the server was started again"))
        return True

    async def _may_retry(self, error: UserError | CommitError, version: int) -> None:
        """After a failure to load `version`: return after a pause if another attempt may succeed, else raise `error`."""
        self._failures += 1
        self.policy.look()
        gone = not self.policy.valid(version)  # removed while it was read: there is another one
        if self._failures >= _ATTEMPTS or not (gone or isinstance(error, EngineTrouble)):
            raise error
        logger.warning("version %d was not loaded, trying again: %s", version, error)
        await asyncio.sleep(_RETRY_SECONDS * self._failures)

    def _lease_to_load(self, life: int, version: int) -> None:
        assert self.policy.lease is not None  # `start` has taken one
        self.policy.hold(lease_to_load(self.policy.lease, life, version))

    async def _load(self, version: int) -> bool:
        """See `ServedPolicy.load`."""
        faults.point(f"update:v{version}")
        same = await self.policy.load(version)
        self._failures = 0
        faults.point(f"updated:v{version}")
        return same

    # -- a server that is gone -------------------------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        """Whether the server is being brought back; nothing may start."""
        return self._recovery is not None and not self._recovery.done()

    def recover(self) -> None:
        """The server is gone, or serves something else: nothing starts until it is back and has proven what it serves."""
        if not self.recovering:
            self._recovery = asyncio.create_task(self._bring_back())
            self._recovery.add_done_callback(self._shell.note_failure)

    async def _bring_back(self) -> None:
        for attempt in range(_ATTEMPTS):
            await self.engine.wait_ready(self.status.waiting)
            async with self.lock:
                if not self.policy.loaded or await self.policy.proven():
                    break
                logger.warning("the server does not serve version %d any more: loading it again", self.core.version)
                async with self.shipping:
                    self.notice_life()
                    self._shell.forget(self.core.doubt("the server lost the weights it was given"))
                if self.core.must_go_back:
                    break  # `follow` loads what counts now
                try:
                    await self._load(self.core.version)
                    break
                except (UserError, CommitError):
                    if attempt == _ATTEMPTS - 1:
                        raise
            await asyncio.sleep(_RETRY_SECONDS * (attempt + 1))
        self._shell.wake()

    async def brought_back(self) -> None:
        """Bring the server back, and wait until it is."""
        self.recover()
        assert self._recovery is not None
        await asyncio.wait(
            [self._recovery], timeout=_ATTEMPTS * (self.config.client.ready_timeout + self.config.client.timeout)
        )

    async def close(self) -> None:
        """End the recovery, if there is one."""
        if self._recovery is not None:
            self._recovery.cancel()
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(self._recovery, return_exceptions=True)
