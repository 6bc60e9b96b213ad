"""Several servers: where an episode goes, who has to prove what, and that one which is lost takes only its own with it."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.evals import servers as eval_servers
from prime_rl.fleet.client import Served, ServerError
from prime_rl.fleet.replicas import ReplicaPool
from prime_rl.monitor import Monitor, Status, read_metrics
from prime_rl.orchestrator.orchestrator import Orchestrator
from support.ledgers import conserved
from support.scripted import ScriptedEngine, ScriptedPool, World, has_batch, until


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
        return len(self.current.fleet.serving) == len(self.servers)

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


async def run(world: FleetWorld, steps: int = 4, last: Callable[[], bool] = lambda: True):
    orchestrator = world.orchestrator()
    trainer = asyncio.create_task(world.train(steps, last))
    async with asyncio.timeout(60):
        await orchestrator.run()
        await trainer
    conserved(orchestrator.config.output_dir)
    return orchestrator


# -- where an episode goes -------------------------------------------------------------------------------------------------------


def serving_fleet(count: int, slack: int) -> ReplicaPool:
    fleet = ReplicaPool([Server(f"http://{number}") for number in range(count)], slack=slack)
    for replica in fleet.replicas:
        fleet.admit(replica)
    return fleet


@pytest.mark.parametrize("seed", range(20))
def test_load_is_even_to_the_slack_and_groups_stay_together(seed):
    """Whatever ends when: no server has more than `slack` + 1 episodes above the one with the fewest when it is given one; one that is away
    gets none; where loads allow it an attempt goes where its group went before."""
    chance = random.Random(seed)
    slack = chance.randint(0, 4)
    fleet = serving_fleet(chance.randint(1, 6), slack)
    flying, homes = [], {}
    for _ in range(500):
        if chance.random() < 0.55 or not flying:
            if chance.random() < 0.05:
                replica = chance.choice(fleet.replicas)
                (fleet.lose if replica.serving else fleet.admit)(replica)
            least = min((r.in_flight for r in fleet.serving), default=None)
            group = chance.randint(0, 5)
            chosen = fleet.place(group)
            if least is None:
                assert chosen is None
                continue
            assert chosen.serving
            assert chosen.in_flight <= least + slack
            home = homes.get(group)
            if home is not None and home.serving and home.in_flight <= least + slack:
                assert chosen is home
            homes[group] = chosen
            fleet.start("episode", chosen)
            flying.append(chosen)
        else:
            fleet.end(flying.pop(chance.randrange(len(flying))))


async def test_a_proof_is_of_one_server_alone():
    """What another one sampled does not count by it, nor what ended after the question."""
    fleet = serving_fleet(2, slack=0)
    one, two = fleet.replicas
    for replica in fleet.replicas:
        replica.given = await replica.engine.served()
    fleet.start("a", one)
    fleet.start("b", two)
    fleet.start("late", one)
    two.engine.base()  # started again
    counting, wrong = await fleet.verify({"a", "b"})
    assert (counting, wrong) == (["a"], [two])


async def test_a_server_that_drains_proves_what_it_has_on_the_version_that_it_has():
    """The others go on to a newer one meanwhile."""
    fleet = serving_fleet(2, slack=0)
    one, two = fleet.replicas
    for replica in fleet.replicas:
        replica.given = await replica.engine.served()
    fleet.start("a", one)
    fleet.drain(one)
    assert fleet.place("group") is two
    two.engine.now = two.given = Served(1, "newer", "1")
    assert await fleet.verify({"a"}) == (["a"], [])
    one.engine.base()  # started again
    assert await fleet.verify({"a"}) == ([], [one])


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
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    trainer = asyncio.create_task(world.train(6, lambda: world.all_serve))
    await until(has_batch(world, 1), run=running)
    assert late.updates == []
    late.up = True
    async with asyncio.timeout(60):
        await running
        await trainer
    world.check(6)
    assert late.updates[-1] == (6, 0)


@pytest.mark.parametrize("moment", ["in a batch", "in an update", "silently"])
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("count", [2, 3])
async def test_a_server_that_dies_takes_only_its_own_with_it(tmp_path, moment, back, count):
    """While it samples, while it loads, or unnoticed (it is back with its base when it is asked): the others go on, what it had is made again."""
    world = FleetWorld(tmp_path, servers=count, max_steps=6, max_error_rate=1.0)
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
    world.check(6)
    assert all(server.updates[-1][0] == 6 for server in world.servers if returns or server is not victim)


async def test_a_server_that_refuses_a_version_is_left_out_and_the_others_serve_it(tmp_path):
    world = FleetWorld(tmp_path, max_steps=6)
    world.servers[0].refuses = {3}
    await run(world, 6)
    world.check(6)
    assert all(server.updates[-1][0] == 6 for server in world.servers[1:])


async def test_when_all_are_gone_the_run_waits_for_the_first_to_come_back(tmp_path):
    world = FleetWorld(tmp_path, max_steps=5, max_error_rate=1.0)
    orchestrator = world.orchestrator()
    running, trainer = asyncio.create_task(orchestrator.run()), asyncio.create_task(world.train(5))
    await until(has_batch(world, 1), run=running)
    for server in world.servers:
        server.up = False
        server.base()
    await asyncio.sleep(0.5)
    world.servers[2].up = True
    async with asyncio.timeout(60):
        await running
        await trainer
    conserved(orchestrator.config.output_dir)
    world.check(5)


async def test_evaluations_are_made_by_all_and_made_again_when_one_is_lost(tmp_path):
    """Half of an evaluation on a server that was started again is no evaluation."""
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
    assert len(world.pool.evaluated) > 2 * 12  # one of the two was made twice


async def test_servers_of_different_weights_are_not_evaluated_together():
    fleet = ReplicaPool([Server("http://0"), Server("http://1")])
    fleet.replicas[1].engine.now = Served(3, "f" * 32)
    with pytest.raises(UserError, match="do not serve the same weights: http://0 version 0 .*, http://1 version 3"):
        await eval_servers.admit(fleet, fleet.replicas, "m")
    fleet.replicas[1].engine.base()
    assert await eval_servers.admit(fleet, fleet.replicas[:1], "m") == 0
    assert [replica.serving for replica in fleet.replicas] == [True, False]


async def test_a_server_that_is_to_leave_evaluates_nothing_while_there_is_another():
    for leaving, expected in (({0}, [False, True]), ({0, 1}, [True, True])):
        fleet = ReplicaPool([Server("http://0"), Server("http://1")])
        for number in leaving:
            fleet.replicas[number].engine.now = replace(fleet.replicas[number].engine.now, leaving=True)
        await eval_servers.admit(fleet, fleet.replicas, "m")
        assert [replica.serving for replica in fleet.replicas] == expected


async def test_a_server_of_another_model_evaluates_nothing():
    """Contract: one line at once, in place of a search for the tokenizer of a model that nobody serves, and of requests that are all refused."""
    fleet = ReplicaPool([Server("http://0")])
    fleet.replicas[0].engine.now = replace(fleet.replicas[0].engine.now, models=("other", "more"))
    with pytest.raises(UserError, match="the server at http://0 serves other, more, not mine: .* --model.name other"):
        await eval_servers.admit(fleet, fleet.replicas, "mine")
    assert await eval_servers.admit(fleet, fleet.replicas, "more") == 0


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
