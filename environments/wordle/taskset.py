"""The wordle taskset and environment: one secret word a task, one guess a reply."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import NonNegativeInt, PositiveInt

from prime_rl.envs.verifiers_v1 import HARNESS_ID
from wordle.data import Split, words
from wordle.game import RULES, Game, play


class WordleData(vf.TaskData):
    secret: str
    max_turns: int


class WordleTask(vf.Task[WordleData]):
    @property
    def key(self) -> str:
        # The default key hashes every field, defaults and row number included: it would change with the split size.
        return f"wordle/{self.data.id}"

    def game(self, trace: vf.Trace) -> Game:
        replies = [str(message.content or "") for message in trace.assistant_messages]
        return play(self.data.secret, replies, self.data.max_turns)

    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace) -> float:
        return float(self.game(trace).solved)

    @vf.reward(weight=0.5)
    async def speed(self, trace: vf.Trace) -> float:
        return self.game(trace).speed

    @vf.reward(weight=0.5)
    async def partial(self, trace: vf.Trace) -> float:
        return self.game(trace).partial

    @vf.reward(weight=0.2)
    async def format(self, trace: vf.Trace) -> float:
        return self.game(trace).format

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Replies used."""
        return float(len(self.game(trace).guesses))


class WordleConfig(vf.TasksetConfig):
    split: Split = "train"
    num_tasks: PositiveInt | None = None
    seed: NonNegativeInt = 0
    max_turns: PositiveInt = 6


class WordleTaskset(vf.Taskset[WordleTask, WordleConfig]):
    def load(self) -> Iterator[WordleTask]:
        config = self.config
        for word in words(config.split, config.num_tasks, config.seed):
            data = WordleData(id=word, system_prompt=RULES, secret=word, max_turns=config.max_turns)
            yield WordleTask(data, config.task)


class WordleEnvConfig(vf.EnvConfig):
    # verifiers' defaults are a shell in a remote sandbox, which a conversation has no use for.
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})


class WordleEnv(vf.Env[WordleEnvConfig]):
    async def run(self, task: WordleTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            said = f"You have {task.data.max_turns} guesses."
            while not (await chat.turn(said)).terminated:
                game = task.game(chat.trace)
                if game.over:
                    break
                said = game.answer()
