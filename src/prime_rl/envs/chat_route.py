"""Replies by the chat route of any OpenAI-compatible API, for environments that have no verifiers between them and the model.

The patient client of `chat` asks. There are no tokens, and there is nothing to train on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from renderers.base import ParsedToolCall
from verifiers.v1.dialects.chat import ChatDialect

from prime_rl.envs.chat import PatientClient, chat_config
from prime_rl.envs.messages import Message


@dataclass(frozen=True)
class Answer:
    text: str
    reasoning: str
    tool_calls: list[ParsedToolCall]
    is_truncated: bool
    sent: int  # tokens, by the API's own count
    sampled: int


class ChatRoute:
    """Clients of the servers that are asked."""

    error = vf.ProviderError

    def __init__(self, request_timeout: float) -> None:
        """`request_timeout`: seconds without a byte of an answer."""
        self._config = chat_config(request_timeout)
        self._clients: dict[str, PatientClient] = {}

    async def ask(
        self,
        base_url: str,
        model: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        sampling: Mapping[str, Any],
    ) -> Answer:
        """Raises vf.ProviderError: the API refuses, or does not answer although it was asked again and again."""
        if base_url not in self._clients:
            self._clients[base_url] = PatientClient(self._config.model_copy(update={"base_url": base_url}))
        said = [{name: value for name, value in one.items() if name != "reasoning_content"} for one in messages]
        body = {"model": model, "messages": said, **sampling, **({"tools": tools} if tools else {})}
        response = await self._clients[base_url].get_response(ChatDialect(), body, vf.SamplingConfig())
        message, usage = response.message, response.usage
        calls = [ParsedToolCall(raw="", name=one.name, arguments=one.arguments, id=one.id) for one in message.tool_calls or []]  # fmt: skip
        return Answer(
            text=str(message.content or ""),
            reasoning=message.reasoning_content or "",
            tool_calls=calls,
            is_truncated=response.finish_reason == "length",
            sent=0 if usage is None else usage.prompt_tokens,
            sampled=0 if usage is None else usage.completion_tokens,
        )

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
