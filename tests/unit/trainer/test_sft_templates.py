"""Every chat template that installed packages ship, over conversations of every kind: what is trained, in which context, and what is refused."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from renderers import build_training_sample, create_renderer
from renderers.configs import config_from_name

from prime_rl.config.sft import LossMask
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import RowRenderer
from support import chat_templates as support

TRL = "trl==1.16.0"
DOCUMENTED = (Path(__file__).parents[3] / "docs" / "reference" / "chat-templates.md").read_text()


def check(name: str, template: str) -> None:
    """Assert, for all conversations that the template accepts, what the names of the tests say."""
    tokenizer, stops = support.make_tokenizer(template, name)
    renderer = RowRenderer(tokenizer, LossMask(), stops)
    for kind, row in support.CONVERSATIONS.items():
        if not support.accepts(tokenizer, row):
            continue
        try:
            replies = support.replies(renderer.samples(row))
        except UserError as error:
            refusal = str(error)
            reasons = ("leaves out the", "writes nothing of message", "in the context that inference sees")
            assert any(reason in refusal for reason in reasons), (kind, refusal)
            continue
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        seen = [set(map(tuple, prompts)) for prompts in zip(*support.contexts(tokenizer, row), strict=True)]
        assert len(replies) == len(said) == len(seen), kind
        for (context, reply), message, prompts in zip(replies, said, seen, strict=True):
            assert tuple(context) in prompts, (kind, tokenizer.decode(context))
            assert reply[-1] in stops, (kind, tokenizer.decode(reply))
            assert not set(reply[:-1]) & set(stops), (kind, tokenizer.decode(reply))
            text = tokenizer.decode(reply)
            if calls := message.get("tool_calls"):
                assert all(text.count(call["function"]["name"]) for call in calls), (kind, text)
            else:
                assert message["content"].split("</think>")[-1].strip() in text, (kind, text)


@pytest.mark.parametrize("name", sorted(support.installed()))
def test_replies_stand_in_the_context_of_inference_and_end_as_there(name: str) -> None:
    """The tokens before a reply are the prompt that the template gives for it; its last is a stop token, and its only one."""
    check(name, support.installed()[name])


FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_8": "qwen3.8",
    "nemotron_3_nano": "nemotron-3",
    "glm4moe": "glm-4.5",
}
FAMILY_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|observation|>", "<|system|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # fmt: skip


def check_family(name: str, template: str) -> None:
    """Assert that `renderers`, which knows the family by hand, trains the same reply, ended by the same token."""
    tokenizer, stops = support.make_tokenizer(template, name, FAMILY_TOKENS)
    renderer = create_renderer(tokenizer, config_from_name(FAMILIES[name]))
    for kind in ("turn", "reasoning", "call"):
        row = support.CONVERSATIONS[kind]
        theirs = build_training_sample(renderer, row["messages"], tools=row.get("tools"), ensure_final_stop=True)
        ((context, reply),) = support.replies(RowRenderer(tokenizer, LossMask(), stops).samples(row))
        trained = [token for token, mask in zip(theirs.token_ids, theirs.loss_mask, strict=True) if mask]
        # They count what a generation prompt opens as said, and GLM's line break before it as not said.
        text = tokenizer.decode(trained)
        opened = next((mark for mark in ("<think>\n", "<think>") if tokenizer.decode(context).endswith(mark)), "")
        same = {text, text.removeprefix(opened), text.removeprefix("<think>")}
        assert tokenizer.decode(reply).lstrip("\n") in {one.lstrip("\n") for one in same}, (name, kind, text)


@cache
def of_trl(directory: Path) -> dict[str, str]:
    done = subprocess.run(
        ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(directory), TRL],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        pytest.skip(f"{TRL} cannot be had from the package index: {done.stderr.strip()[-200:]}")
    return support.of_directory(directory / "trl" / "chat_templates", "trl ")


@pytest.mark.slow
def test_templates_of_models(tmp_path: Path) -> None:
    """The same of the models' templates that TRL ships; docs/reference/chat-templates.md has the table, line by line."""
    templates = of_trl(tmp_path)
    assert len(templates) > 30
    for name, template in templates.items():
        check(name, template)
    for name in FAMILIES:
        check_family(name, templates[f"trl {name}"])
    lines, _, _ = support.table(templates)
    assert [line for line in lines if line not in DOCUMENTED] == []


def test_table_of_the_docs() -> None:
    """docs/reference/chat-templates.md says of every installed template what it does."""
    lines, _, _ = support.table(support.installed())
    assert [line for line in lines if line not in DOCUMENTED] == []
