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


def test_template_that_rewrites_the_past(tokenizer: PreTrainedTokenizerBase) -> None:
    """A template whose prefixes do not tokenize to prefixes is refused, with the message and the tokens that differ; one turn is fine."""
    tokenizer.chat_template = DROPS_REASONING
    one = [user("a"), assistant("<think>hm</think>b")]
    assert trained(tokenize({"messages": one}, tokenizer, LossMask())) == [[*ids("<think>hm</think>b"), END]]
    with pytest.raises(UserError, match=r"differently once more follows.*message 1 \(assistant\).*'<think>h'"):
        tokenize({"messages": [*one, user("c"), assistant("d")]}, tokenizer, LossMask())


def test_template_that_refuses(tokenizer: PreTrainedTokenizerBase) -> None:
    """What the template itself objects to is passed on."""
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="refuses a conversation of user, assistant: roles must alternate"):
        tokenize({"prompt": "a", "completion": "b"}, tokenizer, LossMask())


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
