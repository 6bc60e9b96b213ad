"""From a row to tokens and a loss mask, through the model's own chat template.

The template is asked for the whole conversation, and for the prefixes that end where a trained message begins and ends. If both are prefixes
of the whole, token by token, then the tokens between them are that message's; if not, no mask would be right, and the row is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from prime_rl.errors import UserError
from prime_rl.trainer.sft.rows import ACCEPTED, Row, check_columns

if TYPE_CHECKING:
    from prime_rl.config.sft import LossMask

Message = dict[str, Any]
Messages = list[Message]


@dataclass(frozen=True)
class Tokens:
    """T tokens of one row, and which of them are trained."""

    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Conversation:
    """Messages from `first_trained` on may be trained; the ones before are a prompt."""

    messages: Messages
    first_trained: int
    tools: list[Any] | None


def tokenize(row: Row, tokenizer: PreTrainedTokenizerBase, loss_mask: "LossMask") -> Tokens:
    """Tokens and loss mask of a row.

    * `messages`: every message of a role that `loss_mask` names is trained; by default the assistant's.
    * `prompt` and `completion` as lists of messages: the same, in the completion only.
    * `prompt` and `completion` as text: a user message and the assistant's answer. Without a chat template: the prompt's tokens, then the
      completion's with the end-of-sequence token, which are trained as an assistant's are.

    Of an assistant message its content, its tool calls and the token that ends its turn are trained, not the header that the template writes to
    make the assistant speak. Of other roles the whole message is, header included.

    Raises:
        UserError: the row has another form, the tokenizer lacks a chat template, or the template refuses the row or its prefixes.
    """
    check_columns(row, "row")
    if tokenizer.chat_template is None and "messages" not in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return _plain(prompt, completion, tokenizer, trained=loss_mask.assistant)
    conversation = _conversation(row)
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, which rows of messages need: put a "
            "chat_template.jinja into the model directory, or give prompt and completion as plain text"
        )
    return _masked(conversation, tokenizer, loss_mask)


def _plain(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase, *, trained: bool) -> Tokens:
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has no end-of-sequence token to end a completion with"
        )
    # Tokenized apart, so that the boundary is where generation would begin.
    before = tokenizer(prompt).input_ids
    after = [*tokenizer(completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    in_completion = np.arange(len(before) + len(after)) >= len(before)
    return Tokens(np.array(before + after, dtype=np.int64), in_completion & trained)


def _conversation(row: Row) -> Conversation:
    tools = _tools(row.get("tools"))
    if "messages" in row:
        return Conversation(_messages(row["messages"], "messages", ""), 0, tools)
    prompt, completion = (
        _messages(row["prompt"], "prompt", "user"),
        _messages(row["completion"], "completion", "assistant"),
    )
    return Conversation(prompt + completion, len(prompt), tools)


def _messages(value: Any, column: str, role: str) -> Messages:
    """The messages of a column. Text becomes a message of `role`, if there is one."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(
            f"`{column}` is {_short(value)}; needed: {ACCEPTED}, as a non-empty list of messages{' or text' if role else ''}"
        )
    return [_message(item, column) for item in value]


def _message(item: Any, column: str) -> Message:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise UserError(f"`{column}` holds {_short(item)}, which is no message: it needs a `role`")
    # A columnar store fills in None for every key that only other rows have.
    message = {key: value for key, value in item.items() if value is not None}
    if "content" not in message and "tool_calls" not in message:
        raise UserError(f"`{column}` holds a message of {message['role']} with neither `content` nor `tool_calls`")
    message.setdefault("content", "")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call, column) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any, column: str) -> dict[str, Any]:
    """In the form that templates expect: under `function`, with the arguments as an object, not as its JSON."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        raise UserError(f"`{column}` holds {_short(call)}, which is no tool call")
    function = dict(call.get("function", call))
    if "name" not in function:
        raise UserError(f"`{column}` holds a tool call without a `name`: {_short(call)}")
    arguments = function.get("arguments")
    function["arguments"] = _parsed(arguments) if isinstance(arguments, str) else arguments or {}
    outer = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **outer, "function": function}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # not JSON: the template shows it as it is


def _tools(value: Any) -> list[Any] | None:
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise UserError(f"`tools` is text but not JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise UserError(f"`tools` is {_short(tools)}, not a list")
    return tools or None


def _masked(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, loss_mask: "LossMask") -> Tokens:
    messages, tools = conversation.messages, conversation.tools
    whole = _render(messages, tools, tokenizer)
    mask = np.zeros(len(whole), dtype=np.bool_)
    trained_roles = loss_mask.model_dump()
    for index in range(conversation.first_trained, len(messages)):
        role = messages[index]["role"]
        if trained_roles.get(role, False):
            start = _start(messages, index, tools, tokenizer, whole)
            end = len(whole)
            if index + 1 < len(messages):
                end = _length_as_prefix(
                    _render(messages[: index + 1], tools, tokenizer), whole, messages, index, tokenizer
                )
            mask[start : _end_of_turn(whole, start, end, tokenizer)] = True
    return Tokens(np.array(whole, dtype=np.int64), mask)


def _start(
    messages: Messages, index: int, tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, whole: list[int]
) -> int:
    """Where message `index` begins in `whole`: the assistant's after the header that generation would begin with."""
    assistant = messages[index]["role"] == "assistant"
    if index == 0 and not assistant:
        return 0
    prefix = _render(messages[:index], tools, tokenizer, generation_prompt=assistant)
    return _length_as_prefix(prefix, whole, messages, index, tokenizer)


def _render(
    messages: Messages, tools: list[Any] | None, tokenizer: PreTrainedTokenizerBase, generation_prompt: bool = False
) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False
        )
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        roles = ", ".join(message["role"] for message in messages) or "no messages"
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} refuses a conversation of {roles}: {' '.join(str(error).split())[:300]}"
        ) from error
    return list(ids)


def _length_as_prefix(
    prefix: list[int], whole: list[int], messages: Messages, index: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    if whole[: len(prefix)] == prefix:
        return len(prefix)
    same = next((i for i, pair in enumerate(zip(prefix, whole, strict=False)) if pair[0] != pair[1]), len(whole))
    raise UserError(
        f"the chat template of {tokenizer.name_or_path} writes the beginning of a conversation differently once more follows, so no loss mask is "
        f"right for it: cut at message {index} ({messages[index]['role']}) its {len(prefix)} tokens differ from the whole's at token {same} "
        f"({tokenizer.decode(prefix[same : same + 8])!r}, in the whole {tokenizer.decode(whole[same : same + 8])!r}). Templates that drop earlier "
        "reasoning do this: use one that does not, or rows with a single assistant message"
    )


def _end_of_turn(whole: list[int], start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The end of a message without what the template writes after its end-of-turn token (ChatML: a line break), which is never sampled."""
    special = set(tokenizer.all_special_ids)
    last = next((i for i in range(end - 1, start - 1, -1) if whole[i] in special), None)
    if last is None or str(tokenizer.decode(whole[last + 1 : end])).strip():
        return end
    return last + 1


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
