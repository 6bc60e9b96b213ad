"""Every chat template that installed packages ship, over conversations of every kind: what is trained, in which context, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import chat_templates as support

TRL = "trl==1.16.0"
DOCUMENTED = (Path(__file__).parents[3] / "docs" / "reference" / "chat-templates.md").read_text()


@pytest.mark.parametrize("name", sorted(support.installed()))
def test_installed_templates(name: str) -> None:
    """Contract: replies stand in the context of inference and end as there (`support.line`); the documentation says what each template does."""
    assert support.line(name, support.installed()[name]) in DOCUMENTED


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
