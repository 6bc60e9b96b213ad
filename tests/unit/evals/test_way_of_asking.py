"""Who is behind an address: a server of ours, which proves what it serves, or an API, of which nothing is known but its chat route."""

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from chat_api import ChatApi

from prime_rl.config import EvalConfig
from prime_rl.errors import UserError
from prime_rl.evals.servers import way_of_asking
from prime_rl.launcher.preflight import check_key


@asynccontextmanager
async def server(answers):
    """`answers`: to GET /weights, one after the other, the last one again and again."""
    given = list(answers)

    async def weights(request):
        status, body = given.pop(0) if len(given) > 1 else given[0]
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/weights", weights)
    app.router.add_get("/v1/models", lambda request: web.json_response({}, status=404))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def config(url, weights_dir=None, **client):
    settings = {"environments": [{"id": "e"}], "weights_dir": weights_dir}
    return EvalConfig.model_validate({**settings, "client": {"base_url": url, "ready_timeout": 5, **client}})


async def ask(*arguments, **client):
    waits = []
    return await way_of_asking(config(*arguments, **client), lambda *wait: waits.append(wait)), len(waits)


OURS = (200, {"version": 3, "hash": "f", "boot": "1"})


@pytest.mark.parametrize(
    ("answers", "way"),
    [([OURS], "tokens"), ([(200, {"object": "list"})], "chat"), ([(200, [])], "chat"), ([(404, {})], "chat"), ([(405, {})], "chat"), ([(401, {})], "chat")],
)  # fmt: skip
async def test_a_server_that_says_what_it_serves_is_ours(answers, way):
    async with server(answers) as url:
        assert await ask(url) == (way, 0)


async def test_a_server_that_is_starting_is_waited_for():
    async with server([(503, {}), (500, {}), OURS]) as url:
        way, waits = await ask(url)
    assert (way, waits > 0) == ("tokens", True)


async def test_a_setting_decides_where_it_is_given():
    async with server([OURS]) as url:
        assert (await ask(url, type="chat"))[0] == "chat"
    async with server([(404, {})]) as url:
        assert (await ask(url, type="tokens"))[0] == "tokens"


async def test_an_api_is_given_no_versions(tmp_path):
    async with ChatApi() as api:
        with pytest.raises(UserError, match="has no weight routes: is this server started with `inference`"):
            await ask(api.base_url, tmp_path)


def test_a_variable_that_was_named_has_to_be_set(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match=r"client.api_key_var: the variable MY_KEY is not set"):
        check_key(config("http://a", api_key_var="MY_KEY").client)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    check_key(config("http://a").client)  # a server of ours may have no key
