"""Every transport of weights with a real server: the same versions by the same hashes, and what is damaged leaves the old weights in place."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from conftest import InferenceServer
from prime_rl.config.trainer import WeightsConfig
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_copy import GatheredCopy, RowCopies
from prime_rl.trainer.weight_publisher import WeightPublisher, write_version
from prime_rl.transport.weights import weights_manifest
from support import trainer as support
from support.serving import TOLERANCE, difference, identity, sample, served, update
from support.transports import TRANSPORTS

world, make_policy = support.world, support.make_policy


@dataclass
class Training:
    """A trainer's versions beside a server, which may read them."""

    versions: WeightPublisher
    policy: Policy
    root: Path

    def step(self, version: int) -> Path:
        """Train a little and commit it. Returns its place."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.to_local().view(-1)[version::11].mul_(1.2)
        self.versions.publish(version)
        self.versions.settle()
        return self.root / "weights" / f"step_{version}"

    def as_model(self, place: Path) -> Path:
        """The weights as they are, in full, for transformers."""
        versions = self.versions
        staging = RowCopies(self.policy, versions.world, torch.float32)
        write_version(staging, staging.copy(), versions.source, versions.world, place, version=9, incarnation=0)
        return place


@pytest.fixture(params=[*TRANSPORTS])
def training(
    request: pytest.FixtureRequest,
    inference_server: InferenceServer,
    world: World,
    make_policy: Callable[..., Policy],
) -> Iterator[Training]:
    inference_server.reset()
    options = dict(TRANSPORTS[request.param])
    root = inference_server.weights_root / f"transport {request.param}"
    if request.param == "tmpfs":
        (root / "tmpfs").mkdir(parents=True)
        options["tmpfs"] = root / "tmpfs"
    settings: dict[str, Any] = {"weights": WeightsConfig(**options), "memory": request.param == "memory"}
    model = inference_server.model
    policy = make_policy(model)
    with closing(
        WeightPublisher(root, policy, find_model(str(model)), world, torch.float32, timeout=60, **settings)
    ) as made:
        made.open(0)
        yield Training(made, policy, root)
    inference_server.reset()


@contextmanager
def flipped_bit(training: Training, directory: Path) -> Iterator[None]:
    """In what holds the tensors."""
    manifest = weights_manifest(directory)
    if manifest.publisher is not None:
        copies = training.versions._copies
        assert isinstance(copies, GatheredCopy)
        place, _ = copies.ranges["model.embed_tokens.weight"]
        copies.buffer[place + 100] ^= 1
        yield
        copies.buffer[place + 100] ^= 1
        return
    path = next(path for path in sorted(manifest.files.iterdir()) if path.suffix == ".safetensors")
    before = path.read_bytes()
    flipped = bytearray(before)
    flipped[-100] ^= 1
    path.write_bytes(flipped)
    yield
    path.write_bytes(before)


def test_versions_are_served_however_they_come(
    training: Training, inference_server: InferenceServer, chat_prompt: list[int], tmp_path: Path
) -> None:
    """Contract: the server serves each version by its hash and computes what its weights compute, also after it has missed one; a version with a
    flipped bit is refused while the old weights go on, and the next one is right."""
    server = inference_server

    def take(version: int, directory: Path) -> httpx.Response:
        taken = update(server, directory, version)
        assert taken.status_code == 200, taken.text
        assert identity(taken) == {"version": version, "hash": weights_manifest(directory).hash}
        return taken

    for version in (1, 2):
        assert take(version, training.step(version)).json()["place"] == "host"
    assert difference(server, chat_prompt, training.as_model(tmp_path / "two")) <= TOLERANCE
    training.step(3)  # missed
    take(4, training.step(4))
    assert difference(server, chat_prompt, training.as_model(tmp_path / "four")) <= TOLERANCE

    before = sample(server, chat_prompt, temperature=0.0)
    damaged = training.step(6)
    with flipped_bit(training, damaged):
        refused = update(server, damaged, 6)
        assert refused.status_code in (400, 424)  # of files, from memory
        assert "the previous weights go on" in refused.text
        assert (served(server)["version"], sample(server, chat_prompt, temperature=0.0)) == (4, before)
    take(7, training.step(7))
    assert difference(server, chat_prompt, training.as_model(tmp_path / "seven")) <= TOLERANCE
