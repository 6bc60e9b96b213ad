"""The verifiers harness we use: a conversation turn is one HTTP call from this process, not a program of its own.

verifiers' plain harness starts a script per episode (about one episode a second); this one has no process, no
dependency to download and one shared connection pool.
"""

import asyncio
import sys
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

HARNESS_ID = "prime_rl_chat"
# verifiers imports a harness by a top-level module name; ours lives inside the package.
sys.modules[HARNESS_ID] = sys.modules[__name__]

__all__ = ["ChatHarness"]

_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


class ChatHarnessConfig(vf.HarnessConfig):
    id: str = HARNESS_ID


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True  # the default `resume` sends the whole conversation through `launch`
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message_to_wire(message) for message in prompt or [])
        async with _session().post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        ) as response:
            body = await response.text()
        # verifiers replaces the failure of a non-zero exit by the model call's own error.
        return vf.ProgramResult(0 if response.ok else 1, "", "" if response.ok else body)


def _session() -> aiohttp.ClientSession:
    """One per event loop: a session a call would rebuild its connections every time."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # bounded: by the episode's deadline, which cancels the call
        )
    return _sessions[loop]


async def close_session() -> None:
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()
