"""Where an episode goes, and what verifies it."""

import asyncio
import random

import pytest

from prime_rl.fleet.client import Served
from prime_rl.fleet.replicas import Replica, ReplicaState
from support.fleet import Server, ready_fleet


@pytest.mark.parametrize("seed", range(20))
def test_an_episode_goes_to_its_group_where_loads_are_even_and_a_retry_to_a_server_that_has_not_failed(seed):
    """Whatever ends, fails, joins or leaves: no server given an episode has over `slack` more than the least loaded;
    one that is not ready gets none; where loads allow it an attempt goes where its group went before."""
    chance = random.Random(seed)
    slack = chance.randint(0, 4)
    fleet = ready_fleet(chance.randint(1, 6), slack)
    in_flight, homes = [], {}
    for _ in range(500):
        replica = chance.choice(fleet.replicas)
        match chance.choices(["place", "end", "fail", "good", "join", "away"], [20, 12, 3, 2, 1, 2])[0]:
            case "place":
                least = min((r.in_flight for r in fleet.ready), default=None)
                clean = [r for r in fleet.ready if not r.failures]
                group, retry = chance.randint(0, 5), chance.random() < 0.2
                chosen = fleet.place(group, retry)
                assert (chosen is None) == (least is None)
                if chosen is None:
                    continue
                assert chosen.ready
                assert not (retry and chosen.failures and clean)
                home = homes.get(group)
                if not retry:
                    assert chosen.in_flight <= least + slack
                    assert home is None or not home.ready or home.in_flight > least + slack or chosen is home
                homes[group] = chosen
                fleet.start("episode", chosen)
                in_flight.append(chosen)
            case "end" if in_flight:
                fleet.end(in_flight.pop(chance.randrange(len(in_flight))))
            case "fail" if replica.ready:
                fleet.failed(replica)
                fleet.move(replica, ReplicaState.QUARANTINED)
                fleet.move(replica, ReplicaState.READY)
            case "good":
                replica.failures = 0
            case "join":
                fleet.replicas.append(Replica(Server("http://new")))
                fleet.move(fleet.replicas[-1], ReplicaState.READY)
            case "away":
                fleet.move(replica, ReplicaState.QUARANTINED if replica.ready else ReplicaState.READY)


async def test_a_verification_does_not_count_what_a_restarted_server_sampled_though_it_has_loaded_again():
    """Contract: also where it was restarted and loaded again between question and answer, which is then right."""
    fleet = ready_fleet(1, slack=0)
    (replica,) = fleet.replicas
    replica.loaded = await replica.client.served()
    fleet.start("a", replica)
    served, asked = replica.client.served, asyncio.Event()

    async def later():
        asked.set()
        await replica._load_ended.wait()
        return await served()

    replica.client.served = later
    verifying = asyncio.create_task(fleet.verify({"a"}))
    await asked.wait()
    replica.client.base()  # started again
    await replica.load(None)
    assert await verifying == ([], [])
    assert replica.invalid == {"a"}


async def test_a_server_that_served_other_weights_for_a_while_fails_its_verification():
    """Contract: also where it was given its own again meanwhile. Loads are compared once an update has ended."""
    (replica,) = ready_fleet(1, slack=0).replicas
    replica.client.now = replica.loaded = Served(1, "a", "boot", loads="1")
    assert await replica.verify()
    replica.client.now = Served(1, "a", "boot", loads="3")
    assert not await replica.verify()
    assert replica.mismatch == "the server loaded weights that others gave it, then version 1 again"

    replica.client.now, replica.loading = Served(2, "b", "boot", loads="2"), 2
    verifying = asyncio.create_task(replica.verify())
    await asyncio.sleep(0.01)
    assert not verifying.done()
    replica.loaded, replica.loading = replica.client.now, None
    replica._load_ended.set()
    assert await verifying
