"""Several tenants' adapters in one real engine: each key means its own adapter and no other."""

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
SLOTS = 3


@pytest.fixture(scope="module", params=[None, 2], ids=["resident", "paged"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[InferenceServer]:
    tenants = {"slots": SLOTS, "weights": {"a": 2.0}}
    lora = {"max_rank": 8, "tenants": tenants} | ({} if request.param is None else {"resident": request.param})
    directory = tmp_path_factory.mktemp("tenants") / "server"
    with launch_server(directory, tiny_model, {"lora": lora, "max_model_len": 256}) as launched:
        yield launched


Join = Callable[..., AdapterRun]


@pytest.fixture
def join(server: InferenceServer, world: World) -> Iterator[Join]:
    runs: dict[str, AdapterRun] = {}

    def start(name: str, **how: Any) -> AdapterRun:
        """A tenant with its trainer, whose server is asked with its key."""
        directory = tenant_dir(server.output_dir, f"{name}-{len(list(server.output_dir.glob('tenants/*')))}")
        key = own_key(directory)
        claim_name(directory, key)
        ask_to_join(directory, {})
        runs[name] = AdapterRun(replace(server, key=key), world, directory, seed=10 * len(runs), **how)
        return runs[name]

    yield start
    for one in runs.values():
        one.publisher.close()
        leave(one.root.parent)


def greedy(one: AdapterRun, prompt: list[int] = PROMPT, path: str = "/v1/sample") -> Sampled:
    return sample(one.server, prompt, path, temperature=0.0)


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


async def test_each_tenant_gets_its_own_adapter(join: Join, server: InferenceServer, tmp_path: Path) -> None:
    """Contract: while all tenants' requests are in the engine, each one's have the log-probabilities of its own merged
    weights, on all routes, also where adapters have to be paged; a load of one changes nothing of the others."""
    tenants = [join(name, rank=rank) for name, rank in (("a", 8), ("b", 4), ("c", 8))]
    for round_ in range(3):
        for one in tenants if round_ == 0 else tenants[:2]:
            assert (await one.load(one.publish())).largest < CLOSE
        before = [served(one.server) for one in tenants]
        merged = [one.write_merged(tmp_path / f"{number}-{round_}") for number, one in enumerate(tenants)]
        routes = ("/v1/sample", "/inference/v1/generate", "/v1/generate")
        prompts = [list(range(first, first + 20)) for first in (20, 24, 40, 20)]
        jobs = [(one, prompt, route) for prompt in prompts for route in routes for one in tenants]
        with ThreadPoolExecutor(len(jobs)) as threads:
            replies = list(threads.map(lambda job: sample(job[0].server, job[1], job[2], max_tokens=24), jobs))
        for (one, prompt, _), reply in zip(jobs, replies, strict=True):
            want = reference(merged[tenants.index(one)], prompt, reply.tokens)
            assert (torch.tensor(reply.logprobs) - want).abs().max() < CLOSE
        own = [greedy(one) for one in tenants]
        assert len({tuple(reply.tokens) for reply in own}) == SLOTS
        first, *others = tenants
        await first.load(weights_manifest(step_dir(first.root, 0)))
        assert [greedy(one) for one in others] == own[1:]
        for one, was in zip(others, before[1:], strict=True):
            now = served(one.server)
            assert {key: now[key] for key in ("version", "hash", "boot", "loads")} == {
                key: was[key] for key in ("version", "hash", "boot", "loads")
            }
            assert 0 < now["engine_share"] < 1
    base = reference(server.model, PROMPT, (reply := greedy(tenants[0])).tokens)
    assert (torch.tensor(reply.logprobs) - base).abs().max() < CLOSE


async def test_a_key_is_for_its_tenant_alone(join: Join, server: InferenceServer) -> None:
    """Contract: no key, no tokens; no name, path or link leads from one tenant's key to another's adapter."""
    one, other = join("a"), join("b")
    await one.load(one.publish())
    version = other.publish()
    assert error(other.server.post("/v1/sample", request(server, PROMPT)))[0] == 503, "its adapter is not there yet"
    await other.load(version)
    mine = greedy(one)
    assert greedy(other) != mine
    needs = "this server serves tenants: a request needs a tenant's key"
    for keyless in (server, replace(server, key="x" * 43)):
        assert error(keyless.post("/v1/sample", request(server, PROMPT))) == (401, needs)
        assert error(keyless.get("/weights")) == (401, needs)
    for path in ("/pause", "/resume", "/leave", "/metrics"):
        assert error(one.server.post(path, {})) == (
            403,
            "a tenant's key is not for this route: it needs the server's own",
        )
    for name in (f"{server.model.name}@{served(other.server)['boot']}@1", other.root.parent.name):
        for path in ("/v1/sample", "/inference/v1/generate", "/v1/chat/completions"):
            body = request(server, PROMPT) | {"model": name, "messages": [{"role": "user", "content": "x"}]}
            assert one.server.post(path, body).status_code in (400, 404), name
    listed = one.server.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == [str(server.model)]
    (one.root / "step_7").symlink_to(version.directory)
    for theirs in (version.directory, one.root / "step_7", f"{one.root}/../../{other.root.parent.name}/weights/step_1"):
        assert update(one.server, Path(theirs), 1).status_code == 403, theirs
    assert greedy(one) == mine
    chat = {
        "model": str(server.model),
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0.0,
        "max_tokens": 9,
    }
    texts = {
        each.server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
        for each in (one, other)
    }
    assert len(texts) == 2


async def test_a_failed_load_is_its_tenants_alone(join: Join, server: InferenceServer) -> None:
    """Contract: the tenant's requests fail until it loads another version; the others' go on."""
    one, other = join("a"), join("b")
    for each in (one, other):
        await each.load(each.publish())
    theirs, mine = greedy(other), greedy(one)
    bad, good = one.publish(), one.publish()
    manifest = json.loads((bad.directory / MANIFEST).read_text())
    manifest["extra"]["adapter"]["config"]["lora_alpha"] = "much"
    (bad.directory / MANIFEST).write_text(json.dumps(manifest))
    status, why = error(update(one.server, bad.directory, 2))
    assert status == 500
    assert "could not be loaded, nothing is sampled until a version is" in why
    for response in (one.server.post("/v1/sample", request(server, PROMPT)), one.server.get("/weights")):
        assert error(response) == (500, why)
    assert greedy(other) == theirs
    assert (await one.load(good)).largest < CLOSE
    assert greedy(one) != mine
    assert greedy(other) == theirs
