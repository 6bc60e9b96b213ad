"""verifiers' own `vf-eval` runs the bundled packages against an OpenAI-compatible server, with the command of their docstrings."""

import asyncio
import importlib
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

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


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[str, list[Any]]]:
    """Its address, and the requests that it got."""
    requests: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append(body)
        calls = [CALL] if body.get("tools") and body["messages"][-1]["role"] == "user" else []
        message = {"role": "assistant", "content": "" if calls else REPLY, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response({**answer, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", requests
    await runner.cleanup()


# Each costs a start of `vf-eval`: on every commit the one that calls tools.
@pytest.mark.parametrize(
    "name", [name if name == "calculator" else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
async def test_vf_eval(name: str, server: tuple[str, list[Any]], tmp_path: Path) -> None:
    """No flag but the model and the server: no sandbox, no download, no upload, nothing left open."""
    url, requests = server
    documented = importlib.import_module(name.replace("-", "_")).__doc__ or ""
    line = next(line for line in documented.splitlines() if "vf-eval" in line)
    words = shlex.split(re.sub(r"http\S+", url, line).replace("MODEL", "tiny"))[2:]  # without `uv run`
    more = ["-n", "2", "--no-rich", "--output-dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / words[0]),
        *words[1:],
        *more,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(SECONDS):
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert "Unclosed" not in output
    (results,) = tmp_path.rglob("traces.jsonl")
    text = results.read_text()
    episodes = [json.loads(row) for row in text.splitlines()]
    assert f'"{EXPECTED[name]}"' in text
    assert len(episodes) >= 2
    assert '"errors": [{' not in text, text[:2000]
    assert requests
    if name == "calculator":
        told = [message["content"] for body in requests for message in body["messages"] if message["role"] == "tool"]
        assert told == ["42", "42"]
