"""Versions that are sent: committed with their hashes, received as they were trained, and written where they have to outlive the trainer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.errors import UserError
from prime_rl.inference.receiving import Receiver
from prime_rl.inference.staging import Staging
from prime_rl.trainer.ckpt import Checkpoints
from prime_rl.trainer.model import Policy
from prime_rl.trainer.names import named_parameters
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weights import Versions
from prime_rl.transport.commit import CommitError, list_steps
from prime_rl.transport.line import PairError
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest
from support import trainer as support

world, make_policy, tied_model = support.world, support.make_policy, support.tied_model

CPU = torch.device("cpu")
SECONDS = 120.0
TRANSPORT = ProcessGroupTransport(host="127.0.0.1", timeout=60.0)


@pytest.fixture
def policy(make_policy: Callable[..., Policy], tied_model: Path) -> Policy:
    return make_policy(tied_model)


@pytest.fixture
def versions(policy: Policy, world: World, tied_model: Path, tmp_path: Path) -> Iterator[Callable[..., Versions]]:
    """One life of a trainer each call, all on the same run directory."""
    made: list[Versions] = []

    def make() -> Versions:
        source = find_model(str(tied_model))
        made.append(Versions(tmp_path, policy, source, world, torch.bfloat16, timeout=60, transport=TRANSPORT))
        return made[-1]

    yield make
    for life in made:
        life.close()


def receive(directory: Path) -> dict[str, torch.Tensor]:
    receiver = Receiver(CPU)
    read = Staging(directory, weights_manifest(directory).hash, CPU, receiver=receiver)
    read.wait(SECONDS)
    receiver.close()
    return dict(read.tensors())


def trained(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().to(torch.bfloat16).clone() for name, p in named_parameters(policy)}


def change(policy: Policy) -> None:
    with torch.no_grad():
        for _, p in named_parameters(policy):
            p.to_local().add_(0.01)


def test_what_is_received_is_what_was_trained(
    versions: Callable[..., Versions], policy: Policy, tmp_path: Path
) -> None:
    """Contract: the last two versions can be had bit by bit, none of their tensors is in a file, and what is in the directory is as ever."""
    told: dict[int, dict[str, float]] = {}
    life = versions()
    life._on_committed = lambda version, times: told.update({version: times})
    life.open(0)
    expected = {}
    for version in (1, 2, 3):
        change(policy)
        expected[version] = trained(policy)
        life.commit(version, lasting=version == 1)
    life.settle()
    root = tmp_path / "weights"
    assert verify_weights(version_dir(root, 1)).sender is None  # it was to be written
    assert "time/export_write" in told[1]
    assert "time/export_send" in told[2]
    assert "time/export_write" not in told[2]
    for version in (2, 3):
        directory = version_dir(root, version)
        assert list(directory.glob("*.safetensors*")) == []
        assert (directory / "config.json").exists()
        with pytest.raises(CommitError, match="never written"):
            verify_weights(directory)
        found = receive(directory)
        assert found.keys() == expected[version].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[version].items())
    life.commit(4)
    life.settle()
    with pytest.raises(PairError, match="superseded .there is: 3, 4"):
        receive(version_dir(root, 2))


def test_what_outlives_the_trainer_is_written(
    versions: Callable[..., Versions], policy: Policy, tmp_path: Path
) -> None:
    """Contract: the version that a life starts from, and the one that it ends with, have files, also where they were only sent before; their hash
    stays."""
    root = tmp_path / "weights"
    first = versions()
    first.open(0)
    for version in (1, 2):
        change(policy)
        first.commit(version)
    first.settle()
    before = weights_manifest(version_dir(root, 2))
    first.close()
    second = versions()
    second.open(2)
    assert list_steps(root) == [0, 1, 2]
    after = verify_weights(version_dir(root, 2))
    assert (after.hash, after.incarnation, after.sender) == (before.hash, 1, None)
    second.commit(3)
    second.ensure(3)
    assert verify_weights(version_dir(root, 3)).sender is None


def test_what_was_sent_is_written_in_its_place(
    versions: Callable[..., Versions], policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: a version that turns out to be the last is there all the time while its files come: nobody is left with one that is removed."""
    root, life = tmp_path / "weights", versions()
    life.open(0)
    for version in (1, 2):
        change(policy)
        life.commit(version)
    life.settle()
    expected, directory = trained(policy), version_dir(root, 2)
    before, place, received = weights_manifest(directory), directory.stat().st_ino, []

    def point(name: str, *_: object) -> None:
        if name == "lasting:weights/step_2":
            received.append(receive(directory))

    monkeypatch.setattr("prime_rl.faults.point", point)
    life.ensure(2)
    assert directory.stat().st_ino == place
    assert verify_weights(directory) == replace(before, sender=None)
    for found in (*received, receive(directory)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(received) == 1


@pytest.mark.parametrize("transport", ["process-group", "filesystem-delta"])
def test_ranks_of_several_hosts_are_refused(
    transport: str, policy: Policy, world: World, tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: one clear line at the start, not a version that lacks rows."""
    monkeypatch.setattr("prime_rl.trainer.weights.gather", lambda _, value: [value, "another host"])
    options = {"transport": TRANSPORT} if transport == "process-group" else {"anchor_every": 3}
    two = Versions(
        tmp_path, policy, find_model(str(tied_model)), replace(world, size=2), torch.float32, **options  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(UserError, match=f"type {transport} needs all ranks .* on one host, and they are on 2: use"):
        two.open(0)


class _Every:
    """A checkpoint every twenty steps, a recovery checkpoint every ten."""

    def due(self, step: int) -> str | None:
        return None if step % 10 else "recovery checkpoint" if step % 20 else "checkpoint"


@pytest.mark.parametrize(("recovery", "needed"), [(True, [8, 9, 10, 18, 19, 20]), (False, [18, 19, 20])])
def test_which_versions_checkpoints_need(recovery: bool, needed: list[int]) -> None:
    """Contract: those that `prunable` keeps for a checkpoint; what is sent ends with the trainer, so that recovery checkpoints need files, too."""
    found = [v for v in range(1, 26) if Checkpoints.will_need(_Every(), v, 2, recovery=recovery)]  # type: ignore[arg-type]
    assert found == needed
