"""The reverse-text taskset: prompt = a short text, reward = how much of its reversal the answer matches."""

from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

from prime_rl.envs.verifiers_v1 import HARNESS_ID
from reverse_text.data import Split, texts

SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
OPEN_TAG, CLOSE_TAG = "<reversed_text>", "</reversed_text>"


def parse(reply: str) -> str:
    """The text inside the first pair of tags, stripped; empty when the reply has no such pair."""
    _, opened, rest = reply.partition(OPEN_TAG)
    answer, closed, _ = rest.partition(CLOSE_TAG)
    return answer.strip() if opened and closed else ""


def similarity(answer: str, truth: str) -> float:
    """Ratio in [0, 1] of matched characters (difflib's longest matching blocks); 0 for an empty answer."""
    return SequenceMatcher(None, answer, truth).ratio() if answer else 0.0


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @property
    def key(self) -> str:
        # The default key hashes every field, defaults and row number included: it would change with the split size.
        return f"reverse-text/{self.data.id}"

    @vf.reward(weight=1.0)
    async def lcs(self, trace: vf.Trace) -> float:
        return similarity(parse(trace.last_reply), self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):
    split: Split = "train"
    num_tasks: int = 1000
    min_words: int = 1
    max_words: int = 2
    seed: int = 0


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> Iterator[ReverseTextTask]:
        config = self.config
        for text in texts(config.split, config.num_tasks, config.seed, config.min_words, config.max_words):
            data = ReverseTextData(id=text, prompt=text, system_prompt=SYSTEM_PROMPT, answer=text[::-1])
            yield ReverseTextTask(data, config.task)


class ReverseTextEnvConfig(vf.EnvConfig):
    # verifiers' defaults are a shell in a remote sandbox, which a conversation has no use for.
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})


class ReverseTextEnv(vf.Env[ReverseTextEnvConfig]):
    async def run(self, task: ReverseTextTask, agents: vf.Agents) -> None:
        await agents.agent.run(task)
