"""Choose the renderer that turns messages into token ids, and read its tokenizer.

A renderer that bridges extends the ids already sampled instead of rendering the conversation again, so that a
multi-turn episode is one sequence and nothing that the model sampled is re-tokenized.
"""

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jinja2
from renderers import CustomRendererConfig, create_renderer
from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    extract_message_tool_names,
    load_tokenizer,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig, config_from_name
from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER

from prime_rl.envs.convert import parsed_json
from prime_rl.envs.ids import LoadError
from prime_rl.envs.protocol import Setup

logger = logging.getLogger(__name__)

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_CALLS = re.compile(rf"{CALL}(.*?)({CALL_END}|$)", re.DOTALL)

_Segment = tuple[str, int]  # text, index of the message it belongs to (-1: none)

KNOWN = sorted({"auto", "chatml", "default", *MODEL_RENDERER_MAP.values()})

# Checkpoints in local directories have no hub name to look up: renderers worth trying, by architecture.
_BY_MODEL_TYPE: dict[str, tuple[str, ...]] = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3", "prime-qwen3"),
    "llama": ("llama-3",),
    "gpt_oss": ("gpt-oss",),
    "glm4_moe": ("glm-4.5",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
}

# Conversations on which templates differ: system or none, several turns, blanks at the edges, blanks only, last role.
_PROBES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Hi"),),
    (("system", "Be brief."), ("user", "  two  words \n")),
    (("system", "s"), ("user", "a\n\nb"), ("assistant", "c"), ("user", "\nd é 你好")),
    (("user", "a"), ("assistant", "b c\n")),
)
_PROBE_TOOL = {
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


def _result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "look_up", "content": text}


# The same, of conversations with tools: one call and several, with text before them and without, answered and going on.
_TOOL_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_call(0, "é")]},
        _result(0, "1\n"),
    ],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [_call(0, "c"), _call(1, "d")]},
        _result(0, "1"),
        _result(1, "2"),
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ],
)


class RendererError(Exception):
    """No renderer can be made for this model and choice; the message names the cause."""


def choose(model: str, choice: str, tools: bool = False) -> Any:
    """The renderer for a hub name or local directory.

    `choice`: "auto", "chatml", "default", a name that renderers knows, or an import path (`module.Class`,
    `file.py:Class`). "auto" takes the first that provably renders what the model's chat template renders, with tools
    where there are `tools`. Raises RendererError.
    """
    custom = choice not in KNOWN
    if custom and "." not in choice:
        raise RendererError(f"unknown renderer {choice!r} (known: {', '.join(KNOWN)}, or an import path)")
    tokenizer = tokenizer_of(model)
    if choice == "auto" and model in MODEL_RENDERER_MAP:
        choice = MODEL_RENDERER_MAP[model]
    if choice in ("auto", "default") and not tokenizer.chat_template:
        raise RendererError(
            f"the tokenizer of {model!r} has no chat template: add one to its files, or choose a renderer explicitly"
        )
    if choice == "auto":
        return _auto(model, tokenizer, tools)
    if choice == "default" and tools:
        raise RendererError("the renderer 'default' has no tools: choose the model's own, or chatml")
    try:
        return _made(choice, tokenizer)
    except (ValueError, AssertionError, KeyError, TypeError, ImportError, OSError) as error:
        # Of one that is known: tokens of its family that this tokenizer lacks.
        what = f"cannot load the renderer {choice!r}" if custom else f"renderer {choice!r} does not fit {model!r}"
        raise RendererError(f"{what}: {error}") from error


def choose_for(setup: Setup, tools: bool) -> Any:
    """The renderer of an environment's model. Raises LoadError."""
    try:
        return choose(setup.model, setup.renderer, tools)
    except RendererError as error:
        raise LoadError(f"environment {setup.env_id!r}: {error}") from error


def _auto(model: str, tokenizer: Any, tools: bool) -> Any:
    path = Path(model) / "config.json"
    model_type = json.loads(path.read_text()).get("model_type", "") if path.is_file() else ""
    for name in ("chatml", *_BY_MODEL_TYPE.get(model_type, ())):
        with contextlib.suppress(ValueError, AssertionError, KeyError):  # same architecture, another tokenizer
            renderer = _made(name, tokenizer)
            if equals_template(renderer, tokenizer, tools):
                return renderer
    if tools:
        raise RendererError(
            f"no renderer shows tools to the model as the chat template of {model!r} does: choose one by name, such as "
            "chatml, which shows them as Hermes and Qwen do, or mend the template"
        )
    logger.warning(
        "no renderer reproduces the chat template of %s: using the template itself; every turn after "
        "the first is rendered again and may become a sample of its own",
        model,
    )
    return _made("default", tokenizer)


def _made(name: str, tokenizer: Any) -> Any:
    if name == "chatml":
        return ChatMLRenderer(tokenizer)
    return create_renderer(
        tokenizer, config_from_name(name) if name in KNOWN else CustomRendererConfig(import_path=name)
    )


def equals_template(renderer: Any, tokenizer: Any, tools: bool = False) -> bool:
    """Whether a renderer gives exactly the ids of the tokenizer's chat template on the probe conversations."""
    probes: list[tuple[list[dict[str, Any]], Any]] = [
        ([{"role": role, "content": content} for role, content in probe], None) for probe in _PROBES
    ]
    if tools:
        probes += [(messages, [_PROBE_TOOL]) for messages in _TOOL_PROBES]
    for messages, shown in probes:
        for generate in (False, True):
            ours = renderer.render_ids(messages, tools=shown, add_generation_prompt=generate)
            try:
                theirs = tokenizer.apply_chat_template(
                    messages, tools=shown, tokenize=True, add_generation_prompt=generate, return_dict=False
                )
            except (jinja2.TemplateError, TypeError):  # a template that refuses a conversation we would render
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
    """Hide torch, which transformers would import: 600 MB and seconds for every worker, and a tokenizer needs none of it.

    An environment that imports transformers itself gets another copy, with torch.
    """
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


class ChatMLConfig(BaseRendererConfig):
    name: Literal["chatml"] = "chatml"


class ChatMLRenderer:
    """`<|im_start|>role\\ncontent<|im_end|>\\n` for every message, with a bridge. Text only.

    With tools: their definitions end the system message, calls are JSON between `<tool_call>` tags, and neighbouring results share a user turn,
    each between `<tool_response>` tags.
    """

    config_class = ChatMLConfig
    is_prefix_stable = True
    supports_tools = True

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        """Raises ValueError when the tokenizer lacks ChatML's tokens, or is not one of the tokenizers library."""
        self.tokenizer = tokenizer
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            raise ValueError("ChatML needs a tokenizer of the tokenizers library (tokenizer.json)")
        # Asked directly: transformers takes twice as long, half of it to set these two anew for every call.
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.config = config or ChatMLConfig()
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in (IM_START, IM_END) if token not in vocabulary]
        if missing:
            raise ValueError(f"ChatML needs the token {missing[0]}, which the tokenizer does not have")
        self._start: int = vocabulary[IM_START]
        self._end: int = vocabulary[IM_END]
        self._newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)
        self._prompt: list[int] = [self._start, *tokenizer.encode("assistant\n", add_special_tokens=False)]

    def render(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> RenderedTokens:
        turns = _turns(messages, _described(tools), bool(tools))
        return self._render([], turns, messages, add_generation_prompt)

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        ids = [token for token in token_ids if token != self._end]
        # Some tokenizers count the tags of calls among their special tokens.
        content = self.tokenizer.decode(ids, skip_special_tokens=not tools)
        calls = _calls(content) if tools else []
        if calls:
            content = content[: content.index(CALL)].removesuffix("\n")
        return ParsedResponse(content=content, reasoning_content=None, tool_calls=calls, reasoning_complete=True)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: Any = None,
    ) -> RenderedTokens | None:
        """The ids so far, unchanged, then the new messages and a generation prompt; None when it cannot extend."""
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        # A turn cut off by its token limit has no <|im_end|>: it is closed as the template would.
        closed = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {self._end}, synthesize_close=self._end
        )
        turns = _turns(new_messages, "", bool(tools))
        return self._render([*(closed or []), *self._newline], turns, new_messages, add_generation_prompt=True)

    def _render(
        self, before: list[int], turns: Iterator[list[_Segment]], messages: list[Any], add_generation_prompt: bool
    ) -> RenderedTokens:
        tokens = [(token, -1) for token in before]  # and the message that each belongs to
        for segments in turns:
            tokens.append((self._start, segments[0][1]))
            # One pass over a whole turn: BPE merges across its borders, and so does the template's encoding.
            encoding = self._backend.encode("".join(text for text, _ in segments), add_special_tokens=False)
            owners = [message for text, message in [*segments, (" ", segments[-1][1])] for _ in text]  # of characters
            tokens += [(token, owners[start]) for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)]
            last = segments[-1][1]
            tokens += [(token, last) for token in (self._end, *self._newline)]
        if add_generation_prompt:
            tokens += [(token, -1) for token in self._prompt]
        return RenderedTokens(
            token_ids=[token for token, _ in tokens],
            message_indices=[message for _, message in tokens],
            message_roles=[message["role"] for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )


def _turns(messages: list[Any], described: str, with_tools: bool) -> Iterator[list[_Segment]]:
    """What stands between `<|im_start|>` and `<|im_end|>`, turn by turn."""
    if described and (not messages or messages[0]["role"] != "system"):
        yield [(f"system\n{described}", -1)]
    for index, message in enumerate(messages):
        role, content = message["role"], _text(message.get("content"))
        if with_tools and role == "tool":
            if index and messages[index - 1]["role"] == "tool":
                continue
            yield _results(messages, index)
            continue
        segments: list[_Segment] = [(f"{role}\n", index), (content, index)]
        if described and index == 0 and role == "system":
            segments.append((f"\n\n{described}", index))
        if with_tools and role == "assistant" and message.get("tool_calls"):
            segments.append((_called(message["tool_calls"], bool(content)), index))
        yield segments


def _results(messages: list[Any], start: int) -> list[_Segment]:
    segments: list[_Segment] = [("user", start)]
    for index in range(start, len(messages)):
        if messages[index]["role"] != "tool":
            break
        segments += [
            ("\n<tool_response>\n", index),
            (_text(messages[index].get("content")), index),
            ("\n</tool_response>", index),
        ]
    return segments


def _described(tools: list[Any] | None) -> str:
    lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools or [])
    return f"{_TOOLS_HEADER}{lines}{_TOOLS_FOOTER}" if tools else ""


def _called(calls: list[Any], after_text: bool) -> str:
    text = ""
    for call in calls:
        function = call.get("function", call)
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        before = "\n" if after_text or text else ""
        text += f'{before}{CALL}\n{{"name": "{function["name"]}", "arguments": {written}}}\n{CALL_END}'
    return text


def _calls(text: str) -> list[ParsedToolCall]:
    """Every attempt at a call, the broken ones with why."""
    calls = []
    for attempt in _CALLS.finditer(text):
        raw = attempt[1].strip()
        try:
            call = parsed_json(raw)
        except ValueError:
            status = ToolCallParseStatus.INVALID_JSON if attempt[2] else ToolCallParseStatus.UNCLOSED_BLOCK
            calls.append(ParsedToolCall(raw=raw, status=status))
            continue
        name = call.get("name") if isinstance(call, dict) else None
        if not attempt[2]:
            calls.append(ParsedToolCall(raw=raw, status=ToolCallParseStatus.UNCLOSED_BLOCK))
        elif not isinstance(name, str) or not name:
            calls.append(ParsedToolCall(raw=raw, status=ToolCallParseStatus.MISSING_NAME))
        else:
            arguments = call.get("arguments", {})
            # As the model wrote it, letters beyond ASCII included: verifiers would escape them.
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ParsedToolCall(raw=raw, name=name, arguments=written))
    return calls


def _text(content: Any) -> str:
    if isinstance(content, list):  # OpenAI content parts
        if unknown := [part.get("type") for part in content if part.get("type") != "text"]:
            raise ValueError(f"the ChatML renderer is text only, a message has {unknown[0]!r}")
        return "".join(part["text"] for part in content)
    return content or ""
