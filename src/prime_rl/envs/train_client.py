"""verifiers' train client as we want it: over our own connection, and with what a model got wrong about its tools."""

import json
from typing import Any

from renderers.base import ParsedToolCall, ToolCallParseStatus
from verifiers.v1.clients.train import TrainClient, serialize_completion, tool_to_wire
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.types import ToolCall

from prime_rl.envs.conversation import WHOLE_REPLY_HEADER
from prime_rl.envs.engine import whole_reply
from prime_rl.envs.messages import NestedTooDeep, parsed_json
from prime_rl.envs.tools import MALFORMED_CALL

_SHOWN = 100  # characters of a call that nests too deep


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
        whole_reply.set(WHOLE_REPLY_HEADER in (headers or {}))
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
