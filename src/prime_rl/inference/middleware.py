"""ASGI middleware around vLLM's application: API keys, and the table of served routes.

A route that is not named here is closed. The table for people is in docs/guides/security.md.
"""

import secrets
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.inference.service import Rejected
from prime_rl.inference.tenancy import CURRENT_TENANT, Tenancy

ADMINISTRATIVE = ("/leave", "/pause", "/resume")  # for all tenants at a time
WEIGHTS = ("/update_weights", "/reload_weights", "/weights")  # of several tenants: the one's that asks

OPEN = ("/health", "/ping")  # for launchers and load balancers, which have no key
SERVED = {
    *OPEN, *WEIGHTS, *ADMINISTRATIVE, "/metrics", "/version", "/load", "/tokenize", "/detokenize",
    "/tokenizer_info", "/invocations", "/generative_scoring", "/docs", "/docs/oauth2-redirect", "/redoc",
    "/openapi.json",
}  # fmt: skip
SERVED_BELOW = ("/v1/", "/inference/v1/", "/static/")
# They load adapters by a path that the request names. vLLM's other administrative routes are not served anyway.
OFF = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
TOKEN_ROUTE, TOKEN_ALIAS = "/inference/v1/generate", "/v1/generate"

# What tenants' keys are for.
GENERATING = ("/v1/", "/inference/v1/", "/invocations", "/generative_scoring")
TENANTS = {*WEIGHTS, "/tokenize", "/detokenize", "/tokenizer_info"}


class Guard:
    """Require one of the keys, if there are any, except on `OPEN`; answer 404 for a route that is not served.

    With `tenancy` what is the tenants' needs the key of one. Paths are compared as the router does, character by
    character: another spelling of a path is not served.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], tenancy: Tenancy | None = None) -> None:
        self._app, self._keys, self._tenancy = app, [key.encode() for key in keys], tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["path"] == TOKEN_ALIAS:
            scope = {**scope, "path": TOKEN_ROUTE}
        path = str(scope["path"])
        try:
            name = await self._tenant(scope, path)
            CURRENT_TENANT.set(name)
            if name is None or self._tenancy is None:
                await self._app(scope, receive, send)
            else:
                if self._keys:  # which vLLM's own middleware asks for, behind this one
                    headers = [field for field in scope["headers"] if field[0] != b"authorization"]
                    scope = {**scope, "headers": [*headers, (b"authorization", b"Bearer " + self._keys[0])]}
                generates = path.startswith(GENERATING) and scope["method"] == "POST"
                await self._tenancy.forward(name, self._app, scope, receive, send, generates=generates)
        except Rejected as rejection:  # by this middleware
            if scope["type"] == "http":
                await error_answer(rejection.status, rejection.message)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})

    async def _tenant(self, scope: Scope, path: str) -> str | None:
        """Return whose request it is, None for no tenant's. Rejected if the route is closed to who asks."""
        if path in OPEN:
            return None
        fields = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, candidate = (fields[0] if len(fields) == 1 else b"").partition(b" ")
        key = candidate if scheme.lower() == b"bearer" else b""
        name, has_key = None, any(secrets.compare_digest(key, each) for each in self._keys)
        if self._tenancy is not None and not has_key:
            tenants = path.startswith(GENERATING) or path in TENANTS
            name = await self._tenancy.tenant_of(key.decode(errors="replace")) if key else None
            if name is None and tenants:
                raise Rejected(401, "this server serves tenants: a request needs a tenant's key")
            if name is not None and (not tenants or scope["type"] != "http"):
                raise Rejected(403, "a tenant's key is not for this route: it needs the server's own")
        if self._keys and not has_key and name is None:
            raise Rejected(401, "this route needs the server's API key: `Authorization: Bearer …`")
        if not is_served(path):
            raise Rejected(404, "no such route here; docs/guides/security.md lists those that are served")
        if self._tenancy is not None and name is None:
            if path in WEIGHTS:
                raise Rejected(403, "this server's weights are its tenants': the route needs a tenant's key")
            if path in ADMINISTRATIVE and not self._keys:
                raise Rejected(403, "this server serves tenants: the route needs the server's own key (VLLM_API_KEY)")
        return name


def is_served(path: str) -> bool:
    """Return whether requests for this path reach the application."""
    name = path.rstrip("/")
    return (name in SERVED or path.startswith(SERVED_BELOW)) and name not in OFF


def error_answer(status: int, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)
