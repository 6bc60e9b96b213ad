"""The route that rollouts are sampled by: what it takes, what it answers. The engine itself: tests/integration/test_inference.py."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from renderers.client import _parse_completion_logprobs, parse_generate_response

from prime_rl.inference import routes
from prime_rl.inference.routes import SAMPLE_ROUTE, answer_rejected, sample_answer
from prime_rl.inference.version_files import Rejected


@dataclass
class Output:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None = "length"


def output(ids: list[int], logprobs: list[float], **changed: Any) -> Output:
    return Output(ids, SimpleNamespace(token_ids=list(ids), logprobs=logprobs), **changed)


def test_the_answer_is_read_as_vllms() -> None:
    """Contract: the reader of vLLM's token route gets the sampled ids and exactly their log-probabilities out of our answer. An output whose
    log-probabilities are not those of the sampled tokens is an error of the server."""
    logprobs = [-0.10000000149011612, -9.5, 0.0]
    found = parse_generate_response(sample_answer([1, 2], output([7, 8, 9], logprobs)))
    choice = found["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8, 9], "length")
    assert _parse_completion_logprobs(choice, choice["token_ids"]) == logprobs
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    for others in (None, SimpleNamespace(token_ids=[7, 9], logprobs=[-1.0, -1.0])):
        with pytest.raises(Rejected) as refused:
            sample_answer([1], Output([7, 8], others))
        assert refused.value.status == 500


@dataclass
class Engine:
    """Gives one output, at once or never; counts requests that were cancelled."""

    result: Output | None
    cancelled: int = 0
    model_config: Any = field(default_factory=lambda: SimpleNamespace(max_model_len=16))

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        try:
            if self.result is None:
                await asyncio.sleep(60)
            yield SimpleNamespace(outputs=[self.result])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def client(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    inputs = SimpleNamespace(tokens_input=lambda ids, cache_salt: {"ids": ids, "salt": cache_salt})
    monkeypatch.setitem(__import__("sys").modules, "vllm.inputs", inputs)
    monkeypatch.setattr(routes, "sampling_params", lambda given, prompt, most: given)
    app = FastAPI()
    app.include_router(routes.router)
    app.add_exception_handler(Rejected, answer_rejected)
    app.state.prime_models, app.state.engine_client = ["m"], engine
    return TestClient(app)


def test_requests_are_answered_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: one output is one answer; another model is 404, an unknown field 422, an engine that failed 500."""
    served = client(Engine(output([5], [-1.0])), monkeypatch)
    body = {"token_ids": [1, 2], "sampling_params": {}}
    assert json.loads(served.post(SAMPLE_ROUTE, json=body).content)["choices"][0]["token_ids"] == [5]
    for changed, status in (({"model": "m"}, 200), ({"model": "x"}, 404), ({"features": {}}, 422), ({"token_ids": []}, 422)):  # fmt: skip
        assert served.post(SAMPLE_ROUTE, json=body | changed).status_code == status, changed
    failed = client(Engine(output([5], [-1.0], finish_reason="error")), monkeypatch)
    assert failed.post(SAMPLE_ROUTE, json=body).status_code == 500


async def test_a_client_that_goes_away_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a request that nobody waits for any more does not go on sampling."""
    engine = Engine(None)
    app = client(engine, monkeypatch).app
    body = json.dumps({"token_ids": [1], "sampling_params": {}}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": SAMPLE_ROUTE, "headers": headers, "query_string": b""}
    async with asyncio.timeout(60):
        await app(scope, receive, send)  # type: ignore[operator]
        await asyncio.sleep(0)  # the cancelled request's own turn
    assert (engine.cancelled, sent[0]["status"]) == (1, 499)
