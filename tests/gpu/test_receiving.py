"""Receiving versions on a GPU: with gloo and from the host's memory, from this GPU's, with NCCL from another GPU. (The protocol itself: tests/unit/inference/test_receiving.py.)"""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from prime_rl.transport.device_memory import DeviceMemory, size_of
from prime_rl.transport.line import PairError
from prime_rl.transport.pairs import Pair

from prime_rl.inference.blocks import OnDevice
from prime_rl.inference.receiving import Receiver
from prime_rl.inference.staging import Staging
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import weights_manifest
from prime_rl.wait import wait
from support.lending import LendingTrainer
from support.sending import Files, SendingTrainer

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

SECONDS = 120.0
SIZE = 512 << 20
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL speaks to another GPU")
SERVER = torch.device("cuda:0")
LENT = ("cuda-ipc", "shared-memory")


def files(version: int, count: int = 5, rows: int = 20_000) -> Files:
    generator = torch.Generator().manual_seed(version)
    return {
        f"model-{number}.safetensors": {
            f"{number}.{name}": torch.randn(rows, 1024, generator=generator).bfloat16()
            for name, rows in (("a", rows), ("b", 1), ("c", 3_333))
        }
        for number in range(count)
    }


@pytest.fixture(
    params=[
        "gloo",
        "shared-memory",
        "cuda-ipc",
        pytest.param("nccl", marks=TWO),
        pytest.param("nccl, from a copy", marks=TWO),
    ]
)
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SendingTrainer]:
    if request.param in ("cuda-ipc", "nccl, from a copy"):
        where, backends = (str(SERVER), LENT) if request.param == "cuda-ipc" else ("cuda:1", ("nccl",))
        with closing(LendingTrainer(tmp_path, SIZE, SECONDS, where, backends)) as lending:
            yield lending
        return
    device = "cuda:1" if request.param == "nccl" else "cpu"
    with closing(SendingTrainer(tmp_path, SIZE, SECONDS, backends=(request.param,), device=device)) as made:
        yield made


def receive(directory: Path, receiver: Receiver, place: str = "device") -> dict[str, torch.Tensor]:
    read = Staging(directory, weights_manifest(directory).hash, SERVER, receiver=receiver)
    read.wait(SECONDS)
    assert read.place == place
    return dict(read.tensors())


@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_received_is_what_was_sent(
    trainer: SendingTrainer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Contract: bit by bit, version after version, over the same connections."""
    if place == "host":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    with closing(Receiver(SERVER)) as receiver:
        for version in (1, 2, 3):
            sent = files(version)
            found = receive(trainer.send(version, sent), receiver, place)
            expected = {name: tensor for held in sent.values() for name, tensor in held.items()}
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())


def test_other_bytes_are_refused(trainer: SendingTrainer) -> None:
    """Contract: what is hashed is what the GPU holds; one byte that is not the version's, and nobody gets it."""
    with closing(Receiver(SERVER)) as receiver, pytest.raises(CommitError, match=r"4\.c"):
        receive(trainer.send(1, files(1), spoil=True), receiver)


def test_the_sender_is_killed_in_the_middle(
    trainer: SendingTrainer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Contract: this process lives on, hears one reason, and gets the version from the sender's successor."""
    with closing(Receiver(SERVER)) as receiver:
        directory = trainer.send(
            1, files(1, 2, 110_000)
        )  # more than NCCL may have sent before anybody asks for it (4 MiB a channel)
        receive(directory, receiver)
        pid, blocks = trainer.sender.pid, itertools.count()
        assert pid is not None
        # Those of two backends do not go by the host.
        ways: dict[str, tuple[Any, str]] = {"cuda-ipc": (DeviceMemory, "copy_to")}
        ways |= dict.fromkeys(("nccl", "nccl, from a copy"), (Pair, "_expect"))
        where, name = ways.get(request.node.callspec.params["trainer"], (OnDevice, "filled"))
        done = getattr(where, name)

        def killing(*args: Any) -> None:
            done(*args)
            if next(blocks) == 3:
                os.kill(pid, signal.SIGKILL)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, killing)
            with pytest.raises(PairError):
                receive(directory, receiver)
        assert torch.ones(1, device=SERVER).item() == 1.0
        wait(lambda: trainer.sender.pid not in (None, pid), subject="sender", owner="the trainer", seconds=SECONDS)
        receive(directory, receiver)


@pytest.fixture
def lending(tmp_path: Path) -> Iterator[LendingTrainer]:
    with closing(LendingTrainer(tmp_path, SIZE, SECONDS, str(SERVER), LENT)) as made:
        yield made


@pytest.mark.parametrize("moment", [0, 1, 5, 20])
def test_the_owner_of_the_memory_is_killed_in_the_middle(
    lending: LendingTrainer, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Contract: a GPU's memory that is taken from under those who copy it ends neither this process nor its GPU: the version is refused, or whole."""
    blocks, copy = itertools.count(), DeviceMemory.copy_to

    def killing(*args: Any) -> None:
        copy(*args)
        if next(blocks) == moment:
            os.kill(pid, signal.SIGKILL)
            lending.owner.join(SECONDS)  # the driver takes back what it had

    with closing(Receiver(SERVER)) as receiver:
        sent = files(1, 4, 55_000)
        directory = lending.send(1, sent)
        pid = lending.owner.pid
        assert pid is not None
        monkeypatch.setattr(DeviceMemory, "copy_to", killing)
        try:
            found = receive(directory, receiver)
        except (PairError, CommitError):
            pass
        else:
            assert all(torch.equal(found[name].cpu(), x) for held in sent.values() for name, x in held.items())
        assert next(blocks) > moment
    assert torch.ones(1000, device=SERVER).sum().item() == 1000


def test_memory_of_another_gpu_or_of_none_is_not_borrowed(lending: LendingTrainer) -> None:
    """Contract: what cannot be opened is not there, in place of an error that ends the GPU's context."""
    lent = lending.described
    assert size_of(lent, SERVER) == 2 * SIZE
    for wrong in ({"gpu": "x"}, {"boot": "x"}, {"size": None}):
        assert size_of({**lent, **wrong}, SERVER) is None
    handle = str(lent["handle"])
    memory = DeviceMemory(SIZE, handle, SERVER)
    assert memory.open() is None
    memory.close()
    for other in ("00", "zz", "00" * 64):
        assert DeviceMemory(SIZE, other, SERVER).open() is not None
    lending.owner.kill()
    lending.owner.join(SECONDS)
    assert DeviceMemory(SIZE, handle, SERVER).open() is not None
    assert torch.ones(1, device=SERVER).item() == 1.0


def test_no_memory_of_the_trainers_is_held_between_two_versions(lending: LendingTrainer) -> None:
    """Contract: a trainer that has died finds its GPU's memory free, though servers live on."""
    with closing(Receiver(SERVER)) as receiver:
        receive(lending.send(1, files(1)), receiver)
        torch.cuda.empty_cache()
        held = SIZE * 2 + torch.cuda.mem_get_info(SERVER)[0]
        lending.owner.kill()
        lending.owner.join(SECONDS)
        wait(lambda: torch.cuda.mem_get_info(SERVER)[0] >= held, subject="memory", owner="the driver", seconds=SECONDS)
