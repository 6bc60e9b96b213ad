"""verifiers packages of several turns and of several agents."""

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

DUEL = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class Task(vf.Task[Data]):
    pass

class DuelTaskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(Data(prompt=None, system_prompt="a duel"), self.config.task)

class DuelConfig(vf.EnvConfig):
    black: vf.AgentConfig = vf.AgentConfig()
    white: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, max_turns=8)

class DuelEnv(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        async with agents.black.interaction(task) as black, agents.white.interaction(task) as white:
            said = "begin"
            for _ in range(2):
                move = await black.turn(said)
                if move.terminated:
                    break
                answer = await white.turn(move.last_reply)
                if answer.terminated:
                    break
                said = answer.last_reply

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("win", 1.0 if trace.agent.name == "white" else -1.0)

__all__ = ["DuelTaskset", "DuelEnv"]
"""

SOURCES = {"env_words": WORDS, "env_duel": DUEL}
