"""The inference servers: which of them may be given work, which one an episode goes to, and what each of them can prove.

A *replica* is one server as the orchestrator knows it. It is away until it has answered and proven that it serves what it was given; then it
is `serving`, and gets episodes. What a replica sampled counts once that replica, not another one, has proven what it served meanwhile.
"""

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.orchestrator.canary import CanaryFailed
from prime_rl.orchestrator.engine import Served
from prime_rl.transport.weights import WeightsManifest
from prime_rl.wait import LEAST_POLL_SECONDS, WaitTimeout, wait_async

_HOMES = 65_536  # groups whose server is remembered
_GRACE_SECONDS = 30.0  # for a wait that has a deadline of its own


class EngineClient(Protocol):
    """What a fleet asks of a server: `engine.Engine`."""

    @property
    def root(self) -> str: ...
    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> None: ...
    async def answers(self) -> bool: ...
    async def served(self) -> Served: ...
    async def update(self, weights: WeightsManifest) -> Served: ...


@dataclass(eq=False)
class Replica:
    """One server.

    Attributes:
        serving: Whether it gets work. It does not while it is not heard of, gone, or serving something else.
        unproven: Episodes that it samples, or has sampled since it proved what it serves.
        tainted: Those that it sampled before it was found to have been started again: no proof is of them any more.
        silent: How many times in a row it did not answer.
        losses: How many times it could not prove itself.
    """

    engine: EngineClient
    serving: bool = False
    in_flight: int = 0
    unproven: set[str] = field(default_factory=set)
    tainted: set[str] = field(default_factory=set)
    silent: int = 0
    losses: int = 0
    given: Served | None = None  # the last version that it loaded
    coming: Served | None = None  # what it is loading
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)  # the load has ended, one way or the other

    @property
    def name(self) -> str:
        return self.engine.root

    async def load(self, manifest: WeightsManifest) -> None:
        """Have the server load a committed version and prove it. If it is not the one that was asked before, but was started again and served
        its base model meanwhile, what it had sampled is `tainted`.

        Raises:
            CanaryFailed: it computes something else. It gets no work any more, and nothing that it says proves anything.
            UserError: it refused; the earlier version is still expected.
        """
        before = self.given
        self._loaded.clear()
        self.coming = Served(manifest.version, manifest.hash, "" if before is None else before.boot)
        try:
            self.given = await self.engine.update(manifest)
        except CanaryFailed:
            self.serving = False
            self.given = None if before is None else replace(before, hash="")
            raise
        finally:
            self.coming = None
            self._loaded.set()
        if before is not None and before.boot != self.given.boot:  # at once: from here on it proves what it serves now
            self.tainted |= self.unproven
            self.unproven.clear()

    async def proven(self) -> bool:
        """Whether the server answers, is the one that was asked before, and serves what it was given. During an update it may serve the new
        version already, which is proven when the update has succeeded."""
        try:
            served = await self.engine.served()
        except UserError:
            return False
        if served == self.coming != self.given:
            await self._loaded.wait()  # bounded: the requests that a load consists of are
        return served == self.given


class Fleet:
    """All servers of a run. Which one an episode goes to: the one its group is at, unless that has more than `slack` episodes more than the one
    with the fewest; attempts at one task share their prompt, which a server computes once.
    """

    def __init__(self, engines: Iterable[EngineClient], slack: int = 1) -> None:
        self.replicas = [Replica(engine) for engine in engines]
        self._slack = slack
        self._loads: list[
            tuple[int, int]
        ] = []  # a heap of (episodes, place of the replica); all but the last of each are out of date
        self._places = {replica: place for place, replica in enumerate(self.replicas)}
        self._homes: OrderedDict[Hashable, Replica] = OrderedDict()
        self._where: dict[str, Replica] = {}  # of episodes that are not proven

    # -- who serves ------------------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serving]

    @property
    def away(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.serving]

    @property
    def loading(self) -> int | None:
        """The version that a serving replica is loading now, if one is."""
        return next((replica.coming.version for replica in self.serving if replica.coming is not None), None)

    def admit(self, replica: Replica) -> None:
        """It has proven itself: it gets work."""
        replica.serving = True
        replica.silent = 0
        self._weigh(replica)

    def lose(self, replica: Replica) -> None:
        """It gets no work until it has proven itself again."""
        replica.serving = False

    async def wait_ready(self, on_wait: Callable[[str, str, float], None], seconds: float) -> list[Replica]:
        """Wait until one server at least is healthy; each is given `seconds`. Returns those that are.

        Raises:
            UserError: none came up in time.
        """
        waits = [asyncio.create_task(replica.engine.wait_ready(on_wait)) for replica in self.replicas]

        def decided() -> bool:
            errors = [wait.exception() for wait in waits if wait.done()]
            if None in errors:
                return True
            if len(errors) == len(waits):
                raise UserError("; ".join(str(error) for error in errors))
            return False

        try:
            subject, limit = "a healthy server", seconds + _GRACE_SECONDS
            await wait_async(decided, subject=subject, owner="inference", seconds=limit, poll=LEAST_POLL_SECONDS)
            there = [wait.done() and wait.exception() is None for wait in waits]
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits, timeout=_GRACE_SECONDS)
        if not all(there):
            answers = await asyncio.gather(*(replica.engine.answers() for replica in self.replicas))
            there = [one or other for one, other in zip(there, answers, strict=True)]
        return [replica for replica, ready in zip(self.replicas, there, strict=True) if ready]

    # -- where an episode goes -------------------------------------------------------------------------------------------------

    def place(self, group: Hashable) -> Replica | None:
        """The server for an episode of `group`; None where none serves."""
        chosen = self._least_loaded()
        if chosen is None:
            return None
        home = self._homes.pop(group, None)
        if home is not None and home.serving and home.in_flight <= chosen.in_flight + self._slack:
            chosen = home
        self._homes[group] = chosen
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        return chosen

    def start(self, episode: str, replica: Replica) -> None:
        """`replica` samples the episode, until `end`: it counts once that replica has proven itself afterwards."""
        replica.in_flight += 1
        self._weigh(replica)
        replica.unproven.add(episode)
        self._where[episode] = replica

    def end(self, replica: Replica) -> None:
        """An episode is not in flight there any more, whatever ended it."""
        replica.in_flight -= 1
        self._weigh(replica)

    def forget(self, episodes: Iterable[str]) -> None:
        """These are proven, or will never count."""
        for episode in episodes:
            replica = self._where.pop(episode, None)
            if replica is not None:
                replica.unproven.discard(episode)
                replica.tainted.discard(episode)

    def keep(self, episodes: Collection[str]) -> None:
        """Only these are without a proof."""
        for replica in self.replicas:
            replica.unproven.intersection_update(episodes)
            replica.tainted.intersection_update(episodes)
        self._where = {episode: replica for episode, replica in self._where.items() if episode in episodes}

    @contextmanager
    def busy(self, replica: Replica) -> Iterator[None]:
        """An episode is in flight there that needs no proof of its own."""
        replica.in_flight += 1
        self._weigh(replica)
        try:
            yield
        finally:
            self.end(replica)

    # Among a thousand servers the least loaded one is kept, not looked for.

    def _weigh(self, replica: Replica) -> None:
        heapq.heappush(self._loads, (replica.in_flight, self._places[replica]))
        if len(self._loads) > 8 * len(self.replicas) + 64:
            self._loads = [(serving.in_flight, self._places[serving]) for serving in self.serving]
            heapq.heapify(self._loads)

    def _least_loaded(self) -> Replica | None:
        while self._loads:
            load, place = self._loads[0]
            replica = self.replicas[place]
            if replica.serving and replica.in_flight == load:
                return replica
            heapq.heappop(self._loads)
        return None

    # -- what they can prove ---------------------------------------------------------------------------------------------------

    async def prove(self, finished: Collection[str]) -> tuple[list[str], list[Replica]]:
        """Ask every serving replica what it serves.

        Args:
            finished: Episodes that had ended before the question.

        Returns:
            Those of them that now count, and the replicas that could not prove themselves.
        """
        asked = self.serving
        waiting = {replica: replica.unproven.intersection(finished) for replica in asked}
        proofs = await asyncio.gather(*(replica.proven() for replica in asked))
        counting = [
            episode
            for replica, proof in zip(asked, proofs, strict=True)
            if proof and replica.serving
            for episode in waiting[replica]
        ]
        return counting, [replica for replica, proof in zip(asked, proofs, strict=True) if not proof]


class RoutedPool:
    """An environment pool whose every episode goes to the least loaded serving replica: for one attempt at an evaluation.

    Args:
        avoid: Replicas that spoilt an earlier attempt: they are used if there is no other one.
    """

    def __init__(self, pool: EnvPool, fleet: Fleet, avoid: Collection[Replica] = ()) -> None:
        self._pool, self._fleet, self._avoid = pool, fleet, avoid
        self._used: dict[Replica, int] = {}  # and how often each had been lost before
        self.turned_away = 0  # episodes for which there was no server

    def tasks(self, env: str) -> Sequence[TaskInfo]:
        return self._pool.tasks(env)

    async def run(self, *, episode_id: str, env: str, deadline: float, **arguments: Any) -> EpisodeResult:
        """See `EnvPool.run`."""
        subject, seconds = "server that serves", deadline - time.monotonic()
        try:
            replica = await wait_async(self._choose, subject=subject, owner="inference", seconds=seconds)
        except WaitTimeout as error:
            self.turned_away += 1
            return EpisodeResult(episode_id, env, "", Outcome.ENGINE_UNAVAILABLE, str(error))
        assert replica is not None
        self._used.setdefault(replica, replica.losses)
        with self._fleet.busy(replica):
            return await self._pool.run(
                episode_id=episode_id, env=env, deadline=deadline, server=replica.name, **arguments
            )

    async def spoilt(self) -> list[Replica]:
        """Replicas that cannot prove that they served the same all the time."""
        proofs = await asyncio.gather(*(replica.proven() for replica in self._used))
        used = zip(self._used.items(), proofs, strict=True)
        return [replica for (replica, before), proof in used if not proof or replica.losses != before]

    def _choose(self) -> Replica | None:
        serving = self._fleet.serving
        fit = [replica for replica in serving if replica not in self._avoid] or serving
        return min(fit, key=lambda replica: replica.in_flight, default=None)
