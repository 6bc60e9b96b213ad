"""verifiers packages of several turns."""

WORDS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    words: list[str]

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

class Config(vf.TasksetConfig):
    words: list[str] = ["one", "two", "three"]

class WordsTaskset(vf.Taskset[Task, Config]):
    def load(self):
        yield Task(Data(words=self.config.words, system_prompt="s", name="words"), self.config.task)

class WordsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            for word in task.data.words:
                if (await chat.turn(word)).terminated:
                    break

__all__ = ["WordsTaskset", "WordsEnv"]
"""


SOURCES = {"env_words": WORDS}
