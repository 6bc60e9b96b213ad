"""Versions that a trainer lends its server on one GPU: what both say to each other. Memory of the host stands in for the GPU's (tests/gpu/test_receiving.py has it)."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.errors import UserError
from prime_rl.inference import blocks, receiving
from prime_rl.inference.receiving import Receiver
from prime_rl.inference.staging import Staging
from prime_rl.transport.device_memory import DeviceBorrower, DeviceMemory, is_of
from prime_rl.transport.line import PairError
from prime_rl.transport.shared import HostMemory, describe, host_id
from prime_rl.transport.weights import weights_manifest
from support.sending import Files, SendingTrainer

CPU = torch.device("cpu")
SECONDS = 60.0
SIZE = 1 << 20
BLOCK = 50_000


class StandIn(DeviceMemory):
    """Memory of the host behind a GPU's methods. `copied`: in which pieces."""

    def __init__(self, described: Any, device: torch.device) -> None:
        self._host, self.copied, self.opened = HostMemory(described), list[tuple[int, int]](), 0

    def open(self) -> bool:
        there = self._host.open()
        self.opened += there
        return there

    def fill(self, block: memoryview, at: int) -> None:
        self._host.fill(block, at)

    def copy_to(self, data: torch.Tensor, at: int) -> None:
        self.copied.append((at, data.numel()))
        self._host.fill(data.numpy().data, at)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._host.close()
        self.opened = 0


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(receiving, "DeviceMemory", StandIn)
    monkeypatch.setattr(receiving, "is_of", lambda described, device: True)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[SendingTrainer]:
    class Lending(SendingTrainer):
        def __init__(self) -> None:
            super().__init__(tmp_path / "weights", SIZE, SECONDS, backends=("cuda-ipc",))

    with closing(Lending()) as made:  # it describes its memory of the host, for want of another
        yield made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with closing(Receiver(CPU)) as made:
        yield made


def files(version: int) -> Files:
    generator = torch.Generator().manual_seed(version)
    return {"a.safetensors": {"w": torch.rand(300, 200, generator=generator), "b": torch.rand(7, generator=generator)}}


def borrower(receiver: Receiver) -> DeviceBorrower:
    [(_, found)] = receiver._idle
    assert isinstance(found, DeviceBorrower)
    return found


def test_what_is_borrowed_is_what_was_lent(trainer: SendingTrainer, receiver: Receiver) -> None:
    """Contract: version after version over one connection, by way of the host where the GPU has no room; nothing stays open in between."""
    for version in (1, 2):
        sent = files(version)["a.safetensors"]
        directory = trainer.send(version, {"a.safetensors": sent})
        read = Staging(directory, weights_manifest(directory).hash, CPU, receiver=receiver)
        read.wait(SECONDS)
        found = dict(read.tensors())
        assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
        memory = borrower(receiver)._memory
        assert isinstance(memory, StandIn)
        assert not memory.opened


def test_from_one_memory_of_a_gpu_to_another(trainer: SendingTrainer, receiver: Receiver) -> None:
    """Contract: block after block, to the last byte; who asks for it may give up before each."""
    tensors = files(1)["a.safetensors"]
    sent = receiver.source(weights_manifest(trainer.send(1, {"a.safetensors": tensors})))
    assert (sent.at_once, sent.from_gpu) == (1, True)
    [part] = sent.parts
    buffer, turns = torch.zeros(part.size, dtype=torch.uint8), list[None]()
    sent.receive_on_gpu(part, buffer, lambda: turns.append(None))
    whole = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
    assert torch.equal(buffer, whole)
    assert len(turns) == -(-part.size // BLOCK)

    def enough() -> None:
        raise RuntimeError("enough")

    kept = borrower(receiver)
    with pytest.raises(RuntimeError, match="enough"):
        sent.receive_on_gpu(part, buffer, enough)
    assert not receiver._idle
    assert isinstance(kept._memory, StandIn)
    assert not kept._memory.opened
    buffer.zero_()
    sent.receive_on_gpu(part, buffer, lambda: None)  # over another one
    assert torch.equal(buffer, whole)


def test_a_version_that_is_written_over_meanwhile_is_refused(trainer: SendingTrainer, receiver: Receiver) -> None:
    """Contract: who was slower than the trainer's patience hears that the version is superseded, however much was copied."""
    sent = receiver.source(weights_manifest(trainer.send(1, files(1))))
    [part] = sent.parts
    turns = iter([lambda: trainer.sender.retire(SIZE)])  # where version 1 lies

    with pytest.raises(PairError, match="superseded"):
        sent.receive_on_gpu(part, torch.zeros(part.size, dtype=torch.uint8), lambda: next(turns, lambda: None)())


def test_who_is_on_another_gpu_hears_of_it(
    trainer: SendingTrainer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: one line that names the setting, for good; a memory that is gone may be back."""
    manifest = weights_manifest(trainer.send(1, files(1)))
    with monkeypatch.context() as patch:
        patch.setattr(receiving, "is_of", is_of)
        with pytest.raises(UserError, match=r"offers cuda-ipc, which cannot be used here: set trainer\.weights\.transport\.backend"):  # fmt: skip
            receiver.source(manifest)
    monkeypatch.setattr(StandIn, "open", lambda self: False)
    with pytest.raises(PairError, match="offers cuda-ipc"):
        receiver.source(manifest)


def test_whose_memory_it_is() -> None:
    """Contract: nothing but what says that it is this GPU's, of this boot, is opened; a CPU has none."""
    assert not is_of({"boot": host_id(), "gpu": "x"}, CPU)
    assert not is_of(None, torch.device("cuda:0"))
    assert not is_of({"boot": "another", "gpu": "x"}, torch.device("cuda:0"))
    assert not is_of({**describe(0, 1), "boot": "another"}, torch.device("cuda:0"))
