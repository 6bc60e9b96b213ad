"""Rows of a fine-tuning dataset, from wherever they are stored, and their tokens and loss masks.

From a row to tokens and loss masks, through the model's own chat template. For every message to be trained the template
is asked twice: for what inference would be given before it (with the generation prompt), and for the conversation up to
it. What the second adds to the first is the reply, cut after the first token at which inference stops. Replies whose
contexts continue each other share a sample; where a template rewrites the past (it drops earlier reasoning), they are
samples of their own.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from loguru import logger
from transformers import PreTrainedTokenizerBase

from prime_rl.config.sft import SFTData
from prime_rl.errors import UserError
from prime_rl.trainer.source import one_line

if TYPE_CHECKING:
    from datasets import Dataset

    from prime_rl.config.sft import LossMask

ACCEPTED = "a column `messages`, or two columns `prompt` and `completion` (optionally `tools`)"
_ENDINGS = ".jsonl, .json or .parquet"
_SUFFIXES = (".jsonl", ".json", ".parquet")
Row = Mapping[str, Any]


def load_rows(config: SFTData) -> "list[Row] | Dataset":
    """The rows of `config.name`: a .jsonl, .json or .parquet file, a directory of them, a saved or a hub dataset.

    `split` and `subset` choose within saved and hub datasets; a plain file has neither.

    Raises UserError if it is missing, unreadable or empty, has other columns than the accepted ones, or lacks the split
    or subset that is asked for.
    """
    import httpx
    import pyarrow
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name, path = config.name, Path(config.name).expanduser()
    is_local = path.exists()
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_SUFFIXES)):
        raise UserError(f"dataset {name} does not exist")
    try:
        rows = _load_local(path, config) if is_local else load_dataset(name, config.subset, split=config.split)
    except (DatasetsError, pyarrow.ArrowException, httpx.HTTPError, OSError, ValueError, KeyError) as error:
        problem = "cannot be read" if is_local else "is no local path, and the hub did not give it"
        raise UserError(f"dataset {name} {problem}: {one_line(error)}") from error
    if len(rows) == 0:
        raise UserError(f"dataset {name} is empty")
    check_columns(rows[0], name)
    return rows


def check_columns(row: Row, name: str) -> None:
    """Raise UserError, naming its columns, unless a row is a conversation or a prompt with its completion."""
    if "messages" not in row and not {"prompt", "completion"} <= row.keys():
        raise UserError(f"dataset {name} has the columns {', '.join(row) or '(none)'}; fine-tuning needs {ACCEPTED}")


def _load_local(path: Path, config: SFTData) -> "list[Row] | Dataset":
    from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk

    split = config.split
    if config.subset is not None:
        raise UserError(f"data.subset {config.subset!r} chooses within a dataset of the hub, and {path} is a local one")
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    saved = load_from_disk(str(path)) if is_saved else None
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise UserError(f"saved dataset {path} has no split {split!r}; it has {', '.join(saved)}")
        return saved[split]
    if split != SFTData.model_fields["split"].default:  # else all rows would be trained on
        raise UserError(f"data.split {split!r}: {path} has no splits, give the files of that split")
    if saved is not None:
        return saved
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or kinds[0] not in _SUFFIXES:
        content = " and ".join(kinds) or "none of these"
        raise UserError(f"dataset {path} holds {content}: needed is a saved dataset or files of one kind, {_ENDINGS}")
    if kinds == [".parquet"]:
        return concatenate_datasets([Dataset.from_parquet(str(file)) for file in files])
    return [row for file in files for row in _load_json(file)]


def _load_json(path: Path) -> list[Row]:
    """JSON lines, or one JSON list. (`datasets` would give all rows' tool arguments each other's keys.)"""
    text = path.read_text(encoding="utf-8")
    parts = [(f"{path} line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows: list[Row] = []
    for place, part in [(str(path), text)] if text.lstrip().startswith("[") else parts:
        try:
            value = json.loads(part)
        except ValueError as error:
            raise UserError(f"{place} is not JSON: {error}") from error
        rows += value if place == str(path) else [value]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{path}: row {number} is a {type(row).__name__}, not an object")
    return rows


# ---- a row's tokens

Message = dict[str, Any]
Messages = list[Message]
Tools = list[Any] | None

_REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""What opens and closes reasoning: for generation prompts that a template does not repeat in the conversation."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Tokens:
    """T tokens of one sample, and which of them are trained."""

    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]


class TrainedReply(NamedTuple):
    """A message to be trained: the text before it, and its own with what ends it."""

    context: str
    reply: str

    @property
    def text(self) -> str:
        return self.context + self.reply


class RowRenderer:
    """From rows to samples, with one tokenizer.

    Args:
        stop_ids: Tokens that end a reply at inference besides the tokenizer's end-of-sequence token
            (`generation_config.json` names them).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_mask: "LossMask", stop_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._name = tokenizer, tokenizer.name_or_path
        self._trained_roles = loss_mask.model_dump()
        self._warned = False
        self._stop_ids = [int(token) for token in (*stop_ids, tokenizer.eos_token_id) if token is not None]

    def samples(self, row: Row) -> list[Tokens]:
        """One sample of a row, or several if none has every trained message in the context that inference would see.

        * `messages`: every message of a role that the loss mask names is trained; by default the assistant's.
        * `prompt` and `completion` as lists of messages: the same, in the completion only.
        * `prompt` and `completion` as text: a user message and the assistant's answer. Without a chat template: the
          prompt's tokens, then the completion's with the end-of-sequence token, which are trained as an assistant's are.

        Of an assistant message its reasoning, content, tool calls and the token that ends its turn are trained, not the
        header that the template writes to make the assistant speak. Of other roles the whole message is, with its header.

        Raises UserError if the row has another form, the tokenizer lacks a chat template, or the template refuses the
        row or cannot show it.
        """
        check_columns(row, "row")
        if self._tokenizer.chat_template is None and "messages" not in row:
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return [self._plain(prompt, completion)]
        tools = _tools(row.get("tools"))
        if "messages" in row:
            prompt, messages = [], _messages(row["messages"], "messages", "")
        else:
            prompt = _messages(row["prompt"], "prompt", "user")
            messages = prompt + _messages(row["completion"], "completion", "assistant")
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer of {self._name} has no chat template, which rows of messages need: put a "
                "chat_template.jinja into the model directory, or give prompt and completion as plain text"
            )
        chains: list[list[TrainedReply]] = []  # whose contexts continue each other
        for reply in self._replies(messages, len(prompt), tools):
            if chains and reply.context.startswith(chains[-1][-1].text):
                chains[-1].append(reply)
            else:
                chains.append([reply])
        return [tokens for replies in chains for tokens in self._tokens(replies)]

    def _plain(self, prompt: str, completion: str) -> Tokens:
        if self._tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {self._name} has no end-of-sequence token to end a completion with")
        # Tokenized apart, so that the boundary is where generation would begin.
        before = self._tokenizer(prompt).input_ids
        after = [*self._tokenizer(completion, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
        tokens = _joined([before, after])
        return tokens if self._trained_roles["assistant"] else Tokens(tokens.input_ids, tokens.loss_mask & False)

    def _text(self, messages: Messages, tools: Tools, **options: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = ", ".join(message["role"] for message in messages) or "no messages"
            message = f"the chat template of {self._name} refuses a conversation of {roles}: {one_line(error)}"
            raise UserError(message) from error

    def _replies(self, messages: Messages, first: int, tools: Tools) -> list[TrainedReply]:
        """What is trained of the messages from `first` on, in the first form of them in which the template loses nothing.

        Most templates take arguments as objects and no content as "", some the JSON of the arguments, or None.
        """
        refusals = []
        for as_json, no_content in ((False, ""), (True, ""), (True, None)):
            try:
                return self._replies_of_form([_formed(each, as_json, no_content) for each in messages], first, tools)
            except UserError as error:
                refusals.append(error)
        raise refusals[0]

    def _replies_of_form(self, messages: Messages, first: int, tools: Tools) -> list[TrainedReply]:
        replies = []
        for index, message in enumerate(messages):
            if index >= first and self._trained_roles.get(message["role"], False):
                render = self._assistant if message["role"] == "assistant" else self._other
                replies.append(render(messages, index, tools))
            elif message.get("tool_calls"):
                before, whole = (self._text(messages[:end], tools) if end else "" for end in (index, index + 1))
                self._check_calls(message, index, whole[_divergence(before, whole) :], tools)
        return replies or [TrainedReply(self._text(messages, tools), "")]

    def _assistant(self, messages: Messages, index: int, tools: Tools) -> TrainedReply:
        """An assistant's message after the prompt that inference would be given, up to where inference would stop."""
        message = messages[index]
        whole = self._text(messages[: index + 1], tools)
        context = self._text(messages[:index], tools, add_generation_prompt=True)
        reply = whole[len(context) :] if whole.startswith(context) else _after_prefill(message, whole, context)
        if reply is None:
            at = _divergence(context, whole)
            raise UserError(
                f"message {index} (assistant) cannot be trained in the context that inference sees: there the chat "
                f"template of {self._name} prompts for it with {context[max(0, at - 20) : at + 40]!r}, but with the "
                f"message in place it writes {whole[max(0, at - 20) : at + 40]!r}"
            )
        end = self._end_pattern.search(reply)
        self._check_reply(message, index, reply[: end.start() if end else None], tools)
        if end:
            return TrainedReply(context, reply[: end.end()])
        following = self._text(messages[: index + 2], tools)
        # The header of the next message may be what ends this one (GLM).
        if following.startswith(whole) and (end := self._end_pattern.match(following, len(whole))):
            return TrainedReply(context, reply + end[0])
        if not self._stop_ids:
            raise UserError(
                f"the chat template of {self._name} ends no reply, and its tokenizer has no end-of-sequence token"
            )
        return TrainedReply(context, reply + str(self._tokenizer.convert_ids_to_tokens(self._stop_ids[-1])))

    def _check_reply(self, message: Message, index: int, reply: str, tools: Tools) -> None:
        """Raise UserError unless the reply holds the message's content and tool calls; reasoning may be left out."""
        where, answer = f"message {index} (assistant)", _squeezed(_answer(message))
        if end := self._end_pattern.search(_content(message)):
            raise UserError(f"{where} holds {end[0]!r}, which ends a reply: it cannot be trained")
        if answer and not reply.strip():
            raise UserError(f"the chat template of {self._name} writes nothing of {where} before the end of its turn")
        if answer not in _squeezed(reply):
            raise UserError(f"the chat template of {self._name} leaves out the content of {where}, or alters it")
        self._check_calls(message, index, reply, tools)
        if _squeezed(_reasoning(message)) not in _squeezed(reply) and not self._warned:
            self._warned = True
            logger.warning("the chat template of {} leaves out reasoning: replies are trained without it", self._name)

    def _check_calls(self, message: Message, index: int, text: str, tools: Tools) -> None:
        """Raise UserError unless the text has the message's tool calls beside its content and reasoning."""
        text = text.replace(_answer(message), "", 1).replace(_reasoning(message), "", 1)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        names = Counter(str(call["name"]) for call in calls)
        objects = [call["arguments"] for call in calls if call["arguments"] and isinstance(call["arguments"], dict)]
        # An object in Python's form is no JSON: such a template takes the arguments as text.
        if any(text.count(name) < count for name, count in names.items()) or any(str(each) in text for each in objects):
            hint = "" if tools else " (the row has no `tools`, without which some templates write no calls)"
            raise UserError(f"the chat template of {self._name} leaves out the tool calls of message {index}{hint}")

    def _other(self, messages: Messages, index: int, tools: Tools) -> TrainedReply:
        """A message that no model writes, with its header, without what follows its end (ChatML: a line break)."""
        context = self._text(messages[:index], tools) if index else ""
        whole = self._text(messages[: index + 1], tools)
        if not whole.startswith(context):
            raise UserError(
                f"message {index} ({messages[index]['role']}) cannot be trained: with it the chat template of {self._name} "
                "writes the messages before it differently (see data.loss_mask)"
            )
        stops = [end.end() for end in self._end_pattern.finditer(whole, len(context)) if not whole[end.end() :].strip()]
        return TrainedReply(context, whole[len(context) : stops[-1] if stops else None])

    @cached_property
    def _end_pattern(self) -> re.Pattern[str]:
        """What ends a reply: the stop tokens, or the token that the template ends one with if it is none (base models)."""
        stops = {str(token) for token in self._tokenizer.convert_ids_to_tokens(self._stop_ids) if token is not None}
        try:
            text = self._text([{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}], None)
        except UserError:
            text = ""
        tail = text.partition("Pong")[2]
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        written = max((token for token in special if token in tail), key=tail.rfind, default=None)
        if written is not None and not any(stop in tail for stop in stops):
            stops.add(written)
            logger.warning(
                "the chat template of {} ends a reply with {!r}, at which servers do not stop: name it as "
                "`eos_token_id` in generation_config.json",
                self._name,
                written,
            )
        return re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))) or "(?!)")

    def _tokens(self, replies: list[TrainedReply]) -> list[Tokens]:
        """The samples of replies whose contexts continue each other: one, unless inference would see other tokens."""
        text = replies[-1].text
        cuts = [0, *(cut for reply in replies for cut in (len(reply.context), len(reply.text)))]
        if len(replies) > 1:  # reads the text twice; its prefixes are far longer
            *parts, whole = self._encode([*(text[start:end] for start, end in pairwise(cuts)), text])
            if list(chain.from_iterable(parts)) == whole:
                return [_joined(parts)]
        # One reply; or a token reaches over a cut; or this tokenizer writes a blank before whatever it is given (SentencePiece).
        prefixes = self._encode([text[:cut] for cut in cuts])
        if all(prefixes[-1][: len(prefix)] == prefix for prefix in prefixes):
            return [_joined([prefixes[-1][len(one) : len(two)] for one, two in pairwise(prefixes)])]
        if len(replies) > 1:
            return [tokens for reply in replies for tokens in self._tokens([reply])]
        # As at inference: the prompt is tokenized without what follows.
        return [_joined([prefixes[1], *self._encode([replies[0].reply])])]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _after_prefill(message: Message, whole: str, context: str) -> str | None:
    """The reply if the generation prompt begins or skips reasoning, and the conversation does not show that; else None.

    It is what the model says after the prompt as it is: the rest of its reasoning, or only the tag that closes it, then
    the content.
    """
    for opening, closing in _REASONING_TAGS:
        block = rf"({re.escape(opening)}\s*)?{re.escape(closing)}\s*"  # without reasoning
        prefill = re.search(rf"({block}|{re.escape(opening)}\s*)\Z", context)
        if prefill is None or not whole.startswith(head := context[: prefill.start()]):
            continue
        rest = whole[len(head) :]
        empty = re.match(block, rest)
        if closing in prefill[0]:
            if empty or not rest.startswith(opening):
                return rest[empty.end() :] if empty else rest
        elif empty or rest.startswith(opening) or closing in rest:
            return rest.removeprefix(opening)
        else:
            return f"{_reasoning(message)}\n{closing}\n\n{rest.lstrip()}"
    return None


def _reasoning(message: Message) -> str:
    """What an assistant's message reasons, from a field of its own or from its content."""
    if reasoning := message.get(_REASONING_KEYS[0]):
        return str(reasoning).strip()
    content = _content(message)
    for opening, closing in _REASONING_TAGS:
        if closing in content:
            return content.partition(closing)[0].rpartition(opening)[2].strip()
    return ""


def _content(message: Message) -> str:
    return (message["content"] or "").strip()


def _squeezed(text: str) -> str:
    """Without blanks, which templates add and remove."""
    return "".join(text.split())


def _answer(message: Message) -> str:
    """An assistant's content after its reasoning."""
    content = _content(message)
    for _, closing in _REASONING_TAGS:
        content = content.rpartition(closing)[2]
    return content.strip()


def _divergence(one: str, two: str) -> int:
    """Where two texts begin to differ."""
    if two.startswith(one):
        return len(one)
    return next(i for i, pair in enumerate(zip(one + "\0", two + "\1", strict=False)) if pair[0] != pair[1])


def _joined(parts: list[list[int]]) -> Tokens:
    """Tokens of which every second part is trained."""
    mask = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
    return Tokens(np.array(list(chain.from_iterable(parts)), dtype=np.int64), mask)


def _messages(value: Any, column: str, role: str) -> Messages:
    """The messages of a column. Text becomes a message of `role`, if there is one."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        form = "a non-empty list of messages" + (" or text" if role else "")
        raise UserError(f"`{column}` is {_short(value)}; needed: {ACCEPTED}, as {form}")
    return [_message(item, column) for item in value]


def _message(item: Any, column: str) -> Message:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise UserError(f"`{column}` holds {_short(item)}, which is no message: it needs a `role`")
    # A columnar store fills in None for every key that only other rows have.
    message = {key: value for key, value in item.items() if value is not None}
    if "content" not in message and "tool_calls" not in message:
        raise UserError(f"`{column}` holds a message of {message['role']} with neither `content` nor `tool_calls`")
    message["content"] = _plain_text(message.get("content", ""), column)
    if calls := [_tool_call(call, column) for call in message.pop("tool_calls", ())]:
        message["tool_calls"] = calls
    # Under every name that templates read it by.
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key)), None)
    return message if reasoning is None else message | dict.fromkeys(_REASONING_KEYS, reasoning)


def _plain_text(content: Any, column: str) -> str:
    """Content as text or as a list of parts that are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(strings := [text for text in texts if isinstance(text, str)]) == len(content):
            return "".join(strings)
    raise UserError(f"`{column}` holds content {_short(content)}: needed is text, or a list of parts of type text")


def _tool_call(call: Any, column: str) -> dict[str, Any]:
    """In the form that templates expect: under `function`."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        raise UserError(f"`{column}` holds {_short(call)}, which is no tool call")
    function = dict(call.get("function", call))
    if "name" not in function:
        raise UserError(f"`{column}` holds a tool call without a `name`: {_short(call)}")
    function["arguments"] = function.get("arguments") or {}
    if isinstance(function["arguments"], str):
        try:
            json.loads(function["arguments"])
        except ValueError as error:
            raise UserError(f"`{column}` holds a tool call whose arguments are no JSON: {_short(call)}") from error
    outer = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **outer, "function": function}


def _formed(message: Message, as_json: bool, no_content: str | None) -> Message:
    """A message with its tool arguments as objects or as JSON, and `no_content` beside calls without content."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if as_json != isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False) if as_json else json.loads(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": message["content"] or no_content, "tool_calls": calls}


def _tools(value: Any) -> list[Any] | None:
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise UserError(f"`tools` is text but not JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise UserError(f"`tools` is {_short(tools)}, not a list")
    return tools or None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
