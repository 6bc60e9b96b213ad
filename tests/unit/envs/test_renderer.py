"""Renderers: ours is exactly the chat template, a bridge never touches what was sampled, "auto" takes none on trust."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.envs.renderer import ChatMLRenderer, RendererError, choose, equals_template, tokenizer_of
from support.fake_engine import CHATML, TEMPLATE, make_tokenizer

ROOT = Path(__file__).parents[3]
# What Qwen3 does and plain ChatML does not: an empty thinking block in a final assistant turn.
NOT_PLAIN = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
)
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "é", "parameters": {"type": "object"}}}]

texts = st.text(max_size=20).filter(lambda text: "<|" not in text)
functions = st.builds(lambda word: {"name": "look_up", "arguments": json.dumps({"word": word})}, texts)
numbers = st.integers(0, 3).map("call_{}".format)
calls = st.fixed_dictionaries({"id": numbers, "type": st.just("function"), "function": functions})
said = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool", "assistant"]), "content": texts})
some_calls = st.lists(calls, max_size=3)
called = st.fixed_dictionaries({"role": st.just("assistant"), "content": texts, "tool_calls": some_calls})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(str(make_tokenizer(tmp_path_factory.mktemp("tooled"), TEMPLATE)))


@settings(max_examples=120, deadline=None)
@given(messages=st.lists(said | called, min_size=1, max_size=6), generate=st.booleans(), with_tools=st.booleans())
def test_chatml_equals_the_template(tokenizer, messages, generate, with_tools):
    """Definitions, calls and results, token for token, even where BPE merges across borders; each has its message."""
    if not with_tools:  # calls and results are said by them alone
        messages = [{"role": one["role"].replace("tool", "user"), "content": one["content"]} for one in messages]
    tools = TOOLS if with_tools else None
    rendered = ChatMLRenderer(tokenizer).render(messages, tools=tools, add_generation_prompt=generate)
    assert rendered.token_ids == tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=generate, return_dict=False
    )
    indices = [index for index in rendered.message_indices if index >= 0]
    assert indices == sorted(indices)
    assert set(indices) == set(range(len(messages)))


def test_tiny_template_is_the_scripts():
    """The script that makes the bundled model writes the template that is there."""
    script = ast.parse((ROOT / "scripts" / "make_tiny_model.py").read_text())
    targets = {ast.unparse(one.targets[0]): one.value for one in script.body if isinstance(one, ast.Assign)}
    assert ast.literal_eval(targets["CHAT_TEMPLATE"]) == TEMPLATE


def test_auto_takes_chatml_only_when_it_is(tmp_path):
    """Plain ChatML gets ours, with tools only if shown as the template does; one that differs gets the template."""
    altered = TEMPLATE.replace("<tool_response>\\n", "<tool_response>")
    assert altered != TEMPLATE
    for template, shows_tools in ((TEMPLATE, True), (altered, False), (CHATML, False)):
        directory = str(make_tokenizer(tmp_path / str(hash(template)), template))
        assert isinstance(choose(directory, "auto"), ChatMLRenderer)
        if shows_tools:
            assert isinstance(choose(directory, "auto", tools=True), ChatMLRenderer)
        else:
            with pytest.raises(RendererError, match="no renderer shows tools"):
                choose(directory, "auto", tools=True)
            assert isinstance(choose(directory, "chatml", tools=True), ChatMLRenderer)
    with pytest.raises(RendererError, match="'default' has no tools"):
        choose(directory, "default", tools=True)
    other = str(make_tokenizer(tmp_path / "other", NOT_PLAIN))
    assert not equals_template(ChatMLRenderer(tokenizer_of(other)), tokenizer_of(other))
    assert type(choose(other, "auto")).__name__ == "DefaultRenderer"


@pytest.mark.parametrize(
    ("which", "choice", "message"),
    [
        ("bare", "auto", "has no chat template"),
        ("nowhere", "auto", "cannot load the tokenizer of .*nowhere"),
        ("plain", "chatmll", "unknown renderer 'chatmll'"),
        ("plain", "qwen3", "renderer 'qwen3' does not fit"),
        ("other tokens", "chatml", r"<\|im_start\|>"),  # not to be rendered as letters
    ],
)
def test_what_cannot_be_chosen(which, choice, message, tmp_path):
    """A model without template or files, a name that leads nowhere, a tokenizer without the renderer's tokens."""
    if which != "nowhere":
        make_tokenizer(tmp_path / which, None if which == "bare" else CHATML)
    if which == "other tokens":
        for file in (tmp_path / which).iterdir():
            file.write_text(file.read_text().replace("<|im_start|>", "<|begin|>"))
    with pytest.raises(RendererError, match=message) as caught:
        choose(str(tmp_path / which), choice)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "content", "statuses"),
    [
        ("plain", "plain", []),
        ('hm\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "hm", ["ok"]),
        ("<tool_call>{</tool_call><tool_call>{}</tool_call><tool_call>x", "",
         ["invalid_json", "missing_name", "unclosed_block"]),
    ],
)  # fmt: skip
def test_calls_are_read(tokenizer, text, content, statuses):
    """Every attempt, in order, with what is wrong; only where there are tools."""
    renderer = ChatMLRenderer(tokenizer)
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    parsed, bare = renderer.parse_response(ids, tools=TOOLS), renderer.parse_response(ids)
    assert (parsed.content, [call.status for call in parsed.tool_calls]) == (content, statuses)
    assert (bare.content, bare.tool_calls) == (text, [])
