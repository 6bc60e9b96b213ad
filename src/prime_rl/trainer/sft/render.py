"""Rows of a fine-tuning dataset, from wherever they are stored, and their tokens and loss masks.

The renderer that episodes of the model would have says which tokens are a reply. Where none fits, the model's chat
template is asked twice: for the prompt that inference would give, and for the conversation up to the reply. Replies
whose contexts continue each other share a sample; where the past is rewritten (earlier reasoning is dropped), they are
samples of their own.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from loguru import logger
from pydantic import BaseModel, BeforeValidator, Json, TypeAdapter, ValidationError
from renderers import build_training_sample
from transformers import PreTrainedTokenizerBase

from prime_rl.config.sft import LossMask, SFTData
from prime_rl.envs.renderer import fitting, text_content
from prime_rl.errors import UserError, user_errors

if TYPE_CHECKING:
    from datasets import Dataset

ACCEPTED = "a column `messages`, or two columns `prompt` and `completion` (optionally `tools`)"
_SUFFIXES = (".jsonl", ".parquet")
Row = Mapping[str, Any]


def load_rows(config: SFTData) -> "list[Row] | Dataset":
    """The rows of `config.name`: a .jsonl or .parquet file, a saved or a hub dataset. `split` and `subset` choose
    within saved and hub datasets; a plain file has neither. Raises UserError if it is missing, unreadable or empty, or
    lacks the split or subset that is asked for."""
    import httpx
    import pyarrow
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name, path = config.name, Path(config.name).expanduser()
    is_local = path.exists()
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_SUFFIXES)):
        raise UserError(f"dataset {name} does not exist")
    problem = "cannot be read" if is_local else "is no local path, and the hub did not give it"
    kinds = DatasetsError, pyarrow.ArrowException, httpx.HTTPError, OSError, ValueError, KeyError
    with user_errors(f"dataset {name} {problem}", *kinds):
        rows = _load_local(path, config) if is_local else load_dataset(name, config.subset, split=config.split)
    if len(rows) == 0:
        raise UserError(f"dataset {name} is empty")
    return rows


def _load_local(path: Path, config: SFTData) -> "list[Row] | Dataset":
    from datasets import Dataset, DatasetDict, load_from_disk

    saved: Any = load_from_disk(str(path)) if path.is_dir() else None
    splits = list(saved) if isinstance(saved, DatasetDict) else [SFTData.model_fields["split"].default]
    if config.subset is not None or config.split not in splits:  # else all rows would be trained on
        raise UserError(
            f"dataset {path} has no subsets, and of splits only {', '.join(splits)}: see data.subset and data.split"
        )
    if path.is_dir():
        return saved[config.split] if isinstance(saved, DatasetDict) else saved
    if path.suffix not in _SUFFIXES:
        raise UserError(f"dataset {path} is neither a saved dataset nor a file {' or '.join(_SUFFIXES)}")
    if path.suffix == ".parquet":
        return Dataset.from_parquet(str(path))
    rows: list[Row] = []  # (`datasets` would give all rows' tool arguments each other's keys)
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(rows[-1], dict):
                raise UserError(f"{path} line {number} is a {type(rows[-1]).__name__}, not an object")
    return rows


def _without_nulls(value: Any) -> Any:
    """A columnar store fills in None for every key that only other rows have."""
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


class _Function(BaseModel, extra="allow"):
    name: str
    # Some APIs write "" where a call has no arguments.
    arguments: Annotated[Json[dict[str, Any]] | dict[str, Any], BeforeValidator(lambda value: value or {})] = {}


class _Call(BaseModel, extra="allow"):
    type: str = "function"
    function: Annotated[_Function, BeforeValidator(_without_nulls)]


class _Message(BaseModel, extra="allow"):
    role: str
    content: Annotated[str, BeforeValidator(text_content)] = ""
    tool_calls: list[Annotated[_Call, BeforeValidator(_without_nulls)]] = []


_MESSAGES = TypeAdapter(list[Annotated[_Message, BeforeValidator(_without_nulls)]])
_TOOLS, _JSON_TOOLS = TypeAdapter(list[Any]), TypeAdapter(Json[list[Any]])
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


def _parsed(adapter: "TypeAdapter[Any]", value: Any, column: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.islower())
        place = f"`{column}`, message {where}" if where else f"`{column}`"
        raise UserError(f"{place}: {first['msg']} ({first['input']!r:.80})") from error


def _messages(value: Any, column: str, role: str = "") -> list[Message]:
    """The messages of a column. Text becomes a message of `role`, if there is one."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f"`{column}` is {value!r:.80}, not a list of messages; fine-tuning needs {ACCEPTED}")
    parsed = [message.model_dump() for message in _parsed(_MESSAGES, list(value), column)]
    for number, message in enumerate(parsed):
        if not message["tool_calls"]:
            del message["tool_calls"]
            if "content" not in _without_nulls(value[number]):
                raise UserError(f"`{column}`, message {number} ({message['role']}): neither `content` nor `tool_calls`")
        # Under every name that templates read it by.
        if reasoning := next((message[key] for key in _REASONING_KEYS if message.get(key)), None):
            message |= dict.fromkeys(_REASONING_KEYS, reasoning)
    return parsed


@dataclass(frozen=True)
class Tokens:
    """T tokens of one sample, and which of them are trained."""

    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, context: Sequence[int], reply: Sequence[int], trained: bool = True) -> "Tokens":
        mask = np.arange(len(context) + len(reply)) >= len(context)
        return cls(np.array([*context, *reply], dtype=np.int64), mask & trained)


class RowRenderer:
    """From rows to samples, with one tokenizer. `model`: its hub name or directory. `stop_ids`: what ends a reply at
    inference besides the tokenizer's end-of-sequence token (`generation_config.json` names them)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: str, loss_mask: LossMask, stop_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._trained_roles = loss_mask.model_dump()
        self._stop_ids = {int(token) for token in (*stop_ids, tokenizer.eos_token_id) if token is not None}
        self._renderers: dict[bool, Any] = {}  # by whether there are tools; None: the chat template itself
        self._warned = False

    def samples(self, row: Row) -> list[Tokens]:
        """Return one sample of a row, or several if none has every trained message in the context seen at inference.

        * `messages`: every message of a role that the loss mask names is trained; by default the assistant's.
        * `prompt` and `completion` as lists of messages: the same, in the completion only.
        * `prompt` and `completion` as text: a user message and the assistant's answer. Without a chat template: the
          prompt's tokens, then the completion's with the end-of-sequence token, trained as an assistant's are.

        Of an assistant message its reasoning, content, tool calls and the token that ends its turn are trained; of
        other roles the content. Raises UserError if the row has another form, the tokenizer lacks a chat template, or
        the template refuses the row or cannot show it.
        """
        if "messages" not in row and not {"prompt", "completion"} <= row.keys():
            raise UserError(f"it has the columns {', '.join(row) or '(none)'}; fine-tuning needs {ACCEPTED}")
        shown = row.get("tools") or []
        tools = _parsed(_JSON_TOOLS if isinstance(shown, str) else _TOOLS, shown, "tools") or None
        if "messages" in row:
            first, messages = 0, _messages(row["messages"], "messages")
        else:
            prompt = _messages(row["prompt"], "prompt", "user")
            first, messages = len(prompt), prompt + _messages(row["completion"], "completion", "assistant")
        if self._tokenizer.chat_template is None:
            text, completion = row.get("prompt"), row.get("completion")
            if not (isinstance(text, str) and isinstance(completion, str)):
                raise UserError(
                    f"the tokenizer of {self._model} has no chat template, which rows of messages need: put a "
                    "chat_template.jinja into the model directory, or give prompt and completion as plain text"
                )
            if self._tokenizer.eos_token_id is None:
                raise UserError(f"the tokenizer of {self._model} has no end-of-sequence token to end a completion with")
            # Tokenized apart, so that the boundary is where generation would begin.
            reply = [*self._encode(completion), self._tokenizer.eos_token_id]
            return [Tokens.of(self._tokenizer(text).input_ids, reply, self._trained_roles["assistant"])]
        if not tools and any("tool_calls" in message or message["role"] == "tool" for message in messages):
            raise UserError("the row has tool calls or results but no `tools`, without which templates leave them out")
        renderer = self._renderer(bool(tools))
        samples: list[Tokens] = []
        for number in range(first + 1, len(messages) + 1):
            if not self._trained_roles.get(messages[number - 1]["role"], False):
                continue
            sample = self._sample(renderer, messages[:number], tools)
            before = samples[-1] if samples else Tokens.of([], [])
            length = len(before.input_ids)
            if np.array_equal(sample.input_ids[:length], before.input_ids):
                sample.loss_mask[:length] |= before.loss_mask
                samples = samples[:-1]
            samples.append(sample)
        return samples or [Tokens.of([], [])]

    def _renderer(self, tools: bool) -> Any:
        if tools not in self._renderers:
            renderer = self._renderers[tools] = fitting(self._model, self._tokenizer, tools)
            self._stop_ids |= set(renderer.get_stop_token_ids()) if renderer is not None else set()
        return self._renderers[tools]

    def _sample(self, renderer: Any, messages: list[Message], tools: list[Any] | None) -> Tokens:
        """A conversation of which the last message is trained, up to its end."""
        message, where = messages[-1], f"message {len(messages) - 1} ({messages[-1]['role']})"
        kinds = TemplateError, TypeError, ValueError, KeyError, IndexError, AssertionError
        with user_errors(f"the chat template of {self._model} refuses {where}", *kinds):
            if renderer is None:
                sample = self._by_template(messages, where)
            else:
                built = build_training_sample(
                    renderer,
                    messages,
                    tools=tools,
                    content_sft_roles={message["role"]} - {"assistant"},  # trained though no model samples it
                    message_loss_mask=[*[False] * (len(messages) - 1), True],
                    ensure_final_stop=True,
                )
                sample = Tokens(np.array(built.token_ids, dtype=np.int64), np.array(built.loss_mask, dtype=np.bool_))
        trained = sample.input_ids[sample.loss_mask]
        if held := [token for token in trained[:-1].tolist() if token in self._stop_ids]:
            raise UserError(
                f"{where} holds {self._tokenizer.decode(held[:1])!r}, which ends a reply: it cannot be trained"
            )
        text = _squeezed(self._tokenizer.decode(trained, clean_up_tokenization_spaces=False))
        if _squeezed(message["content"].rpartition("</think>")[2]) not in text:
            raise UserError(f"the chat template of {self._model} leaves out the content of {where}, or alters it")
        if _squeezed(str(message.get(_REASONING_KEYS[0], ""))) not in text and not self._warned:
            self._warned = True
            logger.warning("the chat template of {} leaves out reasoning: replies are trained without it", self._model)
        end = np.flatnonzero(sample.loss_mask)[-1:] + 1  # what follows a reply is the next message's
        return Tokens(sample.input_ids[: end[0]], sample.loss_mask[: end[0]]) if len(end) else sample

    def _by_template(self, messages: list[Message], where: str) -> Tokens:
        """What the chat template adds to the prompt of inference, up to the first token at which that would stop."""
        if messages[-1]["role"] != "assistant":
            raise UserError(f"{where} cannot be trained: no renderer reproduces the chat template of {self._model}")
        context = str(self._tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
        whole = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        if not whole.startswith(context):
            raise UserError(
                f"{where} cannot be trained in the context that inference sees: the chat template of {self._model} "
                f"prompts for it with ...{context[-40:]!r}, which does not begin the conversation with it"
            )
        before, ids = self._encode(context), self._encode(whole)
        # A token may reach over the border: the prompt is tokenized without what follows, as at inference.
        reply = ids[len(before) :] if ids[: len(before)] == before else self._encode(whole[len(context) :])
        if stops := [place for place, token in enumerate(reply) if token in self._stop_ids]:
            return Tokens.of(before, reply[: stops[0] + 1])
        raise UserError(
            f"the chat template of {self._model} ends {where} with no token at which servers stop: name the one that "
            "it writes as `eos_token_id` in generation_config.json"
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _squeezed(text: str) -> str:
    """Without blanks, which templates add and remove, in the form that tokenizers give letters with accents."""
    return "".join(unicodedata.normalize("NFC", text).split())
