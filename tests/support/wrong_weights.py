"""Versions of a model that an engine loads, and what may go wrong with them: for mutation tests on CPUs and GPUs."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import InferenceServer
from prime_rl.config.shared import ClientConfig
from prime_rl.fleet.client import InferenceClient
from prime_rl.fleet.logprob_check import Difference, LogprobCheck, LogprobCheckFailed, compare
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.transport.weights import LogprobReference, WeightsManifest, weights_manifest, write_base_version
from support.committing import commit_weights
from support.serving import perturbed

Tensors = dict[str, torch.Tensor]
Mutation = Callable[[Tensors, Tensors], Tensors]
DRIFTED, STEPPED = 0.1, 1e-4  # relative changes of the weights: far from the base, and as after one step of RL


class Run:
    """Versions of a model, committed as the trainer does, and the client that has a server load them."""

    def __init__(self, server: InferenceServer, make_policy: Callable[..., Policy], world: World) -> None:
        self.server, self.make_policy, self.world = server, make_policy, world
        self.root = Path(tempfile.mkdtemp(prefix="run-", dir=server.weights_root))
        self.check = LogprobCheck()
        self.base = write_base_version(self.root, server.model, self.score(server.model))
        self.version = 0

    def score(self, model: Path) -> LogprobReference:
        policy = self.make_policy(model)
        vocabulary = policy.lm.config.vocab_size
        scorer = ReferenceScorer(policy, self.world, vocabulary, torch.float32, torch.float32)
        return scorer.score()()

    def changed(self, by: float) -> Tensors:
        """The base's tensors with noise of so much of their spread."""
        return perturbed(self.server.model, by=by)

    def write(self, tensors: Tensors, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_bytes((self.server.model / "config.json").read_bytes())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")

    def commit(self, tensors: Tensors, loaded: Tensors | None = None) -> WeightsManifest:
        """The next version. `loaded`: what a faulty loader makes of it."""
        self.version += 1
        right = self.root / f"right_{self.version}"
        self.write(tensors, right)
        reference, write = asdict(self.score(right)), partial(self.write, tensors if loaded is None else loaded)
        return weights_manifest(commit_weights(self.root, self.version, write, reference=reference))

    async def load(self, version: WeightsManifest) -> Difference:
        """As an orchestrator does.

        Returns:
            How far off the reference was.
        """
        config = ClientConfig(base_url=self.server.base_url)
        async with InferenceClient(config, logprob_check=self.check) as engine:
            await engine.update(version)
            return await self.difference(version)

    async def assert_caught(self, mutate: Mutation, by: float) -> None:
        """What a faulty loader makes of a version is found, though the server says that it serves it."""
        await self.load(self.base)
        new = self.changed(by)
        version = self.commit(new, mutate(self.changed(0.0), new))
        with pytest.raises(LogprobCheckFailed, match="does not"):
            await self.load(version)
        async with InferenceClient(ClientConfig(base_url=self.server.base_url)) as engine:
            assert (await engine.served()).holds(version)

    async def difference(self, version: WeightsManifest) -> Difference:
        assert version.reference is not None
        async with InferenceClient(ClientConfig(base_url=self.server.base_url)) as engine:
            return compare(await engine.score(version.reference.tokens), version.reference.logprobs)

    @property
    def hides(self) -> Callable[[Difference], bool]:
        tolerance = self.check.calibrations[self.server.root].tolerance
        assert tolerance is not None
        return lambda difference: difference.within(tolerance)


def skip_a_tensor(base: Tensors, new: Tensors) -> Tensors:
    name = "model.layers.1.mlp.down_proj.weight"
    return {**new, name: base[name]}


def swap_layers(base: Tensors, new: Tensors) -> Tensors:
    def other(name: str) -> str:
        return (
            name.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace("layers.X.", "layers.1.")
        )

    return {other(name): tensor for name, tensor in new.items()}


def stay(base: Tensors, new: Tensors) -> Tensors:
    return base


def flip(bit: int) -> Mutation:
    def flip_bit(base: Tensors, new: Tensors) -> Tensors:
        name = "model.layers.0.self_attn.o_proj.weight"
        changed = new[name].clone()
        changed.view(torch.int32)[3, 5] ^= 1 << bit
        return {**new, name: changed}

    return flip_bit


@pytest.fixture
def run(inference_server: InferenceServer, make_policy: Callable[..., Policy], world: World) -> Iterator[Run]:
    inference_server.reset()
    yield Run(inference_server, make_policy, world)
    inference_server.reset()
