"""reverse-text in plain Python: its workers start in a second, where those of verifiers take four."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from reverse_text.data import texts


def tasks(num_tasks: int = 40) -> Iterator[dict[str, Any]]:
    for text in texts("train", num_tasks, max_words=1):
        yield {"id": f"reverse-plain/{text}", "prompt": text, "answer": text[::-1]}


async def rollout(task: dict[str, Any], chat: Any) -> float:
    reply = await chat()
    return SequenceMatcher(None, reply.text, task["answer"]).ratio()
