"""Versions that the trainer sends, and that are not to be had at some moment: nothing spins, nothing is lost, and the run goes on with what there is."""

import asyncio
from pathlib import Path

import pytest

from prime_rl.config.orchestrator import EvalSection
from prime_rl.envs.protocol import Outcome
from prime_rl.fleet import weight_sync
from prime_rl.fleet.client import Served, VersionNotSent
from prime_rl.monitor import read_metrics
from prime_rl.orchestrator.orchestrator import Orchestrator
from support.fleet import FleetWorld, complete
from support.ledgers import conserved
from support.scripted import ScriptedEngine, ScriptedPool, World, has_batch, until


class Receiving(ScriptedEngine):
    """`unsent`: versions that the trainer does not send."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent: set[int] = set()
        self.refused: list[int] = []

    async def update(self, weights) -> Served:
        if weights.version in self.unsent:
            self.refused.append(weights.version)
            raise VersionNotSent(f"version {weights.version} is superseded")
        return await super().update(weights)


@pytest.fixture
def world(tmp_path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.01)
    world = World(tmp_path, async_level=1, max_steps=4)
    world.engine = Receiving()
    world.pool = ScriptedPool(world.engine)
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    return world


async def begin(world: World, *unsent: int) -> "tuple[Orchestrator, asyncio.Task[None]]":
    """A run that has its first batch; version 1 is committed, and those in `unsent` are not sent any more."""
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 0), run=run)
    world.engine.unsent = set(unsent)
    world.trainer.commit(1)
    return orchestrator, run


async def finish(world: World, run: "asyncio.Task[None]", first: int = 0, incarnation: int = 0) -> None:
    """To the end; what was trained was sampled by a version that its lineage names, and no episode is lost."""
    await complete(world, run, *range(first + 1, 5), incarnation=incarnation)
    for step in range(4):
        assert world.really_sampled(step) <= set(world.versions(step))
        assert min(world.versions(step)) >= step - 1
    conserved(world.config.output_dir)


async def test_servers_go_on_until_the_version_is_sent(world: World) -> None:
    """Contract: however often a version is not sent, the servers sample on, and load it once it is."""
    _, run = await begin(world, 1)
    await until(lambda: world.engine.refused.count(1) > 2 * weight_sync._ATTEMPTS, run=run)
    await until(has_batch(world, 1), run=run)  # on version 0, as the async level allows
    assert world.engine.updates == [(0, 0)]
    world.engine.unsent = set()
    await until(lambda: (1, 0) in world.engine.updates, run=run)
    await finish(world, run, first=1)


async def test_a_version_that_is_never_sent(world: World) -> None:
    """Contract: the trainer is waited for as long as for any version, then the run ends and says why."""
    world.config.weights_timeout = 0.3
    _, run = await begin(world, 1)
    with pytest.raises(VersionNotSent, match="version 1 is superseded"):
        async with asyncio.timeout(60):
            await run


async def test_a_server_that_starts_again_after_its_version_is_superseded(world: World) -> None:
    """Contract: it gets the newest version, and the run goes on with that; what it had in flight is made again."""
    orchestrator, run = await begin(world, 1)
    await until(lambda: bool(world.engine.refused), run=run)
    await until(has_batch(world, 1), run=run)
    world.engine.unsent = {0, 1}
    world.engine.base()
    world.engine.now = Served(7, "of nobody", str(world.engine.boots))
    orchestrator.weight_sync.quarantine(orchestrator.fleet.replicas[0], "scripted")
    await until(lambda: 0 in world.engine.refused, run=run)
    assert not orchestrator.fleet.ready
    world.trainer.commit(2)
    await until(lambda: (2, 0) in world.engine.updates, run=run)
    await finish(world, run, first=2)


async def test_a_trainer_that_starts_again_meanwhile(world: World) -> None:
    """Contract: while a version is waited for, a new incarnation of the trainer is noticed, and its version served."""
    _, run = await begin(world, 1)
    await until(lambda: bool(world.engine.refused), run=run)
    world.trainer.live(1, 0)  # nothing was saved: it starts over
    world.engine.unsent = set()
    world.trainer.commit(1, incarnation=1)
    await until(lambda: (1, 1) in world.engine.updates, run=run)
    await finish(world, run, first=1, incarnation=1)


async def test_an_orchestrator_that_owes_an_evaluation_of_a_superseded_version(world: World) -> None:
    """Contract: an orchestrator that starts anew goes on with the newest version where the one that was served last is not to be had any more."""
    orchestrator, run = await begin(world)
    await until(lambda: orchestrator.scheduler.version == 1, run=run)
    await until(has_batch(world, 1), run=run)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    world.trainer.commit(2)
    world.engine.unsent = {0, 1}
    world.config.recover = True
    again = world.orchestrator()
    again.evaluations.owed = lambda version: True
    run = asyncio.create_task(again.run())
    await until(lambda: (2, 0) in world.engine.updates, run=run)
    assert world.engine.refused[-1] == 1
    await finish(world, run, first=2)


async def test_an_evaluation_whose_version_is_superseded(world: World, tmp_path: Path) -> None:
    """Contract: with the only server lost in the middle, and its version not to be had any more, the evaluation does not wait for it: the run goes on,
    and the evaluation is of the version that is served then."""
    environments = [{"id": "env", "name": "held-out"}]
    world.config.eval = EvalSection(
        interval=1, at_start=False, at_end=False, rollouts_per_example=8, environments=environments
    )
    world.config.max_concurrent = 2
    lost: list[str] = []

    def lose(episode: str, version: int) -> Outcome | None:
        if not episode.startswith("eval") or version != 1:
            return None
        if not lost:
            world.engine.base()
            world.engine.unsent = {1}
            world.trainer.commit(2)
        lost.append(episode)
        return Outcome.ENGINE_UNAVAILABLE

    world.pool.before = lose
    _, run = await begin(world)
    await until(lambda: (2, 0) in world.engine.updates, run=run)
    await finish(world, run, first=2)
    rows = read_metrics(tmp_path / "metrics" / "orchestrator.jsonl")
    evaluated = [row["step"] for row in rows if "eval/held-out/policy_version" in row]
    assert lost
    assert evaluated[0] == 2


async def test_two_servers_that_start_again_after_their_version_is_superseded(tmp_path: Path, monkeypatch) -> None:
    """Contract: while one of them serves it, nothing is superseded; once none does, both go on with the newest version."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.01)
    world = FleetWorld(tmp_path, servers=2, max_steps=4)
    unsent: set[int] = set()
    for server in world.servers:
        load = server.update

        async def update(weights, load=load) -> Served:
            if weights.version in unsent:
                raise VersionNotSent(f"version {weights.version} is superseded")
            return await load(weights)

        server.update = update
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 0), run=run)
    world.trainer.commit(1)
    await until(lambda: orchestrator.scheduler.version == 1 and world.all_serve, run=run)
    unsent |= {1, 2}
    first, second = orchestrator.fleet.replicas
    world.servers[0].base()
    orchestrator.weight_sync.quarantine(first, "scripted")
    await until(has_batch(world, 1), run=run)
    world.trainer.commit(2)  # nor is this one to be had
    await until(has_batch(world, 2), run=run)
    assert orchestrator.scheduler.version == 1
    assert orchestrator.fleet.ready == [second]
    unsent.discard(2)
    world.servers[1].base()
    orchestrator.weight_sync.quarantine(second, "scripted")
    await until(lambda: orchestrator.scheduler.version == 2 and world.all_serve, run=run)
    await complete(world, run, 3, 4)
    world.check(4)
