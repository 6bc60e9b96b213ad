"""A scripted fleet around the real orchestrator, and stories of what becomes of its servers during a run."""

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.fleet.client import Served, ServerError, VersionNotSent
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.replicas import Replica, ReplicaPool, ReplicaState
from prime_rl.fleet.router import RouterClient
from prime_rl.monitor import Monitor, Status
from prime_rl.orchestrator.orchestrator import Orchestrator
from support.ledgers import conserved
from support.scripted import ScriptedEngine, ScriptedPool, World, has_batch, until

NEVER_COMMITTED = 999  # the version of which a server with `wrong` weights samples


class Server(ScriptedEngine):
    """One of several servers.

    Attributes:
        up: Whether it answers.
        silent: It was started again, and no request failed by that.
        unsent: Versions that the trainer does not send it, and `asked_for` those of them that it asked for.
        wrong: Versions of which it computes something else, which the logprob check finds after a while.
        on_load: Awaited with the version before every load; what it raises fails the load.
    """

    def __init__(self, root: str) -> None:
        self.up, self.silent, self.leaving = True, False, False
        self.unsent: set[int] = set()
        self.wrong: set[int] = set()
        self.asked_for: list[int] = []
        self.claim: Served | None = None
        self.on_load: Callable[[int], Awaitable[object]] | None = None
        super().__init__(root)

    def restart(self) -> None:
        self.base()
        self.leaving, self.up = False, True

    def restart_silently(self) -> None:
        self.silent = True
        self.base()

    async def wait_ready(self, on_wait) -> None:
        while not self.up:
            await asyncio.sleep(0.01)

    async def answers(self) -> bool:
        return self.up

    async def served(self) -> Served:
        if not self.up:
            raise ServerError(f"{self.root} is down")
        return self.claim or replace(await super().served(), leaving=self.leaving)

    async def update(self, weights) -> Served:
        if self.on_load is not None:
            await self.on_load(weights.version)
        if not self.up:
            await asyncio.sleep(0.01)
            raise ServerError(f"{self.root} failed")
        if weights.version in self.unsent:
            self.asked_for.append(weights.version)
            raise VersionNotSent(f"version {weights.version} is superseded")
        served = await super().update(weights)
        self.claim = None
        if weights.version in self.wrong:
            self.claim, self.now = served, Served(NEVER_COMMITTED, "", served.boot)
            await asyncio.sleep(0.3)
            raise LogprobCheckFailed(f"{self.root} does not compute version {weights.version}: 0.3 nats")
        return served


class FleetPool(ScriptedPool):
    """What an episode gives depends on what its own server serves; a server that is down fails it."""

    def __init__(self, servers: list[Server], routed: bool = False) -> None:
        super().__init__(servers[0])
        self.pools = {server.root: ScriptedPool(server) for server in servers}
        self.turns = itertools.cycle(servers) if routed else None
        self.sent: dict[str, str] = {}  # episode -> server
        self.gates: dict[str, asyncio.Event] = {}  # of servers whose episodes do not end yet

    async def run(self, *, episode_id: str, server: str, env: str, **rest) -> EpisodeResult:
        server = server if self.turns is None else next(self.turns).root
        self.sent[episode_id] = server
        pool = self.pools[server]
        pool.before, pool.seconds = self.before, self.seconds
        pool.sampled, pool.evaluated = self.sampled, self.evaluated
        began, boot = pool.engine.up, pool.engine.boots
        if server in self.gates:
            await self.gates[server].wait()
        result = await pool.run(episode_id=episode_id, env=env, **rest)
        if not (began and pool.engine.up) or (pool.engine.boots != boot and not pool.engine.silent):
            return EpisodeResult(episode_id, env, "task", Outcome.ENGINE_UNAVAILABLE, "scripted")
        return result

    def sent_to(self, server: Server) -> int:
        return list(self.sent.values()).count(server.root)


class Router:
    """Leads to servers by turns; neither weights nor what is served goes through it."""

    root = "http://router"

    async def wait_ready(self, on_wait) -> None:
        await asyncio.sleep(0)

    async def answers(self) -> bool:
        return True


class FleetWorld(World):
    """A run with several servers; the trainer commits a version for every batch.

    Attributes:
        trained: The newest version of the trainer's present incarnation.
        over: Whether the story has happened; the last version is not committed before.
    """

    def __init__(self, directory, servers: int = 2, steps: int = 5, routed: bool = False, **settings) -> None:
        super().__init__(directory, **({"batch_size": 6, "async_level": 1, "max_steps": steps} | settings))
        self.steps, self.routed = steps, routed
        self.servers = [Server(f"http://server{number}") for number in range(servers)]
        self.pool = FleetPool(self.servers, routed)
        self.trained = self.incarnation = 0
        self.over = False
        self.trainer.live(0, 0)
        self.trainer.commit(0)

    def orchestrator(self) -> Orchestrator:
        monitor = Monitor(self.directory, "orchestrator", self.config.monitor, {})
        status = Status(self.directory, "orchestrator")
        engines = [RouterClient(Router(), self.servers)] if self.routed else self.servers
        self.current = Orchestrator(self.config, self.pool, engines, status, monitor)
        return self.current

    async def wait(self, condition: Callable[[], object]) -> None:
        await until(condition, run=self.running)

    async def batch(self, step: int) -> None:
        await self.wait(has_batch(self, step))

    async def serves(self, version: int) -> None:
        await self.wait(lambda: self.current.started and self.current.scheduler.version >= version)

    def replica(self, server: Server) -> Replica | None:
        return next((one for one in self.current.fleet.replicas if one.client is server), None)

    async def left(self, server: Server) -> None:
        await self.wait(lambda: self.replica(server).state is ReplicaState.QUARANTINED)

    @property
    def all_serve(self) -> bool:
        return len(self.current.fleet.ready) == len(self.servers)

    @asynccontextmanager
    async def loading(self, server: Server, version: int) -> AsyncIterator[None]:
        """The server is loading this version or a newer one, and does not end before the block does."""
        began, may_end = asyncio.Event(), asyncio.Event()

        async def hold(loaded: int) -> None:
            if loaded >= version:
                began.set()
                await may_end.wait()

        server.on_load = hold
        await self.wait(began.is_set)
        yield
        may_end.set()

    @asynccontextmanager
    async def sampling(self, server: Server) -> AsyncIterator[Replica]:
        """The server has episodes, of which none ends before the block does."""
        gate = self.pool.gates[server.root] = asyncio.Event()
        await self.wait(lambda: (one := self.replica(server)) is not None and one.in_flight)
        yield self.replica(server)
        gate.set()

    def quarantine(self, server: Server) -> None:
        self.current.weight_sync.quarantine(self.replica(server), "scripted")

    def restart_trainer(self, step: int) -> None:
        """A new incarnation of the trainer goes on from `step`."""
        self.incarnation += 1
        self.trained = step
        self.trainer.live(self.incarnation, step)

    async def _train(self) -> None:
        while self.trained < self.steps:
            await until(self._may_train, run=self.running)
            self.trainer.commit(self.trained + 1, self.incarnation)
            self.trained += 1

    def _may_train(self) -> bool:
        """The last step waits for the end of the script, unless the trainer is restarted meanwhile."""
        return has_batch(self, self.trained)() and (self.over or self.trained + 1 < self.steps)

    async def run(self, script: AsyncIterator[None]) -> None:
        """Run beside a script up to its `yield`. No episode is lost; versions that sampled are of the lineage."""
        self.running = asyncio.create_task(self.orchestrator().run())
        training, happening = asyncio.create_task(self._train()), asyncio.ensure_future(anext(script))
        happening.add_done_callback(lambda _: setattr(self, "over", True))
        try:
            async with asyncio.timeout(60):
                await asyncio.wait({self.running, training, happening}, return_when=asyncio.FIRST_EXCEPTION)
                for task in (self.running, happening, training):
                    if task.done():
                        task.result()
        finally:
            for task in (self.running, training, happening):
                task.cancel()
            await asyncio.gather(self.running, training, happening, return_exceptions=True)
        conserved(self.config.output_dir)
        for step in range(self.steps):
            assert self.really_sampled(step) <= set(self.versions(step))
            assert NEVER_COMMITTED not in self.really_sampled(step)


def story(ends: str | None = None, **settings: Any) -> Callable[[Callable[..., AsyncIterator[None]]], Any]:
    """Make a test of a script: an async generator of a world (and of what else the test asks for) with one `yield`.
    What precedes it happens during the run, what follows is checked at the end. `ends`: the error it ends with."""

    def wrap(script: Callable[..., AsyncIterator[None]]) -> Any:
        async def test(tmp_path, **requested: Any) -> None:
            world = FleetWorld(tmp_path, **(settings | {k: v for k, v in requested.items() if k == "servers"}))
            beside = script(world, **requested)
            if ends is None:
                await world.run(beside)
            else:
                with pytest.raises(UserError, match=ends):
                    await world.run(beside)
            async for _ in beside:
                raise AssertionError("a story has one yield")

        names = ["tmp_path", *list(inspect.signature(script).parameters)[1:]]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__name__, test.__doc__, test.__module__ = script.__name__, script.__doc__, script.__module__
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return wrap


def ready_fleet(count: int, slack: int) -> ReplicaPool:
    fleet = ReplicaPool([Server(f"http://{number}") for number in range(count)], slack=slack)
    for replica in fleet.replicas:
        fleet.move(replica, ReplicaState.READY)
    return fleet
