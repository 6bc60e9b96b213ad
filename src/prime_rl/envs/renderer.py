"""Which renderer turns messages into token ids, and our own for plain ChatML.

A renderer that bridges extends the ids already sampled instead of rendering the conversation again, so that a
multi-turn episode is one sequence and nothing that the model sampled is re-tokenized.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
from renderers import CustomRendererConfig, create_renderer
from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    RenderedTokens,
    attribute_text_segments,
    load_tokenizer,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig, config_from_name

from prime_rl.envs.tokenizer import from_files

logger = logging.getLogger(__name__)

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHATML_PATH = "prime_rl.envs.renderer.ChatMLRenderer"

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


class RendererError(Exception):
    """No renderer can be made for this model and choice; the message names the cause."""


class ChatMLConfig(BaseRendererConfig):
    name: Literal["chatml"] = "chatml"


class ChatMLRenderer:
    """`<|im_start|>role\\ncontent<|im_end|>\\n` for every message, with a bridge. Text only, no tools."""

    config_class = ChatMLConfig
    is_prefix_stable = True
    supports_tools = False

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = config or ChatMLConfig()
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in (IM_START, IM_END) if token not in vocabulary]
        if missing:
            raise RendererError(f"ChatML needs the token {missing[0]}, which the tokenizer does not have")
        self._start: int = vocabulary[IM_START]
        self._end: int = vocabulary[IM_END]
        self._newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)
        self._prompt: list[int] = [self._start, *tokenizer.encode("assistant\n", add_special_tokens=False)]

    def render(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> RenderedTokens:
        if tools:
            raise ValueError("the ChatML renderer has no tools; choose a renderer of the model's family")
        return self._render([], messages, add_generation_prompt)

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    def parse_response(self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None) -> ParsedResponse:
        ids = [token for token in token_ids if token != self._end]
        content = self.tokenizer.decode(ids, skip_special_tokens=True)
        return ParsedResponse(content=content, reasoning_content=None, tool_calls=[], reasoning_complete=True)

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
        return self._render([*(closed or []), *self._newline], new_messages, add_generation_prompt=True)

    def _render(self, before: list[int], messages: list[Any], add_generation_prompt: bool) -> RenderedTokens:
        """Per token: id, message index (-1 = none), sampled by a model in a full render, content or scaffold."""
        tokens: list[tuple[int, int, bool, bool]] = [(token, -1, False, False) for token in before]
        for index, message in enumerate(messages):
            spoken = message["role"] == "assistant"
            tokens.append((self._start, index, False, False))
            # One pass over role and content: BPE merges across that border, and so does the template's encoding.
            segments = [(f"{message['role']}\n", False), (_text(message.get("content")), True)]
            for token, content in attribute_text_segments(self.tokenizer, segments):
                tokens.append((token, index, spoken and content, content))
            tokens.append((self._end, index, spoken, spoken))
            tokens.extend((token, index, False, False) for token in self._newline)
        if add_generation_prompt:
            tokens.extend((token, -1, False, False) for token in self._prompt)
        return RenderedTokens(
            token_ids=[token[0] for token in tokens],
            message_indices=[token[1] for token in tokens],
            sampled_mask=[token[2] for token in tokens],
            is_content=[token[3] for token in tokens],
            message_roles=[message["role"] for message in messages],
        )


@dataclass(frozen=True)
class Choice:
    """A renderer made for a model: its readable name, the config that verifiers keys it by, and itself."""

    name: str
    config: Any
    renderer: Any


def choose(model: str, choice: str) -> Choice:
    """The renderer for a hub name or local directory.

    `choice`: "auto", "chatml", "default", a name that renderers knows, or an import path (`module.Class`,
    `file.py:Class`). "auto" takes the first that provably renders what the model's chat template renders.
    Raises RendererError.
    """
    if choice == "auto":
        return _auto(model)
    if choice == "chatml":
        return _chatml(_tokenizer(model))
    if choice == "default":
        return _default(model)
    if choice in _known():
        return _named(choice, _tokenizer(model))
    if "." not in choice:
        raise RendererError(f"unknown renderer {choice!r} (known: {', '.join(_known())}, or an import path)")
    try:
        config = CustomRendererConfig(import_path=choice)
        return Choice(choice, config, create_renderer(_tokenizer(model), config))
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise RendererError(f"cannot load the renderer {choice!r}: {error}") from error


def _auto(model: str) -> Choice:
    tokenizer = _tokenizer(model)
    if model in MODEL_RENDERER_MAP:
        return _named(MODEL_RENDERER_MAP[model], tokenizer)
    _require_template(model, tokenizer)
    vocabulary = tokenizer.get_vocab()
    if IM_START in vocabulary and IM_END in vocabulary:
        chatml = _chatml(tokenizer)
        if equals_template(chatml.renderer, tokenizer):
            return chatml
    for name in _BY_MODEL_TYPE.get(_model_type(model), ()):
        try:
            family = _named(name, tokenizer)
        except RendererError:  # same architecture, another tokenizer
            continue
        if equals_template(family.renderer, tokenizer):
            return family
    logger.warning(
        "no renderer reproduces the chat template of %s: using the template itself, without tools; every turn after "
        "the first is rendered again and may become a sample of its own",
        model,
    )
    return _default(model)


def _chatml(tokenizer: Any) -> Choice:
    return Choice("chatml", CustomRendererConfig(import_path=CHATML_PATH), ChatMLRenderer(tokenizer))


def _named(name: str, tokenizer: Any) -> Choice:
    config = config_from_name(name)
    try:
        return Choice(name, config, create_renderer(tokenizer, config))
    except (ValueError, AssertionError, KeyError) as error:  # tokens of the family that this tokenizer lacks
        raise RendererError(f"renderer {name!r} does not fit {tokenizer.name_or_path!r}: {error}") from error


def _default(model: str) -> Choice:
    """The template itself, through transformers: whatever extension it uses."""
    tokenizer = _transformers_tokenizer(model)
    _require_template(model, tokenizer)
    return _named("default", tokenizer)


def equals_template(renderer: Any, tokenizer: Any) -> bool:
    """Whether a renderer gives exactly the ids of the tokenizer's chat template on the probe conversations."""
    for probe in _PROBES:
        messages = [{"role": role, "content": content} for role, content in probe]
        for generate in (False, True):
            ours = renderer.render_ids(messages, add_generation_prompt=generate)
            try:
                theirs = tokenizer.apply_chat_template(
                    messages, tokenize=True, add_generation_prompt=generate, return_dict=False
                )
            except jinja2.TemplateError:  # a template that refuses a conversation we would render
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


def _known() -> list[str]:
    return sorted({"auto", "chatml", "default", *MODEL_RENDERER_MAP.values()})


def _model_type(model: str) -> str:
    path = Path(model) / "config.json"
    return str(json.loads(path.read_text()).get("model_type", "")) if path.is_file() else ""


def _text(content: Any) -> str:
    if isinstance(content, list):  # OpenAI content parts
        if unknown := [part.get("type") for part in content if part.get("type") != "text"]:
            raise ValueError(f"the ChatML renderer is text only, a message has {unknown[0]!r}")
        return "".join(part["text"] for part in content)
    return content or ""
