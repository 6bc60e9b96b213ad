"""Small verifiers packages that misbehave in one way each, for a worker's path; environments on a scripted engine."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.config.shared import EnvConfig
from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult
from support.fake_engine import FakeEngine

TASKSET = """
import itertools, os, random, sys, time
from typing import Any
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: Any = None

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class Config(vf.TasksetConfig):
    {config}

class TestTaskset(vf.Taskset[Task, Config]):
    INFINITE = {infinite}

    def load(self):
        {load}
        for data in {tasks}:
            yield Task(Data(system_prompt="s", **data), self.config.task)

__all__ = ["TestTaskset"]
"""

WORDS = """
class WordsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            for word in task.data.answer:
                if (await chat.turn(word)).terminated:
                    break

__all__ += ["WordsEnv"]
"""


def taskset(
    load: str = "",
    config: str = "num_tasks: int = 2; prompt: str = 'hello'",
    tasks: str = "[{'prompt': self.config.prompt}] * self.config.num_tasks",
    infinite: bool = False,
) -> str:
    return TASKSET.format(load=load, config=config, tasks=tasks, infinite=infinite)


SOURCES = {
    "env_good": taskset(),
    "env_raises_in_load": taskset("raise OSError('the data is not there')"),
    "env_empty": taskset("return"),
    "env_raises_on_import": "value = 1 / 0\n",
    "env_needs_missing": "import surely_not_installed\n",
    "env_classic": "def load_environment():\n    return None\n__all__ = []\n",
    "env_exports_nothing": "__all__ = []\n",
    "env_answers": taskset(
        config="answers: list[Any] = []", tasks="({'prompt': 'hello', 'answer': one} for one in self.config.answers)"
    ),
    "env_endless": taskset(
        config="pass", tasks="({'prompt': f'{n}: {random.randrange(10**6)}'} for n in itertools.count())", infinite=True
    ),
    "env_words": taskset(config="words: list[str] = ['one', 'two', 'three']", tasks="[{'answer': self.config.words}]")
    + WORDS,
}


def write_environments(directory: Path, sources: Mapping[str, str] = SOURCES) -> Path:
    """Every package as a module in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (directory / f"{name}.py").write_text(source)
    return directory


def environment(env_id: str, args: dict[str, Any] | None = None, **settings: Any) -> EnvConfig:
    """An environment's settings: one worker, with slots for few episodes."""
    return EnvConfig(id=env_id, args=args or {}, **{"max_concurrent": 64, "workers": 1, **settings})


@dataclass
class PoolWorld:
    """Environments in workers of their own, and the engine that answers them."""

    engine: FakeEngine
    pool: EnvPool

    async def run(self, env: str, task: int = 0, *, seconds: float = 60.0, **sampling: Any) -> EpisodeResult:
        return await self.pool.run(
            env=env,
            task_index=task,
            sampling={"temperature": 0.7, "max_tokens": 64, **sampling},
            policy_version=3,
            episode_id="1.2.3",
            timeout=seconds,
        )


@asynccontextmanager
async def open_pool(
    envs: Sequence[EnvConfig], model: Path, output: Path, context: int = 512
) -> AsyncIterator[PoolWorld]:
    async with FakeEngine(model, max_model_len=context) as engine:
        pool = EnvPool(envs, model=str(model), base_url=engine.base_url, api_key="secret", output_dir=output)
        try:
            await pool.start(timeout=180.0)
            yield PoolWorld(engine, pool)
        finally:
            await pool.close()
