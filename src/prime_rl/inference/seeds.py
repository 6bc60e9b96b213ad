"""A CPU engine that computes prompts in chunks dies of a request with a seed: vLLM sets the request's generator back, which CPU generators cannot do.

Chunked prefill is therefore off on CPUs, unless `[vllm]` turns it on; then such requests are refused, on every route that takes one.
"""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MESSAGE = (
    "a request with a seed would kill this engine: it computes prompts in chunks on a CPU (vllm.enable_chunked_prefill); "
    "send none (sampling.seeded), or leave that off"
)


class RefuseSeeds:
    """ASGI middleware: 400 for a request whose body has a seed, at its top or in `sampling_params`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        if has_seed(body):
            answer = JSONResponse({"error": {"message": MESSAGE, "code": 400}}, status_code=400)
            await answer(scope, receive, send)
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


def has_seed(body: bytes) -> bool:
    """Whether a JSON body has a seed. Another body is for the route to judge."""
    try:
        request: Any = json.loads(body)
    except ValueError:
        return False
    if not isinstance(request, dict):
        return False
    sampling = request.get("sampling_params")
    places = [request, sampling] if isinstance(sampling, dict) else [request]
    return any(place.get("seed") is not None for place in places)
