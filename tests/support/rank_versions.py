"""The versions of a trainer of several ranks, by each transport: `python -m support.rank_versions RUNS`, forked from one process.

RUNS is JSON, a list of settings of `live`, each with a number of `ranks`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.config.trainer import TrainerModel
from prime_rl.inference.receiving import Receiver
from prime_rl.inference.staging import Staging as Receiving
from prime_rl.trainer import model_files
from prime_rl.trainer.export import write_version
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import close_world, init_world, on_main
from prime_rl.trainer.source import find_model
from prime_rl.trainer.staging import Staging
from prime_rl.trainer.weights import Versions
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest
from support.forking import fork_ranks

SECONDS = 150.0
OPTIONS: dict[str, dict[str, Any]] = {
    "filesystem-delta": {"anchor_every": 8},
    "process-group": {"transport": ProcessGroupTransport(host="127.0.0.1", timeout=60.0)},
}


def live(kind: str, model: str, root: str, replicas: int, device: str = "cpu") -> None:
    """A life of a rank. After each version rank 0 compares it with what the ranks write by `filesystem`, tensor by tensor."""
    torch.set_num_threads(1)
    model_files.FILE_BYTES = 60_000  # several files
    world, source, run = init_world(device, 60, replicas), find_model(model), Path(root)
    config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none", dp_replicate=replicas)
    policy = build_policy(source, config, world)
    written = Staging(policy, world, torch.bfloat16)
    life = Versions(run / "run", policy, source, world, torch.bfloat16, timeout=60, **OPTIONS[kind])
    life.open(0)
    builds_on = {}
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.to_local().view(-1)[::7].add_(0.01)
        if version == 3 and world.rank == world.size - 1:  # what it held of the version before is lost with it
            writer = life._staging.whole and life._staging.whole.writer
            assert writer
            os.kill(writer.start().pid, signal.SIGKILL)
        life.commit(version, lasting=version == 4)
        life.settle()
        right = version_dir(run, version)
        write_version(written, written.copy(), source, world, right, version=version, incarnation=0)
        on_main(world, lambda: check(version_dir(run / "run" / "weights", version), right))  # noqa: B023
        builds_on[version] = weights_manifest(version_dir(run / "run" / "weights", version)).builds_on
    if kind == "filesystem-delta":
        assert builds_on == {1: None, 2: 1, 3: None, 4: None, 5: 4}
    life.ensure(5)  # what was sent is written
    verify_weights(version_dir(run / "run" / "weights", 5))
    assert not list(run.glob("**/.*")), "nothing is left of what was under way"
    life.close()
    written.close()
    close_world()


def check(directory: Path, right: Path) -> None:
    """What is there, or received, is by its own bytes what `right` holds."""
    manifest = weights_manifest(directory)
    assert manifest.hash == verify_weights(right).hash
    if manifest.sender is None:
        verify_weights(directory)
        return
    assert not list(directory.glob("*.safetensors*"))
    receiver = Receiver(torch.device("cpu"))
    read = Receiving(directory, manifest.hash, torch.device("cpu"), receiver=receiver)
    read.wait(SECONDS)  # compares hashes
    assert len(dict(read.tensors())) == len(manifest.tensors)
    receiver.close()


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        fork_ranks(each.pop("ranks"), live, SECONDS, **each)
