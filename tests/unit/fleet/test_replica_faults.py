"""Several servers, at the moments that are hardest to get right: each of these once went wrong."""

import asyncio

import pytest

from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from prime_rl.fleet import weight_sync
from prime_rl.fleet.client import Served, ServerError
from prime_rl.monitor import Status, read_metrics
from prime_rl.transport.incarnations import read_lease
from support.fleet import FleetWorld, complete, run
from support.scripted import World, has_batch, until

EVAL = {"interval": 2, "at_start": False, "environments": [{"id": "env", "name": "held-out"}]}


def eval_rows(directory) -> list[dict[str, float]]:
    rows = read_metrics(directory / "metrics" / "orchestrator.jsonl")
    return [row for row in rows if "eval/held-out/errors/rate" in row]


async def test_a_restart_that_an_update_covers_up_is_found_out(tmp_path):
    """It serves the newer version at once, while another one is still loading: what it sampled with its base before does not count by that."""
    world = FleetWorld(tmp_path, servers=2, max_steps=5, async_level=2)
    a, b = world.servers
    up_a = a.update

    async def slow(weights):
        if weights.version == 2:
            await asyncio.sleep(1.5)
        return await up_a(weights)

    a.update = slow
    pool_run = world.pool.pools[a.root].run

    async def slower(**rest):  # A's episodes are longer
        if world.pool.seconds == 0.1:
            await asyncio.sleep(0.4)
        return await pool_run(**rest)

    world.pool.pools[a.root].run = slower
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 2), run=running)  # all that version 0 allows
    world.pool.seconds = 0.1
    world.trainer.commit(1)
    await until(lambda: orchestrator.scheduler.version == 1, run=running)  # episodes for step 3 start on version 1
    b.silent = True
    b.base()  # B is started again by somebody: it samples them with its base
    await asyncio.sleep(0.2)
    world.trainer.commit(2)
    await asyncio.sleep(0.6)
    world.pool.seconds = 0.02
    await complete(world, running, 3, 4, 5)
    world.check(5)


async def test_an_evaluation_waits_for_a_server(tmp_path):
    """One server; an episode fails there during the update after which an evaluation is due."""
    world = World(
        tmp_path,
        max_steps=5,
        max_error_rate=1.0,
        async_level=2,
        batch_size=6,
        eval=EVAL | {"rollouts_per_example": 6},
    )
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    update, seen = world.engine.update, []

    def fail(e, v):
        if e.startswith("eval") or seen:
            return None
        seen.append(e)
        return Outcome.ENGINE_UNAVAILABLE

    async def slow(weights):
        if weights.version == 2:
            world.pool.before = fail
            await asyncio.sleep(0.5)
        return await update(weights)

    world.engine.update = slow
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 2), run=running)  # all that version 0 allows
    world.pool.seconds = 0.4
    world.trainer.commit(1)
    await until(lambda: orchestrator.scheduler.in_flight > 3, run=running)
    world.trainer.commit(2)
    for v in (3, 4, 5):
        await until(has_batch(world, v - 1), run=running)
        await until(lambda v=v: orchestrator.scheduler.version >= v - 1, run=running)
        world.trainer.commit(v)
    async with asyncio.timeout(60):
        await running
    assert seen
    assert [row["eval/held-out/errors/rate"] for row in eval_rows(tmp_path)] == [0.0, 0.0, 0.0]


async def test_a_server_of_another_base_does_not_end_the_run_when_the_good_one_restarts(tmp_path, monkeypatch):
    """A server of another base came late: refused again and again; then the good one is restarted."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(weight_sync, "MAX_RETRY_SECONDS", 0.3)
    world = FleetWorld(tmp_path, servers=2, max_steps=6, max_error_rate=1.0)
    good, bad = world.servers
    bad.up = False
    seen = []

    async def story(orchestrator, running):
        await until(has_batch(world, 0), run=running)
        bad.now = Served(0, "f" * 32, "other")
        bad.up = True
        await asyncio.sleep(1)
        world.pool.seconds = 0.3
        await asyncio.sleep(0.2)
        good.up = False
        good.base()
        asyncio.get_running_loop().call_later(1.0, setattr, good, "up", True)
        seen.append(True)

    await run(world, 6, lambda: bool(seen), story)


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_version_that_goes_away_between_look_and_load(tmp_path, servers):
    """The trainer has begun a new incarnation: what it commits is served."""
    world = FleetWorld(tmp_path, servers=servers, max_steps=3)
    orchestrator = world.orchestrator()
    history = orchestrator.weight_sync.history
    manifest, gone = history.manifest, []

    def removed(version):
        if version == 2 and not gone:
            gone.append(1)
            world.trainer.live(1, 1)
        return manifest(version)

    history.manifest = removed
    running = asyncio.create_task(orchestrator.run())
    for v in (1, 2):
        await until(has_batch(world, v - 1), run=running)
        world.trainer.commit(v)
        await until(lambda v=v: orchestrator.scheduler.version == v or gone, run=running)
    await asyncio.sleep(0.3)
    await complete(world, running, 2, 3, incarnation=1)


async def test_a_server_that_is_loading_at_the_end_leaves_no_lease(tmp_path):
    """A clean end gives the lease back."""
    world = FleetWorld(tmp_path, servers=2, max_steps=3)
    late = world.servers[1]
    late.up = False
    up = late.update

    async def slow(weights):
        await asyncio.sleep(5)
        return await up(weights)

    late.update = slow

    async def story(orchestrator, running):
        await until(has_batch(world, 0), run=running)
        late.up = True

    await run(world, 3, story=story)
    assert read_lease(tmp_path) is None


async def test_a_server_that_dies_after_the_request_to_stop(tmp_path):
    """The stop is as clean as without it."""
    world = FleetWorld(tmp_path, servers=2, max_steps=50, max_error_rate=1.0)
    st = Status(tmp_path, "trainer")
    st.phase("saving")
    world.pool.seconds = 0.3
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    await until(lambda: orchestrator.started and orchestrator.scheduler.in_flight > 3, run=running)
    orchestrator.stop()
    await asyncio.sleep(1.5)
    world.servers[1].up = False
    orchestrator.weight_sync.quarantine(orchestrator.fleet.replicas[1], "scripted")  # what `watch` does after 15 s
    await asyncio.sleep(1.5)
    st.done("stopped")
    async with asyncio.timeout(60):
        await running


async def test_one_that_cannot_say_what_it_serves_does_not_keep_the_others(tmp_path, monkeypatch):
    """It is left out, with a warning."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.02)
    world = FleetWorld(tmp_path, servers=3)

    async def served():
        raise ServerError("GET /weights fails at server1")

    world.servers[1].served = served
    await run(world)


async def test_a_server_that_hangs_in_an_update_is_left_behind(tmp_path, monkeypatch):
    """The others serve the version as soon as it is known to be lost."""
    monkeypatch.setattr(weight_sync, "PROBE_SECONDS", 0.1)
    world = FleetWorld(tmp_path, servers=3, max_steps=4, max_error_rate=1.0)
    bad = world.servers[1]
    hung, released = asyncio.Event(), asyncio.Event()
    up = bad.update

    async def update(weights):
        if weights.version >= 1:
            bad.up = False
            hung.set()
            await released.wait()  # client.timeout: 600 s
            raise ServerError("did not answer")
        return await up(weights)

    bad.update = update

    async def story(orchestrator, running):
        await hung.wait()
        await until(lambda: orchestrator.scheduler.version >= 1, run=running)  # the others serve it
        released.set()

    await run(world, 4, story=story)


@pytest.mark.parametrize("when", ["at_start", "at_end"])
async def test_the_end_of_hope_is_heard_during_an_evaluation(tmp_path, when):
    """All servers go during the first evaluation, or the last one, beside which nothing else looks: the run ends when none is hoped for any more."""
    section = EVAL | {"interval": None, "at_start": when == "at_start", "at_end": when == "at_end"}
    world = FleetWorld(tmp_path, servers=2, max_steps=1, client={"ready_timeout": 0.5}, eval=section)

    def before(e, v):
        for server in world.servers:
            server.up = server.up and not e.startswith("eval")

    world.pool.before = before
    with pytest.raises(UserError, match=r"no inference server for 0 s .*does not answer"):
        await run(world, 1)  # within a minute; the evaluation waits for a server for 5 x client.timeout


async def test_a_version_that_all_servers_are_lost_over_again_and_again(tmp_path, monkeypatch):
    """They come back with the one before it and are given this one once more: ten times, then the run ends with what they said."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.01)
    world = FleetWorld(tmp_path, servers=2, max_steps=2, weights_timeout=60)
    asked = []
    for server in world.servers:
        load = server.update

        async def die(weights, server=server, load=load):
            if weights.version == 1:
                asked.append(server.root)
                server.base()  # started again by somebody
                raise ServerError(f"{server.root} died of it")
            return await load(weights)

        server.update = die
    running = asyncio.create_task(world.orchestrator().run())
    with pytest.raises(ServerError, match="died of it"):
        await complete(world, running, 1)
    assert len(asked) >= 2 * weight_sync._ATTEMPTS
