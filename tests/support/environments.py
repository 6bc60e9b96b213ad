"""Small verifiers packages that misbehave in one way each, written into a directory for a worker's path."""

from pathlib import Path
from typing import Any

from prime_rl.config.shared import EnvConfig

TASKSET = """
import os, sys, time
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def marks(self, trace: vf.Trace) -> float:
        {reward}

class Config(vf.TasksetConfig):
    num_tasks: int = 2
    prompt: str = "hello"

class TestTaskset(vf.Taskset[Task, Config]):
    def load(self):
        {load}
        for index in range(self.config.num_tasks):
            yield Task(Data(prompt=self.config.prompt, system_prompt="s"), self.config.task)

__all__ = ["TestTaskset"]
"""

ANSWERS = """
from typing import Any
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: Any = None

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def marks(self, trace: vf.Trace) -> float:
        return 1.0

class Config(vf.TasksetConfig):
    answers: list[Any] = []

class AnswersTaskset(vf.Taskset[Task, Config]):
    def load(self):
        for answer in self.config.answers:
            yield Task(Data(prompt="hello", system_prompt="s", answer=answer), self.config.task)

__all__ = ["AnswersTaskset"]
"""

ENDLESS = """
import itertools, random
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def marks(self, trace: vf.Trace) -> float:
        return 1.0

class Config(vf.TasksetConfig):
    pass

class EndlessTaskset(vf.Taskset[Task, Config]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield Task(Data(prompt=f"{number}: {random.randrange(10**6)}", system_prompt="s"), self.config.task)

__all__ = ["EndlessTaskset"]
"""

SOURCES = {
    "env_good": TASKSET.format(reward="return 1.0", load=""),
    "env_bad_reward": TASKSET.format(reward="print('chatter from a reward'); return 1 / 0", load=""),
    "env_raises_in_load": TASKSET.format(reward="return 1.0", load="raise OSError('the data is not there')"),
    "env_empty": TASKSET.format(reward="return 1.0", load="return"),
    "env_raises_on_import": "value = 1 / 0\n",
    "env_needs_missing": "import surely_not_installed\n",
    "env_classic": "def load_environment():\n    return None\n__all__ = []\n",
    "env_exports_nothing": "__all__ = []\n",
    "env_answers": ANSWERS,
    "env_endless": ENDLESS,
}


def write_environments(directory: Path) -> Path:
    """Every package as a module in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        (directory / f"{name}.py").write_text(source)
    return directory


def environment(env_id: str, args: dict[str, Any] | None = None, **settings: Any) -> EnvConfig:
    """An environment's settings: one worker, with slots for few episodes."""
    return EnvConfig(id=env_id, args=args or {}, **{"max_concurrent": 64, "workers": 1, **settings})
