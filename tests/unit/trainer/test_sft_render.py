"""From rows to tokens and loss masks, written by hand. Most tokenizers here have one token per byte, so that text says
which tokens there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.config.sft import LossMask
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import RowRenderer
from support.fake_engine import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = (Path(__file__).parents[3] / "assets" / "tiny-reverse" / "chat_template.jinja").read_text()
# Templates that no renderer knows
OWN = CHATML.replace("<|im_end|>\n", "<|im_end|>")
DROPS_REASONING = OWN.replace(
    "m.content", "m.content if m.role != 'assistant' or loop.last else m.content.split('</think>')[-1]"
)
THINKS = OWN.replace("assistant\n", "assistant\n<think>\n")
STARTS_ALONE = CHATML.replace("<|im_end|>\n", "")
USERS_ALONE = "{% for m in messages %}{{ m.content if m.role == 'user' else '<|im_end|>' }}{% endfor %}"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def talk(*texts: str) -> dict[str, Any]:
    """A row of messages of user and assistant, in turns."""
    return {"messages": [(assistant if number % 2 else user)(text) for number, text in enumerate(texts)]}


def calling(arguments: Any, content: str | None = "") -> dict[str, Any]:
    call = {"id": None, "function": {"name": "f", "arguments": arguments}}
    return {"messages": [user("a"), assistant(content, tool_calls=[call])], "tools": [{"name": "f"}]}


def answered(arguments: Any, content: str | None = "") -> dict[str, Any]:
    row = calling(arguments, content)
    results = [{"role": "tool", "content": "7", "tool_calls": None}, assistant("done")]
    return row | {"messages": row["messages"] + results}


def shown(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, model: str = "m", **loss_mask: bool) -> list[str]:
    """Every sample as text, what is trained in brackets."""
    texts = []
    for sample in RowRenderer(tokenizer, model, LossMask(**loss_mask)).samples(row):
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
PARTS = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
ONCE, TWICE = talk("a", "b"), talk("a", "b", "c", "d")
CALL = '<tool_call>/{"name": "f", "arguments": {"x": 1}}/</tool_call>'
ANSWERED = f"<user/a>/<assistant/[{CALL}>]/<user/<tool_response>/7/</tool_response>>/<assistant/[done>]"


# Name: template, row, samples joined by a blank, and roles that are trained.
Case = tuple[str | None, dict[str, Any], str] | tuple[str | None, dict[str, Any], str, dict[str, bool]]
TRAINED: dict[str, Case] = {
    # Of an assistant's message content and end of turn, no header and no line break after it; none of a prompt.
    "messages": (CHATML, {"messages": [SYSTEM, *ONCE["messages"]]}, "<system/S>/<user/a>/<assistant/[b>]"),
    "turns": (CHATML, TWICE, "<user/a>/<assistant/[b>]/<user/c>/<assistant/[d>]"),
    "text": (CHATML, {"prompt": "Hi", "completion": "Yo"}, "<user/Hi>/<assistant/[Yo>]"),
    "of a completion": (
        CHATML,
        {"prompt": talk("a", "b", "c")["messages"], "completion": [assistant("d")]},
        "<user/a>/<assistant/b>/<user/c>/<assistant/[d>]",
    ),
    # Of other roles that the loss mask names the content.
    "user": (CHATML, ONCE, "<user/[a]", {"user": True, "assistant": False}),
    "system": (CHATML, {"messages": [SYSTEM, assistant("A")]}, "<system/[S]>/<assistant/[A>]", {"system": True}),
    "nothing": (CHATML, ONCE, "", {"assistant": False}),
    # Without a template prompt and completion are joined.
    "plain": (None, PLAIN, "1 + 1 =[ 2>]"),
    # Calls from objects or JSON, beside the nulls of a columnar store.
    "calls": (TINY, answered({"x": 1}, None), ANSWERED),
    "JSON calls": (TINY, answered('{"x": 1}') | {"tools": '[{"name": "f"}]'}, ANSWERED),
    # Parts of text are text; no tool calls are none.
    "parts": (CHATML, {"messages": [user(PARTS), assistant("d", tool_calls=[])]}, "<user/bc>/<assistant/[d>]"),
    # A template that no renderer knows; where it drops earlier reasoning, every reply has a sample of its own.
    "own template": (OWN, TWICE, "<user/a><assistant/[b>]<user/c><assistant/[d>]"),
    "rewrites the past": (
        DROPS_REASONING,
        talk("a", "<think>hm</think>b", "c", "<think>so</think>d"),
        "<user/a><assistant/[<think>hm</think>b>] <user/a><assistant/b><user/c><assistant/[<think>so</think>d>]",
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_tokens(name, tokenizer):
    """Contract: what is trained of a row, and in which context."""
    tokenizer.chat_template, row, expected, *roles = TRAINED[name]
    text = " ".join(shown(row, tokenizer, **(roles[0] if roles else {})))
    assert re.sub("^<system/# Tools.*?/<user", "<user", text) == expected


def test_renderers_of_the_package(tmp_path):
    """Contract: a model that renderers knows is rendered as its episodes are: earlier reasoning is dropped."""
    qwen = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "qwen", tags=True))
    row = talk("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nso\n</think>\n\nd")
    assert shown(row, qwen, "Qwen/Qwen3-0.6B") == [
        "<user/a>/<assistant/[<think>/hm/</think>//b>]",
        "<user/a>/<assistant/b>/<user/c>/<assistant/[<think>/so/</think>//d>]",
    ]


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        # What a template loses: calls, what follows a stop token, a whole reply
        (CHATML, calling({}, "I call f now"), "no renderer shows tools"),
        (TINY, calling({}) | {"tools": None}, "has tool calls or results but no `tools`"),
        (CHATML, talk("a", "a<|im_end|>b"), r"holds '<\|im_end\|>', which ends a reply"),
        (USERS_ALONE, ONCE, r"leaves out the content of message 1"),
        (STARTS_ALONE, ONCE, "ends message 1 .* with no token at which servers stop"),
        (THINKS, ONCE, r"message 1 \(assistant\) cannot be trained in the context that inference sees"),
        (None, {"messages": [user("a")]}, "has no chat template, which rows of messages need"),
        # Malformed rows
        (CHATML, {"text": "a", "label": 1}, "it has the columns text, label; fine-tuning needs a column `messages`"),
        (CHATML, {"prompt": "a"}, "it has the columns prompt; fine-tuning needs"),
        (CHATML, {"messages": "a"}, "`messages` is 'a', not a list of messages; fine-tuning needs"),
        (CHATML, {"messages": []}, r"`messages` is \[\], not a list"),
        (CHATML, {"messages": [{"content": "a"}]}, "`messages`, message 0.role: Field required"),
        (CHATML, {"messages": [{"role": "user"}]}, "neither `content` nor `tool_calls`"),
        (CHATML, {"messages": [assistant("", tool_calls=[{"arguments": {}}])]}, "function: Field required"),
        (CHATML, calling("{a:"), "function.arguments.* Invalid JSON"),
        (CHATML, {"messages": [user([{"type": "image"}])]}, "0.content: Value error, it has parts that are not text"),
        (CHATML, {"messages": [user("a")], "tools": "{"}, "`tools`: Invalid JSON"),
    ],
)
def test_refused(template, row, message, tokenizer):
    """Contract: a row that a template cannot show, or that is malformed, is one clear line that says what was found."""
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message) as caught:
        shown(row, tokenizer)
    assert "\n" not in str(caught.value)


def test_reasoning_without_a_place_is_named_once(tokenizer, caplog):
    tokenizer.chat_template = OWN
    row = {"messages": [user("a"), assistant("b", reasoning_content="c")] * 2}
    assert shown(row, tokenizer) == ["<user/a><assistant/[b>]<user/a><assistant/[b>]"]
    assert len([text for text in caplog.messages if "leaves out reasoning" in text]) == 1
