"""Several processes that answer: one owns the weights, the others pass on what concerns them."""

import asyncio
import multiprocessing
import os
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from prime_rl.inference import leader


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


def follower(directory: Path, root_path: str = "") -> httpx.AsyncClient:
    app = FastAPI(root_path=root_path)
    app.get("/health")(lambda: {"own": True})
    app.get("/weights")(lambda: {"own": True})
    app.add_middleware(leader.ForwardToLeader, directory=directory)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://follower", timeout=20)


async def test_what_concerns_the_weights_is_passed_on(tmp_path: Path) -> None:
    """Contract: the owner answers with its own status and body, sees the caller's key, and gets the body as it was sent; all else stays."""
    async with await leader.listen(owner(), tmp_path), follower(tmp_path) as client:
        assert (await client.get("/health")).json() == {"own": True}
        assert (await client.get("/weights")).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert (await client.get("/weights", headers=key)).json() == {"key": "Bearer secret"}
        assert (await client.post("/update_weights", json={"version": "9" * (2 << 20)})).status_code == 413
        updates = await asyncio.gather(*(client.post("/update_weights", json={"version": v}) for v in range(3)))
        assert [answer.json()["version"] for answer in updates] == [0, 1, 2]
        assert max(answer.json()["changing"] for answer in updates) == 3, "all of them reached the same app"


async def test_behind_a_proxy_with_a_prefix(tmp_path: Path) -> None:
    """Contract: with `root_path` it is passed on as well, by the owner's own name for it."""
    async with await leader.listen(owner(), tmp_path), follower(tmp_path, "/api") as client:
        key = {"Authorization": "Bearer secret"}
        assert (await client.get("/api/weights", headers=key)).json() == {"key": "Bearer secret"}


async def test_an_owner_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: who cannot reach the owner answers 503 in bounded time, never with what it knows itself."""
    monkeypatch.setattr(leader, "CONNECT_SECONDS", 0.2)
    async with follower(tmp_path) as client:
        answer = await client.get("/weights")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)


async def test_the_owner_may_come_later(tmp_path: Path) -> None:
    """Contract: a request that comes before the owner listens waits for it."""
    async with follower(tmp_path) as client:
        early = asyncio.create_task(client.post("/update_weights", json={"version": 5}))
        await asyncio.sleep(0.2)
        async with await leader.listen(owner(), tmp_path):
            async with asyncio.timeout(60):
                assert (await early).json()["version"] == 5


def _claim(directory: Path, results: "multiprocessing.Queue[bool]", hold: "multiprocessing.Event") -> None:  # type: ignore[valid-type]
    results.put(leader.lead(directory))
    hold.wait(60)  # type: ignore[attr-defined]
    os._exit(0)


def test_one_process_leads(tmp_path: Path) -> None:
    """Contract: of the processes of a server exactly one leads."""
    context = multiprocessing.get_context("fork")
    results, hold = context.Queue(), context.Event()
    processes = [context.Process(target=_claim, args=(tmp_path, results, hold)) for _ in range(3)]
    for process in processes:
        process.start()
    try:
        assert sorted(results.get(timeout=60) for _ in processes) == [False, False, True]
    finally:
        hold.set()
        for process in processes:
            process.join(60)
