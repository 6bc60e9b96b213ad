"""The inference servers of a run or an evaluation: which get work, where an episode goes, whose samples are verified.

A *replica* is one server as its clients know it. It is quarantined until it answers and is verified to serve what it
was given; then it is ready, and gets episodes. Its samples may be trained on once that replica, not another one,
is verified to have served its version meanwhile. One that is to leave drains: it gets nothing new and keeps the version
that it has, while its episodes end.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import Any

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.fleet.client import Served
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.router import ServerClient
from prime_rl.transport.protocol import BASE
from prime_rl.transport.weights import WeightsManifest

RESTARTED, FAILED_CHECK = "the server was restarted", "the server failed its logprob check"
LEAVING = "it is to leave"
_HOMES = 65_536  # groups whose server is remembered
_CANCEL_SECONDS = 30.0


class ReplicaState(StrEnum):
    """Status of a replica: what it is given."""

    QUARANTINED = "quarantined"  # nothing, until it answers and is verified
    READY = "ready"  # new episodes and weight updates
    DRAINING = "draining"  # nothing new; its episodes go on, on the version that it has


@dataclass(eq=False)
class Replica:
    """One server. Only `ReplicaPool.move` changes its state."""

    client: ServerClient
    state: ReplicaState = ReplicaState.QUARANTINED
    in_flight: int = 0
    unverified: set[str] = field(default_factory=set)  # episodes that it samples, or has since it was last verified
    # Those that a process sampled which has been replaced since: no verification covers them.
    invalid: set[str] = field(default_factory=set)
    missed_probes: int = 0  # in a row: it did not answer
    failures: int = 0  # consecutive failed episodes there; those that fail together count once
    failed_loads: int = 0  # since it was ready last
    quarantine_reason: str = ""  # why it is still quarantined
    mismatch: str = ""  # why it failed its last verification; empty if it passed
    loaded: Served | None = None  # the last version that it loaded
    reported: Served | None = None  # what it said last that it serves
    loading: int | None = None  # the version that it is loading, if it is
    _load_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.client.root

    @property
    def ready(self) -> bool:
        return self.state is ReplicaState.READY

    @property
    def draining(self) -> bool:
        return self.state is ReplicaState.DRAINING

    async def load(self, manifest: WeightsManifest | None) -> None:
        """Have the server load a committed version and verify it, or its base weights (None).

        If it was restarted meanwhile, what the earlier process sampled is `invalid`.

        Raises:
            LogprobCheckFailed: it computes something else, so that its report is not trusted.
            UserError: it rejected the version; the earlier one is still expected.
        """
        before = self.loaded
        self._load_ended.clear()
        self.loading = BASE if manifest is None else manifest.version
        try:
            self.loaded = await (self.client.reload() if manifest is None else self.client.update(manifest))
        except LogprobCheckFailed:
            self.loaded = None if before is None else replace(before, hash="")  # no report matches it
            raise
        finally:
            self.loading = None
            self._load_ended.set()
        # At once: from here on `verify` is of what it serves now.
        if before is not None and before.boot != self.loaded.boot:
            self.invalid |= self.unverified
            self.unverified.clear()

    async def verify(self) -> bool:
        """True if the server answers, has not restarted and has served only the weights it loaded.

        During an update it may report the new version already: it is asked again once the load has ended.
        """
        served = await self.served()
        if self.loading is not None and served != self.loaded:
            await self._load_ended.wait()  # bounded: the requests that a load consists of are
            served = await self.served()
        self.mismatch = self._find_mismatch(served)
        return not self.mismatch

    async def served(self) -> Served | None:
        """Ask the server what it serves; None if it does not say."""
        try:
            self.reported = await self.client.served()
            return self.reported
        except UserError:
            return None

    def _find_mismatch(self, served: Served | None) -> str:
        """Why this report (None: there was none) does not verify the server; empty if it does."""
        loaded = self.loaded
        if loaded is None:
            return "the server has loaded nothing"
        if not loaded.hash:
            return FAILED_CHECK
        if served == loaded:
            return ""
        if served is None:
            return "the server does not say what it serves"
        if served.boot != loaded.boot:
            return RESTARTED
        if (served.version, served.hash) != (loaded.version, loaded.hash):
            return f"the server no longer reports version {loaded.version}"
        return f"the server loaded weights that others gave it, then version {loaded.version} again"


class ReplicaPool:
    """All servers of a run. Attempts at one task share their prompt, which a server computes once: an episode goes to
    the replica of its group, unless that has over `slack` episodes more than the one with the fewest."""

    def __init__(self, clients: Iterable[ServerClient], slack: int = 1) -> None:
        self.replicas = [Replica(client) for client in clients]
        self.empty_since: float | None = None  # when the last ready one ceased to be
        self._slack = slack
        self._homes: dict[Hashable, Replica] = {}  # by group, the oldest first

    # -- who gets work -------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready]

    @property
    def loading(self) -> int | None:
        """The version that a ready replica is loading now, if one is."""
        return next((replica.loading for replica in self.ready if replica.loading is not None), None)

    def where(self) -> str:
        """For the log, where there are several servers: on how many of them."""
        count = len(self.replicas)
        return f" on {len(self.ready)} of {count} servers" if count > 1 else ""

    def move(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        if replica.state is state:
            return
        logger.debug("{} is {}{}", replica.name, state, reason and f": {reason}")
        replica.state = state
        if state is ReplicaState.READY:
            replica.missed_probes = replica.failed_loads = 0
        self.empty_since = None if self.ready else self.empty_since or time.monotonic()

    def failed(self, replica: Replica) -> None:
        """Count an episode that failed there for want of a server; of several at once the first. Call before `move`."""
        if replica.ready:
            replica.failures += 1

    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> list[Replica]:
        """Wait until one server at least is healthy. Returns those that are. Raises UserError: none came up in time."""
        waits = {asyncio.create_task(replica.client.wait_ready(on_wait)): replica for replica in self.replicas}
        pending, healthy = set(waits), list[Replica]()
        try:
            while pending and not healthy:  # bounded: each of them has its deadline
                done, pending = await asyncio.wait(
                    pending, timeout=_CANCEL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                healthy = [waits[task] for task in done if task.exception() is None]
        finally:
            await cancel_tasks(pending)
        if not healthy:
            raise UserError("; ".join(str(task.exception()) for task in waits))
        answers = await asyncio.gather(*(replica.client.answers() for replica in self.replicas))
        return [one for one, answer in zip(self.replicas, answers, strict=True) if answer or one in healthy]

    # -- where an episode goes -----------------------------------------------------------------------------------------

    def place(self, group: Hashable, retry: bool = False) -> Replica | None:
        """Return a server for an episode of `group`, or None. A `retry` avoids any that failed its last, if it can."""
        ready = self.ready
        chosen = least_loaded_healthy(ready) if retry else min(ready, key=lambda one: one.in_flight, default=None)
        if chosen is None:
            return None
        home = self._homes.pop(group, None)
        if home is not None and home.ready and home.in_flight <= chosen.in_flight + self._slack:
            chosen = chosen if retry and home.failures else home
        self._homes[group] = chosen
        if len(self._homes) > _HOMES:
            del self._homes[next(iter(self._homes))]
        return chosen

    def start(self, episode: str, replica: Replica) -> None:
        """`replica` samples the episode, until `end`: it counts once that replica is verified afterwards."""
        replica.in_flight += 1
        replica.unverified.add(episode)

    def end(self, replica: Replica) -> None:
        """An episode is not in flight there any more, whatever ended it."""
        replica.in_flight -= 1

    @contextmanager
    def busy(self, replica: Replica) -> Iterator[None]:
        """An episode is in flight there that is not verified by itself."""
        replica.in_flight += 1
        try:
            yield
        finally:
            self.end(replica)

    def forget(self, episodes: Collection[str]) -> None:
        """These are verified, or will never count."""
        for replica in self.replicas:
            replica.unverified.difference_update(episodes)
            replica.invalid.difference_update(episodes)

    def keep(self, episodes: Collection[str]) -> None:
        """Forget all but these."""
        for replica in self.replicas:
            replica.unverified.intersection_update(episodes)
            replica.invalid.intersection_update(episodes)

    def tenant_metrics(self) -> dict[str, float]:
        """Means over the ready replicas of what they last reported about a tenant; empty where they share nothing."""
        reports = [one.reported for one in self.ready if one.reported is not None]
        shares = [report.engine_share for report in reports if report.engine_share is not None]
        waiting = [report.waiting for report in reports if report.waiting is not None]
        values = {"tenant/engine_share": shares, "tenant/waiting": waiting}
        return {name: fmean(numbers) for name, numbers in values.items() if numbers}

    async def verify(self, finished: Collection[str]) -> tuple[list[str], list[Replica]]:
        """Ask every replica that is ready or drains what it serves.

        Args:
            finished: Episodes that had ended before the question.

        Returns:
            Those of them that now count, and the replicas that failed.
        """
        asked = [replica for replica in self.replicas if replica.ready or replica.draining]
        waiting = [replica.unverified.intersection(finished) for replica in asked]
        verified = await asyncio.gather(*(replica.verify() for replica in asked))
        answers = list(zip(asked, waiting, verified, strict=True))
        # Not those that became `invalid` meanwhile: the server was restarted, and has loaded its version again.
        counting = [
            episode
            for one, episodes, ok in answers
            if ok and (one.ready or one.draining)
            for episode in episodes & one.unverified
        ]
        return counting, [replica for replica, _, ok in answers if not ok]


async def cancel_tasks(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and await their end for a while; those that go on are logged."""
    for task in tasks:
        task.cancel()
    if tasks:
        _, running = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
        if running:
            logger.warning(
                "{} tasks did not end within {:.0f} s of their cancellation: {}",
                len(running), _CANCEL_SECONDS, next(iter(running)),
            )  # fmt: skip


def least_loaded_healthy(replicas: Sequence[Replica]) -> Replica | None:
    """The replica with the fewest episodes among those without `failures`; among all if each has some."""
    return min(replicas, key=lambda one: (one.failures > 0, one.in_flight), default=None)
