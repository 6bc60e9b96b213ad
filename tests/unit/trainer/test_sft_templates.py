"""Every chat template that installed packages ship, over conversations of every kind: what is trained, in which context, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from renderers import build_training_sample, create_renderer
from renderers.configs import config_from_name

from prime_rl.config.sft import LossMask
from prime_rl.trainer.sft.render import RowRenderer
from support import chat_templates as support

TRL = "trl==1.16.0"
DOCUMENTED = (Path(__file__).parents[3] / "docs" / "reference" / "chat-templates.md").read_text()


@pytest.mark.parametrize("name", sorted(support.installed()))
def test_installed_templates(name: str) -> None:
    """Contract: replies stand in the context of inference and end as there (`support.line`); the documentation says what each template does."""
    assert support.line(name, support.installed()[name]) in DOCUMENTED


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


@pytest.mark.slow
def test_templates_of_models(tmp_path: Path) -> None:
    """The same of the models' templates that TRL ships."""
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(tmp_path)]
    done = subprocess.run([*install, TRL], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{TRL} cannot be had from the package index: {done.stderr.strip()[-200:]}")
    templates = support.of_directory(tmp_path / "trl" / "chat_templates", "trl ")
    assert len(templates) > 30
    for name, template in templates.items():
        assert support.line(name, template) in DOCUMENTED
    for name in FAMILIES:
        check_family(name, templates[f"trl {name}"])
