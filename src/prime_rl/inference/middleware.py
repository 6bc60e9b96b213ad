"""ASGI middleware around vLLM's application: API keys, the table of served routes, and one owner of the weights.

A route that is not named here is closed. The table for people is in docs/guides/security.md.

One of the processes that answer HTTP (`server.api_servers`), the leader, owns the weights: it alone changes them and
reports them. The others forward requests about weights to it, over a socket in a directory that only this server has.
So there is one lock and one identity, however many processes answer.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.inference.service import LOAD_SECONDS, LOCK_SECONDS, PAUSE_SECONDS

# Routes of the process that owns the weights.
WEIGHT_ROUTES = ("/update_weights", "/reload_weights", "/weights", "/leave", "/pause", "/resume")

OPEN = ("/health", "/ping")  # for launchers and load balancers, which have no key
SERVED = {
    *OPEN, *WEIGHT_ROUTES, "/metrics", "/version", "/load", "/tokenize", "/detokenize", "/tokenizer_info", "/invocations", "/generative_scoring",
    "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
}  # fmt: skip
SERVED_BELOW = ("/v1/", "/inference/v1/", "/static/")
# They load adapters by a path that the request names. vLLM's other administrative routes are not served anyway.
OFF = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

CONNECT_RETRIES = 8  # a minute, each wait twice as long as the one before: the leader may be the last of them to start
ANSWER_SECONDS = LOCK_SECONDS + 2 * (PAUSE_SECONDS + 2 * LOAD_SECONDS)  # longer than any change takes
BODY_BYTES = 64 << 10  # of a request to one of these routes: a path of the greatest length, in escapes
TOO_LONG = f"the request is longer than {BODY_BYTES >> 10} KiB"

_held: list[int] = []  # the leader's lock, for as long as this process lives


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
        path = route_path(scope)
        if path not in OPEN and self._keys and not self._has_key(scope):
            return error_answer(401, "this route needs the server's API key: `Authorization: Bearer …`")
        if not is_served(path):
            return error_answer(404, "no such route here; docs/guides/security.md lists those that are served")
        return None

    def _has_key(self, scope: Scope) -> bool:
        fields = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, candidate = (fields[0] if len(fields) == 1 else b"").partition(b" ")
        return scheme.lower() == b"bearer" and any(secrets.compare_digest(candidate, key) for key in self._keys)


def is_served(path: str) -> bool:
    """Return whether requests for this path reach the application."""
    name = path.rstrip("/")
    return (name in SERVED or path.startswith(SERVED_BELOW)) and name not in OFF


def route_path(scope: Scope) -> str:
    """Return the path that the router matches: without the prefix that a proxy has added (`[vllm] root_path`)."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def error_answer(status: int, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def lead(directory: Path) -> bool:
    """Return whether this process is the leader of those that share `directory`: the first to ask is."""
    descriptor = os.open(directory / "leader", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held.append(descriptor)
    return True


class LeaderServer(uvicorn.Server):
    """Serves the leader's application to the other processes, who must have the key like anybody else."""

    def __init__(self, app: ASGIApp, directory: Path) -> None:
        socket = str(directory / "socket")
        super().__init__(uvicorn.Config(app, uds=socket, lifespan="off", access_log=False, log_config=None))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the server that everybody reaches."""
        yield


class ForwardToLeader:
    """ASGI middleware of the other processes: requests about weights go to the leader."""

    def __init__(self, app: ASGIApp, directory: Path) -> None:
        self._app, self._socket = app, str(directory / "socket")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in WEIGHT_ROUTES:
            await self._app(scope, receive, send)
            return
        answer = await self._forward(Request(scope, receive), route_path(scope))
        await answer(scope, receive, send)

    async def _forward(self, request: Request, path: str) -> Response:
        kept = ("authorization", "content-type")
        headers = {name: value for name, value in request.headers.items() if name in kept}
        transport = httpx.AsyncHTTPTransport(uds=self._socket, retries=CONNECT_RETRIES)
        async with httpx.AsyncClient(transport=transport, base_url="http://leader", timeout=ANSWER_SECONDS) as client:
            try:
                answer = await client.request(request.method, path, content=await request.body(), headers=headers)
            except httpx.HTTPError as error:
                return error_answer(503, f"the process that owns the weights did not answer: {error!r}")
            return Response(answer.content, answer.status_code, media_type="application/json")
