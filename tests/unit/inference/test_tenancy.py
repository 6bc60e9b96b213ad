"""Whose a request is, and when it is answered, by the middleware alone (in vLLM: integration/test_tenants_server)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl.inference.fair_share import FairShare
from prime_rl.inference.middleware import Guard
from prime_rl.inference.tenancy import AdapterOfTenant, Tenancy, Tenant, asking
from prime_rl.inference.version_files import Rejected
from prime_rl.transport.tenants import ask_to_join, claim_name, leave, own_key, tenant_dir

NAME = "the/model"


class FakeService:
    """A weight service that may break; clearing it is noted."""

    def __init__(self) -> None:
        self.failures, self.busy, self.cleared, self.usable = 0, False, 0, True

    async def clear(self) -> None:
        self.cleared += 1

    def check_usable(self) -> None:
        if not self.usable:
            raise Rejected(500, "could not be loaded")


class Server:
    """A guarded application of so many adapters and requests at a time, which answers once `gate` is set."""

    def __init__(self, directory: Path, slots: int = 2, most: int = 2, keys: tuple[str, ...] = ()) -> None:
        self.directory, self.gate, self.entered = directory, asyncio.Event(), list[str]()
        self.gate.set()

        def start(name: str, number: int) -> Tenant:
            service: Any = FakeService()
            return Tenant(number, service, f"{name}'s adapter {number}")

        self.tenancy = Tenancy(directory, slots, FairShare[Any](most, {}, {}), start)
        self.adapters = AdapterOfTenant(self.tenancy, (NAME, None, ""))
        transport = httpx.ASGITransport(Guard(self._application, keys, self.tenancy))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"].decode()
        self.entered.append(str(asking()))
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{body} by {self.adapters.get(NAME)}".encode()})

    def join(self, name: str) -> str:
        directory = tenant_dir(self.directory, name)
        key = own_key(directory)
        claim_name(directory, key)
        ask_to_join(directory, {})
        return key

    async def post(self, key: str, path: str = "/v1/sample", body: str = "") -> tuple[int, str]:
        answer = await self.client.post(path, headers={"Authorization": f"Bearer {key}"} if key else {}, content=body)
        return answer.status_code, answer.text


@pytest.fixture
async def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Server]]:
    monkeypatch.setattr("prime_rl.inference.tenancy.KEYS_SECONDS", 0.01)
    servers: list[Server] = []

    def start(**how: Any) -> Server:
        servers.append(Server(tmp_path, **how))
        return servers[-1]

    yield start
    for each in servers:
        await each.client.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("keys", [(), ("admin",)])
async def test_keys_are_for_their_routes(serve: Callable[..., Server], keys: tuple[str, ...]) -> None:
    """Contract: tokens and weights for a tenant's key, also of one that joined just now, the rest for the server's own;
    the model's name means the adapter of who asks, other names nobody's. Nobody gets the base model without a key."""
    server = serve(keys=keys)
    a = server.join("a")
    assert (await server.post(a))[0] == 503, "no adapter yet"
    assert [await server.tenancy.tenant("a"), server.tenancy.tenants["a"].number] == [server.tenancy.tenants["a"], 1]
    b = server.join("b")
    await server.tenancy.tenant("b")
    assert await asyncio.gather(server.post(a, body="x"), server.post(b, "/inference/v1/generate", "y")) == [
        (200, "x by a's adapter 1"), (200, "y by b's adapter 2"),
    ]  # fmt: skip
    for path in ("/v1/sample", "/weights", "/update_weights", "/tokenize", "/invocations", "/generative_scoring"):
        for key in ("", "wrong", a[:-1]):
            assert (await server.post(key, path))[0] == 401, path
        assert (await server.post(b, path))[0] == 200, path
        admin = 403 if path in ("/weights", "/update_weights") else 200
        assert not keys or (await server.post("admin", path))[0] == admin, path
    for path in ("/pause", "/resume", "/leave", "/metrics", "/docs"):
        assert (await server.post(a, path))[0] == 403, path
        assert (await server.post(keys[0] if keys else "", path)) == (200, " by None"), path
    assert (await server.post(a, "/v1/load_lora_adapter"))[0] == 404
    assert (await server.post("", "/health"))[0] == 200
    assert "b's adapter 2" not in server.adapters
    assert list(server.adapters.values()) == []


async def test_numbers(serve: Callable[..., Server]) -> None:
    """Contract: one is taken back from a tenant that has left, once nothing of it is in flight or being loaded, and
    cleared; as long as there is none the next is refused with the names of those that have them."""
    server = serve(slots=2)
    keys = {name: server.join(name) for name in "abc"}
    one, two = await server.tenancy.tenant("a"), await server.tenancy.tenant("b")
    assert (one.number, two.number) == (1, 2)
    with pytest.raises(Rejected, match="taken, by a, b$"):
        await server.tenancy.tenant("c")
    leave(tenant_dir(server.directory, "b"))
    server.gate.clear()
    reply = asyncio.create_task(server.post(keys["b"]))
    await until(lambda: server.entered == ["b"])
    with pytest.raises(Rejected):
        await server.tenancy.tenant("c")
    server.gate.set()
    assert (await reply)[0] == 200
    service: Any = two.service
    service.busy = True
    with pytest.raises(Rejected) as refused:
        await server.tenancy.tenant("c")
    assert refused.value.status == 409
    service.busy = False
    three = await server.tenancy.tenant("c")
    assert (three.number, three.service is two.service) == (2, False)
    assert vars(three.service)["cleared"] == 1
    assert (await server.post(keys["b"]))[0] == 503
    assert await server.post(keys["c"]) == (200, " by c's adapter 2")


async def test_requests_wait_for_the_engine(serve: Callable[..., Server]) -> None:
    """Contract: a request beyond those that the engine takes waits with its body, while others of fewer in flight pass;
    one whose client goes away leaves the queue; what takes no tokens never waits."""
    server = serve(most=2)
    a, b = server.join("a"), server.join("b")
    for name in "ab":
        await server.tenancy.tenant(name)
    server.gate.clear()
    replies = [asyncio.create_task(server.post(a, body=f"a{number}")) for number in range(4)]
    await until(lambda: server.tenancy.numbers("a")["waiting"] == 2)
    gone, other = asyncio.create_task(server.post(b)), asyncio.create_task(server.post(b, body="b"))
    await until(lambda: server.tenancy.numbers("b")["waiting"] == 2)
    gone.cancel()
    await until(lambda: server.tenancy.numbers("b")["waiting"] == 1)
    weights = asyncio.create_task(server.post(b, "/weights"))
    await until(lambda: server.entered == ["a", "a", "b"])
    server.gate.set()
    assert await other == (200, "b by b's adapter 2")
    assert sorted([await reply for reply in replies]) == [(200, f"a{number} by a's adapter 1") for number in range(4)]
    assert (await weights)[0] == 200
    assert server.entered[3] == "b"


async def test_a_reply_under_a_broken_adapter_is_none(serve: Callable[..., Server]) -> None:
    """Contract: nothing is sampled after a failed load, and what was in flight then is an error, also once another load
    has succeeded."""
    server = serve()
    a = server.join("a")
    service: Any = (await server.tenancy.tenant("a")).service
    server.gate.clear()
    reply = asyncio.create_task(server.post(a))
    await until(lambda: server.entered == ["a"])
    service.usable, service.failures = False, 1
    assert (await server.post(a))[0] == 500
    service.usable = True
    server.gate.set()
    assert (await reply)[0] == 500
    assert (await server.post(a))[0] == 200


async def test_a_client_that_hangs_up_is_noticed(serve: Callable[..., Server]) -> None:
    """Contract: the engine gets no request whose client went away while it waited, and nobody waits for it."""
    server = serve(most=1)
    a = server.join("a")
    await server.tenancy.tenant("a")
    server.gate.clear()
    first = asyncio.create_task(server.post(a))
    await until(lambda: server.entered == ["a"])
    messages = asyncio.Queue[Any]()
    for message in ({"type": "http.request", "body": b""}, {"type": "http.disconnect"}):
        messages.put_nowait(message)
    headers = [(b"authorization", f"Bearer {a}".encode())]
    scope = {"type": "http", "path": "/v1/sample", "method": "POST", "headers": headers}
    async with asyncio.timeout(60):
        await Guard(server._application, (), server.tenancy)(scope, messages.get, lambda _: asyncio.sleep(0))
    server.gate.set()
    assert (await first)[0] == 200
    assert server.entered == ["a"]
