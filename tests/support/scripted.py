"""A scripted trainer, engine and environments around the real orchestrator: the outside world, in milliseconds."""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import xxhash

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.fleet.client import Served
from prime_rl.monitor import Monitor, Status
from prime_rl.monitor.status import status_path
from prime_rl.orchestrator.checkpoint import JointCheckpoints, OrchestratorState
from prime_rl.orchestrator.ledger import batch_extra
from prime_rl.orchestrator.orchestrator import Orchestrator
from prime_rl.orchestrator.scheduler import Batched, Task
from prime_rl.transport.commit import list_steps, prune, write_atomically
from prime_rl.transport.incarnations import read_incarnations, read_versions
from prime_rl.transport.protocol import superseded_versions
from prime_rl.transport.rollouts import Sample, open_batch
from prime_rl.transport.weights import TensorEntry, manifest_extra, version_hash
from support.committing import commit_empty
from support.samples import sample_tokens


class ScriptedTrainer:
    """Commits versions and incarnations as the trainer does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def live(self, number: int, start: int) -> None:
        """Open an incarnation, then set aside what it gives up."""
        (self.directory / "incarnations").mkdir(exist_ok=True)
        write_atomically(self.directory / "incarnations" / f"{number}.json", json.dumps({"step": start}).encode())
        for version in superseded_versions(
            read_versions(self.directory / "weights"), read_incarnations(self.directory)
        ):
            prune(self.directory / "weights" / f"step_{version}")

    def commit(self, version: int, incarnation: int = 0, **more: dict) -> None:
        """`more`: where its tensors are, if not on the disk, as the manifest says it."""
        extra = {**manifest_extra(version, incarnation, self.tensors(version, incarnation)), **more}
        commit_empty(self.directory / "weights" / f"step_{version}", version, **extra)

    @staticmethod
    def tensors(version: int, incarnation: int) -> dict[str, TensorEntry]:
        return {"w": TensorEntry("model.safetensors", "F32", [1], f"{version}-{incarnation}")}

    def checkpoint(self, step: int, incarnation: int = 0) -> None:
        commit_empty(self.directory / "checkpoints" / f"step_{step}" / "trainer", step, incarnation=incarnation)


class ScriptedEngine:
    """Serves what it is given; `base()` is a server that somebody has started again."""

    def __init__(self, root: str = "http://engine") -> None:
        self.root = root
        self.update_seconds: dict[str, float] = {}  # what it says an update took
        self.updates: list[tuple[int, int]] = []  # (version, incarnation)
        self.boots = self.reloads = 0
        self.base()

    def base(self) -> None:
        self.boots += 1
        self.now = Served(0, version_hash(ScriptedTrainer.tensors(0, 0)), str(self.boots))

    async def wait_ready(self, on_wait: Callable[[str, str, float], None]) -> None:
        await asyncio.sleep(0)

    async def answers(self) -> bool:
        return True

    async def served(self) -> Served:
        return self.now

    async def update(self, weights) -> Served:
        await asyncio.sleep(0.01)
        self.now = Served(weights.version, weights.hash, str(self.boots), seconds=self.update_seconds)
        self.updates.append((weights.version, weights.incarnation))
        return self.now

    async def reload(self) -> Served:
        self.now = Served(0, version_hash(ScriptedTrainer.tensors(0, 0)), str(self.boots))
        self.reloads += 1
        return self.now


class ScriptedPool:
    """Every episode takes 20 ms; tokens and rewards depend on its place and the version; rewards differ in a group.
    `before` may change the world or the result."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.sampled: dict[str, int] = {}  # episode -> version that really sampled it
        self.before: Callable[[str, int], Outcome | None] = lambda episode, version: None
        self.evaluated: list[int] = []
        self.seconds = 0.02
        self.busiest = 0.0

    async def start(self, timeout: float) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def tasks(self, env: str) -> list[str]:
        return ["task"]

    async def run(self, *, episode_id: str, policy_version: int, env: str, **_) -> EpisodeResult:
        await asyncio.sleep(self.seconds)
        if outcome := self.before(episode_id, policy_version):
            return EpisodeResult(episode_id, env, "task", outcome, "scripted")
        if episode_id.startswith("eval"):
            self.evaluated.append(self.engine.now.version)
        self.sampled[episode_id] = self.engine.now.version
        place = episode_id.rpartition(".")[0] or episode_id
        chance = xxhash.xxh3_64_intdigest(f"{place}/{self.engine.now.version}".encode())
        tokens = sample_tokens([1], [chance % 1000], [-(chance % 97) / 97])
        reward = float(episode_id.split(".")[1]) + chance % 7 / 7 if "." in episode_id else 0.5
        return EpisodeResult(episode_id, env, "task", Outcome.OK, reward=reward, samples=[tokens])


class World:
    def __init__(self, directory: Path, **settings: object) -> None:
        base: dict[str, object] = {
            "environment": {"id": "env"}, "batch_size": 2, "rollouts_per_example": 2, "async_level": 0,
            "max_off_policy_steps": 8, "max_steps": 3,
        }  # fmt: skip
        self.config = OrchestratorConfig(output_dir=directory, **(base | settings))
        self.trainer = ScriptedTrainer(directory)
        self.engine = ScriptedEngine()
        self.pool = ScriptedPool(self.engine)
        self.directory = directory
        if not status_path(directory, "trainer").exists():
            Status(directory, "trainer").done("finished")  # else the orchestrator waits for its last word

    def orchestrator(self) -> Orchestrator:
        monitor = Monitor(self.directory, "orchestrator", self.config.monitor, {})
        return Orchestrator(self.config, self.pool, [self.engine], Status(self.directory, "orchestrator"), monitor)

    def joint(self, step: int) -> None:
        """A complete checkpoint of `step`, as both processes left it."""
        self.trainer.checkpoint(step)
        JointCheckpoints(self.directory, None).join({})

    def rows(self, step: int) -> list[Sample]:
        batch = open_batch(self.directory / "rollouts" / f"step_{step}")
        return batch.rows(range(len(batch)))

    def versions(self, step: int) -> list[int]:
        return sorted({int(version) for row in self.rows(step) for version in row.policy_versions})

    def really_sampled(self, step: int) -> set[int]:
        return {self.pool.sampled[row.sample_id.rpartition(".")[0]] for row in self.rows(step)}


def commit_batch(output_dir: Path, step: int, groups_opened: int, seed: int = 0, **extra: object) -> None:
    """The batch of `step`, with the two episodes of group `step` in it, as the orchestrator commits one."""
    batched = Batched(step, {step: Task("env", 0, "task")}, [f"{step}.0.0", f"{step}.1.0"], [])
    state = OrchestratorState(step=step + 1, seed=seed, groups_opened=groups_opened)
    extra = {**batch_extra(batched), "state": asdict(state), **extra}
    commit_empty(output_dir / "rollouts" / f"step_{step}", step, "orchestrator", **extra)


async def until(condition: Callable[[], bool], timeout: float = 60.0, run: "asyncio.Task[None] | None" = None) -> None:
    """Poll; a `run` that fails meanwhile raises what it failed with."""
    async with asyncio.timeout(timeout):
        while not condition():
            if run is not None and run.done():
                run.result()
            await asyncio.sleep(0.01)


def has_batch(world: World, step: int) -> Callable[[], bool]:
    return lambda: step in list_steps(world.directory / "rollouts")


def fresh(directory: Path, **settings: object) -> World:
    """A world whose trainer has committed version 0."""
    world = World(directory, **settings)
    world.trainer.live(0, 0)
    world.trainer.commit(0)
    return world


async def follow(world: World, versions: Iterable[int], orchestrator: Orchestrator | None = None) -> None:
    """Run an orchestrator to its end. The trainer commits each of `versions` once the batch before it is committed."""
    run = asyncio.create_task((orchestrator or world.orchestrator()).run())
    for version in versions:
        await until(has_batch(world, version - 1), run=run)
        world.trainer.commit(version)
    await run
