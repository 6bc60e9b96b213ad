"""From rows to tokens and loss masks, against token lists written by hand. The tokenizer has one token per byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.config.sft import LossMask
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import RowRenderer, Tokens
from support import trainer as support

tied_model = support.tied_model

START, END, NEWLINE, SPACE = 257, 258, 198, 220  # <|im_start|>, <|im_end|>
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role != 'assistant' or loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(tied_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tied_model)


def ids(text: str) -> list[int]:
    """Bytes 33 to 126 are the tokens 0 to 93, in order."""
    return [{" ": SPACE, "\n": NEWLINE}.get(letter, ord(letter) - 33) for letter in text]


def turn(role: str, text: str) -> list[int]:
    return [START, *ids(f"{role}\n{text}"), END, NEWLINE]


def trained(tokens: Tokens) -> list[list[int]]:
    """The runs of trained tokens."""
    runs: list[list[int]] = []
    previous = False
    for token, mask in zip(tokens.input_ids.tolist(), tokens.loss_mask.tolist(), strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return runs


def tokenize(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, loss_mask: LossMask) -> Tokens:
    """The only sample of a row."""
    (sample,) = RowRenderer(tokenizer, loss_mask).samples(row)
    return sample


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    """Of every assistant message the content and the end-of-turn token are trained: no header, no line break after it."""
    system = {"role": "system", "content": "Be."}
    row = {"messages": [system, user("Hi you"), assistant("Yo"), user("B"), assistant("C")]}
    found = tokenize(row, tokenizer, LossMask())
    turns = [("system", "Be."), ("user", "Hi you"), ("assistant", "Yo"), ("user", "B"), ("assistant", "C")]
    assert found.input_ids.tolist() == [token for item in turns for token in turn(*item)][:-1]
    assert trained(found) == [[*ids("Yo"), END], [*ids("C"), END]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("Hi")], "completion": [assistant("Yo")]},
        {"prompt": "Hi", "completion": "Yo"},
        {"prompt": [user("Hi")], "completion": "Yo"},
    ],
    ids=["messages", "text", "mixed"],
)
def test_prompt_and_completion(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompt and completion as messages or as text are the same conversation."""
    found = tokenize(row, tokenizer, LossMask())
    assert found.input_ids.tolist() == turn("user", "Hi") + turn("assistant", "Yo")[:-1]
    assert trained(found) == [[*ids("Yo"), END]]


def test_prompt_is_not_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    """Assistant messages of a prompt (examples given to the model) are not trained; those of the completion are, all of them."""
    row = {
        "prompt": [user("a"), assistant("b"), user("c")],
        "completion": [assistant("d"), {"role": "tool", "content": "e"}, assistant("f")],
    }
    assert trained(tokenize(row, tokenizer, LossMask())) == [[*ids("d"), END], [*ids("f"), END]]


def test_roles_of_the_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    """The loss mask chooses roles; of others than the assistant the header is trained too."""
    row = {"messages": [{"role": "system", "content": "S"}, user("U"), assistant("A")]}
    found = tokenize(row, tokenizer, LossMask(user=True, assistant=False))
    assert trained(found) == [turn("user", "U")[:-1]]
    found = tokenize(row, tokenizer, LossMask(system=True))
    assert trained(found) == [turn("system", "S")[:-1], [*ids("A"), END]]
    assert trained(tokenize(row, tokenizer, LossMask(assistant=False))) == []


def test_text_without_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a chat template prompt and completion are joined, and the completion with the end-of-sequence token is trained, as an assistant's."""
    tokenizer.chat_template = None
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    found = tokenize(row, tokenizer, LossMask())
    assert found.input_ids.tolist() == [*ids("1 + 1 = 2"), END]
    assert trained(found) == [[*ids(" 2"), END]]
    assert trained(tokenize(row, tokenizer, LossMask(assistant=False))) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_tool_calls(as_json: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tools reach the template; tool calls are trained; arguments may be an object or its JSON; null keys of columnar stores vanish."""
    tokenizer.chat_template = WITH_TOOLS
    arguments: Any = {"x": 1}
    tools: Any = [{"name": "f"}]
    call = {"id": None, "function": {"name": "f", "arguments": json.dumps(arguments) if as_json else arguments}}
    messages = [
        {**user("go"), "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_calls": None},
        assistant("done"),
    ]
    found = tokenize({"messages": messages, "tools": json.dumps(tools) if as_json else tools}, tokenizer, LossMask())
    assert found.input_ids.tolist()[: len(turn("system", '[{"name": "f"}]'))] == turn("system", '[{"name": "f"}]')
    assert trained(found) == [[*ids("f:x=1;"), END], [*ids("done"), END]]


def shown(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *stops: str) -> list[str]:
    """Every sample as text, what is trained in brackets."""
    samples = RowRenderer(tokenizer, LossMask(), tokenizer.convert_tokens_to_ids(list(stops))).samples(row)
    texts = []
    for sample in samples:
        text, previous = "", False
        for token, mask in [*zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True), (None, False)]:
            text += ("[" if mask else "]") * (mask != previous) + ("" if token is None else tokenizer.decode([token]))
            previous = mask
        texts.append(text.replace("<|im_start|>", "<").replace("<|im_end|>", ">").replace("\n", "/"))
    return texts


def test_template_that_rewrites_the_past(tokenizer: PreTrainedTokenizerBase) -> None:
    """Where earlier reasoning is dropped, every reply is trained after the prompt that inference would give for it, in a sample of its own."""
    tokenizer.chat_template = DROPS_REASONING
    row = {"messages": [user("a"), assistant("<think>hm</think>b"), user("c"), assistant("<think>so</think>d")]}
    assert shown(row, tokenizer) == [
        "<user/a>/<assistant/[<think>hm</think>b>]",
        "<user/a>/<assistant/b>/<user/c>/<assistant/[<think>so</think>d>]",
    ]


@pytest.mark.parametrize(
    ("prompt", "history", "content", "expected"),
    [
        ("<think>\n", "{{ m.content.split('</think>')[-1] }}", "<think>\nhm\n</think>\n\nb", "<think>/[hm/</think>//b>]"),
        ("<think>\n", "{{ m.content.split('</think>')[-1] }}", "b", "<think>/[/</think>//b>]"),
        ("<think>\n", "<think></think>{{ m.content }}", "b", "<think>/[</think>b>]"),
        ("<think>", "</think>{{ m.content }}", "b", "<think>[</think>b>]"),
        ("<think>\n\n</think>\n\n", "{{ m.content }}", "b", "<think>//</think>//[b>]"),
        ("<think>\n", "<think>\n\n</think>\n\n{{ m.content }}", "b", "<think>/[/</think>//b>]"),
    ],
    ids=["DeepSeek-R1", "without reasoning", "Nemotron", "GLM", "Gemma", "Qwen3.5"],
)  # fmt: skip
def test_prompts_that_begin_the_reply(
    prompt: str, history: str, content: str, expected: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Where the generation prompt opens or skips reasoning, the reply goes on from there, whatever the template shows of it later."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + history
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    )  # fmt: skip
    assert shown({"prompt": "a", "completion": content}, tokenizer) == ["<user/a><assistant/" + expected]


def test_header_of_the_next_message_ends_a_reply(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a mark of its own a reply ends with the stop token that begins the next message; the last one with the end of the sequence (GLM)."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
    assert shown(row, tokenizer, "<|im_start|>") == ["<user/a<assistant/[b<]user/c<assistant/[d>]"]
    # If it is no stop token, the second reply is not written after the end of the first.
    assert shown(row, tokenizer) == ["<user/a<assistant/[b>]", "<user/a<assistant/b<user/c<assistant/[d>]"]


@pytest.mark.parametrize(
    ("written", "given", "expected"),
    [("call.arguments", '{"x": 1}', '{"x": 1}'), ("call.arguments | tojson", '{"x": 1}', '{"x": 1}'), ("'' + call.arguments", {"x": 1}, '{"x": 1}')],
)  # fmt: skip
def test_arguments_are_what_the_template_takes(
    written: str, given: Any, expected: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """JSON for a template that writes arguments as they are, an object for one that makes JSON of them."""
    tokenizer.chat_template = WITH_TOOLS.replace(
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}",
        "{{ " + written.replace("call.", "call.function.") + " }}",
    )
    calls = [{"function": {"name": "f", "arguments": given}}]
    assert shown({"messages": [user("a"), {"role": "assistant", "tool_calls": calls}]}, tokenizer) == [
        f"<user/a>/<assistant/[f:{expected}>]"
    ]


DROPS_CALLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS_ALONE = DROPS_CALLS.replace(
    "{{ m.content }}", "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}"
)


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        (DROPS_CALLS, "I call f now", r"leaves out the tool calls of message 1"),
        (CALLS_ALONE, "Wait.", "leaves out the content of message 1"),
        (WITH_TOOLS, "a<|im_end|>b", r"holds '<\|im_end\|>', which ends a reply"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", None, "writes nothing of message 1"),
        (
            "{{ messages | length }}{{ messages[-1].content }}",
            None,
            r"message 1 \(assistant\) cannot be .* prompts for it with '1a', but .* writes '2b'",
        ),
    ],
)
def test_what_a_template_loses_is_refused(
    template: str, content: str | None, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A call that the content only names, content beside a call, what follows a stop token, or a whole reply."""
    tokenizer.chat_template = template
    reply = assistant(content or "b") | ({"tool_calls": [{"name": "f", "arguments": {}}]} if content else {})
    with pytest.raises(UserError, match=message):
        shown({"messages": [user("a"), reply]}, tokenizer)


def test_parts_and_empty_calls_are_what_they_say(tokenizer: PreTrainedTokenizerBase) -> None:
    """Parts of text are text for a template that takes text; no tool calls are none; other parts are refused."""
    tokenizer.chat_template = DROPS_CALLS.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.tool_calls is defined %}calls{% endif %}"
    )
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    row = {"messages": [{**user("a"), "content": parts}, {**assistant("d"), "tool_calls": []}]}
    assert shown(row, tokenizer) == ["<user/bc>/<assistant/[d>]"]
    with pytest.raises(UserError, match="list of parts of type text"):
        shown({"messages": [{**user("a"), "content": [{"type": "image"}]}, assistant("d")]}, tokenizer)


def test_reasoning_without_a_place_is_named_once(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": [user("a"), {**assistant("b"), "reasoning_content": "c"}] * 2}
    assert shown(row, tokenizer) == ["<user/a>/<assistant/[b>]/<user/a>/<assistant/[b>]"]
    assert len([text for text in caplog.messages if "leaves out reasoning" in text]) == 1


def no_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None


def untouched(tokenizer: PreTrainedTokenizerBase) -> None:
    pass


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        ({"messages": [user("a")]}, no_template, "has no chat template"),
        ({"prompt": [user("a")], "completion": "b"}, no_template, "has no chat template"),
        ({"messages": "a"}, untouched, "`messages` is 'a'; needed"),
        ({"messages": []}, untouched, r"`messages` is \[\]; needed"),
        ({"prompt": None, "completion": "b"}, untouched, "`prompt` is None"),
        ({"messages": [{"content": "a"}]}, untouched, "it needs a `role`"),
        ({"messages": [{"role": "user"}]}, untouched, "neither `content` nor `tool_calls`"),
        ({"messages": [{**assistant(""), "tool_calls": [{"arguments": {}}]}]}, untouched, "without a `name`"),
        (
            {"messages": [{**assistant(""), "tool_calls": [{"name": "f", "arguments": "{a:"}]}]},
            untouched,
            "arguments are no JSON",
        ),
        ({"messages": [user("a")], "tools": "{"}, untouched, "`tools` is text but not JSON"),
        ({"text": "a"}, untouched, "columns text; fine-tuning needs"),
    ],
)
def test_malformed_rows(
    row: dict[str, Any],
    change: Callable[[PreTrainedTokenizerBase], None],
    message: str,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Every malformed row is one clear line that says what was found."""
    change(tokenizer)
    with pytest.raises(UserError, match=message):
        tokenize(row, tokenizer, LossMask())
