"""A trainer's published copy of its weights on its GPU: the checksums, what a server receives, and what is written later are one version."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from conftest import make_tiny_model
from prime_rl.config.trainer import TrainerModel, WeightsConfig
from prime_rl.inference.staging import Staging
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.parameters import stored_tensors
from prime_rl.trainer.source import Source, find_model
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest
from support.versions import assert_equal, tensors_of

SECONDS = 60.0
Made = tuple[World, Source, Policy]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    source, world = find_model(str(make_tiny_model(tmp_path_factory.mktemp("model")))), init_world("cuda", 60)
    config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none")
    yield world, source, build_policy(source, config, world)
    close_world()


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    """As they are now, in the exported dtype."""
    return {
        stored.name: stored.parameter.to_local().detach().bfloat16().cpu().view(stored.shape)
        for stored in stored_tensors(policy)
    }


def test_a_version_is_what_was_copied(made: Made, tmp_path: Path) -> None:
    """Contract: a version is the weights at the time they were copied, though they change at once: for a server that receives it, and for files that
    are written beside the next version."""
    world, source, policy = made
    settings, expected = WeightsConfig(transport="memory", host="127.0.0.1"), {}
    root = tmp_path / "weights"
    with (
        closing(Subscriber()) as subscriber,
        closing(
            WeightPublisher(tmp_path, policy, source, world, torch.bfloat16, timeout=60, weights=settings, memory=True)
        ) as publisher,
    ):
        publisher.open(0)
        for version in range(1, 4):
            expected[version] = weights(policy)
            torch.cuda._sleep(100_000_000)  # cycles: the copy is enqueued some 0.05 s before it happens
            publisher.publish(version, durable=version == 2)
            publisher.before_update()
            with torch.no_grad():
                torch._foreach_mul_(list(policy.parameters()), 1.01)
            publisher.settle(everything=False)  # committed; files may still be written
            directory = version_dir(root, version)
            staging = Staging(directory, weights_manifest(directory).hash, torch.device("cpu"), subscriber)
            staging.wait(SECONDS)
            assert_equal(dict(staging.tensors), expected[version])
        publisher.settle()
        verify_weights(version_dir(root, 2))
        assert weights_manifest(version_dir(root, 3)).publisher is not None
    assert_equal(tensors_of(version_dir(root, 2)), expected[2])
