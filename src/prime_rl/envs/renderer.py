"""Choose the renderer that turns messages into token ids, and read its tokenizer.

A renderer that bridges extends the ids already sampled instead of rendering the conversation again, so that a
multi-turn episode is one sequence and nothing that the model sampled is re-tokenized.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from huggingface_hub import hf_hub_download
from renderers import CustomRendererConfig, create_renderer
from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    attribute_text_segments,
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


@dataclass(frozen=True)
class RendererChoice:
    """A renderer made for a model: its readable name, the config that verifiers keys it by, and itself."""

    name: str
    config: Any
    renderer: Any


def choose(model: str, choice: str, tools: bool = False) -> RendererChoice:
    """The renderer for a hub name or local directory.

    `choice`: "auto", "chatml", "default", a name that renderers knows, or an import path (`module.Class`,
    `file.py:Class`). "auto" takes the first that provably renders what the model's chat template renders, with tools
    where there are `tools`. Raises RendererError.
    """
    if choice == "auto":
        return _auto(model, tools)
    if choice == "chatml":
        return _chatml(_tokenizer(model))
    if choice == "default":
        return _default(model, tools)
    if choice in KNOWN:
        return _named(choice, _tokenizer(model))
    if "." not in choice:
        raise RendererError(f"unknown renderer {choice!r} (known: {', '.join(KNOWN)}, or an import path)")
    try:
        config = CustomRendererConfig(import_path=choice)
        return RendererChoice(choice, config, create_renderer(_tokenizer(model), config))
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise RendererError(f"cannot load the renderer {choice!r}: {error}") from error


def choose_for(setup: Setup, tools: bool) -> RendererChoice:
    """The renderer of an environment's model. Raises LoadError."""
    try:
        return choose(setup.model, setup.renderer, tools)
    except RendererError as error:
        raise LoadError(f"environment {setup.env_id!r}: {error}") from error


def _auto(model: str, tools: bool) -> RendererChoice:
    tokenizer = _tokenizer(model)
    if model in MODEL_RENDERER_MAP:
        return _named(MODEL_RENDERER_MAP[model], tokenizer)
    _require_template(model, tokenizer)
    vocabulary = tokenizer.get_vocab()
    if IM_START in vocabulary and IM_END in vocabulary:
        chatml = _chatml(tokenizer)
        if equals_template(chatml.renderer, tokenizer, tools):
            return chatml
    path = Path(model) / "config.json"
    model_type = json.loads(path.read_text()).get("model_type", "") if path.is_file() else ""
    for name in _BY_MODEL_TYPE.get(model_type, ()):
        try:
            family = _named(name, tokenizer)
        except RendererError:  # same architecture, another tokenizer
            continue
        if equals_template(family.renderer, tokenizer, tools):
            return family
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
    return _default(model, tools)


def _chatml(tokenizer: Any) -> RendererChoice:
    try:
        renderer = ChatMLRenderer(tokenizer)
    except ValueError as error:
        raise RendererError(str(error)) from error
    return RendererChoice("chatml", CustomRendererConfig(import_path=f"{__name__}.ChatMLRenderer"), renderer)


def _named(name: str, tokenizer: Any) -> RendererChoice:
    config = config_from_name(name)
    try:
        return RendererChoice(name, config, create_renderer(tokenizer, config))
    except (ValueError, AssertionError, KeyError) as error:  # tokens of the family that this tokenizer lacks
        raise RendererError(f"renderer {name!r} does not fit {tokenizer.name_or_path!r}: {error}") from error


def _default(model: str, tools: bool) -> RendererChoice:
    """The template itself, through transformers: whatever extension it uses."""
    if tools:
        raise RendererError("the renderer 'default' has no tools: choose the model's own, or chatml")
    tokenizer = _transformers_tokenizer(model)
    _require_template(model, tokenizer)
    return _named("default", tokenizer)


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


def _tokenizer(model: str) -> Any:
    return from_files(model) or _transformers_tokenizer(model)


def _transformers_tokenizer(model: str) -> Any:
    try:
        return load_tokenizer(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RendererError(f"cannot load the tokenizer of {model!r}: {cause}") from error


def _require_template(model: str, tokenizer: Any) -> None:
    if not tokenizer.chat_template:
        raise RendererError(
            f"the tokenizer of {model!r} has no chat template: add one to its files, or choose a renderer explicitly"
        )


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
        """Raises ValueError when the tokenizer lacks ChatML's tokens."""
        self.tokenizer = tokenizer
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
            tokens += attribute_text_segments(self.tokenizer, segments)
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


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class FileTokenizer:
    """The part of a transformers tokenizer that renderers use, with the same results, from its files alone.

    transformers' loader imports torch, which costs every worker 600 MB and several seconds for nothing.
    """

    def __init__(self, name_or_path: str, backend: tokenizers.Tokenizer, config: dict[str, Any], template: str) -> None:
        """Raises jinja2.TemplateError when the template is not plain Jinja."""
        self.name_or_path = name_or_path
        self.chat_template = template
        self._backend = backend
        self._special = {name: token for name in SPECIAL_TOKENS if (token := _content(config.get(name)))}
        self._template = _environment().from_string(template)
        self.eos_token_id = self._id("eos_token")
        self.unk_token_id = self._id("unk_token")

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            number = self._backend.token_to_id(tokens)
            return self.unk_token_id if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = False, tokenize: bool = True, **kwargs: Any
    ) -> Any:
        """The rendered text, or its ids. Raises jinja2.TemplateError when the template refuses the messages."""
        kwargs.pop("return_dict", None)
        variables = {"tools": None, "documents": None, **self._special, **kwargs}
        text = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._backend.token_to_id(token)


def from_files(model: str) -> FileTokenizer | None:
    """The tokenizer of a local directory or hub model; None when its files do not suffice."""
    paths = {name: _file(model, name) for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}
    tokenizer_path, config_path, template_path = paths.values()
    if tokenizer_path is None or config_path is None:
        return None
    config = json.loads(config_path.read_text())
    template = template_path.read_text() if template_path is not None else config.get("chat_template")
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    # Where a tokenizer was saved after a call with truncation or padding, the file has both; transformers sets them anew for every call.
    backend.no_truncation()
    backend.no_padding()
    several = any((tokenizer_path.parent / "additional_chat_templates").glob("*.jinja"))
    if not isinstance(template, str) or several or not _has_all_tokens(backend, config):
        return None
    try:
        return FileTokenizer(model, backend, config, template)
    except jinja2.TemplateError:  # an extension that only transformers has
        return None


def _has_all_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> bool:
    """Whether tokenizer.json has, just so, every added and special token that tokenizer_config.json names: transformers adds the others."""
    known = backend.get_added_tokens_decoder().values()
    added = [tokenizers.AddedToken(**fields) for fields in (config.get("added_tokens_decoder") or {}).values()]
    more = [config.get(name) or () for name in ("additional_special_tokens", "extra_special_tokens")]
    special = [config.get(name) for name in SPECIAL_TOKENS]
    for tokens in more:
        special += tokens.values() if isinstance(tokens, dict) else tokens
    names = {token.content for token in known}
    described = {repr(token) for token in known}
    return all(repr(token) in described for token in added) and {_content(token) for token in special} - {""} <= names


def _file(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError):  # no such file, no such model, no network: the caller's fallback says which
        return None


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _environment() -> jinja2.Environment:
    """As chat templates expect it (transformers' documentation of chat templates)."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment
