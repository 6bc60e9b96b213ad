"""An environment for measuring: prompts that are given, replies that nobody judges. Used by `rollout.py`."""

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["FixedReplyTaskset"]


class FixedReplyData(vf.TaskData):
    pass


class FixedReplyTask(vf.Task[FixedReplyData]):
    @property
    def key(self) -> str:
        return f"fixed-reply/{self.data.id}"

    @vf.reward(weight=1.0)
    async def present(self, trace: vf.Trace) -> float:
        return 1.0


class FixedReplyConfig(vf.TasksetConfig):
    path: str = ""  # a JSON list of texts


class FixedReplyTaskset(vf.Taskset[FixedReplyTask, FixedReplyConfig]):
    def load(self) -> Iterator[FixedReplyTask]:
        for number, text in enumerate(json.loads(Path(self.config.path).read_text())):
            yield FixedReplyTask(FixedReplyData(id=str(number), prompt=text), self.config.task)
