"""From rows to tokens and loss masks, written by hand. The tokenizer has one token per byte, so that text says which tokens there are."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.config.sft import LossMask
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import RowRenderer
from support import trainer as support
from support.chat_templates import assistant, user

tied_model = support.tied_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}:"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}",
)


@pytest.fixture
def tokenizer(tied_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tied_model)


def shown(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *stops: str, **loss_mask: bool) -> list[str]:
    """Every sample as text, what is trained in brackets."""
    samples = RowRenderer(tokenizer, LossMask(**loss_mask), tokenizer.convert_tokens_to_ids(list(stops))).samples(row)
    texts = []
    for sample in samples:
        text, previous = "", False
        for token, mask in [*zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True), (None, False)]:
            text += ("[" if mask else "]") * (mask != previous) + ("" if token is None else tokenizer.decode([token]))
            previous = mask
        texts.append(text.replace("<|im_start|>", "<").replace("<|im_end|>", ">").replace("\n", "/"))
    return texts


SYSTEM = {"role": "system", "content": "S"}
TURNS = {"messages": [SYSTEM, user("Hi you"), assistant("Yo"), user("B"), assistant("C")]}
EXAMPLES = {
    "prompt": [user("a"), assistant("b"), user("c")],
    "completion": [assistant("d"), {"role": "tool", "content": "e"}, assistant("f")],
}


@pytest.mark.parametrize(
    ("row", "loss_mask", "expected"),
    [
        (TURNS, {}, "<system/S>/<user/Hi you>/<assistant/[Yo>]/<user/B>/<assistant/[C>]"),
        ({"prompt": [user("Hi")], "completion": [assistant("Yo")]}, {}, "<user/Hi>/<assistant/[Yo>]"),
        ({"prompt": "Hi", "completion": "Yo"}, {}, "<user/Hi>/<assistant/[Yo>]"),
        ({"prompt": [user("Hi")], "completion": "Yo"}, {}, "<user/Hi>/<assistant/[Yo>]"),
        (EXAMPLES, {}, "<user/a>/<assistant/b>/<user/c>/<assistant/[d>]/<tool/e>/<assistant/[f>]"),
        ({"messages": [SYSTEM, user("U")]}, {"user": True, "assistant": False}, "<system/S>/[<user/U>]"),
        ({"messages": [SYSTEM, assistant("A")]}, {"system": True}, "[<system/S>]/<assistant/[A>]"),
        ({"messages": [user("U"), assistant("A")]}, {"assistant": False}, "<user/U>/<assistant/A>/"),
    ],
    ids=["messages", "lists", "text", "mixed", "examples", "user", "system", "nothing"],
)
def test_trained_tokens(
    row: dict[str, Any], loss_mask: dict[str, bool], expected: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Contract: of every assistant message the content and the end-of-turn token are trained, no header and no line break after it; none of a
    prompt; of other roles that the loss mask names the header, too."""
    assert shown(row, tokenizer, **loss_mask) == [expected]


def test_text_without_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a chat template prompt and completion are joined, and the completion with the end-of-sequence token is trained, as an assistant's."""
    tokenizer.chat_template = None
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    assert shown(row, tokenizer) == ["1 + 1 =[ 2>]"]
    assert shown(row, tokenizer, assistant=False) == ["1 + 1 = 2>"]


@pytest.mark.parametrize("as_json", [False, True])
def test_tool_calls(as_json: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    """Calls are trained as the template writes them, from arguments and tools that are objects or JSON, beside the nulls of a columnar store."""
    tokenizer.chat_template = WITH_TOOLS
    arguments, tools = {"x": 1}, [{"name": "f"}]
    call = {"id": None, "function": {"name": "f", "arguments": json.dumps(arguments) if as_json else arguments}}
    messages = [
        {**user("go"), "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_calls": None},
        assistant("done"),
    ]
    assert shown({"messages": messages, "tools": json.dumps(tools) if as_json else tools}, tokenizer) == [
        '<system/[{"name": "f"}]>/<user/go>/<assistant/[f:x=1;>]/<tool/7>/<assistant/[done>]'
    ]


def test_template_that_rewrites_the_past(tokenizer: PreTrainedTokenizerBase) -> None:
    """Where earlier reasoning is dropped, every reply is trained after the prompt that inference would give for it, in a sample of its own."""
    tokenizer.chat_template = CHATML.replace(
        "m.content", "m.content if m.role != 'assistant' or loop.last else m.content.split('</think>')[-1]"
    )
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
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", "")
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


CALLS_ALONE = CHATML.replace("{{ m.content }}", "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}")


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        (CHATML, "I call f now", r"leaves out the tool calls of message 1"),
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


def test_calls_of_a_prompt_are_not_lost(tokenizer: PreTrainedTokenizerBase) -> None:
    """Calls that are not trained, but stand before what is, are written as well, or the row is refused."""
    prompt = [user("a"), assistant("f", tool_calls=[{"name": "f", "arguments": {"x": 1}}])]
    row = {"prompt": prompt, "completion": [{"role": "tool", "content": "7"}, assistant("b")]}
    tokenizer.chat_template = WITH_TOOLS
    assert shown(row, tokenizer) == ["<user/a>/<assistant/ff:x=1;>/<tool/7>/<assistant/[b>]"]
    tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match="leaves out the tool calls of message 1"):
        shown(row, tokenizer)


def test_parts_and_empty_calls_are_what_they_say(tokenizer: PreTrainedTokenizerBase) -> None:
    """Parts of text are text for a template that takes text; no tool calls are none."""
    tokenizer.chat_template = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.tool_calls is defined %}calls{% endif %}"
    )
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    row = {"messages": [{**user("a"), "content": parts}, {**assistant("d"), "tool_calls": []}]}
    assert shown(row, tokenizer) == ["<user/bc>/<assistant/[d>]"]


def test_reasoning_without_a_place_is_named_once(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": [user("a"), {**assistant("b"), "reasoning_content": "c"}] * 2}
    assert shown(row, tokenizer) == ["<user/a>/<assistant/[b>]/<user/a>/<assistant/[b>]"]
    assert len([text for text in caplog.messages if "leaves out reasoning" in text]) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "a"}, "`messages` is 'a'; needed"),
        ({"messages": []}, r"`messages` is \[\]; needed"),
        ({"prompt": None, "completion": "b"}, "`prompt` is None"),
        ({"messages": [{"content": "a"}]}, "it needs a `role`"),
        ({"messages": [{"role": "user"}]}, "neither `content` nor `tool_calls`"),
        ({"messages": [assistant("", tool_calls=[{"arguments": {}}])]}, "without a `name`"),
        ({"messages": [assistant("", tool_calls=[{"name": "f", "arguments": "{a:"}])]}, "arguments are no JSON"),
        ({"messages": [{**user("a"), "content": [{"type": "image"}]}]}, "list of parts of type text"),
        ({"messages": [user("a")], "tools": "{"}, "`tools` is text but not JSON"),
        ({"text": "a"}, "columns text; fine-tuning needs"),
    ],
)
def test_malformed_rows(row: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every malformed row is one clear line that says what was found."""
    with pytest.raises(UserError, match=message):
        shown(row, tokenizer)


@pytest.mark.parametrize("row", [{"messages": [user("a")]}, {"prompt": [user("a")], "completion": "b"}])
def test_messages_without_a_template(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Messages need a chat template; the line says what to do."""
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template, which rows of messages need"):
        shown(row, tokenizer)
