"""verifiers' harness and train client as we want them: a turn is one call within this process, not a program of its own.

verifiers' plain harness starts a script per episode (about one episode a second); this one has no process, no
dependency to download and one shared connection pool. The client goes over our own connection, and keeps what a model
got wrong about its tools.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Literal

import aiohttp
import verifiers.v1 as vf
from multidict import CIMultiDict
from renderers.base import ParsedToolCall, ToolCallParseStatus
from verifiers.v1.clients.train import TrainClient, serialize_completion, tool_to_wire
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.types import ToolCall

from prime_rl.envs.conversation import CallFailed, ContextFull, Conversation
from prime_rl.envs.convert import CONTEXT_FULL, Message, NestedTooDeep, Turn, classify, parsed_json
from prime_rl.envs.protocol import Outcome
from prime_rl.envs.tools import CALL_SECONDS, MALFORMED_CALL, Toolbox

HARNESS_ID = "prime_rl_chat"
# verifiers imports a harness by a top-level module name; ours lives inside the package.
sys.modules[HARNESS_ID] = sys.modules[__name__]

__all__ = ["ChatHarness"]

_SHOWN = 100  # characters of a call that nests too deep

interception: ContextVar[InterceptionServer] = ContextVar("interception")
"""verifiers' server of the environment whose episode runs, through which every model call goes. Unset under `vf-eval`: then by HTTP."""

_CHAT = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))
_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

logger = logging.getLogger(__name__)


class TurnTimeoutError(vf.RolloutError):
    """A reply took longer than `turn_timeout`."""


class _InterceptedRequest(dict[str, Any]):
    """What the interception server reads of an aiohttp request. HTTP within one process took a sixth of an episode's processor time."""

    path = "/v1/chat/completions"

    def __init__(self, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__()
        self.headers = headers
        self._body = body

    async def read(self) -> bytes:
        return self._body

    @property
    def content_length(self) -> int:
        return len(self._body)


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
    """The messages and tools of one agent's conversation, kept from segment to segment."""

    harness: ChatHarness

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.harness.config
        self._toolbox = Toolbox(config.tool_timeout)
        self._conversation = Conversation(self._ask, config.turn_timeout, config.overflow)
        self._messages: list[Message] = []

    async def _run(self, messages: vf.Messages | None) -> vf.ProgramResult:
        """Ask for replies until one calls no tool. Raises TurnTimeoutError, vf.ToolsetError."""
        if self.mcp_urls and not self._toolbox.servers:
            await self._toolbox.open(self.mcp_urls)
        if not self._messages:
            system, prompt = self.harness.resolve_prompt(self.data)
            self._messages += opening(system, prompt if messages is None else None)
        self._messages += [message_to_wire(message) for message in messages or []]
        while True:
            try:
                turn, self._messages = await self._conversation.reply(self._messages, self._toolbox.definitions or None)
            except ContextFull:
                self.trace.stop(CONTEXT_FULL)
                return vf.ProgramResult(0, "", "")
            except CallFailed as error:
                if error.outcome is Outcome.TIMEOUT:
                    raise TurnTimeoutError(str(error)) from error
                # verifiers replaces the failure of a non-zero exit by the model call's own error.
                return vf.ProgramResult(0 if self.trace.stop_condition is not None else 1, "", str(error))
            self._messages.append(turn.message)
            # A reply that was cut is the last: what it would have called is anybody's guess.
            if not turn.tool_calls or turn.is_truncated:
                return vf.ProgramResult(0, "", "")
            for call in turn.tool_calls:
                self._messages.append(await self._answer(call))

    async def close(self) -> None:
        if not self._closed and self._toolbox.servers:
            self.trace.record_metrics(self._toolbox.metrics)
        await super().close()
        await self._toolbox.close()

    async def _answer(self, call: dict[str, Any]) -> Message:
        function = call["function"]
        answer = await self._toolbox.call(function["name"], function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": answer.text}

    async def _ask(self, messages: Sequence[Message], tools: list[Any] | None, turns: Sequence[Turn]) -> Turn:
        status, reply = await self._post(
            {"model": self.ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
        )
        if status != 200:
            # Where verifiers ended the rollout it refuses the call: not for its length, whatever it says.
            over = self.trace.stop_condition is not None
            raise CallFailed(*classify("", reply) if over else classify("ProviderError", reply, status))
        choice = reply["choices"][0]
        # What a server adds to its replies beyond that need not be taken back by it.
        message = {key: value for key, value in choice["message"].items() if value or key == "content"}
        calls = message.get("tool_calls", [])
        return Turn(message=message, tool_calls=calls, is_truncated=choice["finish_reason"] == "length")

    async def _post(self, content: dict[str, Any]) -> tuple[int, Any]:
        body = json.dumps(content).encode()
        headers = CIMultiDict({"Authorization": f"Bearer {self.secret}"})
        if (server := interception.get(None)) is not None:  # bounded: of the context, waits for nothing
            return await _served(server, _InterceptedRequest(headers, body))
        headers["Content-Type"] = "application/json"
        url = f"{self.endpoint}/chat/completions"
        async with _session().post(url, data=body, headers=headers) as response:
            return response.status, await (response.json() if response.ok else response.text())


async def _served(server: InterceptionServer, request: Any) -> tuple[int, Any]:
    """Status and body of verifiers' answer to a model call."""
    # A task of its own, as aiohttp's: verifiers cancels the one that serves a session when that is over.
    handler = asyncio.create_task(server.handle_request(request, _CHAT))
    try:
        response: Any = await handler  # bounded: by the turn's timeout and the episode's deadline, which cancel it
    except asyncio.CancelledError:
        if handler.cancelled() and not _cancelling():
            return 499, "the rollout is over"
        raise
    except Exception as error:
        logger.exception("verifiers failed to serve a model call")
        return 500, f"{type(error).__name__}: {error}"
    return response.status, json.loads(response.body) if response.status == 200 else response.text


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def opening(system: str | None, prompt: Any) -> list[Message]:
    """The messages of a task, as the chat route takes them."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]


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


class ConversationClient(TrainClient):
    """Over a `connection` like `EngineConnection`; needs a running event loop.

    `branched`: every prompt is rendered anew by the renderer, none extends the tokens that are there.
    """

    def __init__(self, config: TrainClientConfig, connection: Any, renderer: Any, branched: bool) -> None:
        super().__init__(config)
        self.client = connection
        self._renderer = renderer
        self._branched = branched

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Any = None,
    ) -> Any:
        extended = None if self._branched else turn
        response = await super().get_response(dialect, body, sampling, session_id, extended, headers)
        if turn is not None and turn.tools:
            self._keep_broken_calls(response, [tool_to_wire(tool) for tool in turn.tools])
            response.raw = serialize_completion(response, body["model"])
        return response

    def _keep_broken_calls(self, response: Any, tools: list[dict[str, Any]]) -> None:
        """verifiers leaves out the calls that a renderer could not read: the model would never learn of them."""
        tokens = response.tokens
        parsed = self._renderer.parse_response(tokens.completion_ids, prompt_ids=tokens.prompt_ids, tools=tools)
        if not any(call.status is not ToolCallParseStatus.OK for call in parsed.tool_calls):
            return
        response.message.tool_calls = [_call(number, call) for number, call in enumerate(parsed.tool_calls)]
        if response.finish_reason == "stop":
            response.finish_reason = "tool_calls"


def _call(number: int, call: ParsedToolCall) -> ToolCall:
    name = call.id or f"call_{number}"
    if call.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL) or not call.name:
        return ToolCall(id=name, name=MALFORMED_CALL, arguments=_readable(call.raw))
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
    return ToolCall(id=name, name=call.name, arguments=arguments)


def _readable(raw: str) -> str:
    """Its beginning, where it nests so deep that verifiers, which reads it to compare messages, would not come to its end."""
    try:
        parsed_json(raw)
    except NestedTooDeep:
        return raw[:_SHOWN]
    except ValueError:
        return raw
    return raw
