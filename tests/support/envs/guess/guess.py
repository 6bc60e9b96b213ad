"""Guess a word of which one hears how many letters are right: several turns, several rewards, in plain Python."""

from collections.abc import Iterator
from typing import Any

WORDS = ("stone", "river", "cloud", "light")


def tasks(words: int = 4) -> Iterator[dict[str, Any]]:
    for word in WORDS[:words]:
        yield {
            "id": f"guess/{word}",
            "system_prompt": "Answer with one word.",
            "prompt": f"Guess my word of {len(word)} letters.",
            "word": word,
        }


async def rollout(task: dict[str, Any], chat: Any) -> dict[str, float]:
    reply = await chat()
    while reply is not None and reply.text != task["word"] and len(chat.replies) < 3:
        chat.metrics["letters"] = sum(a == b for a, b in zip(reply.text, task["word"], strict=False))
        reply = await chat(f"{chat.metrics['letters']} letters are right.")
    return {"right": float(reply is not None and reply.text == task["word"]), "short": -0.1 * len(chat.replies)}
