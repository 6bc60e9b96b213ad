"""reverse-text whose judge thinks for a while: a run that lasts long enough to be disturbed many times."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

from reverse_text.taskset import ReverseTextConfig, ReverseTextData, ReverseTextTaskset, parse, similarity

__all__ = ["SlowReverseTaskset"]


class SlowReverseData(ReverseTextData):
    seconds: float


class SlowReverseTask(vf.Task[SlowReverseData]):
    @property
    def key(self) -> str:
        return f"slow-reverse/{self.data.id}"

    @vf.reward(weight=1.0)
    async def lcs(self, trace: vf.Trace) -> float:
        await asyncio.sleep(self.data.seconds)
        return similarity(parse(trace.last_reply), self.data.answer)


class SlowReverseConfig(ReverseTextConfig):
    seconds: float = 1.0


class SlowReverseTaskset(vf.Taskset[SlowReverseTask, SlowReverseConfig]):
    def load(self) -> Iterator[SlowReverseTask]:
        for task in ReverseTextTaskset(self.config).load():
            yield SlowReverseTask(SlowReverseData(**dict(task.data), seconds=self.config.seconds), self.config.task)
