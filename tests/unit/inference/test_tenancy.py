"""Whose a request is, and when it is answered, by the middleware alone (in vLLM: integration/test_tenants_server)."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl.inference.compat import AdapterNames
from prime_rl.inference.fair_share import FairShare
from prime_rl.inference.middleware import Guard
from prime_rl.inference.service import Rejected
from prime_rl.inference.tenancy import CURRENT_TENANT, Tenancy
from prime_rl.transport.tenants import ask_to_join, claim_name, leave, own_key, tenant_dir

NAMES = ("the/model", "", None)


class FakeService:
    def __init__(self, name: str, number: int) -> None:
        self.number, self.name, self.busy, self.cleared, self.failures = number, name, False, False, 0
        self.loading = asyncio.Lock()

    def adapter(self) -> tuple[int, str]:
        return self.number, f"{self.name}'s"

    async def clear(self) -> None:
        self.cleared = True

    def check_usable(self) -> None:
        if self.failures == 1:
            raise Rejected(500, "broken")


class Server:
    """A guarded application with two adapters, and room for `most` requests. It answers once `gate` is set."""

    def __init__(self, directory: Path, most: int = 2, keys: tuple[str, ...] = ()) -> None:
        self.directory, self.gate, self.entered = directory, asyncio.Event(), list[str | None]()
        self.gate.set()
        make_service: Any = FakeService
        self.tenancy = Tenancy(directory, 2, FairShare[Any](most, {}, {}), make_service)
        self.adapters = AdapterNames(["the/model"], self.tenancy.adapter)
        self.guard = Guard(self._application, keys, self.tenancy)
        self.keys = keys

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        if self.keys and scope["path"].startswith("/v1/"):  # as vLLM asks for
            assert dict(scope["headers"])[b"authorization"] == f"Bearer {self.keys[0]}".encode()
        body = (await receive())["body"]
        self.entered.append(CURRENT_TENANT.get())
        await self.gate.wait()
        (adapter,) = {self.adapters[name].lora_name[10:] if name in self.adapters else "no" for name in NAMES}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body + f" by {adapter} adapter".encode()})

    async def join(self, name: str, number: bool = True) -> str:
        directory = tenant_dir(self.directory, name)
        key = own_key(directory)
        claim_name(directory, key)
        ask_to_join(directory, {})
        assert not number or await self.tenancy.service(name)
        return key

    async def post(self, key: str, path: str = "/v1/sample", body: str = "") -> tuple[int, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.guard), base_url="http://server") as client:
            answer = await client.post(path, headers={"Authorization": f"Bearer {key}"} if key else {}, content=body)
        return answer.status_code, answer.text


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.inference.tenancy.KEYS_SECONDS", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("keys", [(), ("admin",)])
async def test_keys_are_for_their_routes(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Contract: tokens and weights for a tenant's key, also of one that joined just now, the rest for the server's own;
    the model's name means the adapter of who asks, other names nobody's. Nobody gets the base model without a key."""
    server = Server(tmp_path, keys=keys)
    a = await server.join("a", number=False)
    assert (await server.post(a))[0] == 503, "no adapter yet"
    await server.tenancy.service("a")
    b = await server.join("b")
    replies = await asyncio.gather(server.post(a, body="x"), server.post(b, "/inference/v1/generate", "y"))
    assert replies == [(200, "x by a's adapter"), (200, "y by b's adapter")]
    for path in ("/v1/sample", "/weights", "/update_weights", "/tokenize", "/invocations", "/generative_scoring"):
        assert {(await server.post(key, path))[0] for key in ("", "wrong", a[:-1])} == {401}, path
        assert (await server.post(b, path))[0] == 200, path
        assert not keys or (await server.post("admin", path))[0] == (403 if "weights" in path else 200), path
    for path in ("/pause", "/resume", "/leave", "/metrics", "/docs"):
        assert (await server.post(a, path))[0] == 403, path
        closed = not keys and path in ("/pause", "/resume", "/leave")
        assert (await server.post("".join(keys), path))[0] == (403 if closed else 200), path
    assert ((await server.post(a, "/v1/load_lora_adapter"))[0], (await server.post("", "/health"))[0]) == (404, 200)
    thief = tenant_dir(tmp_path, "0")
    shutil.copytree(tenant_dir(tmp_path, "a"), thief)
    server.tenancy._hashes.clear()
    assert await server.post(a, body="x") == (200, "x by a's adapter"), "whoever has a copy of its files"
    assert "b's" not in server.adapters
    assert list(server.adapters.values()) == []


async def test_numbers(tmp_path: Path) -> None:
    """Contract: one is taken back from a tenant that has left, once nothing of it is in flight or being loaded, and
    cleared; as long as there is none the next is refused with the names of those that have them."""
    server = Server(tmp_path)
    _, b, c = [await server.join(name, number=name != "c") for name in "abc"]
    left: Any = await server.tenancy.service("b")

    async def refused() -> None:
        with pytest.raises(Rejected, match="taken, by a, b$") as error:
            await server.tenancy.service("c")
        assert error.value.status == 409

    await refused()
    leave(tenant_dir(server.directory, "b"))
    server.gate.clear()
    reply = asyncio.create_task(server.post(b))
    await until(lambda: server.entered == ["b"])
    await refused()
    server.gate.set()
    assert (await reply)[0] == 200
    left.busy = True
    await refused()
    left.busy = False
    new: Any = await server.tenancy.service("c")
    assert (new.number, new.cleared) == (2, True)
    assert [(await server.post(key))[0] for key in (b, c)] == [503, 200]


async def test_requests_wait_for_the_engine(tmp_path: Path) -> None:
    """Contract: a request beyond those that the engine takes waits with its body, while others' of fewer in flight
    pass; what takes no tokens never waits."""
    server = Server(tmp_path)
    a, b = await server.join("a"), await server.join("b")
    server.gate.clear()
    replies = [asyncio.create_task(server.post(a, body=f"a{number}")) for number in range(4)]
    await until(lambda: server.tenancy.usage("a")["waiting"] == 2)
    other = asyncio.create_task(server.post(b, body="b"))
    await until(lambda: server.tenancy.usage("b")["waiting"] == 1)
    weights = asyncio.create_task(server.post(b, "/weights"))
    await until(lambda: server.entered == ["a", "a", "b"])
    server.gate.set()
    assert await other == (200, "b by b's adapter")
    assert [await reply for reply in replies] == [(200, f"a{number} by a's adapter") for number in range(4)]
    assert ((await weights)[0], server.entered[3]) == (200, "b")


async def test_a_reply_under_a_broken_adapter_is_none(tmp_path: Path) -> None:
    """Contract: nothing is sampled after a failed load, and what was in flight then is an error, also once another load
    has succeeded."""
    server = Server(tmp_path)
    a = await server.join("a")
    service: Any = await server.tenancy.service("a")
    server.gate.clear()
    reply = asyncio.create_task(server.post(a))
    await until(lambda: server.entered == ["a"])
    service.failures = 1
    assert (await server.post(a))[0] == 500
    service.failures = 2  # and usable
    server.gate.set()
    assert [(await reply)[0], (await server.post(a))[0]] == [500, 200]
    async with service.loading:  # the reply waits for the outcome
        reply = asyncio.create_task(server.post(a))
        await until(lambda: len(server.entered) == 3)
        service.failures = 3
    assert (await reply)[0] == 500
