"""What a server answers without the key, by route. `python -m support.doors @ inference.toml` is `inference` writing
its whole route table to the file `$TEST_ROUTES`, once vLLM has built it.
"""

import json
import os
import socket
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from conftest import InferenceServer
from prime_rl.entrypoints import inference
from prime_rl.inference import routes
from prime_rl.inference.middleware import OPEN, is_served

ROUTES = "TEST_ROUTES"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# Ways to write a path that a router, or whatever is before it, might take for another one.
DISGUISES = (
    "//health/../invocations", "/health/../invocations", "/health/", "/ping/", "//health", "/health/x", "/health;x",
    "/Health", "/health%2F..%2Finvocations", "/health%00", "/./health", "/ping/../scale_elastic_ep", "/health//",
)  # fmt: skip
# vLLM's routes that change what it is, or say how it is built: of none of these is there any use here.
ADMINISTRATIVE = {
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/kv_event_sources", "/start_profile", "/stop_profile",
    "/abort_requests", "/server_info",
    "/fault_tolerance/apply", "/fault_tolerance/status", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
}  # fmt: skip


def check_doors(server: InferenceServer, table: Path, key: str) -> None:
    """With a key, every route of the server's own table but two asks for it, by any method; vLLM's administrative ones
    are off even with it; the table has none that nobody has thought about."""
    paths = sorted({path.replace("{response_id}", "x") for path in json.loads(table.read_text())})
    assert {"/health", "/ping", "/invocations", "/scale_elastic_ep", "/metrics", "/docs", "/v1/chat/completions"} <= {
        *paths
    }
    unknown = [path for path in paths if not is_served(path) and path not in ADMINISTRATIVE]
    assert not unknown, "decide in middleware.py and docs/guides/security.md whether these are served"
    bearer = {"Authorization": f"Bearer {key}"}
    for path in (*paths, *DISGUISES, "/a-route-of-tomorrow"):
        for method in METHODS:
            status = ask(server, method, path)
            assert (status != 401) == (path in OPEN), (method, path, status)
    with httpx.Client(base_url=server.root, timeout=60) as client:
        for path in ADMINISTRATIVE:
            assert client.post(path, json={}, headers=bearer).status_code == 404, path
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/weights"):
            assert client.get(path, headers=bearer).status_code == 200, path
        assert client.post("/tokenize", json={"prompt": "a"}, headers=bearer).status_code == 200
    assert b" 403 " in handshake(server, "/v1/realtime"), "a connection that is no request"


def ask(server: InferenceServer, method: str, path: str) -> int:
    """The status of a request whose path is sent as it stands here: most clients tidy it up."""
    with closing(HTTPConnection(urlsplit(server.root).netloc, timeout=60)) as connection:
        connection.request(method, path, b"{}", {"Content-Type": "application/json"})
        return connection.getresponse().status


def handshake(server: InferenceServer, path: str) -> bytes:
    """The first line of the answer to a WebSocket handshake."""
    address = urlsplit(server.root)
    request = (
        f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(request.encode())
        return connection.makefile("rb").readline()


if __name__ == "__main__":
    init_state = routes.PrimeRoutes.init_state

    async def init_and_list(self: routes.PrimeRoutes, *arguments: Any) -> None:
        await init_state(self, *arguments)
        Path(os.environ[ROUTES]).write_text(json.dumps([route.path for route in self._app.routes]))  # type: ignore[attr-defined]

    routes.PrimeRoutes.init_state = init_and_list  # type: ignore[method-assign]
    inference.main()
