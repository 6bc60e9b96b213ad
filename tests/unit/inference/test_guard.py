"""Who may ask for what, by the middleware alone (around vLLM's own application: tests/integration/test_inference.py)."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.types import Message, Scope
from starlette.websockets import WebSocketDisconnect

from prime_rl.config import InferenceConfig
from prime_rl.inference import compat
from prime_rl.inference.arguments import chunks_on_cpu
from prime_rl.inference.guard import OFF, SERVED, Guard, SeedFilter, has_seed
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
    for path in (
        "/",
        "/v1/models",
        "/weights",
        "/metrics",
        "/invocations",
        "/docs",
        "/a-route-of-tomorrow",
        *DISGUISES,
    ):
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
        "/metrics",
        "/metrics/",
        "/tokenize",
        "/update_weights",
        "/health",
        "/docs",
    ):
        assert client.post(path, headers=bearer).json() == {"path": path[1:]}


def test_the_docs_name_every_route() -> None:
    """Contract: docs/guides/security.md says of every route that is served, or off, that it is."""
    table = (Path(__file__).parents[3] / "docs" / "guides" / "security.md").read_text()
    names = {name.removesuffix("/oauth2-redirect") for name in SERVED} | {
        f"{prefix}…" for prefix in ("/v1/", "/static/")
    }
    assert [name for name in sorted(names | {*OFF, *ADMINISTRATIVE}) if f"`{name}`" not in table] == []


def test_a_prefix_of_a_proxy_opens_nothing() -> None:
    """Contract: with `root_path` the same two are open, under both names that the router knows them by, and nothing else is."""
    client = make_client(root_path="/api")
    for path, status in (("/api/health", 200), ("/health", 200), ("/api/weights", 401), ("/weights", 401), ("/api/api/health", 401),
                         ("/api", 401), ("/apihealth", 401), ("/api//health", 401)):  # fmt: skip
        assert client.get(path).status_code == status, path
    assert client.get("/api/weights", headers={"Authorization": "Bearer secret"}).json() == {"path": "weights"}


def test_websockets_ask_for_the_key() -> None:
    """Contract: a connection is refused before it is accepted."""
    client = make_client()
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime", headers=headers):
            pass
    with client.websocket_connect("/v1/realtime", headers={"Authorization": "Bearer secret"}) as socket:
        assert socket.receive_text() == "v1/realtime"


async def test_two_keys_at_once_and_unknown_kinds_of_connections_are_refused() -> None:
    """Contract: what is ambiguous is refused, and so is a kind of connection that a later server may know."""
    seen: list[Any] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def send(message: Message) -> None:
        seen.append(message.get("status", message["type"]))

    guard = Guard(app, KEYS)
    twice = [(b"authorization", b"Bearer secret"), (b"authorization", b"Bearer wrong")]
    await guard({"type": "http", "method": "GET", "path": "/weights", "headers": twice}, None, send)  # type: ignore[arg-type]
    await guard({"type": "webtransport", "path": "/weights", "headers": []}, None, send)  # type: ignore[arg-type]
    await guard({"type": "lifespan"}, None, send)  # type: ignore[arg-type]
    assert seen == [401, "http.response.body", "websocket.close", "lifespan"]


@pytest.mark.parametrize(
    ("body", "seeded"),
    [
        ({"prompt": "x", "seed": 0}, True),
        ({"token_ids": [1], "sampling_params": {"seed": 7}}, True),
        ({"prompt": "x", "seed": None, "sampling_params": {"seed": None}}, False),
        ({"messages": [{"content": "seed"}], "sampling_params": [1]}, False),
        ([{"seed": 1}], False),
    ],
)
def test_a_request_with_a_seed_is_refused_and_any_other_reaches_its_route_whole(body: Any, seeded: bool) -> None:
    app = FastAPI()
    app.add_middleware(SeedFilter)

    @app.post("/v1/completions")
    async def route(request: Request) -> Any:
        return {"got": await request.json()}

    answer = TestClient(app).post("/v1/completions", json=body)
    if seeded:
        assert answer.status_code == 400
        assert "a request with a seed would kill this engine" in answer.json()["error"]["message"]
    else:
        assert answer.json() == {"got": body}
    assert has_seed(json.dumps(body).encode()) is seeded
    assert not has_seed(b"no JSON")


def test_seeds_are_taken_wherever_they_do_no_harm() -> None:
    """Contract: chunked prefill is off on a CPU unless `[vllm]` turns it on, under either spelling; GPUs can do both."""
    chunked = InferenceConfig.model_validate({"vllm": {"enable-chunked-prefill": True}})
    assert [
        chunks_on_cpu(InferenceConfig(), compat.Engine((0, 31), "0.31.0", "cpu")),
        chunks_on_cpu(chunked, compat.Engine((0, 31), "0.31.0", "cpu")),
        chunks_on_cpu(chunked, compat.Engine((0, 31), "0.31.0", "cuda")),
    ] == [
        False,
        True,
        False,
    ]
