"""A scripted fleet around the real orchestrator: servers that are late, die, are started again, reject versions, and the pool of their episodes."""

import asyncio
from collections.abc import Callable, Coroutine

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.fleet.client import Served, ServerError
from prime_rl.fleet.replicas import ReplicaPool, ReplicaState
from prime_rl.monitor import Monitor, Status
from prime_rl.orchestrator.orchestrator import Orchestrator
from support.ledgers import conserved
from support.scripted import ScriptedEngine, ScriptedPool, World, has_batch, until

Story = Callable[[Orchestrator, "asyncio.Task[None]"], Coroutine[None, None, None]]


class Server(ScriptedEngine):
    """One of several. `up`: whether it answers; `silent`: it was started again, and no request failed; `refuses`: versions that it does not load."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.up = True
        self.silent = False
        self.refuses: set[int] = set()
        super().__init__()

    async def wait_ready(self, on_wait) -> None:
        while not self.up:
            await asyncio.sleep(0.01)

    async def answers(self) -> bool:
        return self.up

    async def served(self) -> Served:
        if not self.up:
            raise ServerError(f"{self.root} is down")
        return await super().served()

    async def update(self, weights) -> Served:
        if not self.up or weights.version in self.refuses:
            await asyncio.sleep(0.01)
            raise ServerError(f"{self.root} failed")
        return await super().update(weights)


class FleetPool(ScriptedPool):
    """What an episode gives depends on what the very server serves that it was sent to; a server that is down fails it."""

    def __init__(self, servers: list[Server]) -> None:
        super().__init__(servers[0])
        self.pools = {server.root: ScriptedPool(server) for server in servers}
        self.sent: dict[str, str] = {}  # episode -> server

    async def run(self, *, episode_id: str, server: str, env: str, **rest) -> EpisodeResult:
        self.sent[episode_id] = server
        pool = self.pools[server]
        pool.before, pool.seconds, pool.sampled, pool.evaluated = (
            self.before,
            self.seconds,
            self.sampled,
            self.evaluated,
        )
        began, boot = pool.engine.up, pool.engine.boots
        result = await pool.run(episode_id=episode_id, env=env, **rest)
        if not (began and pool.engine.up) or (pool.engine.boots != boot and not pool.engine.silent):
            return EpisodeResult(episode_id, env, "task", Outcome.ENGINE_UNAVAILABLE, "scripted")
        return result


class FleetWorld(World):
    def __init__(self, directory, servers: int = 3, **settings) -> None:
        super().__init__(directory, **({"batch_size": 6, "async_level": 1, "max_steps": 4} | settings))
        self.servers = [Server(f"http://server{number}") for number in range(servers)]
        self.pool = FleetPool(self.servers)
        self.trainer.live(0, 0)
        self.trainer.commit(0)

    def orchestrator(self):
        monitor = Monitor(self.directory, "orchestrator", self.config.monitor, {})
        status = Status(self.directory, "orchestrator")
        self.current = Orchestrator(self.config, self.pool, self.servers, status, monitor)
        return self.current

    @property
    def all_serve(self) -> bool:
        return len(self.current.fleet.ready) == len(self.servers)

    async def train(self, until_step: int = 4, last: Callable[[], bool] = lambda: True) -> None:
        """Commit a version for every batch, the last one not before `last`."""
        for step in range(until_step):
            await until(has_batch(self, step), timeout=30)
            if step + 1 == until_step:
                await until(last, timeout=30)
            self.trainer.commit(step + 1)

    def check(self, steps: int = 4) -> None:
        """What was trained was sampled by a version that its lineage names."""
        for step in range(steps):
            assert self.really_sampled(step) <= set(self.versions(step))


async def run(world: FleetWorld, steps: int = 4, last: Callable[[], bool] = lambda: True, story: Story | None = None):
    """A run of so many steps, `story(orchestrator, running)` beside it; afterwards no episode is lost, and all are of a version that their lineage names."""
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    beside = [asyncio.create_task(world.train(steps, last))]
    if story is not None:
        beside.append(asyncio.create_task(story(orchestrator, running)))
    async with asyncio.timeout(60):
        await running
        await asyncio.gather(*beside)
    conserved(orchestrator.config.output_dir)
    world.check(steps)
    return orchestrator


async def complete(world: World, running: "asyncio.Task[None]", *versions: int, incarnation: int = 0) -> None:
    """Commit each version once the batch that it is made of is there, and await the end of the run."""
    for version in versions:
        await until(has_batch(world, version - 1), run=running)
        world.trainer.commit(version, incarnation)
    async with asyncio.timeout(60):
        await running


def ready_fleet(count: int, slack: int) -> ReplicaPool:
    fleet = ReplicaPool([Server(f"http://{number}") for number in range(count)], slack=slack)
    for replica in fleet.replicas:
        fleet.move(replica, ReplicaState.READY)
    return fleet
