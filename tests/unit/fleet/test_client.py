"""The engine client: what it believes, and what it says when the server is not what it should be."""

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prime_rl.config.shared import ClientConfig, how_to_start
from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient, Served, ServerError, VersionNotSent
from prime_rl.transport.weights import WeightsManifest


class Scripted:
    """Answers from a table of (method, path) -> (status, body) and remembers what was asked."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, object]] = {}
        self.asked: list[tuple[object, str | None]] = []  # body, key

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((body, request.headers.get("Authorization")))
        status, answer = self.answers.get((request.method, request.path), (404, {}))
        return web.json_response(answer, status=status)


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    scripted, app = Scripted(), web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.answer)
    async with TestServer(app) as running:
        scripted.url = str(running.make_url("")).rstrip("/")
        yield scripted


@pytest.fixture
async def engine(server: Scripted) -> AsyncIterator[InferenceClient]:
    async with InferenceClient(ClientConfig(base_url=server.url)) as client:
        yield client


def manifest(version: int = 3) -> WeightsManifest:
    return WeightsManifest(version, 0, "abc", {}, None, Path("/runs/weights/step_3"))


async def test_the_base_url_works_with_and_without_v1(server, monkeypatch):
    """`client.base_url` may end in /v1 or not; the key in the configured variable guards the weight routes too."""
    monkeypatch.setenv("MY_KEY", "secret")
    server.answers["GET", "/weights"] = 200, {"version": 2, "hash": "h"}
    for suffix in ("", "/", "/v1", "/v1/"):
        async with InferenceClient(ClientConfig(base_url=server.url + suffix, api_key_var="MY_KEY")) as engine:
            assert await engine.served() == Served(2, "h")
        assert server.asked[-1][1] == "Bearer secret"


async def test_an_update_is_believed_only_when_the_server_says_what_it_serves(server, engine):
    """What is served is proven to be what was committed: every update is answered with version and hash."""
    seconds = {"stage": 0.5, "pause": 0.25}
    said = {"version": 3, "hash": "abc", "boot": "b", "loads": 2, "seconds": seconds}
    server.answers["POST", "/update_weights"] = 200, said
    served = await engine.update(manifest())
    assert (served, served.seconds) == (Served(3, "abc", "b", loads=2), seconds)
    assert [body for body, _ in server.asked] == [{"weight_dir": "/runs/weights/step_3", "version": 3}]
    lies = ({"version": 2}, "says it serves"), ({"hash": "other"}, "says it serves"), ({"hash": None}, "does not say")
    for lie, message in lies:
        server.answers["POST", "/update_weights"] = 200, said | lie
        with pytest.raises(UserError, match=message):
            await engine.update(manifest())


@pytest.mark.parametrize(
    ("status", "body", "message", "trouble"),
    [
        (400, {"error": {"message": "manifest is broken"}}, "manifest is broken", UserError),
        (401, {}, r"refused the key in \$VLLM_API_KEY", UserError),
        (404, {}, "started with `inference`", UserError),
        (409, {}, "failed", ServerError),
        (424, {"error": {"message": "superseded"}}, "superseded", VersionNotSent),
        (500, {"detail": "x"}, "HTTP 500", ServerError),
        (503, {}, "HTTP 503", ServerError),
    ],
)
async def test_refusals_and_failures_name_their_cause(server, engine, status, body, message, trouble):
    """One clear line: what was refused, by whom, and why. A server's failure is worth a retry, a refusal is not."""
    server.answers["POST", "/update_weights"] = status, body
    with pytest.raises(UserError, match=message) as caught:
        await engine.update(manifest())
    assert type(caught.value) is trouble


async def test_a_prompt_is_scored_by_the_route_of_episodes_and_computed_anew(server, engine):
    """The log-probabilities of all tokens but the first, at temperature 1; what JSON cannot write is no number."""
    entries = [None, {"7": {"logprob": -0.5}}, {"5": {"logprob": None}}]
    server.answers["POST", "/inference/v1/generate"] = 200, {"choices": [], "prompt_logprobs": entries}
    found = [await engine.score([9, 7, 5]) for _ in range(2)]
    assert [logprobs[0] for logprobs in found] == [-0.5, -0.5]
    assert all(math.isnan(logprobs[1]) for logprobs in found)
    bodies = [body for body, _ in server.asked]
    assert bodies[0]["token_ids"] == [9, 7, 5]
    assert bodies[0]["sampling_params"] == {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    assert bodies[0]["cache_salt"] != bodies[1]["cache_salt"]
    assert bodies[0]["priority"] < 0  # before all that waits


@pytest.mark.parametrize("logprobs", [None, [None, {"8": {"logprob": -1.0}}], [None]])
async def test_an_answer_without_the_prompts_log_probabilities_is_an_error(server, engine, logprobs):
    server.answers["POST", "/inference/v1/generate"] = 200, {"prompt_logprobs": logprobs}
    with pytest.raises(ServerError, match="without log-probabilities"):
        await engine.score([9, 7])


@pytest.mark.parametrize(("experts", "more"), [(False, {}), (True, {"routed_experts_prompt_start": 0})])
async def test_a_sampled_reply_has_its_log_probabilities(server, engine, experts, more):
    """What is sampled at temperature 1 has the sampler's numbers and, asked for, the experts that it chose."""
    content = [{"token": "token_id:4", "logprob": -0.5}, {"token": "token_id:6", "logprob": None}]
    choice = {"token_ids": [4, 6], "logprobs": {"content": content}, "routed_experts": {"data": "AA=="}}
    server.answers["POST", "/v1/sample"] = 200, {"choices": [choice]}
    assert await engine.sample([9, 7], 2, 5, experts) == [[4, 6], [-0.5, None], {"data": "AA=="}][: 2 + experts]
    params = {"max_tokens": 2, "temperature": 1.0, "seed": 5, "logprobs": 0, **more}
    assert server.asked[-1][0] == {"token_ids": [9, 7], "sampling_params": params}


async def test_waiting_for_a_server_that_never_comes_is_bounded_and_says_so(server, heard):
    """A wait has a subject, an owner and a deadline, in the log too; its end says what the server answered."""
    waits = []
    async with InferenceClient(ClientConfig(base_url=server.url, ready_timeout=1.0)) as engine:
        with pytest.raises(
            UserError, match=f"no inference server at {server.url} after 1 s .*: GET /health gives HTTP 404"
        ):
            await engine.wait_ready(lambda *wait: waits.append(wait))
    assert heard.messages == [
        f"waiting for an inference server at {server.url} (at most 1 s); {how_to_start(server.url)}"
    ]
    assert (waits[0][0], server.url in waits[0][1]) == ("a healthy server", True)
