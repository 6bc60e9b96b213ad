"""The calculator taskset and environment: a word problem a task, one tool, reward for the right number."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import NonNegativeInt, PositiveInt

from calculator.data import SYSTEM_PROMPT, Split, parse, problems
from calculator.tools import REFUSED, CalculatorTools
from prime_rl.envs.verifiers_v1 import HARNESS_ID


class CalculatorData(vf.TaskData):
    answer: int


class CalculatorTask(vf.Task[CalculatorData]):
    @property
    def key(self) -> str:
        # The default key hashes every field, defaults and row number included: it would change with the split size.
        return f"calculator/{self.data.id}"

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(parse(trace.last_reply) == self.data.answer)

    @vf.reward(weight=0.1)
    async def format(self, trace: vf.Trace) -> float:
        """Whether there is a number in tags at all."""
        return float(parse(trace.last_reply) is not None)

    @vf.metric
    async def refused_expressions(self, trace: vf.Trace) -> float:
        """Count well-formed calls whose expression has no value. The harness counts calls, and malformed ones."""
        return float(sum(str(message.content).startswith(REFUSED) for message in trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    split: Split = "train"
    num_tasks: PositiveInt = 1000
    seed: NonNegativeInt = 0
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        """One server for all episodes: it remembers nothing."""
        return [CalculatorTools(config.tools)]

    def load(self) -> Iterator[CalculatorTask]:
        config = self.config
        for problem in problems(config.split, config.num_tasks, config.seed):
            data = CalculatorData(
                id=problem.id, prompt=problem.text, system_prompt=SYSTEM_PROMPT, answer=problem.answer
            )
            yield CalculatorTask(data, config.task)


class CalculatorEnvConfig(vf.EnvConfig):
    # verifiers' defaults are a shell in a remote sandbox, which a conversation has no use for.
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})


class CalculatorEnv(vf.Env[CalculatorEnvConfig]):
    async def run(self, task: CalculatorTask, agents: vf.Agents) -> None:
        await agents.agent.run(task)
