"""Adapters on a real engine: it computes what the trainer computes, and refuses what is none of its model's."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import InferenceServer, launch_server
from prime_rl.errors import UserError
from prime_rl.fleet.logprob_check import LogprobCheckFailed, compare
from prime_rl.trainer.parallel import World
from prime_rl.transport.commit import MANIFEST, step_dir
from prime_rl.transport.weights import file_hashes, hash_directory, version_hash, weights_manifest
from support import trainer as support
from support.adapters import AdapterRun
from support.serving import difference, parse, reference, request, sample, served, update

world = support.world
CLOSE = 1e-4  # nats
PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[InferenceServer]:
    settings = {"lora": {"max_rank": 8}, "max_model_len": 256}
    with launch_server(tmp_path_factory.mktemp("adapters") / "server", tiny_model, settings) as launched:
        yield launched


@pytest.fixture
def run(server: InferenceServer, world: World) -> Iterator[Callable[..., AdapterRun]]:
    runs: list[AdapterRun] = []

    def start(**how: Any) -> AdapterRun:
        directory = server.weights_root / f"run-{len([*server.weights_root.iterdir()])}"
        runs.append(AdapterRun(server, world, directory, **how))
        return runs[-1]

    yield start
    for one in runs:
        one.publisher.close()
    server.reset()


async def test_the_engine_computes_adapters_as_the_trainer_does(run: Callable[..., AdapterRun], tmp_path: Path) -> None:
    """Contract: each version in turn, also the base again, on every route and whether a request names the model or not;
    what is sampled has the log-probabilities of the merged weights; a request in flight goes on under the new ones."""
    one = run()
    base, first = weights_manifest(step_dir(one.root, 0)), one.publish()
    assert (base.adapter, base.files) == (None, one.server.model.resolve())
    assert (await one.load(base)).largest < CLOSE
    assert difference(one.server, PROMPT, one.server.model) < CLOSE
    in_flight = asyncio.create_task(asyncio.to_thread(sample, one.server, PROMPT, "/v1/sample", max_tokens=200, seed=3))
    await asyncio.sleep(0.1)
    assert (await one.load(first)).largest < CLOSE
    assert len((await in_flight).tokens) == 200
    assert compare(first.reference.logprobs, base.reference.logprobs).mean > 100 * CLOSE
    answer = served(one.server)
    assert (answer["version"], answer["hash"]) == (1, first.hash)

    merged = one.write_merged(tmp_path / "merged")
    replies = [sample(one.server, PROMPT, path, seed=1) for path in ("/v1/sample", "/inference/v1/generate")]
    unnamed = {key: value for key, value in request(one.server, PROMPT, seed=1).items() if key != "model"}
    replies += [parse(one.server.post(path, unnamed)) for path in ("/v1/sample", "/inference/v1/generate")]
    for reply in replies:
        assert reply == replies[0]
    want = reference(merged, PROMPT, replies[0].tokens)
    assert (torch.tensor(replies[0].logprobs) - want).abs().max() < CLOSE

    second = one.publish()
    for version in (second, first, base, second):
        assert (await one.load(version)).largest < CLOSE


async def test_an_adapter_that_the_engine_does_not_compute_is_found(run: Callable[..., AdapterRun]) -> None:
    """Contract: where hashes have nothing to find, the logprob check does: an adapter that is not applied, or another
    version's."""
    one = run()
    first, second = one.publish(), one.publish()
    await one.load(first)
    for tensors in (load_file(first.directory / "adapter_model.safetensors"), None):
        path = second.directory / "adapter_model.safetensors"
        old = load_file(path)
        wrong = {name: torch.zeros_like(t) for name, t in old.items()} if tensors is None else tensors
        manifest = json.loads((second.directory / MANIFEST).read_text())
        save_file(wrong, path)
        hashed = hash_directory(second.directory)
        manifest["extra"] |= {"tensors": {n: vars(e) for n, e in hashed.items()}, "hash": version_hash(hashed)}
        manifest["files"][path.name] = {"size": path.stat().st_size, "xxh3": file_hashes(hashed)[path.name]}
        (second.directory / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(LogprobCheckFailed, match="does not compute it"):
            await one.load(weights_manifest(second.directory))


async def test_versions_that_cannot_be_served_are_refused(run: Callable[..., AdapterRun], world: World) -> None:
    """Contract: one line each, and what was served is served on."""
    one = run()
    first = one.publish()
    await one.load(first)
    larger, merged = run(rank=16).publish(), run(serve="merged").publish()
    other = json.loads((first.directory / MANIFEST).read_text())
    a_tensor = next(iter(other["extra"]["tensors"].values()))
    for version, message in (
        (larger, "an adapter of rank 16: start the server with --lora.max-rank 16"),
        (merged, "full weights, and this server serves adapters"),
    ):
        response = update(one.server, version.directory, 1)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    for change, message in (
        ({"adapter": {**other["extra"]["adapter"], "base": "0" * 32}}, "another base model"),
        ({"tensors": {"base_model.model.lm_head.lora_A.weight": a_tensor}}, "fits no layer"),
    ):
        (first.directory / MANIFEST).write_text(json.dumps(other | {"extra": other["extra"] | change}))
        response = update(one.server, first.directory, 1)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"], response.text
    assert served(one.server)["hash"] == first.hash
    with pytest.raises(UserError, match="refused"):
        await one.load(larger)
