"""A scripted OpenAI-compatible API: answers `/v1/chat/completions` as a script says, and keeps what it was asked."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from support.fake_engine import LoopbackServer

Answer = tuple[int, dict[str, str], dict[str, Any]]  # status, headers, body


def completion(text: str, finish: str = "stop") -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def refusal(status: int, message: str = "scripted", **headers: str) -> Answer:
    return status, headers, {"error": {"message": message, "code": status}}


@dataclass
class ChatApi(LoopbackServer):
    """`script` is asked for each request, by its number and body; None is an ordinary answer."""

    script: Callable[[int, dict[str, Any]], Answer | None] = lambda number, body: None
    key: str = ""
    reply: Callable[[dict[str, Any]], str] = lambda body: "<reversed_text>abc</reversed_text>"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)]

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Incorrect API key provided"}}, status=401)
        return None

    async def _models(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if (refused := self._refused(request)) is not None:
            return refused
        if (answer := self.script(len(self.bodies), body)) is not None:
            status, headers, content = answer
            return web.json_response(content, status=status, headers=headers)
        return web.json_response(completion(self.reply(body)))
