"""A scripted world around an evaluation: servers, environments, a trainer with a test's versions, in milliseconds."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from prime_rl.config import EvalConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.evals import run, runner
from prime_rl.evals.results import EvalResults
from prime_rl.fleet.client import Served
from prime_rl.transport.weights import WeightsManifest
from support.scripted import ScriptedEngine, ScriptedPool, ScriptedTrainer


class Server(ScriptedEngine):
    """A scripted server that sees the directories of versions."""

    async def update(self, weights: WeightsManifest) -> Served:
        if not weights.directory.is_dir():
            raise UserError(f"{weights.directory} is not a directory on the server")
        return await super().update(weights)


class Pool(ScriptedPool):
    """Environments of `tasks` tasks each. A reward follows from environment, task, seed and the version that sampled.
    `before` may change the world, or give an outcome other than a score. Servers in `sick` fail every attempt."""

    def __init__(self, engines: dict[str, Server], tasks: int = 4) -> None:
        self.engines, self.count = engines, tasks
        self.before: Callable[[str, int, int], Outcome | None] = lambda env, task, number: None
        self.made: list[tuple[str, int, int]] = []  # environment, task, the version that sampled it
        self.sampling: list[dict[str, Any]] = []
        self.sick: list[str] = []
        self.running = self.most = 0

    def tasks(self, env: str) -> list[str]:
        return [f"t{index}" for index in range(self.count)]

    async def run(
        self, *, env: str, task_index: int, sampling: dict[str, Any], server: str | None = None, **_: Any
    ) -> EpisodeResult:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.002)
        finally:
            self.running -= 1
        version = next(iter(self.engines.values())).now.version if server is None else self.engines[server].now.version
        self.made.append((env, task_index, version))
        self.sampling.append(sampling)
        if server in self.sick:
            return EpisodeResult("e", env, f"t{task_index}", Outcome.ENGINE_UNAVAILABLE, "scripted")
        if outcome := self.before(env, task_index, len(self.made)):
            return EpisodeResult("e", env, f"t{task_index}", outcome, "scripted")
        chance = xxhash.xxh3_64_intdigest(f"{env}/{task_index}/{sampling.get('seed')}/{version}".encode()) % 2
        scored = {"reward": float(chance), "input_tokens": 5, "output_tokens": 3}
        return EpisodeResult("e", env, f"t{task_index}", Outcome.OK, **scored)


class World:
    """`await world.run(…)` is one `eval` in `directory`; a second one goes on with what the first has left."""

    def __init__(self, directory: Path, monkeypatch: Any, roots: tuple[str, ...] = ("http://engine",)) -> None:
        self.directory = directory
        self.servers = {root: Server(root) for root in roots}
        self.pool = Pool(self.servers)
        self.trainer = ScriptedTrainer(directory / "run")
        self.weights = directory / "run" / "weights"
        self._roots = list(roots)
        monkeypatch.setattr(run, "env_pool", lambda *args, **more: self.pool)
        monkeypatch.setattr(run, "connect_all", lambda *args: self.servers.values())
        monkeypatch.setattr(runner, "PAUSE_SECONDS", 0.001)
        monkeypatch.setattr(run, "LOOK_SECONDS", 0.01)

    @property
    def server(self) -> Server:
        return next(iter(self.servers.values()))

    def config(self, **settings: Any) -> EvalConfig:
        base: dict[str, Any] = {
            "environments": [{"id": "env"}],
            "sampling": {"seeded": True},
            "output_dir": self.directory / "out",
        }
        base["client"] = {"base_url": self._roots, "type": "tokens"}
        return EvalConfig.model_validate(base | settings)

    async def run(self, **settings: Any) -> dict[tuple[str, str], list[list[float | None]]]:
        """The rewards of every environment at every target."""
        return rewards(await run.run_evals(self.config(**settings)))


def rewards(evaluated: list[EvalResults]) -> dict[tuple[str, str], list[list[float | None]]]:
    table: dict[tuple[str, str], list[list[float | None]]] = {}
    for each in evaluated:
        by_task: dict[str, list[float | None]] = {}
        for row in each.made:
            by_task.setdefault(row["task_id"], []).append(row["reward"])
        table[each.plan.env, each.policy] = list(by_task.values())
    return table
