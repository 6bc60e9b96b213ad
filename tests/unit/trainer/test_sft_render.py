"""From rows to tokens and loss masks, written by hand. The tokenizer has one token per byte, so that text says which
tokens there are."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.config.sft import LossMask
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import RowRenderer
from support.chat_templates import assistant, talk, user

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}:" + ARGUMENTS + "{% endfor %}",
)
DROPS_REASONING = CHATML.replace(
    "m.content", "m.content if m.role != 'assistant' or loop.last else m.content.split('</think>')[-1]"
)
MARKS_CALLS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages %}{% if m.tool_calls is defined %}calls{% endif %}"
)
CALLS_ALONE = CHATML.replace("{{ m.content }}", "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}")
USERS_ALONE = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


def prefilling(prompt: str, history: str) -> str:
    """A template that prompts for a reply with `prompt`, and writes it as `history` later."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + history
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prompt + "{% endif %}"
    )  # fmt: skip


def writing(arguments: str) -> str:
    """A template with arguments written as an expression of `call.function.arguments`."""
    return WITH_TOOLS.replace(ARGUMENTS, "{{ " + arguments.replace("call.", "call.function.") + " }}")


def calling(arguments: Any, content: str = "") -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [user("a"), assistant(content, tool_calls=[call])]}


def shown(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...] = (), **loss_mask: bool
) -> list[str]:
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


@pytest.fixture
def tokenizer(tied_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tied_model)


SYSTEM = {"role": "system", "content": "S"}
PLAIN = {"prompt": "1 + 1 =", "completion": " 2"}
TOOL_TURN = [{"role": "tool", "content": "7", "tool_calls": None}, assistant("done")]
NULLS = {"role": "assistant", "content": None}
CALL, CALL_JSON = ({"id": None, "function": {"name": "f", "arguments": x}} for x in ({"x": 1}, '{"x": 1}'))
PARTS = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
CALLED = '<system/[{"name": "f"}]>/<user/go>/<assistant/[f:x=1;>]/<tool/7>/<assistant/[done>]'
STOPPED = prefilling("", "{{ m.content }}").replace("<|im_end|>", "")
ONCE, TWICE = talk("a", "b"), talk("a", "b", "c", "d")
WRITTEN = '<user/a>/<assistant/[f:{"x": 1}>]'
CUT = "{{ m.content.split('</think>')[-1] }}"


# Name: template, row, samples joined by a blank, and what else is asked for.
Case = tuple[str | None, dict[str, Any], str] | tuple[str | None, dict[str, Any], str, dict[str, Any]]
TRAINED: dict[str, Case] = {
    # Of an assistant's message content and end of turn, no header and no line break after it; none of a prompt.
    "messages": (
        CHATML,
        {"messages": [SYSTEM, *talk("Hi", "Yo")["messages"]]},
        "<system/S>/<user/Hi>/<assistant/[Yo>]",
    ),
    "turns": (CHATML, talk("A", "B", "C", "D"), "<user/A>/<assistant/[B>]/<user/C>/<assistant/[D>]"),
    "lists": (CHATML, {"prompt": [user("Hi")], "completion": [assistant("Yo")]}, "<user/Hi>/<assistant/[Yo>]"),
    "text": (CHATML, {"prompt": "Hi", "completion": "Yo"}, "<user/Hi>/<assistant/[Yo>]"),
    "mixed": (CHATML, {"prompt": [user("Hi")], "completion": "Yo"}, "<user/Hi>/<assistant/[Yo>]"),
    "answered": (
        CHATML,
        {"prompt": talk("a", "b", "c")["messages"], "completion": [assistant("d"), *TOOL_TURN]},
        "<user/a>/<assistant/b>/<user/c>/<assistant/[d>]/<tool/7>/<assistant/[done>]",
    ),
    # Of other roles that the loss mask names the header, too.
    "user": (CHATML, talk("U"), "[<user/U>]", {"user": True, "assistant": False}),
    "system": (CHATML, {"messages": [SYSTEM, assistant("A")]}, "[<system/S>]/<assistant/[A>]", {"system": True}),
    "nothing": (CHATML, talk("U", "A"), "<user/U>/<assistant/A>/", {"assistant": False}),
    # Without a template prompt and completion are joined.
    "plain": (None, PLAIN, "1 + 1 =[ 2>]"),
    "plain, nothing": (None, PLAIN, "1 + 1 = 2>", {"assistant": False}),
    # Calls as the template writes them, from objects or JSON, beside the nulls of a columnar store; also of a prompt.
    "calls": (
        WITH_TOOLS,
        {"messages": [user("go"), {**NULLS, "tool_calls": [CALL]}, *TOOL_TURN], "tools": [{"name": "f"}]},
        CALLED,
    ),
    "JSON calls": (
        WITH_TOOLS,
        {"messages": [user("go"), {**NULLS, "tool_calls": [CALL_JSON]}, *TOOL_TURN], "tools": '[{"name": "f"}]'},
        CALLED,
    ),
    "calls of a prompt": (
        WITH_TOOLS,
        {"prompt": calling({"x": 1}, "f")["messages"], "completion": TOOL_TURN},
        "<user/a>/<assistant/ff:x=1;>/<tool/7>/<assistant/[done>]",
    ),
    "arguments": (writing("call.arguments"), calling('{"x": 1}'), WRITTEN),
    "arguments made JSON": (writing("call.arguments | tojson"), calling('{"x": 1}'), WRITTEN),
    "arguments as text": (writing("'' + call.arguments"), calling({"x": 1}), WRITTEN),
    # Parts of text are text; no tool calls are none.
    "parts": (
        MARKS_CALLS,
        {"messages": [{**user("a"), "content": PARTS}, assistant("d", tool_calls=[])]},
        "<user/bc>/<assistant/[d>]",
    ),
    # Where earlier reasoning is dropped, every reply is trained after its own prompt, in a sample of its own.
    "rewrites the past": (
        DROPS_REASONING,
        talk("a", "<think>hm</think>b", "c", "<think>so</think>d"),
        "<user/a>/<assistant/[<think>hm</think>b>] <user/a>/<assistant/b>/<user/c>/<assistant/[<think>so</think>d>]",
    ),
    # Where the generation prompt opens or skips reasoning, the reply goes on from there.
    "DeepSeek-R1": (
        prefilling("<think>\n", CUT),
        talk("a", "<think>\nhm\n</think>\n\nb"),
        "<user/a><assistant/<think>/[hm/</think>//b>]",
    ),
    "without reasoning": (prefilling("<think>\n", CUT), ONCE, "<user/a><assistant/<think>/[/</think>//b>]"),
    "Nemotron": (
        prefilling("<think>\n", "<think></think>{{ m.content }}"),
        ONCE,
        "<user/a><assistant/<think>/[</think>b>]",
    ),
    "GLM": (prefilling("<think>", "</think>{{ m.content }}"), ONCE, "<user/a><assistant/<think>[</think>b>]"),
    "Gemma": (
        prefilling("<think>\n\n</think>\n\n", "{{ m.content }}"),
        ONCE,
        "<user/a><assistant/<think>//</think>//[b>]",
    ),
    "Qwen3.5": (
        prefilling("<think>\n", "<think>\n\n</think>\n\n{{ m.content }}"),
        ONCE,
        "<user/a><assistant/<think>/[/</think>//b>]",
    ),
    # A reply without a mark of its own ends with the stop token that begins the next message, the last one with the end
    # of the sequence (GLM). If it is no stop token, the second reply is not written after the end of the first.
    "header ends": (STOPPED, TWICE, "<user/a<assistant/[b<]user/c<assistant/[d>]", {"stops": ("<|im_start|>",)}),
    "nothing ends": (STOPPED, TWICE, "<user/a<assistant/[b>] <user/a<assistant/b<user/c<assistant/[d>]"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_tokens(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Contract: what is trained of a row, and in which context."""
    tokenizer.chat_template, row, expected, *options = TRAINED[name]
    assert " ".join(shown(row, tokenizer, **(options[0] if options else {}))) == expected


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        # What a template loses: a call that the content only names, content beside a call, what follows a stop token,
        # a whole reply
        (CHATML, calling({}, "I call f now"), r"leaves out the tool calls of message 1"),
        (CHATML, {"prompt": calling({"x": 1}, "f")["messages"], "completion": TOOL_TURN}, "leaves out the tool calls"),
        (CALLS_ALONE, calling({}, "Wait."), "leaves out the content of message 1"),
        (WITH_TOOLS, calling({}, "a<|im_end|>b"), r"holds '<\|im_end\|>', which ends a reply"),
        (USERS_ALONE, ONCE, "writes nothing of message 1"),
        (
            "{{ messages | length }}{{ messages[-1].content }}",
            ONCE,
            r"message 1 \(assistant\) cannot be .* prompts for it with '1a', but .* writes '2b'",
        ),
        (None, {"messages": [user("a")]}, "has no chat template, which rows of messages need"),
        (None, {"prompt": [user("a")], "completion": "b"}, "has no chat template, which rows of messages need"),
        # Malformed rows
        (CHATML, {"messages": "a"}, "`messages` is 'a'; needed"),
        (CHATML, {"messages": []}, r"`messages` is \[\]; needed"),
        (CHATML, {"prompt": None, "completion": "b"}, "`prompt` is None"),
        (CHATML, {"messages": [{"content": "a"}]}, "it needs a `role`"),
        (CHATML, {"messages": [{"role": "user"}]}, "neither `content` nor `tool_calls`"),
        (CHATML, {"messages": [assistant("", tool_calls=[{"arguments": {}}])]}, "without a `name`"),
        (CHATML, calling("{a:"), "arguments are no JSON"),
        (CHATML, {"messages": [{**user("a"), "content": [{"type": "image"}]}]}, "list of parts of type text"),
        (CHATML, {"messages": [user("a")], "tools": "{"}, "`tools` is text but not JSON"),
        (CHATML, {"text": "a"}, "columns text; fine-tuning needs"),
    ],
)
def test_refused(template: str | None, row: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Contract: a row that a template cannot show, or that is malformed, is one clear line that says what was found."""
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        shown(row, tokenizer)


def test_reasoning_without_a_place_is_named_once(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": [user("a"), assistant("b", reasoning_content="c")] * 2}
    assert shown(row, tokenizer) == ["<user/a>/<assistant/[b>]/<user/a>/<assistant/[b>]"]
    assert len([text for text in caplog.messages if "leaves out reasoning" in text]) == 1
