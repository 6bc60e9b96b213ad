"""Renderers: ours is exactly the chat template, a bridge never touches what was sampled, "auto" takes none on trust."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from fake_engine import CHATML, make_tokenizer

from prime_rl.envs.renderer import ChatMLRenderer, RendererError, choose, equals_template
from prime_rl.envs.tokenizer import FileTokenizer, from_files

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
def tokenizer(model: Path) -> FileTokenizer:
    tokenizer = from_files(str(model))
    assert tokenizer is not None
    return tokenizer


@settings(max_examples=60, deadline=None)
@given(messages=conversations, generate=st.booleans())
def test_chatml_equals_the_template(tokenizer: FileTokenizer, messages: list[dict[str, Any]], generate: bool) -> None:
    """Token for token, for any text: also where BPE merges across the border of role and content."""
    rendered = ChatMLRenderer(tokenizer).render(messages, add_generation_prompt=generate)
    assert rendered.token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=generate)
    lengths = {len(rendered.token_ids), len(rendered.message_indices), len(rendered.sampled_mask)}
    assert len(lengths | {len(rendered.is_content)}) == 1


def test_file_tokenizer_equals_transformers(model: Path, tokenizer: FileTokenizer) -> None:
    """Reading the files ourselves gives the ids and texts that transformers gives."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    for text in ("Hello  world\n", "é 你好 🦊", "<|im_start|>user\n\nx<|im_end|>", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": " a\nb"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == expected
    assert (tokenizer.eos_token_id, tokenizer.get_vocab()) == (theirs.eos_token_id, theirs.get_vocab())


@settings(max_examples=40, deadline=None)
@given(
    completion=st.lists(st.integers(3, 250), max_size=12),
    closed=st.booleans(),
    followup=st.lists(texts, min_size=1, max_size=2),
)
def test_bridge_extends_what_was_sampled(
    tokenizer: FileTokenizer, completion: list[int], closed: bool, followup: list[str]
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


def test_bridge_refuses_to_retokenize_an_assistant_turn(tokenizer: FileTokenizer) -> None:
    """An assistant message in the extension would replace sampled ids: no bridge."""
    renderer = ChatMLRenderer(tokenizer)
    assert renderer.bridge_to_next_turn([1], [2], [{"role": "assistant", "content": "x"}]) is None
    assert renderer.bridge_to_next_turn([1], [2], []) is None


def test_parse_response_drops_the_end_token(tokenizer: FileTokenizer) -> None:
    """The reward sees the text without <|im_end|>."""
    renderer = ChatMLRenderer(tokenizer)
    ids = tokenizer.encode("<reversed_text>abc</reversed_text><|im_end|>", add_special_tokens=False)
    assert renderer.parse_response(ids).content == "<reversed_text>abc</reversed_text>"


def test_auto_takes_chatml_only_when_it_is(model: Path, tmp_path: Path) -> None:
    """Plain ChatML gets ours; a template that differs in one corner gets the template itself."""
    assert choose(str(model), "auto").name == "chatml"
    other = make_tokenizer(tmp_path / "other", NOT_PLAIN)
    tokenizer = from_files(str(other))
    assert tokenizer is not None
    assert not equals_template(ChatMLRenderer(tokenizer), tokenizer)
    assert choose(str(other), "auto").name == "default"


def test_no_chat_template_is_a_clear_error(tmp_path: Path) -> None:
    """A tokenizer without a chat template is refused by name, under every choice that needs one."""
    bare = make_tokenizer(tmp_path / "bare", None)
    for choice in ("auto", "default"):
        with pytest.raises(RendererError, match="has no chat template"):
            choose(str(bare), choice)


def test_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    """A directory that is not there is named on one line."""
    with pytest.raises(RendererError, match=r"cannot load the tokenizer of .*nowhere") as caught:
        choose(str(tmp_path / "nowhere"), "auto")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "message"),
    [("chatmll", "unknown renderer 'chatmll'"), ("no.such.Renderer", "cannot load the renderer 'no.such.Renderer'")],
)
def test_unknown_renderers_are_refused(model: Path, choice: str, message: str) -> None:
    """Names and import paths that lead nowhere are named."""
    with pytest.raises(RendererError, match=message):
        choose(str(model), choice)


def test_chatml_needs_its_tokens(model: Path, tmp_path: Path) -> None:
    """Forcing ChatML on a tokenizer without its tokens is refused, not rendered as letters."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        source = model / name
        if source.is_file():
            text = source.read_text().replace("<|im_start|>", "<|begin|>")
            (tmp_path / name).write_text(text)
    assert json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(RendererError, match="<|im_start|>"):
        choose(str(tmp_path), "chatml")


def test_import_path_is_used(model: Path) -> None:
    """A renderer of one's own, by import path."""
    choice = choose(str(model), "prime_rl.envs.renderer.ChatMLRenderer")
    assert isinstance(choice.renderer, ChatMLRenderer)
