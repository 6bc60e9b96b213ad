"""Staging versions on a GPU beside generation: from files, from a CPU, from a trainer on the same GPU or on another
one.

On a CPU: tests/unit/inference/test_receiving.py.
"""

import itertools
import multiprocessing
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.inference.staging import Staging
from prime_rl.transport.commit import CommitError
from prime_rl.transport.exchange import ExchangeError, Subscriber
from prime_rl.transport.weights import weights_manifest
from support.committing import commit_weights
from support.publishing import PublishingTrainer

SECONDS = 120.0
SIZE = 512 << 20
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL speaks to another GPU")
SERVER = torch.device("cuda:0")
TRAINERS = {"tcp": "cpu", "cuda-ipc": "cuda:0", "nccl": "cuda:1"}


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        f"{number}.{name}": torch.randn(rows, 1024, generator=generator).bfloat16()
        for number in range(5)
        for name, rows in (("a", 20_000), ("b", 1), ("c", 3_333))
    }


class Trainer:
    """A publishing trainer in a process of its own: nobody can open memory of a GPU that is his own."""

    def __init__(self, root: Path, device: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._line, there = spawn.Pipe()
        self.process = spawn.Process(target=_publish, args=(root, device, there), daemon=True)
        self.process.start()

    def publish(self, version: int, spoil: bool = False) -> Path:
        self._line.send((version, spoil))
        assert self._line.poll(SECONDS), "the trainer publishes nothing"
        directory: Path = self._line.recv()
        return directory

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)


def _publish(root: Path, device: str, line: Connection) -> None:
    trainer = PublishingTrainer(root, SIZE, SECONDS, device=device)
    while True:  # ends with the other side
        version, spoil = line.recv()
        line.send(trainer.publish(version, tensors(version), spoil=spoil))


def commit(root: Path, version: int) -> Path:
    """The same version in files."""

    def write(directory: Path) -> None:
        for number, group in itertools.groupby(tensors(version).items(), key=lambda item: item[0][0]):
            save_file(dict(group), directory / f"model-{number}.safetensors")

    return commit_weights(root, version, write)


BACKENDS = ["tcp", "cuda-ipc", pytest.param("nccl", marks=TWO)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return str(request.param)


@pytest.fixture
def trainer(backend, tmp_path):
    made = Trainer(tmp_path / "weights", TRAINERS[backend])
    yield made
    made.kill()


@pytest.fixture
def publish(backend, tmp_path):
    """Makes a version available by the backend."""
    if backend == "files":
        yield partial(commit, tmp_path / "weights")
        return
    made = Trainer(tmp_path / "weights", TRAINERS[backend])
    yield made.publish
    made.kill()


@pytest.fixture
def subscriber():
    with closing(Subscriber()) as made:
        yield made


def receive(directory: Path, subscriber: Subscriber, place: str = "device") -> Staging:
    read = Staging(directory, weights_manifest(directory).hash, SERVER, subscriber)
    assert read.answer(SECONDS)["state"] == "ready"
    assert read.place == place
    return read


def check(read: Staging, version: int) -> None:
    """It holds the version, bit by bit, where it says."""
    found, expected = dict(read.tensors), tensors(version)
    assert found.keys() == expected.keys()
    assert {x.device.type for x in found.values()} == {"cuda" if read.place == "device" else "cpu"}
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("backend", ["files", *BACKENDS])
def test_what_is_received_is_what_was_published(publish, backend, subscriber, monkeypatch, place):
    """Contract: bit by bit, version after version, by the fastest way that the two have; without room on the GPU the
    host keeps it; chunks that go through pinned memory overwrite nothing that is still being copied; what is dropped
    takes no memory."""
    backends, receive_version = [], Subscriber.receive

    def noted(*args: Any) -> str:
        backends.append(receive_version(*args))
        return backends[-1]

    monkeypatch.setattr(Subscriber, "receive", noted)
    if place == "host":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    for version in (1, 2, 3):
        directory, before = publish(version), torch.cuda.memory_allocated(SERVER)
        read = receive(directory, subscriber, place)
        check(read, version)
        read.drop()
        assert backend != "files" or torch.cuda.memory_allocated(SERVER) == before
    assert backends == ([] if backend == "files" else [backend if place == "device" else "tcp"] * 3)


def test_other_bytes_are_rejected(trainer, subscriber):
    """Contract: the checksums are of what the GPU holds; one byte that is not the version's, and nobody gets it."""
    with pytest.raises(ExchangeError, match="what was received is not"):
        receive(trainer.publish(1, spoil=True), subscriber)


def test_no_memory_of_the_trainers_is_held_between_two_versions(tmp_path, subscriber):
    """Contract: a trainer that has died leaves its GPU's memory free, though servers live on."""
    trainer = Trainer(tmp_path / "weights", str(SERVER))
    receive(trainer.publish(1), subscriber)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(SERVER)[0]
    trainer.kill()
    assert torch.cuda.mem_get_info(SERVER)[0] >= before + SIZE


def test_the_trainer_is_killed_in_the_middle(trainer, subscriber, tmp_path, monkeypatch):
    """Contract: the version is given up, or whole; what is served stays as it is, and a later version arrives."""
    served, directory, progress = receive(trainer.publish(1), subscriber), trainer.publish(2), Staging._progress
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_progress", lambda read: (progress(read), trainer.kill()))
        with suppress(ExchangeError, CommitError):
            check(receive(directory, subscriber), 2)
    check(served, 1)
    served.drop()
    check(receive(commit(tmp_path / "later", 3), subscriber), 3)
