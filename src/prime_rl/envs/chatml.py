"""Our renderer of plain ChatML, with tools in the manner of Hermes and Qwen."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from renderers.base import (
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    attribute_text_segments,
    extract_message_tool_names,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig

from prime_rl.envs.convert import parsed_json

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

# Models are trained on these very words: they are part of the format.
_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CALLS = re.compile(rf"{CALL}(.*?)({CALL_END}|$)", re.DOTALL)

# Text, index of the message it belongs to (-1: none), whether a model would have sampled it, content or scaffold.
_Segment = tuple[str, int, bool, bool]


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
        turns = _turns(messages, _described(tools) if tools else "", bool(tools))
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
        """Per token: id, message index (-1 = none), sampled by a model in a full render, content or scaffold."""
        tokens: list[tuple[int, int, bool, bool]] = [(token, -1, False, False) for token in before]
        for segments in turns:
            tokens.append((self._start, segments[0][1], False, False))
            # One pass over a whole turn: BPE merges across its borders, and so does the template's encoding.
            positions: Any = [(text, place) for place, (text, *_) in enumerate(segments)]
            for token, place in attribute_text_segments(self.tokenizer, positions):
                tokens.append((token, *segments[place][1:]))
            _, last, spoken, _ = segments[-1]
            tokens.append((self._end, last, spoken, spoken))
            tokens.extend((token, last, False, False) for token in self._newline)
        if add_generation_prompt:
            tokens.extend((token, -1, False, False) for token in self._prompt)
        return RenderedTokens(
            token_ids=[token[0] for token in tokens],
            message_indices=[token[1] for token in tokens],
            sampled_mask=[token[2] for token in tokens],
            is_content=[token[3] for token in tokens],
            message_roles=[message["role"] for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )


def _turns(messages: list[Any], described: str, with_tools: bool) -> Iterator[list[_Segment]]:
    """What stands between `<|im_start|>` and `<|im_end|>`, turn by turn."""
    if described and (not messages or messages[0]["role"] != "system"):
        yield [(f"system\n{described}", -1, False, False)]
    for index, message in enumerate(messages):
        role, content = message["role"], _text(message.get("content"))
        if with_tools and role == "tool":
            if index and messages[index - 1]["role"] == "tool":
                continue
            yield _results(messages, index)
            continue
        spoken = role == "assistant"
        segments: list[_Segment] = [(f"{role}\n", index, False, False), (content, index, spoken, True)]
        if described and index == 0 and role == "system":
            segments.append((f"\n\n{described}", index, False, False))
        if with_tools and spoken and message.get("tool_calls"):
            segments.append((_called(message["tool_calls"], bool(content)), index, True, True))
        yield segments


def _results(messages: list[Any], start: int) -> list[_Segment]:
    segments: list[_Segment] = [("user", start, False, False)]
    for index in range(start, len(messages)):
        if messages[index]["role"] != "tool":
            break
        segments += [
            ("\n<tool_response>\n", index, False, False),
            (_text(messages[index].get("content")), index, False, True),
            ("\n</tool_response>", index, False, False),
        ]
    return segments


def _described(tools: list[Any]) -> str:
    lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    return f"{_TOOLS_BEFORE}{lines}{_TOOLS_AFTER}"


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
    return [_attempt(attempt[1].strip(), closed=bool(attempt[2])) for attempt in _CALLS.finditer(text)]


def _attempt(raw: str, closed: bool) -> ParsedToolCall:
    if not closed:
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


def _text(content: Any) -> str:
    if isinstance(content, list):  # OpenAI content parts
        if unknown := [part.get("type") for part in content if part.get("type") != "text"]:
            raise ValueError(f"the ChatML renderer is text only, a message has {unknown[0]!r}")
        return "".join(part["text"] for part in content)
    return content or ""
