"""verifiers' own `vf-eval` runs the bundled packages against an OpenAI-compatible server, as their docstrings say."""

import asyncio
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.chat_api import Answer, ChatApi, completion

SECONDS = 120.0
# What a model that knows nothing but the form would say; the calculator's calls its tool first.
REPLY = "<reversed_text>a</reversed_text><sorted>A B</sorted><guess>crane</guess><move>bet</move><answer>1</answer>"
CALL = {"id": "c", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "6*7"}'}}
# Rewards or metrics that show that the reply was understood.
EXPECTED = {
    "reverse-text": "lcs",
    "alphabet-sort": "sorted_names",
    "wordle": "format",
    "calculator": "format",
    "kuhn-poker": "chips",
}


def call_first(number: int, body: dict[str, Any]) -> Answer | None:
    """A call of the tool where there is one, until its result is there."""
    if not body.get("tools") or body["messages"][-1]["role"] != "user":
        return None
    answer = completion("", "tool_calls")
    answer["choices"][0]["message"]["tool_calls"] = [CALL]
    return 200, {}, answer


# Each costs a start of `vf-eval`: on every commit the one that calls tools.
@pytest.mark.parametrize(
    "name", [name if name == "calculator" else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
async def test_vf_eval(name: str, tmp_path: Path) -> None:
    """No flag but the model and the server: no sandbox, no download, no upload, nothing left open."""
    async with ChatApi(script=call_first, reply=lambda body: REPLY) as api:
        documented = importlib.import_module(name.replace("-", "_")).__doc__ or ""
        line = next(line for line in documented.splitlines() if "vf-eval" in line)
        words = shlex.split(re.sub(r"http\S+", api.base_url, line).replace("MODEL", "tiny"))[2:]  # without `uv run`
        more = ["-n", "2", "--no-rich", "--output-dir", str(tmp_path)]
        command = [str(Path(sys.executable).parent / words[0]), *words[1:], *more]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Unclosed" not in done.stdout + done.stderr
    (results,) = tmp_path.rglob("traces.jsonl")
    text = results.read_text()
    assert f'"{EXPECTED[name]}"' in text
    assert len(text.splitlines()) >= 2
    assert '"errors": [{' not in text, text[:2000]
    if name == "calculator":
        told = [message["content"] for body in api.bodies for message in body["messages"] if message["role"] == "tool"]
        assert told == ["42", "42"]
