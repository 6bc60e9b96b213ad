"""Requests that would kill a CPU engine that computes prompts in chunks."""

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from prime_rl.config import InferenceConfig
from prime_rl.inference import compat
from prime_rl.inference.arguments import chunks_on_cpu
from prime_rl.inference.seeds import RefuseSeeds, has_seed

CPU = compat.Engine((0, 31), "0.31.0", "cpu")
CUDA = compat.Engine((0, 31), "0.31.0", "cuda")


@pytest.mark.parametrize(
    ("body", "seeded"),
    [
        ({"prompt": "x", "seed": 0}, True),
        ({"token_ids": [1], "sampling_params": {"seed": 7}}, True),
        ({"prompt": "x", "seed": None, "sampling_params": {"seed": None}}, False),
        ({"messages": [{"content": "seed"}], "sampling_params": [1]}, False),
        ([{"seed": 1}], False),
    ],
)
def test_a_request_with_a_seed_is_refused_and_any_other_reaches_its_route_whole(body: Any, seeded: bool) -> None:
    app = FastAPI()
    app.add_middleware(RefuseSeeds)

    @app.post("/v1/completions")
    async def route(request: Request) -> Any:
        return {"got": await request.json()}

    answer = TestClient(app).post("/v1/completions", json=body)
    if seeded:
        assert answer.status_code == 400
        assert "a request with a seed would kill this engine" in answer.json()["error"]["message"]
    else:
        assert answer.json() == {"got": body}
    assert has_seed(json.dumps(body).encode()) is seeded
    assert not has_seed(b"no JSON")


def test_seeds_are_taken_wherever_they_do_no_harm() -> None:
    """Contract: chunked prefill is off on a CPU unless `[vllm]` turns it on, under either spelling; GPUs can do both."""
    chunked = InferenceConfig.model_validate({"vllm": {"enable-chunked-prefill": True}})
    assert [chunks_on_cpu(InferenceConfig(), CPU), chunks_on_cpu(chunked, CPU), chunks_on_cpu(chunked, CUDA)] == [
        False,
        True,
        False,
    ]
