"""The loop around the core, against a scripted engine and pool: restarts, new lives of the trainer, evaluations, deadlines, stopping."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome, SampleTokens, TaskInfo
from prime_rl.errors import UserError
from prime_rl.monitor import Monitor, Status, read_metrics
from prime_rl.orchestrator.engine import Served
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.transport.commit import list_steps, prune, stage, write_atomically
from prime_rl.transport.rollouts import open_batch
from prime_rl.transport.weights import TensorEntry, manifest_extra, version_hash


class ScriptedTrainer:
    """Commits versions and lives as the trainer does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def live(self, number: int, start: int) -> None:
        for version in list_steps(self.directory / "weights"):
            if version > start:
                prune(self.directory / "weights" / f"step_{version}")
        (self.directory / "incarnations").mkdir(exist_ok=True)
        write_atomically(self.directory / "incarnations" / f"{number}.json", json.dumps({"step": start}).encode())

    def commit(self, version: int, life: int = 0) -> None:
        extra = manifest_extra(version, life, self.tensors(version, life))
        with stage(self.directory / "weights" / f"step_{version}", step=version, producer="trainer", extra=extra):
            pass

    @staticmethod
    def tensors(version: int, life: int) -> dict[str, TensorEntry]:
        return {"w": TensorEntry("model.safetensors", "F32", [1], f"{version}-{life}")}

    def checkpoint(self, step: int) -> None:
        with stage(self.directory / "checkpoints" / f"step_{step}" / "trainer", step=step, producer="trainer"):
            pass

    def batch(self, step: int, groups_opened: int) -> None:
        extra = {"groups_opened": groups_opened}
        with stage(self.directory / "rollouts" / f"step_{step}", step=step, producer="orchestrator", extra=extra):
            pass


class ScriptedEngine:
    """Serves what it is given; `base()` is a server that somebody has started again."""

    root = "http://engine"

    def __init__(self) -> None:
        self.updates: list[tuple[int, int]] = []  # (version, life)
        self.base()

    def base(self) -> None:
        self.now = Served(0, version_hash(ScriptedTrainer.tensors(0, 0)))

    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> None:
        await asyncio.sleep(0)

    async def served(self) -> Served:
        return self.now

    async def update(self, weights) -> Served:
        await asyncio.sleep(0.01)
        self.now = Served(weights.version, weights.hash)
        self.updates.append((weights.version, weights.incarnation))
        return self.now


class ScriptedPool:
    """Every episode takes 20 ms; rewards differ within a group. `before` may change the world or the result."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.sampled: dict[str, int] = {}  # episode -> version that really sampled it
        self.before: Callable[[str, int], Outcome | None] = lambda episode, version: None
        self.evaluated: list[int] = []
        self.seconds = 0.02

    async def start(self, timeout: float) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def tasks(self, env: str) -> list[TaskInfo]:
        return [TaskInfo("task", 0)]

    async def run(self, *, episode_id: str, policy_version: int, env: str, **_) -> EpisodeResult:
        await asyncio.sleep(self.seconds)
        if outcome := self.before(episode_id, policy_version):
            return EpisodeResult(episode_id, env, "task", outcome, "scripted")
        if episode_id.startswith("eval"):
            self.evaluated.append(self.engine.now.version)
        self.sampled[episode_id] = self.engine.now.version
        tokens = SampleTokens([1, 2], [False, True], [0.0, -1.0], 1, 0.0)
        reward = float(episode_id.split(".")[1]) if "." in episode_id else 0.5
        return EpisodeResult(episode_id, env, "task", Outcome.OK, reward=reward, samples=[tokens])


class World:
    def __init__(self, directory: Path, **settings: object) -> None:
        base = {"batch_size": 2, "rollouts_per_example": 2, "async_level": 0, "max_off_policy_steps": 8, "max_steps": 3}
        self.config = OrchestratorConfig(output_dir=directory, environment={"id": "env"}, **(base | settings))
        self.trainer = ScriptedTrainer(directory)
        self.engine = ScriptedEngine()
        self.pool = ScriptedPool(self.engine)
        self.directory = directory

    def orchestrator(self) -> Orchestrator:
        monitor = Monitor(self.directory, "orchestrator", self.config.monitor, {})
        return Orchestrator(self.config, self.pool, self.engine, Status(self.directory, "orchestrator"), monitor)

    def versions(self, step: int) -> list[int]:
        batch = open_batch(self.directory / "rollouts" / f"step_{step}")
        return sorted({int(version) for row in batch.rows(range(len(batch))) for version in row.policy_versions})

    def really_sampled(self, step: int) -> set[int]:
        batch = open_batch(self.directory / "rollouts" / f"step_{step}")
        return {self.pool.sampled[row.sample_id.rpartition(".")[0]] for row in batch.rows(range(len(batch)))}


async def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def has_batch(world: World, step: int) -> Callable[[], bool]:
    return lambda: step in list_steps(world.directory / "rollouts")


async def test_a_server_that_was_started_again_is_not_trained_on_before_it_serves_the_version_again(tmp_path):
    """It comes back with base weights and answers health: what it samples then must not pass as the newer version's."""
    world = World(tmp_path)
    crashed = []

    def crash(episode: str, version: int) -> Outcome | None:
        if version == 1 and not crashed:
            crashed.append(episode)
            world.engine.base()
            return Outcome.ENGINE_UNAVAILABLE
        return None

    world.pool.before = crash
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    run = asyncio.create_task(world.orchestrator().run())
    for version in (1, 2, 3):
        await until(has_batch(world, version - 1))
        world.trainer.commit(version)
    await run
    assert crashed
    for step in range(3):
        assert world.versions(step) == [step]
        assert world.really_sampled(step) == {step}


async def test_a_silent_restart_is_noticed_before_the_batch_is_committed(tmp_path):
    """No episode failed, but the server serves something else now: the batch is not committed, and is made again."""
    world = World(tmp_path)
    restarted = []

    def restart(episode: str, version: int) -> Outcome | None:
        if version == 1 and not restarted:
            restarted.append(episode)
            world.engine.base()
        return None

    world.pool.before = restart
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    run = asyncio.create_task(world.orchestrator().run())
    for version in (1, 2, 3):
        await until(has_batch(world, version - 1))
        world.trainer.commit(version)
    await run
    assert restarted
    assert [world.really_sampled(step) for step in range(3)] == [{0}, {1}, {2}]


async def test_when_the_trainer_goes_on_from_an_earlier_step_its_later_versions_are_forgotten(tmp_path):
    """A resumed run, the orchestrator up first: versions of the life that was given up are not served, or given up as soon as it ends."""
    world = World(tmp_path, max_steps=9, async_level=1, ckpt={"resume_step": 2})
    for version in range(6):
        world.trainer.commit(version, life=0)
    world.trainer.live(0, 5)
    for step in range(6):
        world.trainer.batch(step, groups_opened=step + 1)
    world.trainer.checkpoint(2)
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await asyncio.sleep(0.3)
    world.trainer.live(1, 2)
    for version in range(3, 9):
        await until(lambda version=version: world.engine.updates[-1:] == [(version - 1, 1 if version > 3 else 0)])
        world.trainer.commit(version, life=1)
    await until(lambda: world.engine.updates[-1] == (8, 1))
    orchestrator.stop()
    await run
    later = [update for update in world.engine.updates if update[0] > 2]
    assert [life for _, life in later] == [1] * len(later)
    assert all(max(world.versions(step)) <= step for step in list_steps(tmp_path / "rollouts") if step >= 6)


async def test_a_trainer_that_is_restarted_alone_is_followed(tmp_path):
    """While the orchestrator lives the trainer begins again from step 1: the engines go back to version 1, in-flight work is dropped."""
    world = World(tmp_path, max_steps=6, async_level=1)
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    for version in (1, 2, 3):
        await until(lambda version=version: world.engine.updates[-1:] == [(version - 1, 0)])
        world.trainer.commit(version)
    await until(lambda: world.engine.updates[-1] == (3, 0))
    world.trainer.live(1, 1)
    await until(lambda: world.engine.updates[-1] == (1, 0))
    for version in range(2, 7):
        world.trainer.commit(version, life=1)
        await until(lambda version=version: world.engine.updates[-1] == (version, 1))
    await run
    orchestrator.core.check_conservation()


async def test_a_resumed_run_that_ends_before_the_batches_it_has_does_end(tmp_path):
    """Batches up to step 5 stand there, max_steps is 4: the run ends with version 4 served."""
    world = World(tmp_path, max_steps=4, ckpt={"resume_step": 2})
    for version in range(3):
        world.trainer.commit(version)
    for step in range(6):
        world.trainer.batch(step, groups_opened=step + 1)
    world.trainer.checkpoint(2)
    world.trainer.live(1, 2)
    run = asyncio.create_task(world.orchestrator().run())
    for version in (3, 4):
        await asyncio.sleep(0.2)
        world.trainer.commit(version, life=1)
    async with asyncio.timeout(20):
        await run
    assert world.engine.updates[-1] == (4, 1)


async def test_evaluations_come_at_every_multiple_even_when_versions_are_skipped(tmp_path):
    """interval 2, and versions 1-3 appear at once: the version that is served then is evaluated, and the last one once."""
    world = World(
        tmp_path, max_steps=4, async_level=4, eval={"interval": 2, "environments": [{"id": "env", "name": "held-out"}]}
    )
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    run = asyncio.create_task(world.orchestrator().run())
    await until(has_batch(world, 3))
    for version in (1, 2, 3):
        world.trainer.commit(version)
    await until(lambda: 3 in world.pool.evaluated or 2 in world.pool.evaluated)
    world.trainer.commit(4)
    await run
    assert world.pool.evaluated[0] == 0
    assert world.pool.evaluated[-1] == 4
    assert world.pool.evaluated.count(4) == 1
    evaluated = {row["eval/held-out/policy_version"] for row in read_metrics(tmp_path / "metrics" / "orchestrator.jsonl")
                 if "eval/held-out/policy_version" in row}  # fmt: skip
    assert evaluated == set(world.pool.evaluated)


async def test_a_stop_ends_an_evaluation_too(tmp_path):
    """Ctrl-C during a long evaluation does not sit it out."""
    world = World(tmp_path, eval={"environments": [{"id": "env", "name": "held-out"}]})
    world.pool.seconds = 3600
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await until(lambda: orchestrator._evaluation is not None)
    orchestrator.stop()
    async with asyncio.timeout(20):
        await run
    assert list_steps(tmp_path / "rollouts") == []


async def test_a_trainer_that_owes_a_version_is_named_when_the_deadline_passes(tmp_path):
    """weights_timeout: the wait ends, and says what was waited for and who owed it."""
    world = World(tmp_path, weights_timeout=1.5)
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    with pytest.raises(UserError, match="no weights/step_1 from trainer after 2 s"):
        async with asyncio.timeout(30):
            await world.orchestrator().run()


async def test_ten_batches_without_signal_end_the_run(tmp_path):
    """All rewards equal: nothing can be learned, and the run says so instead of spinning."""
    world = World(tmp_path)
    world.pool.run = equal_rewards(world.pool.run)
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    with pytest.raises(UserError, match="10 batches in a row carried no learning signal"):
        async with asyncio.timeout(30):
            await world.orchestrator().run()
    assert list_steps(tmp_path / "rollouts") == []


def equal_rewards(run):
    async def equal(**arguments) -> EpisodeResult:
        result = await run(**arguments)
        result.reward = 0.25
        return result

    return equal
