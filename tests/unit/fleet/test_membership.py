"""Servers that join and leave during a run, by a directory or on request: nothing is lost, and nothing made twice that needn't be."""

import asyncio
import math
import random
import socket
from dataclasses import replace

import pytest

import prime_rl.fleet.membership as members
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError
from prime_rl.fleet.client import Served
from prime_rl.fleet.membership import GONE_SECONDS, STALE_SECONDS, Registry, Roster, first_members
from prime_rl.monitor import Monitor, Status
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.transport.members import Member, member_path, publish, read_members
from support.scripted import has_batch, until
from unit.fleet.test_replicas import FleetWorld, Server

MODEL = "the model"


def member(address: str, boot: str = "1", beat: int = 1, leaving: bool = False) -> Member:
    return Member(address, boot, MODEL, socket.gethostname(), beat, leaving)


# -- what a reader judges ----------------------------------------------------------------------------------------------------------


def joining(roster: Roster, now: float, fleet=(), left=None) -> list[str]:
    return [found.address for found in roster.judge(now, fleet, left or {}).joining]


def test_who_was_just_seen_joins_and_who_does_not_beat_does_not():
    """What a server that crashed last week left behind is hoped for a little while only."""
    roster = Roster()
    for now in range(0, 200, 2):
        roster.look([member("http://dead", beat=7), member("http://alive", beat=now)], now)
        assert joining(roster, now) == (["http://dead", "http://alive"] if now <= STALE_SECONDS else ["http://alive"])


def test_who_beats_again_joins_as_new():
    roster = Roster()
    roster.look([member("http://a", beat=1)], 0)
    assert joining(roster, 1000) == []
    roster.look([member("http://a", beat=2)], 1000)
    assert joining(roster, 1000) == ["http://a"]


def test_who_has_left_comes_back_only_in_another_incarnation():
    roster = Roster()
    roster.look([member("http://a", boot="1", beat=5)], 0)
    assert joining(roster, 0, left={"http://a": "1"}) == []
    roster.look([member("http://a", boot="2", beat=1)], 1)
    assert joining(roster, 1, left={"http://a": "1"}) == ["http://a"]


@pytest.mark.parametrize("seed", range(20))
def test_verdicts_of_random_histories(seed):
    """Judged from the reader's own clock alone: nobody of the fleet joins; who leaves is of the fleet and asked to; silent is who has shown no
    change for long, whether the file is there or not; a beat that the reader sees change ends the silence."""
    chance, roster = random.Random(seed), Roster()
    files: dict[str, Member] = {}
    changed: dict[str, float] = {}
    fleet: set[str] = set()
    now = chance.uniform(-1e6, 1e6)
    for _ in range(400):
        now += chance.choice([0.5, 2.0, 2.0, 20.0])
        for address in ("http://a", "http://b", "http://c"):
            match chance.choices(["beat", "still", "vanish", "restart", "leave"], [6, 6, 1, 1, 1])[0]:
                case "beat" if address in files:
                    files[address] = replace(files[address], beat=files[address].beat + 1)
                case "vanish":
                    files.pop(address, None)
                case "restart":
                    files[address] = member(address, boot=str(chance.random()))
                case "leave" if address in files:
                    files[address] = replace(files[address], leaving=True, beat=files[address].beat + 1)
        if chance.random() < 0.8:  # else the directory could not be read
            for address, found in files.items():
                if (found.boot, found.beat) != changed.get(f"{address} as"):
                    changed[address], changed[f"{address} as"] = now, (found.boot, found.beat)
            roster.look(files.values(), now)
        verdict = roster.judge(now, fleet, {})
        assert not fleet.intersection(found.address for found in verdict.joining)
        for found in verdict.joining:
            assert now - changed[found.address] <= STALE_SECONDS
            assert not found.leaving
        assert fleet.issuperset(verdict.leaving)
        assert verdict.silent == {a for a in fleet if now - changed.get(a, -math.inf) > GONE_SECONDS}
        fleet = {a for a in ("http://a", "http://b", "http://c") if chance.random() < 0.5}


async def test_each_trouble_is_said_once_and_the_others_are_found(tmp_path, heard):
    """Another model; a loopback address of another host, which would be a server of this one; half a file."""
    publish(tmp_path, member("http://good:1"))
    publish(tmp_path, replace(member("http://other:1"), model="another"))
    publish(tmp_path, replace(member("http://127.0.0.1:1"), host="far-away"))
    publish(tmp_path, member("http://localhost:2"))
    (tmp_path / "half.json").write_text('{"addr')
    registry = Registry(tmp_path, MODEL)
    for _ in range(3):
        await registry.look()
        found = registry.roster.judge(0, (), {}).joining
        assert {each.address for each in found} == {"http://good:1", "http://localhost:2"}
    warnings = [record.getMessage() for record in heard.records if record.levelname == "WARNING"]
    assert len(warnings) == 3
    for part in ("half.json", "serves another", "only far-away itself"):
        assert part in " ".join(warnings)


async def test_nobody_registers_in_time(tmp_path):
    """The error names the directory, the options, and what stands there."""
    (tmp_path / "half.json").write_text("{")
    config = ClientConfig(discover=tmp_path, ready_timeout=0.3)
    waits = []
    with pytest.raises(UserError, match="no inference server has registered in .* after 0 s .client.discover") as error:
        await first_members(config, MODEL, lambda *wait: waits.append(wait))
    assert "half.json" in str(error.value)
    assert str(tmp_path) in waits[0][0]


# -- runs ------------------------------------------------------------------------------------------------------------------------


class Leaver(Server):
    leaving = False

    async def served(self) -> Served:
        return replace(await super().served(), leaving=self.leaving)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"LOOK_SECONDS": 0.05, "_ASK_SECONDS": 0.1, "_POLL_SECONDS": 0.02}.items():
        monkeypatch.setattr(members, name, seconds)


class MovingWorld(FleetWorld):
    """Servers that register (`discover`) or are listed, beat, and leave."""

    def __init__(self, directory, servers: int = 3, discover: bool = True, **settings) -> None:
        self.place = directory / "servers"
        if discover:
            settings["client"] = {"discover": self.place}
        super().__init__(directory, servers=servers, **settings)
        for server in self.servers:
            server.__class__ = Leaver
        self.discover = discover
        self.beats: dict[str, Member] = {}
        self.beating: set[str] = set()

    def register(self, server: Server, **changes) -> None:
        name = self.config.model.name
        before = self.beats.get(server.root)
        beat = 1 if before is None else before.beat + 1
        found = Member(server.root, str(server.boots), name, socket.gethostname(), beat, server.leaving)
        self.beats[server.root] = found
        publish(self.place, found)

    def orchestrator(self):
        by_root = {server.root: server for server in self.servers}
        monitor = Monitor(self.directory, "orchestrator", self.config.monitor, {})
        status = Status(self.directory, "orchestrator")
        engines = [] if self.discover else self.servers
        self.current = Orchestrator(self.config, self.pool, engines, status, monitor, by_root.__getitem__)
        return self.current

    async def go(self, steps: int, story, last=lambda: True):
        """A run of so many steps, and `story(orchestrator, running)` beside it."""
        orchestrator = self.orchestrator()
        running = asyncio.create_task(orchestrator.run())
        trainer = asyncio.create_task(self.train(steps, last))
        told = asyncio.create_task(story(orchestrator, running))
        async with asyncio.timeout(60):
            await running
            await trainer
            await told
        orchestrator.core.check_conservation()
        self.check(steps)
        return orchestrator

    def sent_to(self, server: Server) -> int:
        return list(self.pool.sent.values()).count(server.root)


async def test_a_run_begins_with_whom_it_finds_and_others_join(tmp_path):
    """Nobody is there at first; the one that registers late is brought up to the present version and gets work."""
    world = MovingWorld(tmp_path, max_steps=12)
    first, late, _ = world.servers
    done, present = [], []

    async def story(orchestrator, running):
        await asyncio.sleep(0.3)
        assert not world.pool.sent
        world.register(first)
        await until(has_batch(world, 2), run=running)
        assert late.updates == []
        present.append(orchestrator.core.version)
        world.register(late)
        world.pool.seconds = 0.2
        await until(lambda: len(orchestrator.fleet.serving) == 2, run=running)
        world.pool.seconds = 0.02
        done.append(orchestrator.core.step)

    await world.go(12, story, lambda: bool(done))
    assert done[0] < 10
    assert late.updates[0][0] >= present[0] >= 1  # none of those before
    assert late.updates[-1] == (12, 0)
    assert world.sent_to(late) > 3


@pytest.mark.parametrize("discover", [True, False])
@pytest.mark.parametrize("moment", ["sampling", "loading"])
async def test_a_server_that_asks_to_leave_is_drained(tmp_path, discover, moment, heard):
    """It gets nothing new; what is in flight there ends there while the others go on to newer versions; all that it sampled counts; nothing is
    made again; it loads nothing any more; and it is not asked again after it has left."""
    world = MovingWorld(tmp_path, max_steps=8, discover=discover, async_level=2)
    leaver = world.servers[1]
    pool, at = world.pool.pools[leaver.root], {}
    quick_run, quick_update = pool.run, leaver.update

    async def slow(**rest):
        await asyncio.sleep(0.5)
        return await quick_run(**rest)

    async def loading(weights):
        await asyncio.sleep(0.3)
        return await quick_update(weights)

    leaver.update = loading if moment == "loading" else quick_update

    async def story(orchestrator, running):
        if discover:
            for server in world.servers:
                world.register(server)
        await until(lambda: bool(world.sent_to(leaver)) and len(orchestrator.fleet.replicas) == 3, run=running)
        pool.run = slow
        await until(has_batch(world, 1), run=running)
        replica = next(each for each in orchestrator.fleet.replicas if each.name == leaver.root)
        await until(lambda: replica.in_flight > 0, run=running)
        if moment == "loading":
            await until(lambda: orchestrator.serving.moving, run=running)
        leaver.leaving = True
        if discover:
            world.register(leaver)
        await until(lambda: replica.draining or replica not in orchestrator.fleet, run=running)
        at["flying"], at["sent"], at["updates"] = replica.in_flight, world.sent_to(leaver), list(leaver.updates)
        await until(lambda: replica not in orchestrator.fleet, run=running)
        at["version"] = orchestrator.core.version
        leaver.up = False

    orchestrator = await world.go(8, story, lambda: "version" in at)
    assert at["flying"] > 0
    assert (world.sent_to(leaver), leaver.updates) == (at["sent"], at["updates"])
    assert orchestrator.core.dropped["stale"] == orchestrator.core.dropped["errored"] == 0
    text = heard.text
    assert f"{leaver.root} is to leave: it gets nothing new, {at['flying']} episodes in flight there go on" in text
    assert f"{leaver.root} has left, and may be stopped: nothing of it is made again" in text


async def test_what_ended_last_on_a_leaving_server_is_proven_before_it_goes(tmp_path):
    """No batch is complete that would have it proven: the others are still at it."""
    world = MovingWorld(tmp_path, servers=2, max_steps=3)
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
        await until(lambda: replica not in orchestrator.fleet, run=running)
        leaver.up, world.pool.seconds = False, 0.02
        left.append(True)

    world.discover, world.config.client = False, ClientConfig()
    orchestrator = await world.go(3, story, lambda: bool(left))
    assert orchestrator.core.dropped["stale"] == 0


async def test_a_server_that_answers_is_not_gone_though_it_gets_no_work(tmp_path, monkeypatch):
    """It loads nothing that it is given, and its file system is away."""
    monkeypatch.setattr(members, "GONE_SECONDS", 0.3)
    world = MovingWorld(tmp_path, servers=2, max_steps=3)
    good, sick = world.servers
    sick.refuses = {0, 1, 2, 3}
    waited = []

    async def story(orchestrator, running):
        world.register(good)
        world.register(sick)
        await until(lambda: len(orchestrator.fleet.replicas) == 2, run=running)
        await asyncio.sleep(1.0)
        assert [replica.name for replica in orchestrator.fleet.away] == [sick.root]
        sick.up = False
        await until(lambda: len(orchestrator.fleet.replicas) == 1, run=running)
        waited.append(True)

    await world.go(3, story, lambda: bool(waited))


@pytest.mark.parametrize("discover", [True, False])
async def test_a_server_that_dies_while_it_drains_takes_only_its_own_with_it(tmp_path, discover):
    """What was in flight there, or had no proof yet, is made again by the others."""
    world = MovingWorld(tmp_path, servers=2, max_steps=6, discover=discover, max_error_rate=1.0)
    leaver = world.servers[1]
    left = []

    async def story(orchestrator, running):
        if discover:
            for server in world.servers:
                world.register(server)
        await until(has_batch(world, 1), run=running)
        world.pool.seconds = 0.4
        replica = next(each for each in orchestrator.fleet.replicas if each.name == leaver.root)
        await until(lambda: replica.in_flight > 0, run=running)
        leaver.leaving = True
        if discover:
            world.register(leaver)
        await until(lambda: replica.draining, run=running)
        leaver.up = False
        leaver.base()
        await until(lambda: replica not in orchestrator.fleet, run=running)
        world.pool.seconds = 0.02
        left.append(True)

    await world.go(6, story, lambda: bool(left))
    assert left


@pytest.mark.parametrize("discover", [True, False])
async def test_when_the_last_one_leaves_the_run_waits_and_a_later_incarnation_of_it_joins(tmp_path, discover):
    world = MovingWorld(tmp_path, servers=1, max_steps=5, discover=discover)
    server = world.servers[0]
    seen = []

    async def story(orchestrator, running):
        if discover:
            world.register(server)
        await until(has_batch(world, 1), run=running)
        server.leaving = True
        if discover:
            world.register(server)
        await until(lambda: not orchestrator.fleet.replicas, run=running)
        await asyncio.sleep(0.3)
        assert not orchestrator.fleet.replicas  # the incarnation that has left does not come back
        server.leaving = False
        server.base()  # started again
        if discover:
            world.register(server)
        await until(lambda: bool(orchestrator.fleet.serving), run=running)
        seen.append(True)

    orchestrator = await world.go(5, story, lambda: bool(seen))
    assert server.updates[-1] == (5, 0)
    assert orchestrator.core.dropped["stale"] == 0


async def test_when_the_last_one_has_left_nobody_is_waited_for_without_end(tmp_path):
    world = MovingWorld(tmp_path, servers=1, max_steps=5)
    world.config.client.ready_timeout = 1.0
    world.register(world.servers[0])
    orchestrator = world.orchestrator()
    running = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 0), run=running)
    world.servers[0].leaving = True
    world.register(world.servers[0])
    with pytest.raises(
        UserError, match=r"no inference server for 1 s \(client.discover, client.ready_timeout\): all have left"
    ):
        async with asyncio.timeout(60):
            await running


@pytest.mark.parametrize("how", ["vanishes", "stops"])
async def test_a_server_that_neither_beats_nor_answers_leaves_for_good_and_comes_back_as_new(
    tmp_path, monkeypatch, how
):
    """Who beats without an answer is hoped for, and who answers without a beat stays; what is gone is made again by the others."""
    monkeypatch.setattr(members, "GONE_SECONDS", 0.6)
    monkeypatch.setattr(members, "STALE_SECONDS", 0.4)
    world = MovingWorld(tmp_path, servers=3, max_steps=8, max_error_rate=1.0)
    staying, mute, gone = world.servers
    beating, done = {staying, mute, gone}, []

    async def beat():
        while True:
            for server in beating:
                world.register(server)
            await asyncio.sleep(0.1)

    async def story(orchestrator, running):
        hearts = asyncio.create_task(beat())
        await until(lambda: len(orchestrator.fleet.serving) == 3, run=running)
        await until(has_batch(world, 1), run=running)
        beating.discard(staying)  # its file system is away
        mute.up = gone.up = False
        beating.discard(gone)
        if how == "vanishes":
            member_path(world.place, gone.root).unlink()
        await until(lambda: len(orchestrator.fleet.replicas) == 2, run=running)
        assert {replica.name for replica in orchestrator.fleet.replicas} == {staying.root, mute.root}
        await asyncio.sleep(1.0)
        assert len(orchestrator.fleet.replicas) == 2
        gone.base()
        gone.up = True
        beating.add(gone)
        await until(lambda: {r.name for r in orchestrator.fleet.serving} == {staying.root, gone.root}, run=running)
        done.append(True)
        hearts.cancel()

    await world.go(8, story, lambda: bool(done))
    assert gone.updates[-1] == (8, 0)


async def test_what_the_dead_left_behind_does_not_keep_the_run_from_the_living(tmp_path):
    """The registration of a server that crashed last week is the first that is found."""
    world = MovingWorld(tmp_path, servers=2, max_steps=3)
    dead, alive = world.servers
    dead.up = False
    world.register(dead)

    async def story(orchestrator, running):
        await asyncio.sleep(0.3)
        world.register(alive)

    await world.go(3, story)
    assert not world.sent_to(dead)
    assert read_members(world.place)[0]  # nobody else's files are removed


async def test_an_evaluation_stands_that_a_leaving_server_had_a_part_in(tmp_path):
    """It ends what it has of it, and proves it: nothing of it is made again, though the server is gone when the evaluation ends."""
    evaluation = {
        "interval": 2, "at_start": False, "at_end": False, "rollouts_per_example": 12,
        "environments": [{"id": "env", "name": "held-out"}],
    }  # fmt: skip
    world = MovingWorld(tmp_path, servers=2, max_steps=3, eval=evaluation)
    leaver, left = world.servers[1], []
    stays = world.pool.pools[world.servers[0].root]
    quick_run = stays.run

    async def slow(*, episode_id, **rest):
        if episode_id.startswith("eval"):
            await until(lambda: bool(left))
        return await quick_run(episode_id=episode_id, **rest)

    stays.run = slow

    async def story(orchestrator, running):
        for server in world.servers:
            world.register(server)
        await until(lambda: orchestrator.evaluations.running, run=running)
        replica = next(each for each in orchestrator.fleet.replicas if each.name == leaver.root)
        leaver.leaving = True
        world.register(leaver)
        await until(lambda: replica not in orchestrator.fleet, run=running)
        leaver.up = False
        left.append(True)

    await world.go(3, story)
    assert len(world.pool.evaluated) == 12
    assert {world.pool.sent[name] for name in world.pool.sent if name.startswith("eval")} == {
        s.root for s in world.servers
    }


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_comes_and_goes_the_run_ends_and_its_stamps_are_right(tmp_path, monkeypatch, seed):
    """Four servers that join, ask to leave, die without a word, are started again, and take their time to load."""
    monkeypatch.setattr(members, "GONE_SECONDS", 0.5)
    monkeypatch.setattr(members, "STALE_SECONDS", 0.3)
    world = MovingWorld(tmp_path, servers=4, max_steps=12, async_level=2, max_error_rate=1.0, rollout_timeout=5)
    chance, steady, ended = random.Random(seed), world.servers[0], []
    beating = set(world.servers[:2])

    def slowly(server):
        update = server.update

        async def load(weights):
            await asyncio.sleep(chance.choice([0, 0, 0.1]))
            return await update(weights)

        server.update = load

    for server in world.servers:
        slowly(server)

    async def beat():
        while True:
            for server in beating:
                world.register(server)
            await asyncio.sleep(0.05)

    def restart(server):
        server.base()
        server.leaving, server.up = False, True
        beating.add(server)

    async def story(orchestrator, running):
        hearts = asyncio.create_task(beat())
        for _ in range(25):
            await asyncio.sleep(chance.uniform(0.02, 0.2))
            world.pool.seconds = chance.choice([0.02, 0.05, 0.2])
            server = chance.choice(world.servers[1:])
            match chance.choice(["leave", "die", "restart", "restart"]):
                case "leave":
                    server.leaving = True
                case "die":
                    server.up = False
                    beating.discard(server)
                case "restart" if server.leaving or not server.up or server not in beating:
                    restart(server)
            if chance.random() < 0.1:
                steady.leaving = True
            elif steady.leaving and chance.random() < 0.5:
                restart(steady)
        restart(steady)
        world.pool.seconds = 0.02
        ended.append(True)
        await until(lambda: running.done(), timeout=50)
        hearts.cancel()

    await world.go(12, story, lambda: bool(ended))
