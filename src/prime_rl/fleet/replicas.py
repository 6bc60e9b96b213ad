"""The inference servers: which of them may be given work, which one an episode goes to, and what each of them can prove.

A *replica* is one server as the orchestrator knows it. It is away until it has answered and proven that it serves what it was given; then it
is `serving`, and gets episodes. What a replica sampled counts once that replica, not another one, has proven what it served meanwhile. One that
is to leave is `draining`: it gets nothing new and keeps the version that it has, while what is in flight there ends.
"""

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EndlessTasks, EpisodeResult, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.fleet.client import Served
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.router import ServerClient
from prime_rl.transport.weights import WeightsManifest
from prime_rl.wait import LEAST_POLL_SECONDS, WaitTimeout, wait_async

_HOMES = 65_536  # groups whose server is remembered
_GRACE_SECONDS = 30.0  # for a wait that has a deadline of its own
_FIRST_REST_SECONDS = 1.0  # of a server that fails what it is given, again and again; doubled with each further time
_LONGEST_REST_SECONDS = 60.0


@dataclass(eq=False)
class Replica:
    """One server.

    Attributes:
        serving: Whether it gets work. It does not while it is not heard of, gone, or serving something else.
        draining: Whether it only ends what it has in flight. It then stays on the version that it has: what it samples is of a version that
            the episodes' stamps cover, and a proof of that version is a proof of them.
        unverified: Episodes that it samples, or has sampled since it proved what it serves.
        invalid: Those that it sampled before it was found to have been started again: no proof is of them any more.
        silent: How many times in a row it did not answer.
        losses: How many times it could not prove itself.
        failures: How many times in a row it was lost by an episode that failed there, with none between them that ended well.
        released: Whether it has left, and had proven all that it sampled.
    """

    engine: ServerClient
    serving: bool = False
    draining: bool = False
    in_flight: int = 0
    unverified: set[str] = field(default_factory=set)
    invalid: set[str] = field(default_factory=set)
    silent: int = 0
    losses: int = 0
    failures: int = 0
    released: bool = False
    given: Served | None = None  # the last version that it loaded
    coming: Served | None = None  # what it is loading
    _loaded: asyncio.Event = field(default_factory=asyncio.Event)  # the load has ended, one way or the other

    @property
    def name(self) -> str:
        return self.engine.root

    @property
    def on_trial(self) -> bool:
        """Whether it answers and proves itself, but failed what it was given more than once in a row: it gets one episode at a time until one
        ends well. As it fails them fast it would else always be the least loaded one, and draw all of them to it."""
        return self.failures > 1

    async def load(self, manifest: WeightsManifest | None) -> None:
        """Have the server load a committed version and prove it, or its base weights (None), where nothing is ever committed. If it is not the one that was asked before, but was started again and served
        its base model meanwhile, what it had sampled is `invalid`.

        Raises:
            LogprobCheckFailed: it computes something else. It gets no work any more, and nothing that it says proves anything.
            UserError: it refused; the earlier version is still expected.
        """
        before = self.given
        self._loaded.clear()
        if manifest is not None:
            self.coming = Served(manifest.version, manifest.hash, "" if before is None else before.boot)
        try:
            self.given = await (self.engine.reload() if manifest is None else self.engine.update(manifest))
        except LogprobCheckFailed:
            self.serving = False
            self.given = None if before is None else replace(before, hash="")
            raise
        finally:
            self.coming = None
            self._loaded.set()
        if before is not None and before.boot != self.given.boot:  # at once: from here on it proves what it serves now
            self.invalid |= self.unverified
            self.unverified.clear()

    async def verify(self) -> bool:
        """Whether the server answers, is the one that was asked before, and serves what it was given; or left when it did. During an update it
        may serve the new version already, which is proven when the update has succeeded."""
        try:
            if self.released:
                return True
            served = await self.engine.served()
        except UserError:
            return False
        if served == self.coming != self.given:
            await self._loaded.wait()  # bounded: the requests that a load consists of are
        return served == self.given


class ReplicaPool:
    """All servers of a run. Which one an episode goes to: the one its group is at, unless that has more than `slack` episodes more than the one
    with the fewest; attempts at one task share their prompt, which a server computes once.
    """

    def __init__(self, engines: Iterable[ServerClient], slack: int = 1) -> None:
        self.replicas: list[Replica] = []
        self._slack = slack
        self._loads: list[
            tuple[int, int]
        ] = []  # a heap of (episodes, number of the replica); all but the last of each are out of date
        self._numbers: dict[Replica, int] = {}
        self._at: dict[int, Replica] = {}  # by number
        self._joined = 0
        for engine in engines:
            self.add(engine)
        self._homes: OrderedDict[Hashable, Replica] = OrderedDict()
        self._where: dict[str, Replica] = {}  # of episodes that are not proven

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._numbers

    # -- who serves ------------------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serving]

    @property
    def draining(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.draining]

    @property
    def away(self) -> list[Replica]:
        return [replica for replica in self.replicas if not (replica.serving or replica.draining)]

    @property
    def loading(self) -> int | None:
        """The version that a serving replica is loading now, if one is."""
        return next((replica.coming.version for replica in self.serving if replica.coming is not None), None)

    def where(self) -> str:
        """For the log, where there are several servers: on how many of them."""
        count = len(self.replicas)
        return f" on {len(self.serving)} of {count} servers" if count > 1 else ""

    def add(self, engine: ServerClient) -> Replica:
        """A server joins. It is away until it is admitted."""
        replica = Replica(engine)
        self.replicas.append(replica)
        self._numbers[replica], self._at[self._joined] = self._joined, replica
        self._joined += 1
        return replica

    def remove(self, replica: Replica) -> None:
        """A server leaves for good. What it has not proven by now is to be made again, or given up, by the caller."""
        self.lose(replica)
        self.replicas.remove(replica)
        del self._at[self._numbers.pop(replica)]
        self.forget(replica.unverified | replica.invalid)

    def admit(self, replica: Replica) -> None:
        """It has proven itself: it gets work, if it is still of the fleet."""
        if replica in self._numbers:
            replica.serving = True
            replica.silent = 0
            self._weigh(replica)

    def lose(self, replica: Replica) -> None:
        """It gets no work until it has proven itself again."""
        replica.serving = replica.draining = False

    def drain(self, replica: Replica) -> None:
        """A serving replica gets nothing new, and no newer version; what is in flight there goes on."""
        replica.serving, replica.draining = False, True

    def failed(self, replica: Replica) -> None:
        """An episode failed there for want of a server. Of those that fail together only the first counts: call it before `lose`."""
        if replica.serving:
            replica.failures += 1

    def succeeded(self, replica: Replica) -> None:
        """An episode ended well there."""
        if replica.failures:
            replica.failures = 0
            self._weigh(replica)

    async def wait_ready(self, on_wait: Callable[[str, str, float], None], seconds: float) -> list[Replica]:
        """Wait until one server at least is healthy; each is given `seconds`, also one that joins meanwhile. Returns those that are.

        Raises:
            UserError: none came up in time.
        """
        waits: dict[Replica, asyncio.Task[None]] = {}

        def decided() -> bool:
            for replica in self.replicas:
                if replica not in waits:
                    waits[replica] = asyncio.create_task(replica.engine.wait_ready(on_wait))
            errors = [waits[replica].exception() for replica in self.replicas if waits[replica].done()]
            if None in errors:
                return True
            if errors and len(errors) == len(self.replicas):
                raise UserError("; ".join(str(error) for error in errors))
            return False

        try:
            subject, limit = "a healthy server", seconds + _GRACE_SECONDS
            await wait_async(decided, subject=subject, owner="inference", seconds=limit, poll=LEAST_POLL_SECONDS)
            healthy = {replica for replica, wait in waits.items() if wait.done() and wait.exception() is None}
        finally:
            for wait in waits.values():
                wait.cancel()
            if waits:
                await asyncio.wait(waits.values(), timeout=_GRACE_SECONDS)
        if others := [replica for replica in self.replicas if replica not in healthy]:
            answers = await asyncio.gather(*(replica.engine.answers() for replica in others))
            healthy |= {replica for replica, answer in zip(others, answers, strict=True) if answer}
        return [replica for replica in self.replicas if replica in healthy]

    # -- where an episode goes -------------------------------------------------------------------------------------------------

    def place(self, group: Hashable, again: bool = False) -> Replica | None:
        """The server for an episode of `group`; None where none serves. One that was tried before (`again`) goes to no server that has
        failed the last one it was given, if there is another."""
        chosen = self._least_loaded()
        if chosen is None or (again and chosen.failures):
            chosen = least_loaded(self.serving, sound=again)
        if chosen is None:
            return None
        home = self._homes.pop(group, None)
        if (
            home is not None
            and home.serving
            and not (home.failures if again else home.on_trial)
            and home.in_flight <= chosen.in_flight + self._slack
        ):
            chosen = home
        self._homes[group] = chosen
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        return chosen

    def start(self, episode: str, replica: Replica) -> None:
        """`replica` samples the episode, until `end`: it counts once that replica has proven itself afterwards."""
        replica.in_flight += 1
        self._weigh(replica)
        replica.unverified.add(episode)
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
                replica.unverified.discard(episode)
                replica.invalid.discard(episode)

    def keep(self, episodes: Collection[str]) -> None:
        """Only these are without a proof."""
        for replica in self.replicas:
            replica.unverified.intersection_update(episodes)
            replica.invalid.intersection_update(episodes)
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
        if not self._has_room(replica):
            return  # it is weighed again once it has
        heapq.heappush(self._loads, (replica.in_flight, self._numbers[replica]))
        if len(self._loads) > 8 * len(self.replicas) + 64:
            self._loads = [
                (serving.in_flight, self._numbers[serving]) for serving in self.serving if self._has_room(serving)
            ]
            heapq.heapify(self._loads)

    def _has_room(self, replica: Replica) -> bool:
        return replica in self._numbers and not (replica.on_trial and replica.in_flight)

    def _least_loaded(self) -> Replica | None:
        while self._loads:
            load, number = self._loads[0]
            replica = self._at.get(number)
            if replica is not None and replica.serving and replica.in_flight == load and self._has_room(replica):
                return replica
            heapq.heappop(self._loads)
        return None

    # -- what they can prove ---------------------------------------------------------------------------------------------------

    async def verify(self, finished: Collection[str]) -> tuple[list[str], list[Replica]]:
        """Ask every replica that serves or drains what it serves.

        Args:
            finished: Episodes that had ended before the question.

        Returns:
            Those of them that now count, and the replicas that could not prove themselves.
        """
        asked = [*self.serving, *self.draining]
        waiting = {replica: replica.unverified.intersection(finished) for replica in asked}
        proofs = await asyncio.gather(*(replica.verify() for replica in asked))
        counting = [
            episode
            for replica, proof in zip(asked, proofs, strict=True)
            if proof and (replica.serving or replica.draining)
            for episode in waiting[replica]
        ]
        return counting, [replica for replica, proof in zip(asked, proofs, strict=True) if not proof]


def rest_seconds(failures: int) -> float:
    """How long a server rests that was lost by a failed episode so many times in a row: none after the first, which may have been a restart."""
    return min(_FIRST_REST_SECONDS * 2.0 ** (failures - 2), _LONGEST_REST_SECONDS) if failures > 1 else 0.0


def least_loaded(replicas: Sequence[Replica], sound: bool = False) -> Replica | None:
    """The one with the fewest episodes; one that is tried with a single episode at a time only if there is no other, nor, with `sound`, one
    that failed the last one that it was given."""
    order = [(replica.on_trial, sound and replica.failures > 0, replica.in_flight) for replica in replicas]
    return min(zip(order, replicas, strict=True), key=lambda pair: pair[0], default=(None, None))[1]


class RoutedEnvPool:
    """An environment pool whose every episode goes to the least loaded serving replica: for one attempt at an evaluation.

    Args:
        avoid: Replicas that failed their verification after an earlier attempt: they are used if there is no other one.
        hopeless: Whether none that is away will serve this version again.
    """

    def __init__(
        self,
        pool: EnvPool,
        fleet: ReplicaPool,
        avoid: Collection[Replica] = (),
        hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pool, self._fleet, self._avoid, self._hopeless = pool, fleet, avoid, hopeless
        self._used: dict[Replica, int] = {}  # and how often each had been lost before
        self.turned_away = 0  # episodes for which there was no server

    def tasks(self, env: str) -> list[TaskInfo] | EndlessTasks:
        return self._pool.tasks(env)

    async def run(self, *, episode_id: str, env: str, deadline: float, **arguments: Any) -> EpisodeResult:
        """See `EnvPool.run`. What fails for want of the server is tried once with each other one that serves."""
        tried: set[Replica] = set()
        while True:  # each server is tried once
            subject, seconds = "server that serves", deadline - time.monotonic()
            try:
                replica = await wait_async(
                    partial(self._choose, tried),
                    subject=subject,
                    owner="inference",
                    seconds=seconds,
                    stop=self._hopeless,
                )
            except WaitTimeout as error:
                self.turned_away += 1
                return EpisodeResult(episode_id, env, "", Outcome.ENGINE_UNAVAILABLE, str(error))
            if replica is None:
                self.turned_away += 1
                return EpisodeResult(episode_id, env, "", Outcome.ENGINE_UNAVAILABLE, "the version is superseded")
            self._used.setdefault(replica, replica.losses)
            with self._fleet.busy(replica):
                result = await self._pool.run(
                    episode_id=episode_id, env=env, deadline=deadline, server=replica.name, **arguments
                )
            if result.outcome is not Outcome.ENGINE_UNAVAILABLE:
                if result.ok:
                    self._fleet.succeeded(replica)
                return result
            if not replica.on_trial:  # many may fail together here, where none is lost by it
                self._fleet.failed(replica)
            tried.add(replica)
            if tried.issuperset(self._fleet.serving) or time.monotonic() >= deadline:
                return result

    async def unverified(self) -> list[Replica]:
        """Replicas that cannot prove that they served the same all the time."""
        proofs = await asyncio.gather(*(replica.verify() for replica in self._used))
        used = zip(self._used.items(), proofs, strict=True)
        return [replica for (replica, before), proof in used if not proof or replica.losses != before]

    def _choose(self, tried: Collection[Replica]) -> Replica | None:
        serving = [replica for replica in self._fleet.serving if replica not in tried] or self._fleet.serving
        return least_loaded([replica for replica in serving if replica not in self._avoid] or serving)
