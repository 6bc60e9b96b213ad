"""Several servers: where an episode goes, who has to prove what, and that one which is lost takes only its own with it."""

import asyncio
import random
from dataclasses import replace

import pytest

from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from prime_rl.evals import servers as eval_servers
from prime_rl.fleet import weight_sync
from prime_rl.fleet.client import Served
from prime_rl.fleet.replicas import ReplicaPool, ReplicaState
from prime_rl.monitor import read_metrics
from support.fleet import FleetWorld, Server, ready_fleet, run
from support.scripted import has_batch, until

# -- where an episode goes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_load_is_even_to_the_slack_and_groups_stay_together(seed):
    """Whatever ends when: no server has more than `slack` + 1 episodes above the one with the fewest when it is given one; one that is away
    gets none; where loads allow it an attempt goes where its group went before."""
    chance = random.Random(seed)
    slack = chance.randint(0, 4)
    fleet = ready_fleet(chance.randint(1, 6), slack)
    flying, homes = [], {}
    for _ in range(500):
        if chance.random() < 0.55 or not flying:
            if chance.random() < 0.05:
                replica = chance.choice(fleet.replicas)
                fleet.move(replica, ReplicaState.QUARANTINED if replica.ready else ReplicaState.READY)
            least = min((r.in_flight for r in fleet.ready), default=None)
            group = chance.randint(0, 5)
            chosen = fleet.place(group)
            if least is None:
                assert chosen is None
                continue
            assert chosen.ready
            assert chosen.in_flight <= least + slack
            home = homes.get(group)
            if home is not None and home.ready and home.in_flight <= least + slack:
                assert chosen is home
            homes[group] = chosen
            fleet.start("episode", chosen)
            flying.append(chosen)
        else:
            fleet.end(flying.pop(chance.randrange(len(flying))))


async def test_a_proof_is_of_one_server_alone():
    """What another one sampled does not count by it, nor what ended after the question. One that drains proves what it
    has on the version that it has; the others go on to a newer one meanwhile."""
    fleet = ready_fleet(2, slack=0)
    one, two = fleet.replicas
    for replica in fleet.replicas:
        replica.loaded = await replica.engine.served()
    fleet.start("a", one)
    fleet.start("b", two)
    fleet.start("late", one)
    two.engine.base()  # started again
    assert await fleet.verify({"a", "b"}) == (["a"], [two])
    fleet.move(one, ReplicaState.DRAINING)
    assert fleet.place("group") is two
    two.engine.now = two.loaded = Served(1, "newer", "1")
    assert await fleet.verify({"a"}) == (["a"], [])
    one.engine.base()
    assert await fleet.verify({"a"}) == ([], [one])


async def test_a_server_that_served_other_weights_for_a_while_fails_its_verification():
    """Contract: also where it has been given its own again meanwhile. The number of loads is compared once an update has ended, not during it."""
    (replica,) = ready_fleet(1, slack=0).replicas
    replica.engine.now = replica.loaded = Served(1, "a", "boot", loads="1")
    assert await replica.verify()
    replica.engine.now = Served(1, "a", "boot", loads="3")
    assert not await replica.verify()

    replica.engine.now, replica.loading = Served(2, "b", "boot", loads="2"), Served(2, "b", "boot")
    verifying = asyncio.create_task(replica.verify())
    await asyncio.sleep(0.01)
    assert not verifying.done()
    replica.loaded, replica.loading = replica.engine.now, None
    replica._load_ended.set()
    assert await verifying


# -- runs ------------------------------------------------------------------------------------------------------------------------


async def test_every_server_is_kept_on_the_newest_version_and_gets_its_share(tmp_path):
    world = FleetWorld(tmp_path)
    await run(world)
    assert all(server.updates == world.servers[0].updates for server in world.servers)
    assert world.servers[0].updates[-1] == (4, 0)
    shares = [list(world.pool.sent.values()).count(server.root) for server in world.servers]
    assert max(shares) - min(shares) <= len(world.pool.sent) / 3
    world.check()


async def test_a_run_begins_with_the_first_server_and_others_join(tmp_path):
    """One that comes up late is given what the others serve by then, and work."""
    world = FleetWorld(tmp_path, max_steps=6)
    late = world.servers[2]
    late.up = False

    async def story(orchestrator, running):
        await until(has_batch(world, 1), run=running)
        assert late.updates == []
        late.up = True

    await run(world, 6, lambda: world.all_serve, story)
    assert late.updates[-1] == (6, 0)


@pytest.mark.parametrize("moment", ["in a batch", "in an update", "silently"])
@pytest.mark.parametrize("back", [True, False])
async def test_a_server_that_dies_takes_only_its_own_with_it(tmp_path, moment, back):
    """While it samples, while it loads, or unnoticed (it is back with its base when it is asked): the others go on, what it had is made again."""
    world = FleetWorld(tmp_path, servers=2, max_steps=6, max_error_rate=1.0)
    victim = world.servers[1]
    died = []

    def die() -> None:
        died.append(True)
        victim.base()
        victim.silent = moment == "silently"
        victim.up = moment == "silently"
        if back and not victim.up:
            asyncio.get_running_loop().call_later(0.3, setattr, victim, "up", True)

    def before(episode: str, version: int) -> Outcome | None:
        if version >= 2 and not died and world.pool.sent[episode] == victim.root and moment != "in an update":
            die()
        return None

    update = victim.update

    async def loading(weights) -> Served:
        if weights.version >= 2 and not died and moment == "in an update":
            die()
        return await update(weights)

    world.pool.before, victim.update = before, loading
    returns = back or moment == "silently"
    await run(world, 6, lambda: not returns or (victim.boots == 2 and world.all_serve))
    assert died
    assert all(server.updates[-1][0] == 6 for server in world.servers if returns or server is not victim)


async def test_no_batch_waits_for_a_server_that_can_load_nothing_any_more(tmp_path, monkeypatch):
    """Contract: what it finished counts once it is verified for the version that it has, though it never gets work again."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.05)
    world = FleetWorld(tmp_path, servers=2, max_steps=6)
    world.servers[0].refuses, world.pool.seconds = set(range(3, 7)), 0.1  # it samples while version 3 is loaded
    await run(world, 6)
    assert "http://server0" in world.pool.sent.values()


async def test_when_all_are_gone_the_run_waits_for_the_first_to_come_back(tmp_path):
    world = FleetWorld(tmp_path, max_steps=5, max_error_rate=1.0)

    async def story(orchestrator, running):
        await until(has_batch(world, 1), run=running)
        for server in world.servers:
            server.up = False
            server.base()
        await asyncio.sleep(0.5)
        world.servers[2].up = True

    await run(world, 5, story=story)


async def test_evaluations_are_made_by_all_and_made_again_when_one_is_lost(tmp_path):
    """Contract: an attempt counts for a version only if its server is verified to have served that meanwhile."""
    world = FleetWorld(
        tmp_path, max_steps=4, max_error_rate=1.0,
        eval={"interval": 2, "at_start": False, "rollouts_per_example": 12, "environments": [{"id": "env", "name": "held-out"}]},
    )  # fmt: skip
    restarted = []

    def before(episode: str, version: int) -> Outcome | None:
        if episode.startswith("eval") and not restarted:
            restarted.append(episode)
            world.servers[1].silent = True
            world.servers[1].base()
        return None

    world.pool.before = before
    await run(world)
    evaluated = [server for episode, server in world.pool.sent.items() if episode.startswith("eval")]
    assert restarted
    assert set(evaluated) == {server.root for server in world.servers}
    assert len(world.pool.evaluated) > 2 * 12  # what the lost one had of it was made again


@pytest.mark.parametrize(
    ("second", "healthy", "problem", "ready"),
    [
        ({"version": 3, "hash": "f" * 32}, 2, "do not serve the same weights: http://0 version 0 .*, http://1 version 3", []),
        ({}, 1, None, [True, False]),
        ({"leaving": True}, 2, None, [True, False]),  # it is to leave, and there is another
        ({"leaving": True}, -1, None, [False, True]),
        ({"models": ("other", "more")}, 2, "the server at http://1 serves other, more, not m: .* --model.name other", []),
        ({"models": ("other", "m")}, 2, None, [True, True]),
    ],
)  # fmt: skip
async def test_which_servers_evaluate(second, healthy, problem, ready):
    """Contract: one line at once, not requests that are all refused, where weights differ or one has another model."""
    fleet = ReplicaPool([Server("http://0"), Server("http://1")])
    two = fleet.replicas[1]
    two.engine.now = replace(two.engine.now, **second)
    answering = [two] if healthy < 0 else fleet.replicas[:healthy]
    if problem is not None:
        with pytest.raises(UserError, match=problem):
            await eval_servers.admit(fleet, answering, "m")
    else:
        assert await eval_servers.admit(fleet, answering, "m") == 0
        assert [replica.ready for replica in fleet.replicas] == ready


async def test_no_server_at_all_is_one_clear_line(tmp_path):
    world = FleetWorld(tmp_path, servers=2)

    async def never(on_wait) -> None:
        raise UserError("nobody there")

    for server in world.servers:
        server.wait_ready = never
    with pytest.raises(ExceptionGroup) as raised:
        await world.orchestrator().run()
    assert "nobody there; nobody there" in str(raised.value.exceptions[0])


async def test_a_server_of_another_base_model_is_refused_at_start(tmp_path):
    world = FleetWorld(tmp_path, servers=2)
    world.servers[1].now = Served(0, "f" * 32, "other")
    with pytest.raises(UserError, match="server1 serves another base model"):
        await world.orchestrator().run()


async def test_updates_are_reported_in_parts(tmp_path):
    """Contract: what servers say an update took is in the step's metrics: of every part what the slowest took; a server that says nothing counts
    for nothing."""
    world = FleetWorld(tmp_path)
    world.servers[0].update_seconds = {"stage": 0.5, "pause": 0.25}
    world.servers[1].update_seconds = {"stage": 0.25, "pause": 0.75}
    await run(world)
    rows = read_metrics(tmp_path / "metrics" / "orchestrator.jsonl")
    updates = sum(len(server.updates) for server in world.servers) / len(world.servers)
    parts = {key: sum(row.get(f"time/update_{key}", 0.0) for row in rows) for key in ("stage", "pause")}
    assert 0 < parts["stage"] <= 0.5 * updates
    assert parts["pause"] == 1.5 * parts["stage"]
