"""Choose the renderer that turns messages into token ids, and read its tokenizer.

A renderer that bridges extends the ids already sampled instead of rendering the conversation again, so that a
multi-turn episode is one sequence and nothing that the model sampled is re-tokenized. Fine-tuning takes the same one.
"""

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import jinja2
from renderers import create_renderer
from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    load_tokenizer,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import config_from_name
from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER

from prime_rl.envs.convert import parsed_json
from prime_rl.errors import UserError

logger = logging.getLogger(__name__)

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_CALLS = re.compile(rf"{CALL}(.*?)({CALL_END}|$)", re.DOTALL)

_Segment = tuple[str, int, bool]  # text, index of its message (-1: none), whether it is the message's own (no header)

_FAMILIES = tuple(dict.fromkeys(["chatml", *MODEL_RENDERER_MAP.values()]))
KNOWN = sorted({"auto", "default", *_FAMILIES})

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look é up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def _call(number: int, word: str) -> dict[str, Any]:
    arguments = json.dumps({"word": word}, ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


# Where templates differ: blanks at the edges, reasoning, several turns; one call and several, with text and without.
_PROBE: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  two  words \n"},
    {"role": "assistant", "content": "b", "reasoning_content": "r"},
    {"role": "user", "content": "\na\n\nb é 你好"},
    {"role": "assistant", "content": "", "tool_calls": [_call(0, "é")]},
    {"role": "tool", "content": "1\n", "tool_call_id": "call_0", "name": "look_up"},
    {"role": "assistant", "content": "b", "tool_calls": [_call(1, "c"), _call(2, "d")]},
    {"role": "tool", "content": "1", "tool_call_id": "call_1", "name": "look_up"},
    {"role": "tool", "content": "2", "tool_call_id": "call_2", "name": "look_up"},
    {"role": "assistant", "content": "b c\n", "reasoning_content": "s"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "g"},
)


class RendererError(UserError):
    """No renderer can be made for this model and choice; the message names the cause."""


def choose(model: str, choice: str, tools: bool = False) -> Any:
    """Return the renderer for a hub name or local directory. `choice`: "auto", "chatml", "default", or a name that
    renderers knows. "auto" takes `fitting`'s, with tools if `tools`, or the template itself. Raises RendererError."""
    if choice not in KNOWN:
        raise RendererError(f"unknown renderer {choice!r} (known: {', '.join(KNOWN)})")
    tokenizer = tokenizer_of(model)
    if choice in ("auto", "default") and not tokenizer.chat_template and model not in MODEL_RENDERER_MAP:
        raise RendererError(
            f"the tokenizer of {model!r} has no chat template: add one to its files, or choose a renderer explicitly"
        )
    if choice == "default" and tools:
        raise RendererError("the renderer 'default' has no tools: choose the model's own, or chatml")
    if choice == "auto":
        if (renderer := fitting(model, tokenizer, tools)) is not None:
            return renderer
        logger.warning(
            "no renderer reproduces the chat template of %s: using the template itself; every turn after "
            "the first is rendered again and may become a sample of its own",
            model,
        )
        choice = "default"
    return _made(model, choice, tokenizer)


def fitting(model: str, tokenizer: Any, tools: bool) -> Any:
    """The renderer of a model that renderers knows by name, else the first that provably renders what the tokenizer's
    chat template renders. None: there is none, and no `tools` either. Raises RendererError: none shows `tools` so.
    """
    if model in MODEL_RENDERER_MAP:
        return _made(model, MODEL_RENDERER_MAP[model], tokenizer)
    for name in _FAMILIES:
        with contextlib.suppress(RendererError):  # tokens of that family that this tokenizer lacks
            renderer = _made(model, name, tokenizer)
            if equals_template(renderer, tokenizer, tools):
                return renderer
    if tools:
        raise RendererError(
            f"no renderer shows tools to the model as the chat template of {model!r} does: mend the template, or for "
            "rollouts choose a renderer by name, such as chatml, which shows them as Hermes and Qwen do"
        )
    return None


def _made(model: str, name: str, tokenizer: Any) -> Any:
    try:
        return ChatMLRenderer(tokenizer) if name == "chatml" else create_renderer(tokenizer, config_from_name(name))
    except (ValueError, AssertionError, KeyError, TypeError, ImportError, OSError) as error:
        raise RendererError(f"renderer {name!r} does not fit {model!r}: {error}") from error


def equals_template(renderer: Any, tokenizer: Any, tools: bool = False) -> bool:
    """Whether a renderer gives exactly the ids of the tokenizer's chat template.

    Compared are all beginnings of the probe conversation, with its system message and without, with a generation prompt
    and without; where there are `tools`, with its calls as well.
    """
    talk = [message for message in _PROBE if message["role"] != "tool" and not message.get("tool_calls")]
    for messages, shown in ((talk, None), (_PROBE, [_TOOL]))[: 1 + tools]:
        for start, end, generate in product((0, 1), range(2, len(messages) + 1), (False, True)):
            part = list(messages[start:end])
            try:
                ours = renderer.render(part, tools=shown, add_generation_prompt=generate).token_ids
                theirs = tokenizer.apply_chat_template(
                    part, tools=shown, tokenize=True, add_generation_prompt=generate, return_dict=False
                )
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, AssertionError):  # one of them refuses it
                return False
            if list(ours) != list(theirs):
                return False
    return True


def tokenizer_of(model: str) -> Any:
    """transformers' tokenizer of a hub name or local directory. Raises RendererError."""
    try:
        with _no_torch():
            return load_tokenizer(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RendererError(f"cannot load the tokenizer of {model!r}: {cause}") from error


@contextlib.contextmanager
def _no_torch() -> Iterator[None]:
    """Hide torch, which transformers would import: 600 MB and seconds for every worker, none of it for a tokenizer. An
    environment that imports transformers itself gets another copy, with torch."""
    if {"transformers", "torch"} & set(sys.modules):
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers")]:
            del sys.modules[name]


class ChatMLRenderer:
    """`<|im_start|>role\\ncontent<|im_end|>\\n` for every message, with a bridge. Text only.

    With tools: their definitions end the system message, calls are JSON between `<tool_call>` tags, and neighbouring
    results share a user turn, each between `<tool_response>` tags. The package's renderers of this form need tokens
    that small tokenizers do not have.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ValueError when the tokenizer lacks ChatML's tokens, or is not one of the tokenizers library."""
        self.tokenizer = tokenizer
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            raise ValueError("ChatML needs a tokenizer of the tokenizers library (tokenizer.json)")
        # Asked directly: transformers takes twice as long, half of it to set these two anew for every call.
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        vocabulary = tokenizer.get_vocab()
        if missing := [token for token in (IM_START, IM_END) if token not in vocabulary]:
            raise ValueError(f"ChatML needs the token {missing[0]}, which the tokenizer does not have")
        self._end: int = vocabulary[IM_END]

    def render(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> RenderedTokens:
        lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools or [])
        described = f"{_TOOLS_HEADER}{lines}{_TOOLS_FOOTER}" if tools else ""
        return self._tokens([], _segments(messages, described, bool(tools)), messages, add_generation_prompt)

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        ids = [token for token in token_ids if token != self._end]
        # Some tokenizers count the tags of calls among their special tokens.
        content = self.tokenizer.decode(ids, skip_special_tokens=not tools)
        calls = [_call_of(attempt) for attempt in _CALLS.finditer(content)] if tools else []
        if calls:
            content = content[: content.index(CALL)].removesuffix("\n")
        return ParsedResponse(content=content, reasoning_content=None, tool_calls=calls, reasoning_complete=True)

    def bridge_to_next_turn(
        self, prompt_ids: list[int], completion_ids: list[int], new_messages: list[Any], *, tools: Any = None
    ) -> RenderedTokens | None:
        """The ids so far, unchanged, then the new messages and a generation prompt; None when it cannot extend."""
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        # A turn cut off by its token limit has no <|im_end|>: it is closed as the template would.
        closed = trim_to_turn_close(prompt_ids, completion_ids, {self._end}, synthesize_close=self._end)
        segments = [("\n", -1, False), *_segments(new_messages, "", bool(tools))]
        return self._tokens(closed or [], segments, new_messages, add_generation_prompt=True)

    def _tokens(
        self, before: list[int], segments: Iterable[_Segment], messages: list[Any], add_generation_prompt: bool
    ) -> RenderedTokens:
        segments = [*segments, (f"{IM_START}assistant\n", -1, False)] if add_generation_prompt else list(segments)
        # One pass over all text: BPE merges across the borders of segments, and so does the template's encoding.
        encoding = self._backend.encode("".join(text for text, _, _ in segments), add_special_tokens=False)
        owners: list[tuple[int, bool]] = []  # of characters
        for text, message, is_content in segments:
            owners += [(message, is_content)] * len(text)
        attributed = [(-1, False)] * len(before) + [owners[start] for start, _ in encoding.offsets]
        return RenderedTokens(
            token_ids=[*before, *encoding.ids],
            message_indices=[message for message, _ in attributed],
            sampled_mask=[own and messages[message]["role"] == "assistant" for message, own in attributed],
            is_content=[own for _, own in attributed],
            message_roles=[message["role"] for message in messages],
        )


def _segments(messages: list[Any], described: str, with_tools: bool) -> Iterator[_Segment]:
    """The text of a conversation, `described` being its tools."""
    if described and (not messages or messages[0]["role"] != "system"):
        yield f"{IM_START}system\n{described}{IM_END}\n", -1, False
    for index, message in enumerate(messages):
        role, text = message["role"], text_content(message.get("content"))
        if with_tools and role == "tool":
            is_first = not index or messages[index - 1]["role"] != "tool"
            is_last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            yield (f"{IM_START}user" if is_first else "") + "\n<tool_response>\n", index, False
            yield text, index, True
            yield "\n</tool_response>" + (f"{IM_END}\n" if is_last else ""), index, False
            continue
        if with_tools and role == "assistant":
            for call in message.get("tool_calls") or []:
                function = call.get("function", call)
                arguments = function["arguments"]
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                before = "\n" if text else ""
                text += f'{before}{CALL}\n{{"name": "{function["name"]}", "arguments": {written}}}\n{CALL_END}'
        yield f"{IM_START}{role}\n", index, False
        yield text, index, True
        if described and index == 0 and role == "system":
            yield f"\n\n{described}", index, False
        yield IM_END, index, role == "assistant"
        yield "\n", index, False


def _call_of(attempt: re.Match[str]) -> ParsedToolCall:
    """A call that the model wrote, or what is wrong with it."""
    raw = attempt[1].strip()
    if not attempt[2]:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        call = parsed_json(raw)
    except ValueError:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME)
    arguments = call.get("arguments", {})
    # As the model wrote it, letters beyond ASCII included: verifiers would escape them.
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ParsedToolCall(raw=raw, name=name, arguments=written)


def text_content(content: Any) -> Any:
    """The content of a message, as one text where it is a list of parts. Raises ValueError: a part is not text."""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("it has parts that are not text")
        return "".join(str(part["text"]) for part in content)
    return "" if content is None else content
