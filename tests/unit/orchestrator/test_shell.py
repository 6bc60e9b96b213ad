"""The loop around the scheduler, with a scripted engine and pool: restarts, incarnations, evaluations, deadlines."""

import asyncio
import dataclasses
import itertools
import json

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import NEVER_WORKED, UserError
from prime_rl.fleet import weight_sync
from prime_rl.monitor import read_metrics
from prime_rl.monitor.monitor import metrics_path
from prime_rl.orchestrator.audit import audit_text
from prime_rl.transport.commit import list_steps, prune
from support.fleet import FleetWorld
from support.scripted import World, commit_batch, fresh, has_batch, until


def rows_of(world: World) -> list[dict[str, float]]:
    """The run's metrics."""
    return read_metrics(metrics_path(world.directory, "orchestrator"))


async def fails(world: World, message: str) -> None:
    """The run ends with that error."""
    async with asyncio.timeout(60):
        with pytest.raises(UserError, match=message):
            await world.orchestrator().run()


async def test_when_the_trainer_goes_on_from_an_earlier_step_its_later_versions_are_forgotten(tmp_path):
    """A resumed run, the orchestrator up first: versions of the superseded incarnation are not served, or forgotten
    as soon as it ends."""
    world = World(tmp_path, max_steps=9, async_level=1, ckpt={"resume_step": 2})
    for version in range(6):
        world.trainer.commit(version, incarnation=0)
    world.trainer.live(0, 0)
    for step in range(6):
        commit_batch(tmp_path, step, groups_opened=step + 1)
    world.joint(2)
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await asyncio.sleep(0.3)
    world.trainer.live(1, 2)
    for version in range(3, 9):
        served = [(version - 1, 1 if version > 3 else 0)]
        await until(lambda served=served: world.engine.updates[-1:] == served, run=run)
        world.trainer.commit(version, incarnation=1)
    await until(lambda: world.engine.updates[-1] == (8, 1), run=run)
    orchestrator.stop()
    await run
    assert {incarnation for version, incarnation in world.engine.updates if version > 2} == {1}
    assert all(max(world.versions(step)) <= step for step in list_steps(tmp_path / "rollouts") if step >= 6)


async def test_a_run_is_not_mixed_with_another(tmp_path):
    """A first one that died left a ledger, whose episodes a fresh run would count. (Another seed: test_launch.py.)"""
    world = fresh(tmp_path, max_steps=1)
    run = asyncio.create_task(world.orchestrator().run())
    await until(has_batch(world, 0), run=run)
    run.cancel()
    await asyncio.wait([run])
    prune(tmp_path / "rollouts" / "step_0")
    await fails(world, "episodes of an earlier run")


HELD_OUT = {"environments": [{"id": "env", "name": "held-out"}]}


async def test_evaluations_come_at_every_multiple_even_when_versions_are_skipped(tmp_path):
    """interval 2, and versions 1-3 appear at once: what is served then is evaluated, and the last version once."""
    world = fresh(tmp_path, max_steps=4, async_level=4, eval={"interval": 2, **HELD_OUT})
    run = asyncio.create_task(world.orchestrator().run())
    await until(has_batch(world, 3), run=run)
    for version in (1, 2, 3):
        world.trainer.commit(version)
    await until(lambda: 3 in world.pool.evaluated or 2 in world.pool.evaluated, run=run)
    world.trainer.commit(4)
    await run
    assert (world.pool.evaluated[0], world.pool.evaluated[-1], world.pool.evaluated.count(4)) == (0, 4, 1)
    logged = {row.get("eval/held-out/policy_version") for row in rows_of(world)} - {None}
    assert logged == set(world.pool.evaluated)


async def test_a_version_that_another_incarnation_of_the_trainer_makes_again_is_evaluated_again(tmp_path):
    """Contract: a number is not a policy: what is logged last for it is of the one that the run goes on with, after a
    restart of this process, too."""
    world = fresh(tmp_path, max_steps=2, eval={"interval": 1, "at_start": False, **HELD_OUT})
    run = asyncio.create_task(world.orchestrator().run())
    await until(has_batch(world, 0), run=run)
    world.trainer.commit(1)
    await until(has_batch(world, 1), run=run)
    assert world.pool.evaluated == [1]
    world.trainer.live(1, 0)
    world.trainer.commit(1, incarnation=1)
    await until(lambda: world.pool.evaluated == [1, 1], run=run)
    world.trainer.commit(2, incarnation=1)
    await run
    assert world.pool.evaluated == [1, 1, 2]
    name = "eval/held-out/policy_incarnation"
    assert [row[name] for row in rows_of(world) if name in row] == [1, 1]
    evaluations = world.orchestrator().evaluations
    evaluations._weight_sync.published.refresh()
    assert not evaluations.due(2)
    world.trainer.live(2, 1)
    evaluations._weight_sync.published.refresh()
    assert evaluations.due(2)


async def test_a_stop_ends_an_evaluation_and_none_begins_after_it(tmp_path):
    """Ctrl-C during a long evaluation does not sit it out; what is served by then is left to the resumed run."""
    world = fresh(tmp_path, eval={"interval": 1, **HELD_OUT})
    world.pool.seconds = 3600
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await until(lambda: orchestrator.evaluations.running, run=run)
    orchestrator.stop()
    async with asyncio.timeout(60):
        await run
    await orchestrator.on_version_served(1)
    assert not world.pool.evaluated
    assert list_steps(tmp_path / "rollouts") == []


def everything(result: EpisodeResult) -> bool:
    return True


REJECTED = r"groups in a row were rejected \({}: \d+\): the task is too easy or too hard, .* filters"
EQUAL, FAILING = {"reward": 0.25}, {"outcome": Outcome.ERRORED}
CUSTOM = {"path": f"{__file__}:everything"}


@pytest.mark.parametrize(
    ("settings", "result", "message"),
    [
        ({"weights_timeout": 1.5}, {}, "no weights/step_1 from trainer after 2 s"),
        ({}, EQUAL, "10 batches in a row carried no learning signal"),
        ({"filters": {"dynamic_sampling": True}}, EQUAL, REJECTED.format("dynamic_sampling")),
        ({"filters": {"difficulty": {"low": 0.5}}}, EQUAL, REJECTED.format("difficulty")),
        ({"filters": {"custom": CUSTOM}}, EQUAL, REJECTED.format("custom")),
        ({"batch_size": 512, "max_concurrent": 256}, FAILING, "of the last .* episodes failed"),
    ],
)
async def test_what_never_comes_ends_the_run(tmp_path, settings, result, message):
    """Contract: a trainer that owes a version is named after weights_timeout; useless groups are not replaced
    for ever; episodes that fail as fast as they start do not keep the loop from counting them."""
    world = fresh(tmp_path, **settings)
    run, world.pool.seconds = world.pool.run, 0.0

    async def scripted(**arguments) -> EpisodeResult:
        return dataclasses.replace(await run(**arguments), **result)

    world.pool.run = scripted
    await fails(world, message)
    assert len(list_steps(tmp_path / "rollouts")) == int("weights_timeout" in settings)
    if result == FAILING:
        assert "errored" in audit_text(tmp_path), "those that failed since the last flush are counted, too"


@pytest.mark.parametrize(
    ("outcome", "worked", "permanent"),
    [(Outcome.ERRORED, 0, True), (Outcome.ERRORED, 1, False), (Outcome.TIMEOUT, 0, False)],
)
async def test_environments_that_never_worked_fail_for_good(tmp_path, outcome, worked, permanent):
    """Contract: a restart is ruled out where the environment failed every episode there was, and only there."""
    world = fresh(tmp_path, batch_size=64)
    run, episodes = world.pool.run, itertools.count()

    async def scripted(**arguments) -> EpisodeResult:
        result = await run(**arguments)
        return result if next(episodes) < worked else dataclasses.replace(result, outcome=outcome)

    world.pool.run = scripted
    async with asyncio.timeout(60):
        with pytest.raises(UserError, match="episodes failed") as caught:
            await world.orchestrator().run()
    assert str(caught.value).startswith(NEVER_WORKED) is permanent


async def test_what_limits_the_run_is_in_the_metrics_of_its_steps(tmp_path):
    """Contract: time with nothing in flight is counted, and named once the trainer has reported steps, too."""
    world = fresh(tmp_path)
    world.pool.busiest = 0.97
    path = metrics_path(tmp_path, "trainer")
    path.parent.mkdir()
    rows = ({"step": step, "time": 0.0, "time/step": 1.0, "time/wait_for_batch": 0.0} for step in range(3))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = asyncio.create_task(world.orchestrator().run())
    for version in (1, 2, 3):
        await until(has_batch(world, version - 1), run=run)
        await asyncio.sleep(0.2)  # the trainer trains
        world.trainer.commit(version)
    await run
    made = rows_of(world)
    assert [0.0 <= row["time/idle"] <= row["time/step"] for row in made] == [True] * 3
    assert all(row["time/idle"] > 0.0 for row in made[1:]), "each waited for the version before it"
    named = [[name for name in row if name.startswith("limit/")] for row in made]
    assert named == [[], [], ["limit/training"]]
    assert {row["workers/cpu"] for row in made} == {0.97}


async def test_a_server_that_is_not_sent_a_version_waits_while_others_serve(tmp_path, monkeypatch):
    """Contract: one that comes back while an evaluation holds up the newer version ends no run, however long."""
    monkeypatch.setattr(weight_sync, "RETRY_SECONDS", 0.05)
    world = FleetWorld(tmp_path, eval={"interval": 1, **HELD_OUT}, weights_timeout=0.5)
    world.pool.seconds, (_, back) = 3600, world.servers
    world.running = asyncio.create_task(world.orchestrator().run())
    await world.wait(lambda: world.current.evaluations.running)
    back.restart()
    back.unsent = {0}
    world.quarantine(back)
    await world.wait(lambda: back.asked_for)
    await asyncio.sleep(1.0)  # twice the timeout
    assert not world.running.done()
    world.running.cancel()
    await asyncio.wait([world.running], timeout=30)
