"""Servers that leave during a run on request, and join again: nothing is lost, and nothing made twice that needn't be."""

import asyncio
import random
from dataclasses import replace

import pytest

from prime_rl.errors import UserError
from prime_rl.fleet import weight_sync
from prime_rl.fleet.client import Served
from support.fleet import FleetWorld, Server, run
from support.ledgers import conserved
from support.scripted import has_batch, until


class Leaver(Server):
    leaving = False

    async def served(self) -> Served:
        return replace(await super().served(), leaving=self.leaving)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"PROBE_SECONDS": 0.05, "_DRAIN_POLL_SECONDS": 0.02, "RETRY_SECONDS": 0.05}.items():
        monkeypatch.setattr(weight_sync, name, seconds)


class LeavingWorld(FleetWorld):
    def __init__(self, directory, **settings) -> None:
        super().__init__(directory, **settings)
        for server in self.servers:
            server.__class__ = Leaver

    def sent_to(self, server: Server) -> int:
        return list(self.pool.sent.values()).count(server.root)


@pytest.mark.parametrize("moment", ["sampling", "loading"])
async def test_a_server_that_asks_to_leave_is_drained(tmp_path, moment, heard):
    """It gets nothing new; what is in flight there ends there while the others go on to newer versions; all that it sampled counts; nothing is
    made again; it loads nothing any more; and it is not asked again after it has left."""
    world = LeavingWorld(tmp_path, max_steps=8, async_level=2)
    leaver = world.servers[1]
    pool, at = world.pool.pools[leaver.root], {}
    quick_run, quick_update = pool.run, leaver.update
    drained = asyncio.Event()

    async def slow(**rest):
        await drained.wait()
        return await quick_run(**rest)

    async def loading(weights):
        if moment == "loading" and "replica" in at and at["replica"].in_flight:
            leaver.leaving = True
        await asyncio.sleep(0.2)
        return await quick_update(weights)

    leaver.update = loading

    async def story(orchestrator, running):
        replica = orchestrator.fleet.replicas[1]
        await until(has_batch(world, 0), run=running)
        pool.run = slow
        await until(lambda: replica.in_flight > 0, run=running)
        at["replica"] = replica
        if moment == "sampling":
            leaver.leaving = True
        await until(lambda: replica.draining, run=running)
        at.update(sent=world.sent_to(leaver), updates=list(leaver.updates), version=orchestrator.scheduler.version)
        await asyncio.sleep(0.2)
        in_flight = replica.in_flight
        drained.set()
        await until(lambda: replica not in orchestrator.fleet.replicas, run=running)
        leaver.up = False
        at["done"] = True
        assert in_flight > 0

    orchestrator = await run(world, 8, lambda: "done" in at, story)
    assert (world.sent_to(leaver), leaver.updates) == (at["sent"], at["updates"])
    assert conserved(orchestrator.config.output_dir).dropped.keys().isdisjoint({"stale", "errored"})
    assert f"{leaver.root} is to leave: it gets nothing new" in heard.text
    assert f"{leaver.root} has left, and may be stopped: nothing of it is made again" in heard.text


async def test_what_ended_last_on_a_leaving_server_is_verified_before_it_goes(tmp_path):
    """No batch is complete that would have it verified: the others are still at it."""
    world = LeavingWorld(tmp_path, servers=2, max_steps=3)
    stays, leaver = world.servers
    pool, left = world.pool.pools[stays.root], []
    quick_run = pool.run

    async def held(**rest):
        await until(lambda: bool(left))
        return await quick_run(**rest)

    async def story(orchestrator, running):
        await until(has_batch(world, 0), run=running)
        pool.run, world.pool.seconds = held, 0.3
        replica = orchestrator.fleet.replicas[1]
        await until(lambda: replica.in_flight > 0, run=running)
        leaver.leaving = True
        await until(lambda: replica not in orchestrator.fleet.replicas, run=running)
        leaver.up, world.pool.seconds = False, 0.02
        left.append(True)

    orchestrator = await run(world, 3, lambda: bool(left), story)
    assert "stale" not in conserved(orchestrator.config.output_dir).dropped


async def test_a_server_that_dies_while_it_drains_takes_only_its_own_with_it(tmp_path):
    """What was in flight there, or was not verified yet, is made again by the others."""
    world = LeavingWorld(tmp_path, servers=2, max_steps=6, max_error_rate=1.0)
    leaver = world.servers[1]
    left = []

    async def story(orchestrator, running):
        await until(has_batch(world, 1), run=running)
        world.pool.seconds = 0.4
        replica = orchestrator.fleet.replicas[1]
        await until(lambda: replica.in_flight > 0, run=running)
        leaver.leaving = True
        await until(lambda: replica.draining, run=running)
        leaver.up = False
        leaver.base()
        await until(lambda: replica not in orchestrator.fleet.replicas, run=running)
        world.pool.seconds = 0.02
        left.append(True)

    await run(world, 6, lambda: bool(left), story)


async def test_when_the_last_one_leaves_the_run_waits_and_a_later_incarnation_of_it_joins(tmp_path):
    world = LeavingWorld(tmp_path, servers=1, max_steps=5)
    server = world.servers[0]
    seen = []

    async def story(orchestrator, running):
        await until(has_batch(world, 1), run=running)
        server.leaving = True
        await until(lambda: not orchestrator.fleet.replicas, run=running)
        await asyncio.sleep(0.3)
        assert not orchestrator.fleet.replicas  # the incarnation that has left does not come back
        server.leaving = False
        server.base()  # started again
        await until(lambda: bool(orchestrator.fleet.ready), run=running)
        seen.append(True)

    orchestrator = await run(world, 5, lambda: bool(seen), story)
    assert server.updates[-1] == (5, 0)
    assert "stale" not in conserved(orchestrator.config.output_dir).dropped


async def test_when_the_last_one_has_left_nobody_is_waited_for_without_end(tmp_path):
    world = LeavingWorld(tmp_path, servers=1, max_steps=5)
    world.config.client.ready_timeout = 1.0
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 0), run=running)
    world.servers[0].leaving = True
    with pytest.raises(
        UserError, match=r"no inference server for 1 s \(client.base_url, client.ready_timeout\): all have left"
    ):
        async with asyncio.timeout(60):
            await running


async def test_an_evaluation_stands_that_a_leaving_server_had_a_part_in(tmp_path):
    """It ends what it has of it, and is verified: nothing of it is made again, though the server is gone when the evaluation ends."""
    evaluation = {
        "interval": 2, "at_start": False, "at_end": False, "rollouts_per_example": 12,
        "environments": [{"id": "env", "name": "held-out"}],
    }  # fmt: skip
    world = LeavingWorld(tmp_path, servers=2, max_steps=3, eval=evaluation)
    leaver, left = world.servers[1], []
    stays = world.pool.pools[world.servers[0].root]
    quick_run = stays.run

    async def slow(*, episode_id, **rest):
        if episode_id.startswith("eval"):
            await until(lambda: bool(left))
        return await quick_run(episode_id=episode_id, **rest)

    stays.run = slow

    async def story(orchestrator, running):
        await until(lambda: orchestrator.evaluations.running, run=running)
        replica = orchestrator.fleet.replicas[1]
        leaver.leaving = True
        await until(lambda: replica not in orchestrator.fleet.replicas, run=running)
        leaver.up = False
        left.append(True)

    await run(world, 3, story=story)
    assert len(world.pool.evaluated) == 12
    assert {world.pool.sent[name] for name in world.pool.sent if name.startswith("eval")} == {
        s.root for s in world.servers
    }


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_comes_and_goes_the_run_ends_and_its_stamps_are_right(tmp_path, seed):
    """Four servers that are late, ask to leave, die without a word, are started again, and take their time to load."""
    world = LeavingWorld(tmp_path, servers=4, max_steps=12, async_level=2, max_error_rate=1.0, rollout_timeout=5)
    chance, steady, ended = random.Random(seed), world.servers[0], []
    world.servers[3].up = False

    def slowly(server):
        update = server.update

        async def load(weights):
            await asyncio.sleep(chance.choice([0, 0, 0.1]))
            return await update(weights)

        server.update = load

    for server in world.servers:
        slowly(server)

    def restart(server):
        server.base()
        server.leaving, server.up = False, True

    async def story(orchestrator, running):
        for _ in range(25):
            await asyncio.sleep(chance.uniform(0.02, 0.2))
            world.pool.seconds = chance.choice([0.02, 0.05, 0.2])
            server = chance.choice(world.servers[1:])
            match chance.choice(["leave", "die", "restart", "restart"]):
                case "leave":
                    server.leaving = True
                case "die":
                    server.up = False
                case "restart" if server.leaving or not server.up:
                    restart(server)
            if chance.random() < 0.1:
                steady.leaving = True
            elif steady.leaving and chance.random() < 0.5:
                restart(steady)
        for server in (steady, *world.servers[1:]):
            if server is steady or not server.up:
                restart(server)
        world.pool.seconds = 0.02
        ended.append(True)

    await run(world, 12, lambda: bool(ended), story)
