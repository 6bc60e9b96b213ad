"""An orchestrator that is killed at any moment and started again ends the run as if nothing had happened."""

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from faults import audit
from prime_rl import faults, wait
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.fleet import weight_sync
from prime_rl.monitor import Status, read_metrics
from prime_rl.orchestrator.checkpoint import read_state
from prime_rl.orchestrator.ledger import open_copy
from prime_rl.transport import checkpoints
from prime_rl.transport.commit import list_steps
from prime_rl.transport.incarnations import read_lease
from support.samples import sample_tokens
from support.scripted import ScriptedPool, World, fresh, has_batch, until

STEPS = 5
EVERYTHING = {
    "batch_size": 4, "max_steps": STEPS, "ckpt": {"interval": 2}, "max_error_rate": 1.0,
    "eval": {"interval": 2, "environments": [{"id": "env", "name": "held-out"}]},
    "algorithm": {"type": "rae"},
    "curriculum": {"easy": 1.0, "hard": -0.5, "easy_weight": 2.0, "hard_weight": 2.0},
    "filters": {"truncated": {}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(wait, "LEAST_POLL_SECONDS", 0.01)
    monkeypatch.setattr(weight_sync, "POLL_SECONDS", 0.01)


class MixedPool(ScriptedPool):
    """What an episode gives is a function of its place, its attempt, its task and the version, and how long it takes of
    its name: some fail for good, some are worth another attempt, some groups carry no signal, some samples do not fit;
    there are tasks of all difficulties."""

    def tasks(self, env: str) -> list[str]:
        return [f"task-{i}" for i in range(12)]

    async def run(self, *, episode_id: str, env: str, task_index: int, **rest) -> EpisodeResult:
        await asyncio.sleep(xxhash.xxh3_64_intdigest(episode_id.encode()) % 50 / 1000)
        result = await super().run(episode_id=episode_id, env=env, task_index=task_index, **rest)
        if episode_id.startswith("eval"):
            return result
        group, number, attempt = map(int, episode_id.split("."))
        if (group, number, attempt) in [(1, 0, 0), (5, 1, 0), (5, 1, 1)]:
            return EpisodeResult(episode_id, env, "task", Outcome.WORKER_DIED, "scripted")
        if (group, number) in [(2, 1), (3, 0), (3, 1)]:
            return EpisodeResult(episode_id, env, "task", Outcome.ERRORED, "scripted")
        if group in (6, 7, 8):
            result.reward = 0.5
        if (group, number) == (9, 0):
            result.samples = [sample_tokens([1, 2], [3], [-1.0])]
        result.reward += task_index % 4 - 1.5
        result.is_truncated = (group, number) == (4, 1)
        return result


def make_world(directory, **settings) -> World:
    """The lease covers every version that is read: taken before, by incarnation, and raised only once it is served."""
    directory.mkdir()
    world = fresh(directory, seq_len=2, sampling={"max_tokens": 1}, **(EVERYTHING | settings))
    update = world.engine.update

    async def covered(weights):
        lease = read_lease(directory)
        assert lease.version <= weights.version
        assert weights.incarnation <= lease.incarnation
        return await update(weights)

    world.engine.update = covered
    world.pool = MixedPool(world.engine)
    return world


async def train(
    world: World, start: int = 0, incarnation: int = 0, until_step: int = STEPS, replaced: bool = False
) -> None:
    """The trainer's part of a run: a version for every batch, a part of a checkpoint every second step.
    `replaced`: checkpoints beyond `start` are of an incarnation that this one gives up."""
    root = world.directory / "checkpoints"
    if replaced:
        checkpoints.supersede_after(root, start, incarnation)
    for step in range(start, until_step):
        await until(has_batch(world, step), timeout=60)
        world.trainer.commit(step + 1, incarnation)
        if (step + 1) % 2 == 0 or step + 1 == STEPS:
            world.trainer.checkpoint(step + 1, incarnation)


async def finish(world: World, trainer: "asyncio.Task[None] | None" = None) -> None:
    """One whole run, or the rest of one by the next orchestrator."""
    world.config = world.config.model_copy(update={"recover": trainer is not None})
    trainer = trainer or asyncio.create_task(train(world))
    async with asyncio.timeout(60):
        await world.orchestrator().run()
        await trainer


def check(world: World, reference: World | None = None) -> None:
    """Everything that the run directory must say at the end.
    With a reference also which tasks were drawn, and what pools and algorithm remember."""
    run = world.directory
    assert list(audit._ledger(run, STEPS)) == []
    assert list(audit._leftovers(run)) == []
    assert checkpoints.complete_steps(run / "checkpoints") == [2, 4, 5]
    assert read_lease(run) is None
    lines = [json.loads(line) for line in (run / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
    assert {row["step"] for row in lines if "reward/mean" in row} == set(range(STEPS))
    evaluated = {row["step"] for row in lines if "eval/held-out/time" in row}
    assert {0, 5} <= evaluated <= ({0, 2, 4, 5} if reference is None else {0, 2, 3, 4, 5})
    assert evaluated & {2, 3}, "where an evaluation was interrupted the next version that is served is evaluated"
    if reference is not None:
        assert audit.differences(run, reference.directory, attempts=True) == []
        assert drawn(world) == drawn(reference)
        assert states(world) == states(reference)


def drawn(world: World) -> list[tuple[int, int, str, int | None]]:
    """Number, task, end and step of every group."""
    with open_copy(world.directory / "ledger.sqlite") as db:
        return db.execute("SELECT number, task_index, state, step FROM groups ORDER BY number").fetchall()


def states(world: World) -> list[tuple[dict, dict]]:
    """Difficulty pools, and what the algorithm remembers, after every step."""
    found = [read_state(world.directory / "rollouts" / f"step_{step}") for step in range(STEPS)]
    return [(one.curriculum, one.algorithm) for one in found]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> World:
    """The run that nothing disturbed: all pools are drawn from, and a filter leaves samples out."""
    world = make_world(tmp_path_factory.mktemp("reference") / "run")
    asyncio.run(finish(world))
    check(world)
    groups = drawn(world)
    assert len({task for _, task, *_ in groups}) < len(groups)
    assert states(world)[-1][1]["env"][""]
    rows = read_metrics(world.directory / "metrics" / "orchestrator.jsonl")
    assert sum(row.get("filtered/truncated", 0) for row in rows) > 0
    return world


def new_threads() -> ThreadPoolExecutor:
    threads = ThreadPoolExecutor(4)
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


async def cut_off(world: World, seconds: float, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """Start an orchestrator and stop it where it stands after so many seconds.
    A write that a thread has begun ends by itself: that is waited for, for threads cannot be killed."""
    threads, run = new_threads(), asyncio.create_task(world.orchestrator().run())
    await asyncio.wait([run], timeout=seconds)
    if meanwhile is not None:
        await meanwhile()
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run
    threads.shutdown(wait=True)
    new_threads()
    world.config = world.config.model_copy(update={"recover": True})


async def stop(world: World, seconds: float) -> None:
    """Start an orchestrator and ask it to stop after so many seconds."""
    orchestrator = world.orchestrator()
    asyncio.get_running_loop().call_later(0.1 + seconds / 4, orchestrator.stop)
    await orchestrator.run()
    world.config = world.config.model_copy(update={"recover": True})


@pytest.mark.parametrize("interrupt", [cut_off, stop])
async def test_a_synchronous_run_that_is_interrupted_at_random_moments_ends_like_one_that_is_not(
    tmp_path, reference, interrupt
):
    """Ledger, batches, weights, checkpoints and metrics are equal but for times, and so are draws, pools and moving
    averages: whether it is killed, or stopped by Ctrl-C, episodes in flight are started again under their name."""
    world, chance = make_world(tmp_path / "run"), random.Random(1)
    trainer = asyncio.create_task(train(world))
    for _ in range(6):
        await interrupt(world, chance.uniform(0.02, 0.35))
    await finish(world, trainer)
    check(world, reference)


class Killed(BaseException):
    """Nothing after it runs, but for what Python itself unwinds."""


STEP, PART = "rollouts/step_1", "checkpoints/step_2/orchestrator"
BOUNDARIES = {
    "batches": [f"write:{STEP}", f"rename:{STEP}", f"renamed:{STEP}", "update:v2", "updated:v2"],
    "checkpoints": [f"rename:{PART}", f"renamed:{PART}", "join:checkpoints/step_2", "joined:checkpoints/step_2"],
    "ledger": ["update:v0", "ledger:begin", "ledger:commit", "ledger:committed", "renamed:leases/orchestrator.json"],
}


@pytest.mark.parametrize("points", BOUNDARIES.values(), ids=BOUNDARIES.keys())
async def test_a_synchronous_run_that_is_killed_at_durable_boundaries_ends_like_one_that_is_not(
    tmp_path, reference, monkeypatch, points
):
    """Before and after renames and transactions of its own: killed at each of these once, one after the other."""
    world, ahead = make_world(tmp_path / "run"), list(points)

    def kill(name, file=None):
        if name in ahead:
            ahead.remove(name)
            raise Killed

    monkeypatch.setattr(faults, "point", kill)
    trainer = asyncio.create_task(train(world))
    while ahead:
        run = asyncio.create_task(world.orchestrator().run())
        await asyncio.wait([run], timeout=30)
        assert isinstance(run.exception(), Killed)
        world.config = world.config.model_copy(update={"recover": True})
    await finish(world, trainer)
    check(world, reference)


@pytest.mark.parametrize(("back_to", "seconds"), [(0, 0.3), (1, 0.0), (3, 0.03)])
async def test_a_trainer_that_begins_again_changes_no_batch(tmp_path, reference, back_to, seconds):
    """It dies with version 3 served, while step 3 is sampled or while nothing is in flight, and goes on from an earlier
    step: what was sampled by versions that were given up is made again in its place, and every batch is the one of an
    undisturbed run but for the attempts' numbers."""
    world = make_world(tmp_path / "run")
    run = asyncio.create_task(world.orchestrator().run())
    await train(world, until_step=3)
    await until(lambda: world.engine.updates[-1] == (3, 0), run=run)
    await asyncio.sleep(seconds)
    world.trainer.live(1, back_to)
    await train(world, start=back_to, incarnation=1, replaced=True)
    async with asyncio.timeout(60):
        await run
    assert list(audit._ledger(world.directory, STEPS)) == []
    for step in range(STEPS):
        mine, other = (audit._batch(one.directory, step, attempts=False) for one in (world, reference))
        assert mine == other
    assert world.engine.updates[-1] == (STEPS, 1)


@pytest.mark.parametrize("seed", range(2))
async def test_an_asynchronous_run_under_kills_of_both_trains_every_sample_once(tmp_path, seed):
    """Level 2, orchestrator killed, trainer thrown back at random: all steps, each sample once, a right ledger."""
    world, chance = make_world(tmp_path / "run", async_level=2, max_off_policy_steps=3), random.Random(seed)
    trainers = [asyncio.create_task(train(world))]

    async def throw_back() -> None:
        if chance.random() < 0.5:
            trainers[-1].cancel()
            incarnation, back_to = len(trainers), chance.choice([0, *list_steps(world.directory / "weights")])
            world.trainer.live(incarnation, back_to)
            trainers.append(asyncio.create_task(train(world, back_to, incarnation, replaced=True)))
            await asyncio.sleep(chance.uniform(0, 0.3))

    for _ in range(6):
        await cut_off(world, chance.uniform(0.03, 0.3), throw_back)
    await finish(world, trainers[-1])
    assert list(audit._batches(world.directory, STEPS)) == []
    assert list(audit._ledger(world.directory, STEPS)) == []
    for step in range(STEPS):
        assert min(world.versions(step)) >= step - 3


@pytest.mark.parametrize("begins_again", [False, True])
async def test_the_trainer_is_followed_to_its_last_word(tmp_path, begins_again):
    """The orchestrator waits for it before it goes, and completes the checkpoint saved at the end. If the trainer died
    before that with the last version served, the one that it makes once more is what is served at the end."""
    world = make_world(tmp_path / "run")
    status = Status(world.directory, "trainer")
    run = asyncio.create_task(world.orchestrator().run())
    for step in range(STEPS):
        await until(has_batch(world, step), run=run)
        world.trainer.commit(step + 1)
    await until(lambda: 5 in world.pool.evaluated, run=run)
    await asyncio.sleep(0.3)
    assert not run.done()
    if begins_again:
        world.trainer.live(1, 3)
        await until(lambda: world.engine.updates[-1] == (3, 0), run=run)
        await train(world, 3, 1, replaced=True)
    else:
        world.trainer.checkpoint(STEPS)
    status.done("finished")
    async with asyncio.timeout(60):
        await run
    assert world.engine.updates[-1] == (STEPS, int(begins_again))
    assert checkpoints.complete_steps(world.directory / "checkpoints")[-1] == STEPS
    assert list(audit._ledger(world.directory, STEPS)) == []
