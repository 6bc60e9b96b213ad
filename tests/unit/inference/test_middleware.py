"""Who may ask for what, by the middleware alone (around vLLM's own application: tests/integration/test_inference.py), and which process answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from starlette.types import Message, Scope

from prime_rl.inference import middleware
from prime_rl.inference.middleware import OFF, SERVED, Guard
from support.doors import ADMINISTRATIVE, DISGUISES

KEYS = ("secret", "other")


def make_client(keys: tuple[str, ...] = KEYS, root_path: str = "") -> TestClient:
    """An application that answers everything, whatever it is asked, with what the router saw."""
    app = FastAPI()
    app.root_path = root_path

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def every(path: str) -> dict[str, str]:
        return {"path": path}

    @app.websocket("/{path:path}")
    async def socket(websocket: WebSocket, path: str) -> None:
        await websocket.accept()
        await websocket.send_text(path)
        await websocket.close()

    app.add_middleware(Guard, keys=list(keys))
    return TestClient(app)


async def status(method: str, path: str) -> int:
    """Of a request whose path is sent as it stands here: clients tidy it up."""
    seen: list[int] = []

    async def send(message: Message) -> None:
        seen.append(message.get("status", 0))

    async def answer(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "headers": []}
    await Guard(answer, KEYS)(scope, None, send)  # type: ignore[arg-type]
    return seen[0]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"])
async def test_every_route_asks_for_the_key_but_two(method: str) -> None:
    """Contract: whatever the method and however a path is written, only /health and /ping answer without the key."""
    for path in ("/health", "/ping"):
        assert await status(method, path) == 200
    closed = ("/", "/v1/models", "/weights", "/metrics", "/invocations", "/docs", "/a-route-of-tomorrow")
    for path in (*closed, *DISGUISES):
        assert await status(method, path) == 401, path


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, False), ("", False), ("secret", False), ("Basic secret", False), ("Bearer wrong", False), ("Bearer secret2", False),
        ("Bearer ", False), ("Bearer", False), ("Bearer secret", True), ("bearer other", True), ("Bearer  secret", False),
    ],
)  # fmt: skip
def test_keys(header: str | None, allowed: bool) -> None:
    """Contract: one of the keys, whole, as a bearer; what is refused learns only that a key is needed."""
    answer = make_client().get("/weights", headers={} if header is None else {"Authorization": header})
    assert answer.status_code == (200 if allowed else 401)
    assert allowed or "API key" in answer.json()["error"]["message"]
    assert make_client(keys=()).get("/weights").status_code == 200, "without a key nobody is asked for one"


@pytest.mark.parametrize("keys", [(), KEYS])
def test_what_is_not_named_is_not_served(keys: tuple[str, ...]) -> None:
    """Contract: with or without a key vLLM's administrative routes, and any that we do not know, are 404."""
    client = make_client(keys)
    bearer = {"Authorization": "Bearer secret"}
    for path in ("/scale_elastic_ep", "/scale_elastic_ep/", "//scale_elastic_ep", "/is_scaling_elastic_ep", "/start_profile", "/collective_rpc",
                 "/sleep", "/fault_tolerance/apply", "/abort_requests", "/server_info", "/v1/load_lora_adapter", "/v1/load_lora_adapter/",
                 "/", "/V1/models", "/v2/rerank", "/a-route-of-tomorrow"):  # fmt: skip
        assert client.post(path, headers=bearer).status_code == 404, path
    for path in (
        "/v1/chat/completions",
        "/inference/v1/generate",
        "/metrics/",
        "/tokenize",
        "/update_weights",
        "/health",
    ):
        assert client.post(path, headers=bearer).json() == {"path": path[1:]}


@pytest.mark.parametrize("root", ["", "/api"])
def test_a_prefix_of_a_proxy_opens_nothing(root: str) -> None:
    """Contract: with `root_path` the same two are open, under both names that the router knows them by, and nothing else is."""
    client = make_client(root_path=root)
    for path, status in ((f"{root}/health", 200), ("/health", 200), (f"{root}/weights", 401), ("/weights", 401), ("/api/api/health", 401),
                         ("/api", 401), ("/apihealth", 401), ("/api//health", 401)):  # fmt: skip
        assert client.get(path).status_code == status, path
    assert client.get(f"{root}/weights", headers={"Authorization": "Bearer secret"}).json() == {"path": "weights"}


def test_the_docs_name_every_route() -> None:
    """Contract: docs/guides/security.md says of every route that is served, or off, that it is."""
    table = (Path(__file__).parents[3] / "docs" / "guides" / "security.md").read_text()
    names = {name.removesuffix("/oauth2-redirect") for name in SERVED} | {
        f"{prefix}…" for prefix in ("/v1/", "/static/")
    }
    assert [name for name in sorted(names | {*OFF, *ADMINISTRATIVE}) if f"`{name}`" not in table] == []


def owner() -> FastAPI:
    """An app that says what it was asked; it changes one thing at a time."""
    app = FastAPI()
    app.state.changing = 0

    @app.get("/weights")
    async def weights(request: Request) -> JSONResponse:
        return JSONResponse({"key": request.headers.get("authorization")}, 200 if "authorization" in request.headers else 401)  # fmt: skip

    @app.post("/update_weights")
    async def update(request: Request) -> dict[str, int]:
        app.state.changing += 1
        await asyncio.sleep(0.01)
        return {"version": (await request.json())["version"], "changing": app.state.changing}

    return app


@asynccontextmanager
async def listening(directory: Path) -> AsyncIterator[None]:
    server = middleware.LeaderServer(owner(), directory)
    task = asyncio.create_task(server.serve())
    yield
    server.should_exit = True
    await task


def follower(directory: Path, root_path: str = "") -> httpx.AsyncClient:
    app = FastAPI(root_path=root_path)
    app.get("/health")(lambda: {"own": True})
    app.get("/weights")(lambda: {"own": True})
    app.add_middleware(middleware.ForwardToLeader, directory=directory)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://follower", timeout=20)


async def test_what_concerns_the_weights_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the leader answers with its own status and body, sees the caller's key, and gets the body as it was sent; all else stays. A request
    that comes before it listens waits for it; where it cannot be reached the answer is 503 in bounded time, never what a follower knows itself. With
    `root_path` it is passed on as well, by the leader's own name for it."""
    key = {"Authorization": "Bearer secret"}
    async with follower(tmp_path) as client:
        early = asyncio.create_task(client.post("/update_weights", json={"version": 5}))
        await asyncio.sleep(0.2)
        async with listening(tmp_path), asyncio.timeout(60), follower(tmp_path, "/api") as prefixed:
            assert (await early).json()["version"] == 5
            assert (await client.get("/health")).json() == {"own": True}
            assert (await client.get("/weights")).status_code == 401
            assert (await client.get("/weights", headers=key)).json() == {"key": "Bearer secret"}
            assert (await prefixed.get("/api/weights", headers=key)).json() == {"key": "Bearer secret"}
            updates = await asyncio.gather(*(client.post("/update_weights", json={"version": v}) for v in range(3)))
            assert [answer.json()["version"] for answer in updates] == [0, 1, 2]
            assert max(answer.json()["changing"] for answer in updates) == 4, "all of them reached the same app"
        monkeypatch.setattr(middleware, "CONNECT_RETRIES", 1)
        answer = await client.get("/weights")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)


def test_one_process_leads(tmp_path: Path) -> None:
    """Contract: of the processes of a server exactly one leads, the first."""
    assert [middleware.lead(tmp_path) for _ in range(3)] == [True, False, False]
