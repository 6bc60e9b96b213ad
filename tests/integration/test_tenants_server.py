"""Several tenants' adapters in one real engine: each key means its own adapter and no other."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from conftest import InferenceServer, launch_server
from prime_rl.trainer.parallel import World
from prime_rl.transport.commit import MANIFEST, step_dir
from prime_rl.transport.tenants import ask_to_join, claim_name, leave, own_key, tenant_dir
from prime_rl.transport.weights import weights_manifest
from support import trainer as support
from support.adapters import AdapterRun
from support.serving import Sampled, reference, request, sample, served, update

world = support.world
CLOSE = 1e-4  # nats
PROMPT = list(range(20, 40))
Join = Callable[..., AdapterRun]


@pytest.fixture(scope="module", params=[{}, {"resident": 2}], ids=["resident", "paged"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[InferenceServer]:
    lora = {"max_rank": 8, "tenants": {"slots": 3}, **request.param}
    directory = tmp_path_factory.mktemp("tenants") / "server"
    with launch_server(directory, tiny_model, {"lora": lora, "max_model_len": 256}) as launched:
        yield launched


@pytest.fixture
def join(server: InferenceServer, world: World) -> Iterator[Join]:
    """Have a tenant join, whose adapter is that of one which has left before, if all were used."""
    runs: list[AdapterRun] = []

    def start(**how: Any) -> AdapterRun:
        directory = tenant_dir(server.output_dir, f"tenant-{len(list(server.output_dir.glob('tenants/*')))}")
        key = own_key(directory)
        claim_name(directory, key)
        ask_to_join(directory, {})
        runs.append(AdapterRun(replace(server, key=key), world, directory, seed=10 * len(runs), **how))
        return runs[-1]

    yield start
    for one in runs:
        one.publisher.close()
        leave(one.root.parent)


def greedy(one: AdapterRun) -> Sampled:
    return sample(one.server, PROMPT, "/v1/sample", temperature=0.0)


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


async def test_each_tenant_gets_its_own_adapter(join: Join, server: InferenceServer, tmp_path: Path) -> None:
    """Contract: while all tenants' requests are in the engine, each one's have the log-probabilities of its own merged
    weights, on all routes, also where adapters are paged; a load of one changes nothing of the others, in flight or
    not; version 0 is the base model."""
    tenants = [join(rank=rank) for rank in (8, 4, 8)]
    first, *others = tenants
    jobs = [
        (one, list(range(start, start + 20)), route)
        for start in (20, 24, 40, 20)
        for route in ("/v1/sample", "/inference/v1/generate")
        for one in tenants
    ]
    for round_ in range(3):
        for one in tenants if round_ == 0 else tenants[:2]:
            assert (await one.load(one.publish())).largest < CLOSE
        merged = {id(one): one.write_merged(tmp_path / f"{id(one)}-{round_}") for one in tenants}
        with ThreadPoolExecutor(len(jobs)) as threads:
            replies = threads.map(lambda job: sample(job[0].server, *job[1:], max_tokens=24), jobs)
            for (one, prompt, _), reply in zip(jobs, replies, strict=True):
                want = reference(merged[id(one)], prompt, reply.tokens)
                assert (torch.tensor(reply.logprobs) - want).abs().max() < CLOSE
        before = [(greedy(one).tokens, served(one.server)) for one in tenants]
        assert before[0][0] != before[1][0] != before[2][0] != before[0][0]
        in_flight = [asyncio.create_task(asyncio.to_thread(greedy, one)) for one in others]
        await first.load(weights_manifest(step_dir(first.root, 0)))
        for one, task, (tokens, was) in zip(others, in_flight, before[1:], strict=True):
            assert (await task).tokens == greedy(one).tokens == tokens
            now = served(one.server)
            assert 0 < now["engine_share"] < 1
            assert now | {"engine_share": was["engine_share"]} == was
    base = greedy(first)
    assert (torch.tensor(base.logprobs) - reference(server.model, PROMPT, base.tokens)).abs().max() < CLOSE


async def test_a_key_is_for_its_tenant_alone(join: Join, server: InferenceServer) -> None:
    """Contract: no key, no tokens; no name, path or link leads from one tenant's key to another's adapter."""
    one, other = join(), join()
    await one.load(one.publish())
    version = other.publish()
    assert error(other.server.post("/v1/sample", request(server, PROMPT)))[0] == 503, "its adapter is not there yet"
    await other.load(version)
    mine = greedy(one)
    for path in ("/v1/sample", "/weights"):
        why = (401, "this server serves tenants: a request needs a tenant's key")
        assert error(server.post(path, request(server, PROMPT))) == why
    for path in ("/pause", "/resume", "/leave", "/metrics"):
        why = (403, "a tenant's key is not for this route: it needs the server's own")
        assert error(one.server.post(path, {})) == why
    chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.0, "max_tokens": 9}
    for name in (f"{server.model.name}@{served(other.server)['boot']}@1", other.root.parent.name):
        for path in ("/v1/sample", "/inference/v1/generate", "/v1/chat/completions"):
            assert one.server.post(path, request(server, PROMPT) | chat | {"model": name}).status_code in (400, 404)
    assert [each["id"] for each in one.server.get("/v1/models").json()["data"]] == [str(server.model)]
    (one.root / "step_7").symlink_to(version.directory)
    for theirs in (version.directory, one.root / "step_7", f"{one.root}/../../{other.root.parent.name}/weights/step_1"):
        assert update(one.server, Path(theirs), 1).status_code == 403, theirs
    assert greedy(one) == mine != greedy(other)
    texts = [each.server.post("/v1/chat/completions", chat).json()["choices"][0]["message"] for each in (one, other)]
    assert texts[0] != texts[1]


async def test_a_failed_load_is_its_tenants_alone(join: Join, server: InferenceServer) -> None:
    """Contract: the tenant's requests fail until it loads another version; the others' go on."""
    one, other = join(), join()
    for each in (one, other):
        await each.load(each.publish())
    theirs, bad, good = greedy(other), one.publish(), one.publish()
    manifest = json.loads((bad.directory / MANIFEST).read_text())
    manifest["extra"]["adapter"]["config"]["lora_alpha"] = "much"
    (bad.directory / MANIFEST).write_text(json.dumps(manifest))
    body = request(server, PROMPT, max_tokens=230)
    in_flight = asyncio.create_task(asyncio.to_thread(one.server.post, "/v1/sample", body))
    await asyncio.sleep(0.1)
    status, why = error(update(one.server, bad.directory, 2))
    assert status == 500
    assert "could not be loaded, nothing is sampled until a version is" in why
    for response in (one.server.post("/v1/sample", request(server, PROMPT)), one.server.get("/weights")):
        assert error(response) == (500, why)
    assert (await in_flight).status_code in (200, 500), "it ended before, or is none"
    assert greedy(other) == theirs
    assert (await one.load(good)).largest < CLOSE
    assert greedy(other) == theirs
