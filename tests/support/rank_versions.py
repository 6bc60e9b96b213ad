"""The versions of a trainer of several ranks, each on a host of its own, by each transport: `python -m support.rank_versions RUNS`, forked from one process.

RUNS is JSON, a list of settings of `live`, each with a number of `ranks`.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.config.trainer import TrainerModel, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.trainer import weight_copy, weight_publisher
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import close_world, init_world, on_main
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_copy import RowCopies
from prime_rl.trainer.weight_publisher import WeightPublisher, write_version
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest
from support.forking import fork_ranks
from support.publishing import received

SECONDS = 150.0


def live(kind: str, model: str, root: str, replicas: int, device: str = "cpu") -> None:
    """An incarnation of a rank. After each version rank 0 compares it with what the ranks write by themselves, tensor by tensor."""
    torch.set_num_threads(1)
    weight_copy.FILE_BYTES = 60_000  # several files
    world, source, run = init_world(device, 60, replicas), find_model(model), Path(root)
    weight_publisher.boot_id = lambda: f"host of rank {world.rank}"
    config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none", dp_replicate=replicas)
    policy = build_policy(source, config, world)
    if kind == "filesystem":
        refuse_tmpfs(
            WeightPublisher(run / "tmpfs", policy, source, world, torch.bfloat16, weights=WeightsConfig(tmpfs=run))
        )
    written = RowCopies(policy, world, torch.bfloat16)
    memory, weights = kind == "memory", WeightsConfig(transport=kind, host="127.0.0.1", timeout=60.0)
    publisher = WeightPublisher(
        run / "run", policy, source, world, torch.bfloat16, timeout=60, weights=weights, memory=memory
    )
    publisher.open(0)
    for version in range(1, 4):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.to_local().view(-1)[::7].add_(0.01)
        publisher.publish(version, durable=version == 2)
        publisher.settle()
        right = version_dir(run, version)
        write_version(written, written.copy(), source, world, right, version=version, incarnation=0)
        on_main(world, lambda: check(version_dir(run / "run" / "weights", version), right))  # noqa: B023
    publisher.ensure(3, durable=True)
    verify_weights(version_dir(run / "run" / "weights", 3))
    assert not list(run.glob("**/.*")), "nothing is left of what was under way"
    publisher.close()
    close_world()


def refuse_tmpfs(publisher: WeightPublisher) -> None:
    with pytest.raises(UserError, match="is the memory of one host"):
        publisher.open(0)
    publisher.close()


def check(directory: Path, right: Path) -> None:
    """What is there, or received, is by its own bytes what `right` holds."""
    manifest, expected = weights_manifest(directory), {}
    for file in sorted(right.glob("*.safetensors")):
        expected |= load_file(file)
    if manifest.publisher is None:
        verify_weights(directory)
        found = {}
        for file in sorted(directory.glob("*.safetensors")):
            found |= load_file(file)
    else:
        assert not list(directory.glob("*.safetensors*"))
        found = received(directory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        fork_ranks(each.pop("ranks"), live, SECONDS, **each)
