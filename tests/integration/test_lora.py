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
from prime_rl.config.shared import ClientConfig
from prime_rl.config.trainer import LoRAConfig, TrainerModel, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.fleet.client import InferenceClient
from prime_rl.fleet.logprob_check import Difference, LogprobCheck, LogprobCheckFailed, compare
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import is_adapter, named_parameters
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.commit import MANIFEST, step_dir
from prime_rl.transport.weights import WeightsManifest, file_hashes, hash_directory, version_hash, weights_manifest
from support import trainer as support
from support.serving import difference, parse, reference, request, sample, served, update

world = support.world
CLOSE = 1e-4  # nats
PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[InferenceServer]:
    settings = {"lora": {"max_rank": 8}, "max_model_len": 256}
    with launch_server(tmp_path_factory.mktemp("adapters") / "server", tiny_model, settings) as launched:
        yield launched


class Run:
    """A trainer of adapters that publishes, and an orchestrator that has the server load and verify."""

    def __init__(self, server: InferenceServer, world: World, directory: Path, **how: Any) -> None:
        self.server, self.source, self.root = server, find_model(str(server.model)), directory / "weights"
        lora = LoRAConfig(**{"rank": 8, "alpha": 16} | how)
        self.policy = build_policy(self.source, TrainerModel(), world, lora=lora)
        vocabulary, exact = self.source.config.vocab_size, (torch.float32, torch.float32)
        self.publisher = WeightPublisher(
            directory, self.policy, self.source, world, torch.float32, lora=lora, weights=WeightsConfig(keep=None),
            scorer=ReferenceScorer(self.policy, world, vocabulary, *exact, lora.serve),
        )  # fmt: skip
        self.publisher.open(0)
        self.check, self.version = LogprobCheck(), 0

    def publish(self) -> WeightsManifest:
        """Commit a version with other adapters."""
        torch.manual_seed(self.version)
        self.version += 1
        with torch.no_grad():
            for name, parameter in named_parameters(self.policy):
                if is_adapter(name):
                    parameter.to_local().normal_(std=0.05)
        self.publisher.publish(self.version)
        self.publisher.settle()
        return weights_manifest(step_dir(self.root, self.version))

    async def load(self, version: WeightsManifest) -> Difference:
        """Have the server load and verify it; return how far off the server is."""
        config = ClientConfig(base_url=self.server.base_url)
        async with InferenceClient(config, logprob_check=self.check) as client:
            await client.update(version)
            assert version.reference is not None
            return compare(await client.score(version.reference.tokens), version.reference.logprobs)


@pytest.fixture
def run(server: InferenceServer, world: World) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**how: Any) -> Run:
        runs.append(Run(server, world, server.weights_root / f"run-{len([*server.weights_root.iterdir()])}", **how))
        return runs[-1]

    yield start
    for one in runs:
        one.publisher.close()
    server.reset()


async def test_the_engine_computes_adapters_as_the_trainer_does(run: Callable[..., Run], tmp_path: Path) -> None:
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

    merged = tmp_path / "merged"
    with torch.no_grad():
        copies = one.publisher._copies
        lora = copies._lora.model_copy(update={"serve": "merged"})
        full = type(copies)(one.policy, copies.world, torch.float32, lora=lora)
        full.copy()
        merged.mkdir()
        full.write_files(full.to_host(), one.source, merged)
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


async def test_an_adapter_that_the_engine_does_not_compute_is_found(run: Callable[..., Run]) -> None:
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


async def test_versions_that_cannot_be_served_are_refused(run: Callable[..., Run], world: World) -> None:
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
