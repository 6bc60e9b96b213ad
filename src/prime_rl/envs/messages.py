"""Messages of a conversation as the chat route has them: dicts with `role` and `content`."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

Message = dict[str, Any]
TEXT_LIMIT = 8000  # characters of prompt and completion kept for people to read
MOST_LEVELS = 100  # of what a model nests


class NestedTooDeep(ValueError):
    """It may be JSON, but Python's and others' readers of it end at some depth."""


def parsed_json(text: str) -> Any:
    """What a model wrote, read as JSON.

    Raises:
        ValueError: it is none, or nested too deep.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise NestedTooDeep("nested too deep") from error
    level = [value]
    for _ in range(MOST_LEVELS):
        if not (level := [below for one in level if isinstance(one, dict | list) for below in _within(one)]):
            return value
    raise NestedTooDeep(f"nested deeper than {MOST_LEVELS} levels")


def _within(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def without_oldest(messages: Sequence[Message]) -> list[Message] | None:
    """Without the oldest turn after the system message; None when all that is left is the one that is going on.

    A turn is a user's message and all until the next one; of the last, whose question stays, a reply with the results of its calls.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
    asked = [i for i in range(start, len(messages)) if messages[i]["role"] == "user"]
    replies = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
    if later := [i for i in asked if any(reply < i for reply in replies)]:
        return [*messages[:start], *messages[later[0] :]]
    return [*messages[: replies[0]], *messages[replies[1] :]] if len(replies) > 1 else None


def text_of(messages: Sequence[Message]) -> str:
    """`role: content` lines for people; a lone reply without its role."""
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        return _content(messages[0])[:TEXT_LIMIT]
    return "\n".join(f"{message['role']}: {_content(message)}" for message in messages)[:TEXT_LIMIT]


def _content(message: Message) -> str:
    text = str(message.get("content") or "")
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return "\n".join([*([text] if text or not calls else []), *(f"{one['name']}({one['arguments']})" for one in calls)])
