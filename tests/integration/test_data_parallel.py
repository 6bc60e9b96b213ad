"""Several engines behind one address (`data_parallel_size`), for real: each computes what the server says it serves."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import InferenceServer, LaunchServer, failing_loads, make_tiny_model
from support.serving import TOLERANCE, Sampled, commit, parse, perturbed, reference, request, served, update

ENGINES = 2
# No process of its own for each worker: a third of the time to start.
LEAN = {"vllm": {"distributed_executor_backend": "uni"}}


@pytest.fixture(autouse=True)
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # one NUMA node has all engines
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def sample_at(server: InferenceServer, engine: int, prompt: list[int], **params: object) -> Sampled:
    headers = {"X-data-parallel-rank": str(engine)}
    return parse(server.post("/inference/v1/generate", request(server, prompt, **params), headers=headers))


def check_engines(server: InferenceServer, prompt: list[int], weights: Path) -> None:
    for engine in range(ENGINES):
        got = sample_at(server, engine, prompt, temperature=0.0)
        expected = reference(weights, prompt, got.tokens).tolist()
        assert max(abs(one - other) for one, other in zip(got.logprobs, expected, strict=True)) <= TOLERANCE


@pytest.mark.slow
def test_every_engine_follows_updates(start_server: LaunchServer, tmp_path: Path, chat_prompt: list[int]) -> None:
    """Contract: every engine loads a version before the server says that it serves it, with requests in flight on all;
    where one of them fails to load, none is said to serve; the next attempt succeeds."""
    settings = {"data_parallel_size": ENGINES, **LEAN}
    server = start_server(make_tiny_model(tmp_path / "model"), settings, environment=failing_loads(tmp_path))
    assert served(server)["engines"] == ENGINES
    check_engines(server, chat_prompt, server.model)

    good = commit(server.weights_root, 20, server.model, perturbed(server.model, seed=20))
    with ThreadPoolExecutor(2 * ENGINES) as threads:
        flying = [
            threads.submit(sample_at, server, n % ENGINES, chat_prompt, max_tokens=400) for n in range(2 * ENGINES)
        ]
        answer = update(server, good, 20)
        assert answer.status_code == 200, answer.text
        assert {flight.result().finish_reason for flight in flying} == {"length"}
    check_engines(server, chat_prompt, good)

    bad = commit(server.weights_root, 925, server.model, perturbed(server.model, seed=25))
    refused = update(server, bad, 925)
    assert (refused.status_code, "could not be loaded" in refused.text) == (500, True), refused.text
    assert server.get("/weights").status_code == 500
    assert update(server, bad, 925).status_code == 200
    check_engines(server, chat_prompt, bad)
