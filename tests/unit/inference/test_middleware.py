"""Who may ask for what, by the middleware alone (in vLLM: integration/test_inference.py), and which process answers."""

from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from prime_rl.inference.middleware import OFF, SERVED, Guard
from support.doors import ADMINISTRATIVE

KEYS = ("secret", "other")


def make_client(keys: tuple[str, ...] = KEYS) -> TestClient:
    """An application that answers everything, whatever it is asked, with what the router saw."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def every(path: str) -> dict[str, str]:
        return {"path": path}

    app.add_middleware(Guard, keys=list(keys))
    return TestClient(app)


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, False), ("", False), ("secret", False), ("Basic secret", False), ("Bearer wrong", False),
        ("Bearer", False), ("Bearer ", False), ("Bearer secret2", False), ("Bearer  secret", False),
        ("Bearer secret", True), ("bearer other", True),
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
    for path in ("/scale_elastic_ep", "/scale_elastic_ep/", "//scale_elastic_ep", "/is_scaling_elastic_ep",
                 "/start_profile", "/collective_rpc", "/sleep", "/fault_tolerance/apply", "/abort_requests",
                 "/server_info", "/v1/load_lora_adapter", "/v1/load_lora_adapter/",
                 "/", "/V1/models", "/v2/rerank", "/a-route-of-tomorrow"):  # fmt: skip
        assert client.post(path, headers=bearer).status_code == 404, path
    served = "/v1/chat/completions /inference/v1/generate /metrics/ /tokenize /update_weights /health"
    for path in served.split():
        assert client.post(path, headers=bearer).json() == {"path": path[1:]}


def test_the_docs_name_every_route() -> None:
    """Contract: docs/guides/security.md says of every route that is served, or off, that it is."""
    table = (Path(__file__).parents[3] / "docs" / "guides" / "security.md").read_text()
    names = {name.removesuffix("/oauth2-redirect") for name in SERVED} | {
        f"{prefix}…" for prefix in ("/v1/", "/static/")
    }
    assert [name for name in sorted(names | {*OFF, *ADMINISTRATIVE}) if f"`{name}`" not in table] == []
