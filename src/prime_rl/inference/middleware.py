"""ASGI middleware around vLLM's application: API keys, the table of served routes, and one owner of the weights.

A route that is not named here is closed. The table for people is in docs/guides/security.md.

One of the processes that answer HTTP (`server.api_servers`), the leader, owns the weights: it alone changes them and
reports them. The others forward requests about weights to it, over a socket in a directory that only this server has.
So there is one lock and one identity, however many processes answer.
"""

import asyncio
import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi.responses import JSONResponse
from loguru import logger
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.inference.service import DRAIN_SECONDS, LOAD_SECONDS, LOCK_SECONDS, PAUSE_SECONDS

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

CONNECT_SECONDS = 60.0  # the leader may be the last of them to start
ANSWER_SECONDS = LOCK_SECONDS + DRAIN_SECONDS + 2 * (PAUSE_SECONDS + 2 * LOAD_SECONDS)  # longer than any change takes
POLL_SECONDS = 0.1
BODY_BYTES = 64 << 10  # of a request to one of these routes: a path of the greatest length, in escapes
TOO_LONG = f"the request is longer than {BODY_BYTES >> 10} KiB"
_MOST_BYTES = 1 << 20  # of a request or an answer on one line

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
            return _answer(401, "this route needs the server's API key: `Authorization: Bearer …`")
        if not is_served(path):
            return _answer(404, "no such route here; docs/guides/security.md lists those that are served")
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


def _answer(status: int, message: str) -> JSONResponse:
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


@dataclass(frozen=True)
class ForwardedRequest:
    """A request on its way to the leader; one line of JSON each way."""

    method: str
    path: str
    body: str
    authorization: str


async def listen(app: ASGIApp, directory: Path) -> asyncio.Server:
    """Serve the leader's side: answer forwarded requests as if they had come by HTTP."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                line = await reader.readline()
            request = ForwardedRequest(**json.loads(line))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://leader", timeout=ANSWER_SECONDS
            ) as client:
                headers = {"authorization": request.authorization} if request.authorization else {}
                headers["content-type"] = "application/json"
                response = await client.request(request.method, request.path, content=request.body, headers=headers)
            writer.write(json.dumps([response.status_code, response.text]).encode() + b"\n")
            async with asyncio.timeout(CONNECT_SECONDS):
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:
            logger.warning("a forwarded request got no answer: {!r}", error)
        finally:
            writer.close()

    return await asyncio.start_unix_server(answer, directory / "socket", limit=_MOST_BYTES)


class ForwardToLeader:
    """ASGI middleware of the other processes: requests about weights go to the leader."""

    def __init__(self, app: ASGIApp, directory: Path) -> None:
        self._app, self._socket = app, directory / "socket"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in WEIGHT_ROUTES:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        body = (await request.body()).decode(errors="replace")
        if len(body) > BODY_BYTES:
            await _answer(413, TOO_LONG)(scope, receive, send)
            return
        forwarded = ForwardedRequest(request.method, route_path(scope), body, request.headers.get("authorization", ""))
        await (await self._ask(forwarded))(scope, receive, send)

    async def _ask(self, forwarded: ForwardedRequest) -> Response:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await self._connect()
                try:
                    writer.write(json.dumps(asdict(forwarded)).encode() + b"\n")
                    await writer.drain()
                    status, text = json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            return _answer(503, f"the process that owns the weights did not answer: {error!r}")
        return Response(text, status, media_type="application/json")

    async def _connect(self) -> tuple[asyncio.StreamReader, Any]:
        async with asyncio.timeout(CONNECT_SECONDS):
            while True:  # bounded: by the timeout
                try:
                    return await asyncio.open_unix_connection(self._socket, limit=_MOST_BYTES)
                except (FileNotFoundError, ConnectionRefusedError):
                    await asyncio.sleep(POLL_SECONDS)
