"""Renderers: ours is exactly the chat template, a bridge never touches what was sampled, "auto" takes none on trust."""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import extract_message_tool_names

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from fake_engine import CHATML, make_tokenizer

from prime_rl.envs.renderer import ChatMLRenderer, RendererError, choose, equals_template, tokenizer_of

# What Qwen3 does and plain ChatML does not: an empty thinking block in a final assistant turn.
NOT_PLAIN = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
)

texts = st.text(max_size=20).filter(lambda text: "<|" not in text)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts}),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return tokenizer_of(str(model))


@settings(max_examples=60, deadline=None)
@given(messages=conversations, generate=st.booleans())
def test_chatml_equals_the_template(tokenizer: Any, messages: list[dict[str, Any]], generate: bool) -> None:
    """Token for token, for any text: also where BPE merges across the border of role and content."""
    rendered = ChatMLRenderer(tokenizer).render(messages, add_generation_prompt=generate)
    assert rendered.token_ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=generate, return_dict=False
    )
    assert len(rendered.token_ids) == len(rendered.message_indices)


TEMPLATE = (Path(__file__).parents[3] / "assets" / "tiny-reverse" / "chat_template.jinja").read_text()
calls = st.builds(
    lambda word, number: {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "look_up", "arguments": json.dumps({"word": word})},
    },
    texts,
    st.integers(0, 3),
)
with_tools = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": texts})
    | st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts}, optional={"tool_calls": st.lists(calls, max_size=3)}
    ),
    min_size=1,
    max_size=6,
)
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "é", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of(str(make_tokenizer(tmp_path_factory.mktemp("tooled"), TEMPLATE)))


@settings(max_examples=80, deadline=None)
@given(messages=with_tools, generate=st.booleans())
def test_chatml_with_tools_equals_the_template(tooled: Any, messages: list[dict[str, Any]], generate: bool) -> None:
    """Definitions, calls and results, token for token; each message has its own tokens, in its place."""
    rendered = ChatMLRenderer(tooled).render(messages, tools=TOOLS, add_generation_prompt=generate)
    assert rendered.token_ids == tooled.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=generate, return_dict=False
    )
    assert rendered.message_tool_names == extract_message_tool_names(messages)
    indices = [index for index in rendered.message_indices if index >= 0]
    assert indices == sorted(indices)
    assert set(indices) == set(range(len(messages)))


def test_tiny_template_is_the_scripts() -> None:
    """The script that makes the bundled model writes the template that is there."""
    script = ast.parse((Path(__file__).parents[3] / "scripts" / "make_tiny_model.py").read_text())
    (value,) = [
        ast.literal_eval(one.value)
        for one in script.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "CHAT_TEMPLATE"
    ]
    assert value == TEMPLATE


def test_auto_wants_the_tools_of_the_template(model: Path, tmp_path: Path) -> None:
    """A renderer that shows tools otherwise than the template does is not taken where there are tools; without, it is."""
    altered = TEMPLATE.replace("<tool_response>\\n", "<tool_response>")
    assert altered != TEMPLATE
    for template, error in (
        (TEMPLATE, None),
        (altered, "no renderer shows tools"),
        (CHATML, "no renderer shows tools"),
    ):
        directory = make_tokenizer(tmp_path / str(hash(template)), template)
        assert isinstance(choose(str(directory), "auto"), ChatMLRenderer)
        if error is None:
            assert isinstance(choose(str(directory), "auto", tools=True), ChatMLRenderer)
        else:
            with pytest.raises(RendererError, match=error):
                choose(str(directory), "auto", tools=True)


@pytest.mark.parametrize(
    ("text", "content", "statuses"),
    [
        ("plain", "plain", []),
        ('hm\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "hm", ["ok"]),
        (
            "<tool_call>{</tool_call><tool_call>{}</tool_call><tool_call>x",
            "",
            ["invalid_json", "missing_name", "unclosed_block"],
        ),
    ],
)
def test_calls_are_read(tooled: Any, text: str, content: str, statuses: list[str]) -> None:
    """Every attempt, in order, with what is wrong; only where there are tools."""
    renderer = ChatMLRenderer(tooled)
    ids = tooled.encode(f"{text}<|im_end|>", add_special_tokens=False)
    parsed = renderer.parse_response(ids, tools=TOOLS)
    assert (parsed.content, [call.status for call in parsed.tool_calls]) == (content, statuses)
    assert (renderer.parse_response(ids).content, renderer.parse_response(ids).tool_calls) == (text, [])


@settings(max_examples=40, deadline=None)
@given(
    completion=st.lists(st.integers(3, 250), max_size=12),
    closed=st.booleans(),
    followup=st.lists(texts, min_size=1, max_size=2),
)
def test_bridge_extends_what_was_sampled(
    tokenizer: Any, completion: list[int], closed: bool, followup: list[str]
) -> None:
    """Whatever the model sampled (even bytes that are no text), the next prompt starts with exactly those ids."""
    renderer = ChatMLRenderer(tokenizer)
    (end,) = renderer.get_stop_token_ids()
    prompt = renderer.render_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    sampled = [token for token in completion if token != end] + ([end] if closed else [])
    new = [{"role": "user", "content": text} for text in followup]
    bridged = renderer.bridge_to_next_turn(prompt, sampled, new)
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + len(sampled)] == prompt + sampled
    rest = bridged.token_ids[len(prompt) + len(sampled) :]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert rest == ([] if closed else [end]) + newline + renderer.render_ids(new, add_generation_prompt=True)


def test_bridge_refuses_to_retokenize_an_assistant_turn(tokenizer: Any) -> None:
    """An assistant message in the extension would replace sampled ids: no bridge."""
    renderer = ChatMLRenderer(tokenizer)
    assert renderer.bridge_to_next_turn([1], [2], [{"role": "assistant", "content": "x"}]) is None
    assert renderer.bridge_to_next_turn([1], [2], []) is None


def test_auto_takes_chatml_only_when_it_is(model: Path, tmp_path: Path) -> None:
    """Plain ChatML gets ours; a template that differs in one corner gets the template itself."""
    assert isinstance(choose(str(model), "auto"), ChatMLRenderer)
    other = make_tokenizer(tmp_path / "other", NOT_PLAIN)
    tokenizer = tokenizer_of(str(other))
    assert not equals_template(ChatMLRenderer(tokenizer), tokenizer)
    assert type(choose(str(other), "auto")).__name__ == "DefaultRenderer"


@pytest.mark.parametrize(
    ("which", "choice", "message"),
    [
        ("bare", "auto", "has no chat template"),
        ("bare", "default", "has no chat template"),
        ("nowhere", "auto", "cannot load the tokenizer of .*nowhere"),
        ("plain", "chatmll", "unknown renderer 'chatmll'"),
        ("plain", "no.such.Renderer", "cannot load the renderer 'no.such.Renderer'"),
        ("other tokens", "chatml", r"<\|im_start\|>"),  # not to be rendered as letters
    ],
)
def test_what_cannot_be_chosen(which: str, choice: str, message: str, tmp_path: Path) -> None:
    """A model without template or files, a name or path that leads nowhere, a tokenizer without the renderer's tokens: said on one line."""
    if which != "nowhere":
        make_tokenizer(tmp_path / which, None if which == "bare" else CHATML)
    if which == "other tokens":
        for file in (tmp_path / which).iterdir():
            file.write_text(file.read_text().replace("<|im_start|>", "<|begin|>"))
    with pytest.raises(RendererError, match=message) as caught:
        choose(str(tmp_path / which), choice)
    assert "\n" not in str(caught.value)


def test_import_path_is_used(model: Path) -> None:
    """A renderer of one's own, by import path."""
    assert isinstance(choose(str(model), "prime_rl.envs.renderer.ChatMLRenderer"), ChatMLRenderer)
