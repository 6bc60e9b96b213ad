"""The alphabet-sort taskset and environment: each turn brings people, the reward is how well answers sort them all."""

from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from alphabet_sort.data import SYSTEM_PROMPT, By, Problem, Split, problems, scores
from prime_rl.envs.verifiers_v1 import HARNESS_ID


class AlphabetSortData(vf.TaskData):
    by: By
    turns: list[list[str]]

    @property
    def problem(self) -> Problem:
        return Problem(self.by, tuple(tuple(names) for names in self.turns))


class AlphabetSortTaskConfig(vf.TaskConfig):
    power: PositiveFloat = Field(default=4.0, description="Power that the similarity of a turn is raised to.")


class AlphabetSortTask(vf.Task[AlphabetSortData, vf.State, AlphabetSortTaskConfig]):
    @property
    def key(self) -> str:
        # The default key hashes every field, defaults and row number included: it would change with the split size.
        return f"alphabet-sort/{self.data.id}"

    @vf.reward(weight=1.0)
    async def sorted_names(self, trace: vf.Trace) -> float:
        """Mean over the task's turns, those without a reply included, of similarity to the power `power`."""
        earned = self._scores(trace, self.config.power)
        return sum(earned) / len(earned)

    @vf.metric
    async def turns_right(self, trace: vf.Trace) -> float:
        """Share of turns answered exactly."""
        earned = self._scores(trace, 1.0)
        return sum(score == 1.0 for score in earned) / len(earned)

    def _scores(self, trace: vf.Trace, power: float) -> list[float]:
        return scores(self.data.problem, [str(message.content or "") for message in trace.assistant_messages], power)


class AlphabetSortConfig(vf.TasksetConfig):
    split: Split = "train"
    num_tasks: PositiveInt = 1000
    seed: NonNegativeInt = 0
    by: Literal["first", "last", "both"] = "both"
    min_turns: PositiveInt = 2
    max_turns: PositiveInt = 3
    min_names: PositiveInt = 2
    max_names: PositiveInt = 4
    task: AlphabetSortTaskConfig = AlphabetSortTaskConfig()


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    def load(self) -> Iterator[AlphabetSortTask]:
        config = self.config
        sizes = config.model_dump(include={"by", "min_turns", "max_turns", "min_names", "max_names"})
        for problem in problems(config.split, config.num_tasks, config.seed, **sizes):
            data = AlphabetSortData(
                id=problem.id,
                system_prompt=SYSTEM_PROMPT,
                by=problem.by,
                turns=[list(names) for names in problem.turns],
            )
            yield AlphabetSortTask(data, config.task)


class AlphabetSortEnvConfig(vf.EnvConfig):
    # verifiers' defaults are a shell in a remote sandbox, which a conversation has no use for.
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    async def run(self, task: AlphabetSortTask, agents: vf.Agents) -> None:
        problem = task.data.problem
        async with agents.agent.interaction(task) as chat:
            for turn in range(len(problem.turns)):
                if (await chat.turn(problem.message(turn))).terminated:
                    break
