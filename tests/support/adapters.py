"""A trainer of adapters beside a real server."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from conftest import InferenceServer
from prime_rl.config.shared import ClientConfig
from prime_rl.config.trainer import LoRAConfig, TrainerModel, WeightsConfig
from prime_rl.fleet.client import InferenceClient
from prime_rl.fleet.logprob_check import Difference, LogprobCheck, compare
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import is_adapter, named_parameters
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.commit import step_dir
from prime_rl.transport.weights import WeightsManifest, weights_manifest


class AdapterRun:
    """A trainer of adapters that publishes, and an orchestrator that has the server load and verify."""

    def __init__(self, server: InferenceServer, world: World, directory: Path, seed: int = 0, **how: Any) -> None:
        self.server, self.source, self.root = server, find_model(str(server.model)), directory / "weights"
        lora = LoRAConfig(**{"rank": 8, "alpha": 16} | how)
        self.policy = build_policy(self.source, TrainerModel(), world, lora=lora)
        vocabulary, exact = self.source.config.vocab_size, (torch.float32, torch.float32)
        self.publisher = WeightPublisher(
            directory, self.policy, self.source, world, torch.float32, lora=lora, weights=WeightsConfig(keep=None),
            scorer=ReferenceScorer(self.policy, world, vocabulary, *exact, lora.serve),
        )  # fmt: skip
        self.publisher.open(0)
        self.check, self.version, self.seed = LogprobCheck(), 0, seed

    def publish(self) -> WeightsManifest:
        """Commit a version with other adapters."""
        torch.manual_seed(self.version + self.seed)
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
        config = ClientConfig(base_url=self.server.base_url, api_key_var="TENANT_KEY")
        with patch.dict(os.environ, TENANT_KEY=self.server.key):
            client = InferenceClient(config, logprob_check=self.check)
        async with client:
            await client.update(version)
            assert version.reference is not None
            return compare(await client.score(version.reference.tokens), version.reference.logprobs)

    def write_merged(self, directory: Path) -> Path:
        """Write the model with the adapter in its weights."""
        with torch.no_grad():
            copies = self.publisher._copies
            lora = copies._lora.model_copy(update={"serve": "merged"})
            full = type(copies)(self.policy, copies.world, torch.float32, lora=lora)
            full.copy()
            directory.mkdir()
            full.write_files(full.to_host(), self.source, directory)
        return directory
