"""What becomes of a run when its servers, or its trainer, do what they should not: one story a test.

Of every story `support.fleet` checks the contracts that hold always: no episode is lost, and what was trained was
sampled by a version that its lineage names.
"""

import asyncio
import random
import sqlite3
from contextlib import closing

import pytest

from prime_rl.config.orchestrator import EvalSection
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.fleet import weight_sync
from prime_rl.fleet.client import Served, ServerError
from prime_rl.monitor import read_metrics
from support.fleet import NEVER_COMMITTED, FleetWorld, story
from support.ledgers import conserved

HELD_OUT = {"id": "env", "name": "held-out"}
EVAL = {"interval": 2, "at_start": False, "rollouts_per_example": 12, "environments": [HELD_OUT]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"PROBE_SECONDS": 0.05, "RETRY_SECONDS": 0.02}.items():
        monkeypatch.setattr(weight_sync, name, seconds)


def dropped(world: FleetWorld) -> dict[str, int]:
    return conserved(world.config.output_dir).dropped


@story(servers=3)
async def test_all_are_kept_on_the_newest_version_and_get_their_share(w):
    """And an update's times are in the metrics: the slowest's of each phase; a server without them does not count."""
    w.servers[0].update_seconds = {"stage": 0.5, "pause": 0.25}
    w.servers[1].update_seconds = {"stage": 0.25, "pause": 0.75}
    yield
    assert all(server.updates == w.servers[0].updates for server in w.servers)
    assert w.servers[0].updates[-1] == (5, 0)
    shares = [w.pool.sent_to(server) for server in w.servers]
    assert max(shares) - min(shares) <= len(w.pool.sent) / 3
    rows = read_metrics(w.directory / "metrics" / "orchestrator.jsonl")
    stage, pause = (sum(row.get(f"time/update_{phase}", 0.0) for row in rows) for phase in ("stage", "pause"))
    assert (0 < stage <= 0.5 * len(w.servers[0].updates), pause) == (True, 1.5 * stage)


@pytest.mark.parametrize("moment", ["sampling", "loading", "silently"])
@pytest.mark.parametrize("back", [True, False])
@story(max_error_rate=1.0)
async def test_a_server_that_dies_takes_only_its_own_with_it(w, moment, back):
    """While it samples, while it loads, or unnoticed, back with its base when asked: others make again what it had."""
    victim = w.servers[1]
    if moment == "silently":
        await w.wait(lambda: victim.now.version > 0)  # else its base is what it should serve
    async with w.loading(victim, 2) if moment == "loading" else w.sampling(victim):
        if moment == "silently":
            victim.restart_silently()
        else:
            victim.up = False
            victim.base()
    if back:
        victim.up = True
    if victim.up:
        await w.wait(lambda: victim.updates and w.all_serve)
    yield
    assert [server.updates[-1][0] for server in w.servers if server.up] == [5] * (1 + victim.up)


@pytest.mark.parametrize("when", ["at_start", "at_end"])
@story(
    ends=r"no inference server for 0 s .*does not answer", steps=1, client={"ready_timeout": 0.5}, eval=EVAL
)  # fmt: skip
async def test_when_all_stay_away_the_run_ends_also_during_an_evaluation(w, when):
    times = {"interval": None, "at_start": when == "at_start", "at_end": when == "at_end"}
    w.config.eval = EvalSection(**(EVAL | times))

    def before(episode, version):
        for server in w.servers:
            server.up = server.up and not episode.startswith("eval")

    w.pool.before = before
    yield


@story(steps=6)
async def test_no_batch_waits_for_a_server_that_can_load_nothing_any_more(w):
    """Contract: what it finished counts once it is verified for its version, though it never gets work again."""

    async def fail(version):
        if version >= 3:
            raise ServerError("failed")

    w.servers[0].on_load, w.pool.seconds = fail, 0.1  # it samples while version 3 is loaded
    yield
    assert w.pool.sent_to(w.servers[0])


@story(servers=3, steps=8, batch_size=12)
async def test_a_server_that_fails_what_it_is_given_gets_work_more_and_more_rarely(w):
    """It fails at once, so that it is always the least loaded. The others make every episode; none is dropped."""
    sick, swallowed = w.servers[1], []

    async def fail(*, episode_id, env, **rest):
        await asyncio.sleep(0)
        swallowed.append(episode_id)
        return EpisodeResult(episode_id, env, "task", Outcome.ENGINE_UNAVAILABLE, "status 500")

    w.pool.pools[sick.root].run = fail
    yield
    counts = conserved(w.config.output_dir)
    assert counts.dropped.get("errored", 0) == len(swallowed)  # each is made again, none for the third time
    assert counts.batched == 8 * 12
    assert 0 < len(swallowed) <= 24 + 8  # its share at first, and after each backoff


def evaluated_steps(w: FleetWorld) -> list[float]:
    rows = read_metrics(w.directory / "metrics" / "orchestrator.jsonl")
    return [row["step"] for row in rows if "eval/held-out/policy_version" in row]


@story(eval=EVAL, max_error_rate=1.0)
async def test_evaluations_are_made_by_all_and_made_again_when_one_is_lost(w):
    """Contract: an attempt counts for a version only if its server is verified to have served that meanwhile."""
    restarted = []

    def before(episode, version):
        if episode.startswith("eval") and not restarted:
            restarted.append(episode)
            w.servers[1].restart_silently()

    w.pool.before = before
    yield
    evaluated = {server for episode, server in w.pool.sent.items() if episode.startswith("eval")}
    assert (bool(restarted), evaluated) == (True, {server.root for server in w.servers})
    assert len(w.pool.evaluated) > 12 * len(evaluated_steps(w))  # what the lost one had of it was made again


@story(servers=1, eval=EVAL | {"interval": 1, "at_end": False}, max_concurrent=2)
async def test_an_evaluation_whose_version_is_superseded_is_of_the_next(w):
    """The only server is lost in the middle, and its version is gone: the evaluation does not wait for it."""
    (server,), lost = w.servers, []

    def lose(episode, version):
        if not episode.startswith("eval") or version != (lost or [version])[0]:
            return None
        if not lost:
            server.base()
            server.unsent = {version}
            if w.trained == version:
                w.trainer.commit(version + 1)
                w.trained += 1
        lost.append(version)
        return Outcome.ENGINE_UNAVAILABLE

    w.pool.before = lose
    yield
    assert evaluated_steps(w)[0] > lost[0]


@story(servers=1)
async def test_servers_go_on_until_the_version_is_sent(w):
    """Contract: however often it is not sent, they sample on as the async level allows, and load it once it is."""
    (server,) = w.servers
    server.unsent = set(range(1, 6))
    await w.wait(lambda: len(server.asked_for) > 2 * weight_sync._ATTEMPTS)
    await w.batch(1)
    assert server.updates == [(0, 0)]
    server.unsent = set()
    yield


@story(servers=1, ends=r"version \d is superseded", weights_timeout=0.3)
async def test_a_version_that_is_never_sent_ends_the_run(w):
    w.servers[0].unsent = set(range(1, 6))
    yield


@pytest.mark.parametrize("servers", [1, 2])
@story(async_level=0)
async def test_servers_that_start_again_after_their_version_is_superseded(w, servers):
    """Contract: while one of them serves it, nothing is superseded; then all go on with the newest version."""
    for server in w.servers:
        server.unsent = set(range(2, 6))
    await w.serves(1)
    await w.batch(1)
    for server in w.servers:
        server.unsent |= {0, 1}
        server.asked_for.clear()
    for number, server in enumerate(w.servers):
        if number > 0:
            assert w.current.scheduler.version < 2
            assert len(w.current.fleet.ready) == 1
        server.base()
        w.quarantine(server)
        if server is not w.servers[-1]:
            await w.wait(lambda server=server: 1 in server.asked_for)
    for server in w.servers:
        server.unsent = {0, 1}
    await w.serves(2)
    yield


@story(steps=4)
async def test_a_version_that_goes_away_before_it_is_loaded(w):
    """The trainer has begun a new incarnation: what it commits is served."""
    published, gone = w.current.weight_sync.published, []
    manifest = published.manifest

    def removed(version):
        if version >= 2 and not gone:
            gone.append(version)
            w.restart_trainer(1)
        return manifest(version)

    published.manifest = removed
    await w.wait(lambda: w.servers[0].updates and w.servers[0].updates[-1][1] == 1)
    yield


@pytest.mark.parametrize("moment", ["sampling", "loading"])
@story(servers=3, steps=8, async_level=2)
async def test_a_server_that_asks_to_leave_is_drained(w, moment, heard):
    """It gets nothing new; what is in flight ends there while the others go on to newer versions; all that it sampled
    counts; it loads nothing any more, and it is not asked again after it has left."""
    leaver = w.servers[1]
    await w.batch(0)
    async with w.sampling(leaver) as replica:
        if moment == "loading":
            async with w.loading(leaver, w.current.scheduler.version + 1):
                leaver.leaving = True
        leaver.leaving = True
        await w.wait(lambda: replica.draining)
        before, version = (w.pool.sent_to(leaver), list(leaver.updates)), w.current.scheduler.version
        await w.serves(version + 1)
        assert replica.in_flight
    await w.left(leaver)
    leaver.up = False
    yield
    assert (w.pool.sent_to(leaver), leaver.updates) == before
    assert dropped(w).keys().isdisjoint({"stale", "errored"})
    assert f"{leaver.root} is to leave: it gets nothing new" in heard.text
    assert f"{leaver.root} has left and can be stopped (2 servers remain)" in heard.text


@story(servers=1)
async def test_when_the_last_one_leaves_the_run_waits_and_joins_when_it_is_restarted(w):
    (server,) = w.servers
    await w.batch(1)
    server.leaving = True
    await w.left(server)
    await asyncio.sleep(0.3)
    assert not w.current.fleet.ready  # the process that has left does not come back
    server.restart()
    await w.wait(lambda: w.current.fleet.ready)
    yield
    assert server.updates[-1] == (5, 0)
    assert "stale" not in dropped(w)


@story(
    servers=1,
    steps=100,
    ends=r"no inference server for 1 s \(client.base_url.*: .* to leave",
    client={"ready_timeout": 1},
)
async def test_when_the_last_one_has_left_nobody_is_waited_for_without_end(w):
    await w.batch(0)
    w.servers[0].leaving = True
    yield


@pytest.mark.parametrize("seed", range(2))
@story(servers=4, steps=12, async_level=2, max_error_rate=1.0, rollout_timeout=5)
async def test_whoever_comes_and_goes_the_run_ends_and_its_stamps_are_right(w, seed):
    """Four servers that are late, ask to leave, die without a word, are started again, and take their time to load."""
    chance, (steady, *others) = random.Random(seed), w.servers
    others[-1].up = False
    for server in w.servers:
        server.on_load = lambda version: asyncio.sleep(chance.choice([0, 0, 0.1]))
    for _ in range(25):
        await asyncio.sleep(chance.uniform(0.02, 0.2))
        w.pool.seconds = chance.choice([0.02, 0.05, 0.2])
        server = chance.choice(others)
        match chance.choice(["leave", "die", "restart", "restart"]):
            case "leave":
                server.leaving = True
            case "die":
                server.up = False
            case "restart" if server.leaving or not server.up:
                server.restart()
        if chance.random() < 0.1:
            steady.leaving = True
        elif steady.leaving and chance.random() < 0.5:
            steady.restart()
    for server in (steady, *(server for server in others if not server.up)):
        server.restart()
    w.pool.seconds = 0.02
    yield


@story(steps=6, max_error_rate=1.0, weights_timeout=20)
async def test_a_server_that_computes_something_else_gets_no_work_and_nothing_of_it_is_trained(w, heard):
    """Contract: not even what ends while the prompt is being scored, when the server says the right hash already. It
    returns with the first version that it computes."""
    wrong = w.servers[1]
    wrong.wrong = {1, 2, 3}
    async with w.sampling(wrong):
        await w.wait(lambda: wrong.claim is not None)
    await w.wait(lambda: w.current.scheduler.version > 3 and w.all_serve)
    yield
    assert NEVER_COMMITTED in w.pool.sampled.values(), "nothing was sampled wrongly: the test shows nothing"
    assert any("did not load version" in message for message in heard.messages)
    with closing(sqlite3.connect(w.directory / "ledger.sqlite")) as ledger:
        reasons = {detail for (detail,) in ledger.execute("SELECT detail FROM episodes WHERE reason = 'stale'")}
    assert reasons == {"the server failed its logprob check"}


@pytest.mark.parametrize("first", [0, 2])
@story(servers=1, ends=r"does not compute version \d: 0.3 nats", max_error_rate=1.0)
async def test_the_only_server_is_given_the_version_a_few_times_and_then_the_run_ends(w, first):
    """Contract: and nothing that it sampled meanwhile is trained."""
    (wrong,) = w.servers
    wrong.wrong = set(range(first, 9))
    yield
    given = [version for version, _ in wrong.updates if version >= first]
    assert weight_sync._ATTEMPTS <= len(given) <= weight_sync._ATTEMPTS + 1
    assert first > 0 or not w.pool.sent


@story(servers=1, ends="describes another base model")
async def test_a_server_of_another_base_model_ends_the_start_at_once(w):
    """Contract: it refuses version 0 and is not asked again: no other attempt may help."""
    asked = []

    async def refuse(version):
        asked.append(version)
        raise UserError(f"{w.servers[0].root} refused it: step_0 describes another base model")

    w.servers[0].on_load = refuse
    yield
    assert asked == [0]


@story(servers=2, steps=5, async_level=1, max_error_rate=1.0)
async def test_away_while_its_version_is_made_again(w):
    """Contract: a server back with version 2 of a superseded incarnation loads version 2 of the current one."""
    other, away = w.servers
    w.pool.seconds = 0.05
    steps, w.steps = w.steps, 3  # version 3 would supersede the one that is made again
    await w.batch(1)
    gates = {server.root: asyncio.Event() for server in w.servers}
    w.pool.gates.update(gates)
    await w.wait(lambda: other.updates and away.updates and other.updates[-1] == away.updates[-1] == (2, 0))
    await w.serves(2)
    away.up = False
    w.quarantine(away)
    w.restart_trainer(1)
    await w.wait(lambda: other.updates[-1] == (2, 1))
    await w.wait(lambda: w.current.scheduler.version == 2 and not w.current.scheduler.must_go_back)
    away.up = True
    await w.wait(lambda: w.replica(away).ready)
    assert away.updates[-1] == (2, 1)
    for gate in gates.values():
        gate.set()
    w.steps = steps
    yield


@pytest.mark.parametrize("trouble", ["differ at start", "silent restart", "failed load"])
@story(routed=True)
async def test_a_run_through_a_router(w, trouble):
    """Contract: any server may have sampled what came through it. Different backends are brought together at the start;
    if one served its base meanwhile all is made again; half a group on a new version is tried again."""
    one, two = w.servers
    if trouble == "differ at start":
        two.now = Served(7, "f" * 32, "1")
    elif trouble == "silent restart":
        await w.serves(1)
        two.restart_silently()
    elif trouble == "failed load":
        failures = []

        async def once(version):
            if version >= 1 and not failures:
                failures.append(version)
                raise ServerError("lost")

        two.on_load = once
        await w.wait(lambda: failures)
    yield
    assert [server.now.version for server in w.servers] == [5, 5]
    assert w.pool.sent_to(one)
    assert w.pool.sent_to(two)
