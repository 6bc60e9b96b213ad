"""Attempts are made as often as they have to be, and no longer than their version counts; who is behind an address."""

from types import SimpleNamespace

import httpx
import pytest

from prime_rl.config import EvalConfig
from prime_rl.config.shared import SamplingConfig
from prime_rl.envs.protocol import FirstTasks
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalPlan
from prime_rl.evals.run import way_of_asking
from prime_rl.evals.runner import tasks_of, wire_sampling
from prime_rl.launcher.preflight import check_key

TASKS = [f"t{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("kind", "wanted", "count"),
    [(list, -1, 4), (list, 3, 3), (list, 9, 4), (FirstTasks, 3, 3), (FirstTasks, 9, 4), (FirstTasks, -1, None)],
)
def test_as_many_tasks_as_asked_for_or_a_warning(kind, wanted, count, caplog):
    """-1: all of them, which an endless environment refuses."""
    pool, plan = SimpleNamespace(tasks=lambda env: kind(TASKS)), EvalPlan("e", "e", SamplingConfig(), wanted, 1, 100)
    if count is None:
        with pytest.raises(UserError, match="environment 'e' is endless: set num_examples"):
            tasks_of(pool, plan)
    else:
        assert list(tasks_of(pool, plan)) == TASKS[:count]
        assert ("e has 4 tasks, not 9" in caplog.text) == (wanted == 9)


def test_every_sampling_parameter_is_sent_so_that_no_server_default_applies():
    """Train and eval sample as configured; a seed travels only when asked for."""
    wire = wire_sampling(SamplingConfig(temperature=0.5, max_tokens=9), 17, 100)
    assert wire == {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "max_tokens": 9}
    assert wire_sampling(SamplingConfig(seeded=True), 17, 100)["seed"] == 17
    assert wire_sampling(SamplingConfig(), 17, 100)["max_tokens"] == 100


OURS = (200, {"version": 3, "hash": "f", "boot": "1"})
UNKNOWN = (404, {})


@pytest.mark.parametrize(
    ("answers", "kind", "way"),
    [
        ([OURS], "auto", "tokens"),
        ([(503, {}), (500, {}), OURS], "auto", "tokens"),  # it is starting
        ([(200, {"object": "list"})], "auto", "chat"),
        ([UNKNOWN], "auto", "chat"),
        ([(401, {})], "auto", "chat"),
        ([OURS], "chat", "chat"),
        ([UNKNOWN], "tokens", "tokens"),
    ],
)
async def test_a_server_that_says_what_it_serves_is_ours(monkeypatch, tmp_path, answers, kind, way):
    """Contract: else it is an API, of which nothing is known but its chat route, and which is given no versions."""
    left, client = list(answers), httpx.AsyncClient

    def answer(request):
        assert request.url.path == "/weights"
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(status, json=body)

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "AsyncClient", lambda base_url, **_: client(base_url=base_url, transport=transport))
    waits, settings = [], {"environments": [{"id": "e"}]}
    settings["client"] = {"base_url": "http://a/v1", "ready_timeout": 5, "type": kind}
    assert await way_of_asking(EvalConfig.model_validate(settings), lambda *wait: waits.append(wait)) == way
    assert len(waits) == len(answers) - 1
    if (answers, kind) == ([UNKNOWN], "auto"):
        with pytest.raises(UserError, match="http://a"):
            await way_of_asking(
                EvalConfig.model_validate(settings | {"weights_dir": tmp_path}), lambda *wait: print(wait)
            )


def test_a_variable_that_was_named_has_to_be_set(monkeypatch):
    for name in ("MY_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"client.api_key_var: the variable MY_KEY is not set"):
        check_key(EvalConfig.model_validate({"client": {"base_url": "http://a", "api_key_var": "MY_KEY"}}).client)
    check_key(EvalConfig().client)  # a server of ours may have no key
