"""One conversation with a model: its replies, the tools that they call, and the end of the model's context."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
import verifiers.v1 as vf
from multidict import CIMultiDict
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.interception.server import InterceptionServer

from prime_rl.envs.convert import CONTEXT_FULL, TOO_LONG
from prime_rl.envs.messages import Message, without_oldest
from prime_rl.envs.tools import Toolbox

# Asks the client to refuse a prompt that leaves no room for a whole reply, rather than to shorten the reply.
WHOLE_REPLY_HEADER = "X-Prime-RL-Whole-Reply"

interception: ContextVar[InterceptionServer] = ContextVar("interception")
"""verifiers' server of the environment whose episode runs, through which every model call goes. Unset under `vf-eval`: then by HTTP."""

_CHAT = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))

logger = logging.getLogger(__name__)


class TurnTimeoutError(vf.RolloutError):
    """A reply took longer than `turn_timeout`."""


@dataclass(frozen=True)
class Model:
    """Where a conversation's model is asked, and how."""

    session: Callable[[], aiohttp.ClientSession]  # made for those that ask by HTTP
    endpoint: str
    secret: str
    name: str


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


class HarnessConversation:
    """The messages of one agent's conversation, from segment to segment: `run` asks for replies until one calls no tool."""

    def __init__(self, model: Model, trace: Any, toolbox: Toolbox, turn_timeout: float, overflow: str) -> None:
        self.messages: list[Message] = []
        self._model = model
        self._trace = trace
        self._toolbox = toolbox
        self._turn_timeout = turn_timeout or None
        self._overflow = overflow
        self._turns = 0

    async def run(self) -> vf.ProgramResult:
        """Raises TurnTimeoutError, vf.ToolsetError."""
        while True:
            status, body = await self._reply()
            if status != 200:
                # verifiers replaces the failure of a non-zero exit by the model call's own error.
                return vf.ProgramResult(0 if self._trace.stop_condition is not None else 1, "", str(body))
            choice = body["choices"][0]
            self._turns += 1
            # What a server adds to its replies beyond that need not be taken back by it.
            self.messages.append({key: value for key, value in choice["message"].items() if value or key == "content"})
            calls = choice["message"].get("tool_calls")
            # A reply that was cut is the last: what it would have called is anybody's guess.
            if not calls or choice["finish_reason"] == "length":
                return vf.ProgramResult(0, "", "")
            for call in calls:
                self.messages.append(await self._answer(call))

    async def _answer(self, call: dict[str, Any]) -> Message:
        function = call["function"]
        answer = await self._toolbox.call(function["name"], function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": answer.text}

    async def _reply(self) -> tuple[int, Any]:
        """Status and body of the next reply. What does not fit is dealt with here, as `overflow` says."""
        whole = self._overflow == "truncate"
        while True:
            status, body = await self._timed(whole)
            if status != 400 or self._trace.stop_condition is not None or not TOO_LONG.search(body):
                return status, body
            if whole:
                whole = self._forget()  # nothing left to forget: a short reply, then, if there is room for one
            else:
                if self._turns and self._overflow != "refuse":
                    self._trace.stop(CONTEXT_FULL)
                return status, body

    def _forget(self) -> bool:
        """Leave out the oldest turn; False when there is none."""
        rest = without_oldest(self.messages)
        if rest is not None:
            self.messages[:] = rest
        return rest is not None

    async def _timed(self, whole: bool) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(self._turn_timeout):
                return await self._post(whole)
        except TimeoutError as error:
            raise TurnTimeoutError(
                f"turn {self._trace.num_turns + 1}: no reply within {self._turn_timeout:g} s"
            ) from error

    async def _post(self, whole: bool) -> tuple[int, Any]:
        headers = CIMultiDict({"Authorization": f"Bearer {self._model.secret}"})
        if whole:
            headers[WHOLE_REPLY_HEADER] = "1"
        content: dict[str, Any] = {"model": self._model.name, "messages": self.messages}
        if self._toolbox.tools:
            content["tools"] = self._toolbox.definitions
        body = json.dumps(content).encode()
        if (server := interception.get(None)) is not None:  # bounded: of the context, waits for nothing
            return await _served(server, _InterceptedRequest(headers, body))
        headers["Content-Type"] = "application/json"
        url = f"{self._model.endpoint}/chat/completions"
        async with self._model.session().post(url, data=body, headers=headers) as response:
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
