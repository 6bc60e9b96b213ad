"""ASGI middleware around vLLM's application: API keys, and the table of served routes.

A route that is not named here is closed. The table for people is in docs/guides/security.md.
"""

import secrets
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

WEIGHT_ROUTES = ("/update_weights", "/reload_weights", "/weights", "/leave", "/pause", "/resume")

OPEN = ("/health", "/ping")  # for launchers and load balancers, which have no key
SERVED = {
    *OPEN, *WEIGHT_ROUTES, "/metrics", "/version", "/load", "/tokenize", "/detokenize", "/tokenizer_info",
    "/invocations", "/generative_scoring", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
}  # fmt: skip
SERVED_BELOW = ("/v1/", "/inference/v1/", "/static/")
# They load adapters by a path that the request names. vLLM's other administrative routes are not served anyway.
OFF = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Guard:
    """Require one of the keys, if there are any, except on `OPEN`; answer 404 for a route that is not served.

    Paths are compared as the router does, character by character: another spelling of a path is not served.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = None if scope["type"] == "lifespan" else self._rejection(scope)
        if rejection is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await rejection(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _rejection(self, scope: Scope) -> JSONResponse | None:
        path, root = str(scope["path"]), str(scope.get("root_path", ""))
        if root and path.startswith(f"{root}/"):  # a prefix that a proxy has added (`[vllm] root_path`)
            path = path[len(root) :]
        fields = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, candidate = (fields[0] if len(fields) == 1 else b"").partition(b" ")
        has_key = scheme.lower() == b"bearer" and any(secrets.compare_digest(candidate, key) for key in self._keys)
        if path not in OPEN and self._keys and not has_key:
            return error_answer(401, "this route needs the server's API key: `Authorization: Bearer …`")
        if not is_served(path):
            return error_answer(404, "no such route here; docs/guides/security.md lists those that are served")
        return None


def is_served(path: str) -> bool:
    """Return whether requests for this path reach the application."""
    name = path.rstrip("/")
    return (name in SERVED or path.startswith(SERVED_BELOW)) and name not in OFF


def error_answer(status: int, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)
