"""Servers behind a router: any of them may have sampled what came through it, so that all of them prove it, or it does not count."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError
from prime_rl.evals import servers as eval_servers
from prime_rl.fleet.client import Served, ServerError
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.replicas import ReplicaPool
from prime_rl.fleet.router import NO_VERSION, RouterClient, connect_all
from prime_rl.monitor import Monitor, Status
from prime_rl.orchestrator.orchestrator import Orchestrator
from support.fleet import FleetPool, FleetWorld, Server, run


class Router:
    """Leads to the servers by turns. `status` of its routes may differ."""

    root = "http://router"

    def __init__(self, servers: list[Server]) -> None:
        self.turns = itertools.cycle(servers)
        self.statuses = {"/v1/sample": 422, "/inference/v1/generate": 422}

    async def wait_ready(self, on_wait) -> None:
        await asyncio.sleep(0)

    async def answers(self) -> bool:
        return True

    async def served(self) -> Served:
        raise AssertionError("what is served is never asked through a router")

    async def update(self, weights) -> Served:
        raise AssertionError("weights never go through a router")

    async def status(self, path: str) -> int:
        return self.statuses[path]


class RouterPool(FleetPool):
    """What goes to the router is sampled by one of the servers, nobody says which."""

    def __init__(self, servers: list[Server]) -> None:
        super().__init__(servers)
        self.turns = itertools.cycle(servers)

    async def run(self, *, server: str, **rest):
        assert server == Router.root
        return await super().run(server=next(self.turns).root, **rest)


class RoutedWorld(FleetWorld):
    def __init__(self, directory, **settings) -> None:
        super().__init__(directory, servers=2, **settings)
        self.pool = RouterPool(self.servers)
        self.router = Router(self.servers)

    def orchestrator(self):
        monitor = Monitor(self.directory, "orchestrator", self.config.monitor, {})
        engine = RouterClient(self.router, self.servers)
        self.current = Orchestrator(self.config, self.pool, [engine], Status(self.directory, "orchestrator"), monitor)
        return self.current


@pytest.fixture
def servers() -> list[Server]:
    return [Server("http://a"), Server("http://b")]


@pytest.fixture
def routed(servers) -> RouterClient:
    return RouterClient(Router(servers), servers)


def nothing(*_) -> None:
    pass


class Weights:
    version, hash, incarnation = 3, "h" * 32, 0


async def test_all_parts_are_one_incarnation(servers, routed):
    """Contract: a part that was started again changes the identity of all; a part that leaves takes the others along."""
    before = await routed.served()
    assert before.boot == "1+1"
    servers[1].base()
    assert await routed.served() != before
    servers[0].now = Served(0, before.hash, "1", leaving=True)
    assert (await routed.served()).leaving


async def test_parts_of_different_weights_prove_nothing(servers, routed, heard):
    """Contract: what they say equals nothing that was given; it is said who serves what; an evaluation refuses them."""
    servers[1].now = Served(3, "f" * 32, "1")
    assert (await routed.served()).version == NO_VERSION
    await routed.served()
    assert [
        m for m in heard.messages if "different weights: http://a version 0" in m and "http://b version 3" in m
    ] == [heard.messages[-1]]
    fleet = ReplicaPool([routed])
    with pytest.raises(UserError, match="the servers behind http://router do not serve the same weights"):
        await eval_servers.admit(fleet, fleet.replicas, "m")


async def test_parts_that_serve_other_names_evaluate_nothing(servers, routed):
    """Contract: a name that one of them does not know would fail wherever a router leads to it."""
    for models, problem in ((("m", "x"), None), (("x",), "models without a common name, not m"), (None, None)):
        base = servers[0].now
        servers[0].now, servers[1].now = replace(base, models=("m", "y")), replace(base, models=models)
        fleet = ReplicaPool([routed])
        if problem is None:
            assert await eval_servers.admit(fleet, fleet.replicas, "m") == 0
        else:
            with pytest.raises(UserError, match=problem):
                await eval_servers.admit(fleet, fleet.replicas, "m")


async def test_a_proof_during_an_update_waits_for_its_end(servers, routed):
    """Contract: parts that are not equally far with an update are not taken for parts that differ."""
    slow = servers[1].update
    gate = asyncio.Event()

    async def update(weights) -> Served:
        await gate.wait()
        return await slow(weights)

    servers[1].update = update
    change = asyncio.create_task(routed.update(Weights))
    while servers[0].now.version != 3:
        await asyncio.sleep(0.01)
    proof = asyncio.create_task(routed.served())
    await asyncio.sleep(0.05)
    assert not proof.done()
    gate.set()
    assert (await proof).version == (await change).version == 3


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([ServerError("t"), None], ServerError),
        ([ServerError("t"), UserError("refused")], UserError),
        ([UserError("refused"), LogprobCheckFailed("c")], LogprobCheckFailed),
        ([LogprobCheckFailed("c"), ValueError("a bug")], ValueError),
    ],
)
async def test_the_gravest_error_of_an_update_is_told(servers, routed, errors, raised):
    """Contract: a part that computes something else is not hidden by another that did not answer."""
    for server, error in zip(servers, errors, strict=True):
        if error is not None:
            server.update = lambda weights, error=error: _raise(error)
    with pytest.raises(raised) as found:
        await routed.update(Weights)
    assert type(found.value) is raised


async def _raise(error: Exception) -> Served:
    raise error


async def test_a_router_without_a_token_route_is_refused(servers, routed):
    """Contract: chat alone would have to be tokenized again: refused before anything starts. One of the routes is enough."""
    routed._router.statuses["/v1/sample"] = 404
    await routed.wait_ready(nothing)
    routed = RouterClient(routed._router, routed._parts)
    routed._router.statuses["/inference/v1/generate"] = 405
    with pytest.raises(UserError, match="forwards neither /v1/sample nor /inference/v1/generate"):
        await routed.wait_ready(nothing)


def test_clients_are_made_of_settings():
    """Contract: a list is a list of servers; servers behind a router are one client, which episodes know by the router's address."""
    made = []

    def connect(root: str):
        made.append(root)
        return Server(root)

    config = ClientConfig(base_url="http://r:1/v1", admin_base_url=["http://a:1", "http://b:1/v1"])
    (client,) = connect_all(config, connect)
    assert (client.root, made) == ("http://r:1", ["http://r:1", "http://a:1", "http://b:1"])
    assert config.behind == {"http://r:1": ["http://a:1", "http://b:1"]}
    assert [each.root for each in connect_all(ClientConfig(base_url=["http://a:1", "http://b:1"]), connect)] == [
        "http://a:1",
        "http://b:1",
    ]


# -- the real orchestrator ---------------------------------------------------------------------------------------------------------


async def test_a_run_through_a_router(tmp_path):
    world = RoutedWorld(tmp_path)
    await run(world)
    assert [server.now.version for server in world.servers] == [4, 4]
    assert {world.pool.sent[episode] for episode in world.pool.sent} == {"http://server0", "http://server1"}


async def test_parts_of_different_weights_are_brought_together_at_the_start(tmp_path):
    """Contract: one of them was started again since an earlier run: that is no reason to refuse the run."""
    world = RoutedWorld(tmp_path)
    world.servers[1].now = Served(7, "f" * 32, "1")
    await run(world)


async def test_a_part_that_silently_starts_again_taints_what_all_sampled(tmp_path):
    """Contract: what came through the router while one part served its base again is made again, whoever sampled it; nothing wrong is trained."""
    world = RoutedWorld(tmp_path)
    restarted = []

    def before(episode: str, version: int):
        if version >= 1 and not restarted:
            restarted.append(episode)
            world.servers[1].silent = True
            world.servers[1].base()
        return None

    world.pool.before = before
    await run(world)
    assert restarted


async def test_a_part_that_fails_an_update_is_given_it_again(tmp_path):
    """Contract: half of the group on a new version is no version: all go back to one that all serve, and the new one is tried again."""
    world = RoutedWorld(tmp_path)
    update, failures = world.servers[1].update, []

    async def once(weights) -> Served:
        if weights.version >= 1 and not failures:
            failures.append(weights.version)
            raise ServerError("lost")
        return await update(weights)

    world.servers[1].update = once
    await run(world)
    assert failures
    assert [server.now.version for server in world.servers] == [4, 4]
