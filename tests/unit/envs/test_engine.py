"""The connection that rollouts are sampled by: our own route where it is passed on, else vLLM's behind a router."""

from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prime_rl.envs.conversation import CallFailed, EngineClient, EngineConnection

BODY = {"model": "m", "token_ids": [1], "sampling_params": {"temperature": 1.0, "max_tokens": 1}}
OWN, VLLMS = "/v1/sample", "/inference/v1/generate"


@pytest.mark.parametrize(
    ("own", "vllms", "seen"),
    [(401, 200, [OWN, VLLMS, VLLMS]), (404, 404, [OWN, VLLMS, VLLMS]), (400, 200, [OWN, OWN]), (500, 200, [OWN, OWN])],
)
async def test_which_route_is_asked(own: int, vllms: int, seen: list[str]) -> None:
    """Contract: where our route is not passed on, or without the key, vLLM's token route is used, from then on without
    asking again. A refusal or a failure of our route is no reason for another attempt."""
    statuses, asked, outcomes = {OWN: own, VLLMS: vllms}, list[str](), list[bytes | int]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text=request.path, status=statuses[request.path])

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer)
    async with TestServer(app) as server:
        root = str(server.make_url("")).rstrip("/")
        connection = EngineConnection(f"{root}/v1", "k")
        for _ in range(2):
            try:
                outcomes.append((await connection.post(f"{root}{VLLMS}", cast_to=None, body=BODY)).content)
            except CallFailed as error:
                outcomes.append(error.status)
        await connection.close()
    assert asked == seen
    assert outcomes == [VLLMS.encode() if VLLMS in seen and vllms == 200 else own] * 2


async def test_images_are_refused() -> None:
    """Contract: a renderer that knows images renders places for them, meaningless without them: nothing is sent."""
    client = object.__new__(EngineClient)
    media = SimpleNamespace(is_empty=lambda: False)
    client.renderer = SimpleNamespace(render=lambda *_, **__: SimpleNamespace(token_ids=[1], multi_modal_data=media))
    client._connections = {"u": None}  # type: ignore[dict-item]
    with pytest.raises(CallFailed, match="images"):
        await client.generate("u", [], None, None, {})
