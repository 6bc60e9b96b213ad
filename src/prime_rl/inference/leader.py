"""One of the processes that answer HTTP (`server.api_servers`), the leader, owns the weights: it alone changes them and reports them.

The others forward requests about weights to it, over a socket in a directory that only this server has. So there is
one lock and one identity, however many processes answer.
"""

import asyncio
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from loguru import logger
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl.inference.guard import WEIGHT_ROUTES, route_path
from prime_rl.inference.service import DRAIN_SECONDS, LOAD_SECONDS, LOCK_SECONDS, PAUSE_SECONDS

CONNECT_SECONDS = 60.0  # the leader may be the last of them to start
ANSWER_SECONDS = LOCK_SECONDS + DRAIN_SECONDS + 2 * (PAUSE_SECONDS + 2 * LOAD_SECONDS)  # longer than any change takes
POLL_SECONDS = 0.1
BODY_BYTES = 64 << 10  # of a request to one of these routes: a path of the greatest length, in escapes
TOO_LONG = f"the request is longer than {BODY_BYTES >> 10} KiB"
_MOST_BYTES = 1 << 20  # of a request or an answer on one line

_held: list[int] = []  # the leader's lock, for as long as this process lives


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
            await JSONResponse({"error": {"message": TOO_LONG, "code": 413}}, status_code=413)(scope, receive, send)
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
            message = f"the process that owns the weights did not answer: {error!r}"
            return JSONResponse({"error": {"message": message, "code": 503}}, status_code=503)
        return Response(text, status, media_type="application/json")

    async def _connect(self) -> tuple[asyncio.StreamReader, Any]:
        async with asyncio.timeout(CONNECT_SECONDS):
            while True:  # bounded: by the timeout
                try:
                    return await asyncio.open_unix_connection(self._socket, limit=_MOST_BYTES)
                except (FileNotFoundError, ConnectionRefusedError):
                    await asyncio.sleep(POLL_SECONDS)
