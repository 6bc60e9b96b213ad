"""The connection that rollouts are sampled by: our own route where it is passed on, vLLM's where a router knows only that."""

from typing import Any

import pytest
from aiohttp import web
from openai import APIStatusError

from prime_rl.envs.conversation import EngineConnection

BODY = {"model": "m", "token_ids": [1], "sampling_params": {"temperature": 1.0, "max_tokens": 1}}


async def serve(statuses: dict[str, int], seen: list[str]) -> tuple[web.AppRunner, str]:
    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"path": request.path}, status=statuses[request.path])

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def post(connection: EngineConnection, root: str) -> Any:
    return (await connection.post(f"{root}/inference/v1/generate", cast_to=None, body=BODY)).content


@pytest.mark.parametrize("status", [401, 404, 405])
async def test_a_router_that_does_not_know_our_route_is_asked_by_vllms(status: int) -> None:
    """Contract: where our route is not passed on, or without the key, vLLM's token route is used, from then on without asking again."""
    seen: list[str] = []
    runner, root = await serve({"/v1/sample": status, "/inference/v1/generate": 200}, seen)
    connection = EngineConnection(f"{root}/v1", "k")
    try:
        for _ in range(2):
            assert b"/inference/v1/generate" in await post(connection, root)
    finally:
        await connection.close()
        await runner.cleanup()
    assert seen == ["/v1/sample", "/inference/v1/generate", "/inference/v1/generate"]


@pytest.mark.parametrize(("own", "vllms"), [(404, 404), (400, 200), (500, 200)])
async def test_other_errors_are_told_as_they_are(own: int, vllms: int) -> None:
    """Contract: a refusal or a failure of our route is no reason for another attempt; where neither answers the next request asks ours again."""
    seen: list[str] = []
    runner, root = await serve({"/v1/sample": own, "/inference/v1/generate": vllms}, seen)
    connection = EngineConnection(f"{root}/v1", "k")
    try:
        for _ in range(2):
            with pytest.raises(APIStatusError) as error:
                await post(connection, root)
            assert error.value.status_code == own
    finally:
        await connection.close()
        await runner.cleanup()
    assert seen == ["/v1/sample", "/inference/v1/generate"] * 2 if own == 404 else ["/v1/sample"] * 2
