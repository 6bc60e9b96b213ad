"""The verifiers harness we use: a conversation turn is one call from this process, not a program of its own.

verifiers' plain harness starts a script per episode (about one episode a second); this one has no process, no
dependency to download and one shared connection pool.
"""

import asyncio
import sys
from typing import Any, Literal

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from prime_rl.envs.conversation import HarnessConversation, Model, opening
from prime_rl.envs.tools import CALL_SECONDS, Toolbox

HARNESS_ID = "prime_rl_chat"
# verifiers imports a harness by a top-level module name; ours lives inside the package.
sys.modules[HARNESS_ID] = sys.modules[__name__]

__all__ = ["ChatHarness"]

_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}


class ChatHarnessConfig(vf.HarnessConfig):
    id: str = HARNESS_ID
    turn_timeout: float = 0.0
    """Seconds for one reply (0: the episode's time alone)."""
    tool_timeout: float = CALL_SECONDS
    """Seconds for one call of a tool."""
    overflow: Literal["stop", "truncate", "refuse"] = "stop"
    """When the model's context is full: end, go on without the oldest turns, or fail."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *args: Any, **kwargs: Any) -> "ChatSession":
        return ChatSession(self, *args, **kwargs)

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        session = await self.session(ctx, trace, runtime, endpoint, secret, mcp_urls, data)
        try:
            return await session._run(None)
        finally:
            await session.close()


class ChatSession(vf.HarnessSession):
    """A rollout's conversation and tools, kept from segment to segment."""

    harness: ChatHarness

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.harness.config
        self._toolbox = Toolbox(config.tool_timeout)
        model = Model(_session, self.endpoint, self.secret, self.ctx.model)
        self._conversation = HarnessConversation(model, self.trace, self._toolbox, config.turn_timeout, config.overflow)

    async def _run(self, messages: vf.Messages | None) -> vf.ProgramResult:
        if self.mcp_urls and not self._toolbox.servers:
            await self._toolbox.open(self.mcp_urls)
        said = self._conversation.messages
        if not said:
            system, prompt = self.harness.resolve_prompt(self.data)
            said += opening(system, prompt if messages is None else None)
        said += [message_to_wire(message) for message in messages or []]
        return await self._conversation.run()

    async def close(self) -> None:
        if not self._closed and self._toolbox.servers:
            self.trace.record_metrics(self._toolbox.metrics)
        await super().close()
        await self._toolbox.close()


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
