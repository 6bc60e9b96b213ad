"""A server that is healthy, proves itself, and fails what it is given: it must not draw all the work to it."""

import asyncio
import random

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.fleet.replicas import ReplicaPool, ReplicaState, rest_seconds
from support.fleet import FleetWorld, Server, ready_fleet, run
from support.ledgers import conserved


def fail(fleet: ReplicaPool, replica, times: int) -> None:
    """Lost by a failed episode, and back, so often."""
    for _ in range(times):
        fleet.failed(replica)
        fleet.move(replica, ReplicaState.QUARANTINED)
        fleet.move(replica, ReplicaState.READY)


def test_of_episodes_that_fail_together_one_counts():
    """A restart fails all that is in flight at once: one failure, which costs nothing; further ones cost more and more."""
    fleet = ready_fleet(2, slack=0)
    victim = fleet.replicas[0]
    for _ in range(50):
        fleet.failed(victim)
        fleet.move(victim, ReplicaState.QUARANTINED)
    assert victim.failures == 1
    rests = [rest_seconds(failures) for failures in range(12)]
    assert rests[:5] == [0, 0, 1, 2, 4]
    assert rests[-1] == 60


@pytest.mark.parametrize("seed", range(20))
def test_a_retried_episode_goes_to_a_server_that_has_not_failed(seed):
    """Whatever happens: who is not ready gets nothing, and an episode that has failed before goes to a server that has not, if there is one."""
    chance = random.Random(seed)
    fleet = ready_fleet(3, slack=2)
    in_flight = []
    for _ in range(500):
        replica = chance.choice(fleet.replicas) if fleet.replicas else fleet.add(Server("http://new"))
        match chance.choices(["place", "end", "fail", "good", "join", "leave", "drain"], [10, 6, 2, 1, 1, 1, 1])[0]:
            case "place":
                clean = [r for r in fleet.ready if not r.failures]
                retry = chance.random() < 0.3
                chosen = fleet.place(chance.randint(0, 3), retry)
                assert (chosen is None) == (not fleet.ready)
                if chosen is not None:
                    assert chosen.ready
                    assert not (retry and chosen.failures and clean)
                    fleet.start("episode", chosen)
                    in_flight.append(chosen)
            case "end" if in_flight:
                fleet.end(in_flight.pop(chance.randrange(len(in_flight))))
            case "fail" if replica.ready:
                fail(fleet, replica, chance.randint(1, 3))
            case "good":
                fleet.succeeded(replica)
            case "join":
                fleet.move(fleet.add(Server("http://new")), ReplicaState.READY)
            case "leave":
                fleet.move(replica, ReplicaState.LEFT)
                assert replica not in fleet.replicas
            case "drain" if replica.ready:
                fleet.move(replica, ReplicaState.DRAINING)
        loads = [r.in_flight for r in fleet.ready]
        assert loads == [] or fleet.place(object()).in_flight == min(loads)


async def test_a_black_hole_gets_a_handful_and_costs_nothing(tmp_path):
    """It fails at once, so that it always is the least loaded. It rests longer and longer, every episode is made by the others, none is given up."""
    world = FleetWorld(tmp_path, servers=3, max_steps=8, weights_timeout=15, batch_size=12)
    pool, swallowed = world.pool.pools[world.servers[1].root], []

    async def sick(*, episode_id, env, **rest):
        await asyncio.sleep(0)
        swallowed.append(episode_id)
        return EpisodeResult(episode_id, env, "task", Outcome.ENGINE_UNAVAILABLE, "status 500")

    pool.run = sick
    orchestrator = await run(world, 8)
    counts = conserved(orchestrator.config.output_dir)
    assert counts.dropped.get("errored", 0) == len(swallowed)  # each is made again, none for the third time
    assert counts.trained + counts.batched == 8 * 12
    assert 0 < len(swallowed) <= 24 + 8  # its share at first, and after each rest


async def test_a_server_that_is_mended_gets_its_share_again(tmp_path):
    """One episode that ends well clears it."""
    world = FleetWorld(tmp_path, servers=2, max_steps=8, weights_timeout=15)
    pool = world.pool.pools[world.servers[1].root]
    healthy, count = pool.run, []

    async def sick(*, episode_id, env, **rest):
        count.append(episode_id)
        if len({name.split(".")[0] for name in count}) > 3:
            pool.run = healthy
        return EpisodeResult(episode_id, env, "task", Outcome.ENGINE_UNAVAILABLE, "status 500")

    pool.run = sick
    await run(world, 8, lambda: not world.current.fleet.replicas[1].failures)
    assert count
    assert list(world.pool.sent.values()).count(world.servers[1].root) > len(count)
