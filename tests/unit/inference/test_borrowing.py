"""Versions that a trainer lends its server on one GPU: what both say to each other. Memory of the host stands in for the GPU's, which tests/gpu/test_receiving.py has."""

import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prime_rl.transport.device_memory import DeviceBorrower, DeviceMemory, size_of
from prime_rl.transport.line import Line, PairError
from prime_rl.transport.shared import HostMemory, describe, host_id

from prime_rl.errors import UserError
from prime_rl.inference import blocks, receiving
from prime_rl.inference.receiving import Receiver, Sent
from prime_rl.inference.staging import Staging
from prime_rl.transport.weights import weights_manifest
from support.sending import Files, SendingTrainer

CPU = torch.device("cpu")
SECONDS = 60.0
SIZE = 1 << 20
BLOCK = 50_000


class StandIn(DeviceMemory):
    """Memory of the host behind a GPU's methods, with what `describe` tells of it in the handle's place."""

    broken = False
    opened = 0
    asked = 0

    def __init__(self, size: int, handle: str, device: torch.device) -> None:
        assert size == 2 * SIZE
        self._host = HostMemory(json.loads(handle))

    def open(self) -> str | None:
        if StandIn.broken:
            return "scripted"
        StandIn.opened += 1
        StandIn.asked += 1
        return self._host.open()

    def copy_to(self, data: torch.Tensor, at: int) -> None:
        self._host.fill(data.numpy().data, at)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._host.close()
        StandIn.opened = 0


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(receiving, "DeviceMemory", StandIn)
    monkeypatch.setattr(receiving, "size_of", lambda described, device: described["size"])
    for name, value in (("broken", False), ("opened", 0), ("asked", 0)):
        monkeypatch.setattr(StandIn, name, value)


Start = Callable[..., SendingTrainer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[SendingTrainer] = []

    def lend(memory: int) -> dict[str, object]:
        return {"size": 2 * SIZE, "handle": json.dumps(describe(memory, 2 * SIZE))}

    def begin(*backends: str) -> SendingTrainer:
        made.append(SendingTrainer(tmp_path / "weights", SIZE, SECONDS, backends=backends, lent=lend))
        return made[-1]

    yield begin
    for one in made:
        one.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with closing(Receiver(CPU)) as made:
        yield made


def files(version: int) -> Files:
    generator = torch.Generator().manual_seed(version)
    return {
        f"{number}.safetensors": {
            f"{number}.w": torch.rand(300, 200, generator=generator),
            f"{number}.b": torch.rand(7, generator=generator),
        }
        for number in range(2)
    }


def ask(trainer: SendingTrainer, receiver: Receiver, version: int = 1) -> tuple[Sent, list[torch.Tensor]]:
    """A version, and memory for it."""
    sent = receiver.source(weights_manifest(trainer.send(version, files(version))))
    sent.meet(on_device=True)
    return sent, [torch.zeros(part.size, dtype=torch.uint8) for part in sent.parts]


def whole(version: int) -> torch.Tensor:
    return torch.cat([x.flatten().view(torch.uint8) for held in files(version).values() for x in held.values()])


def test_from_one_memory_of_a_gpu_to_another(start: Start, receiver: Receiver) -> None:
    """Contract: all files in one go, to the last byte, version after version over one connection; nothing stays open in between."""
    trainer, lines = start("cuda-ipc", "shared-memory"), set[Line]()
    for version in (1, 2):
        before, turns = StandIn.asked, itertools.count()
        sent, buffers = ask(trainer, receiver, version)
        assert (sent.at_once, sent.from_gpu) == (1, True)
        [group] = sent.groups(buffers)
        sent.receive_on_gpu(group, turns.__next__)
        assert torch.equal(torch.cat(buffers), whole(version))
        assert next(turns) == sum(-(-part.size // BLOCK) for part in sent.parts)
        assert StandIn.asked - before == (2 if version == 1 else 1)  # the first time to see whether it can be had
        assert not StandIn.opened
        [(_, pair)] = receiver._idle
        assert isinstance(pair, DeviceBorrower)
        lines.add(pair.line)
    assert len(lines) == 1


def test_who_gives_up_in_the_middle(start: Start, receiver: Receiver) -> None:
    """Contract: what was open is closed, and the connection is not used again."""
    sent, buffers = ask(start("cuda-ipc"), receiver)

    def enough() -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        sent.receive_on_gpu(sent.groups(buffers)[0], enough)
    assert not receiver._idle
    assert not StandIn.opened
    sent.receive_on_gpu(sent.groups(buffers)[0], lambda: None)
    assert torch.equal(torch.cat(buffers), whole(1))


def test_a_version_that_is_written_over_meanwhile_is_refused(start: Start, receiver: Receiver) -> None:
    """Contract: who was slower than the trainer's patience hears that the version is superseded, however much was copied."""
    sent, buffers = ask(trainer := start("cuda-ipc"), receiver)
    turns = iter([lambda: trainer.sender.retire(SIZE)])  # where version 1 lies
    with pytest.raises(PairError, match="superseded"):
        sent.receive_on_gpu(sent.groups(buffers)[0], lambda: next(turns, lambda: None)())
    assert not StandIn.opened


def test_who_has_no_room_on_the_gpu_reads_the_hosts_memory(start: Start, receiver: Receiver) -> None:
    """Contract: as without a GPU, many parts at once."""
    directory = start("cuda-ipc", "shared-memory").send(1, sent := files(1))
    read = Staging(directory, weights_manifest(directory).hash, CPU, receiver=receiver)
    read.wait(SECONDS)
    found = dict(read.tensors())
    assert all(torch.equal(found[name], x) for held in sent.values() for name, x in held.items())
    assert {pair.backend for _, pair in receiver._idle} == {"shared-memory"}


def test_memory_that_cannot_be_opened_is_said_once(
    start: Start, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Contract: with CUDA's own word for it; versions come another way, or are refused in one line."""
    monkeypatch.setattr(StandIn, "broken", True)
    trainer = start("cuda-ipc", "shared-memory")
    for version in (1, 2):
        sent, _ = ask(trainer, receiver, version)
        assert not sent.from_gpu
        assert {pair.backend for _, pair in receiver._idle} == {"shared-memory"}
    said = [record.getMessage() for record in caplog.records if "cannot be opened" in record.getMessage()]
    assert len(said) == 1
    assert "(scripted)" in said[0]
    monkeypatch.setattr(receiving, "size_of", lambda described, device: None)
    with pytest.raises(UserError, match=r"offers cuda-ipc, which cannot be used here: set trainer\.weights\.transport\.backend"):  # fmt: skip
        ask(start("cuda-ipc"), receiver, 3)


def test_the_handle_is_for_those_who_know_the_token(start: Start) -> None:
    """Contract: who has it can write to the trainer's memory; who connects is told no more than which GPU it is."""
    address = start("cuda-ipc", "shared-memory").sender.address
    with closing(socket.create_connection((address.host, address.port), SECONDS)) as connection:
        hello = Line(connection).hear(SECONDS)
    assert hello["gpu"] == {"size": 2 * SIZE}


def test_whose_memory_it_is() -> None:
    """Contract: nothing but what says that it is this GPU's, of this boot, is asked for; a CPU has none."""
    assert size_of({"boot": host_id(), "gpu": "x", "size": 1}, CPU) is None
    assert size_of(None, torch.device("cuda:0")) is None
    assert size_of({"boot": "another", "gpu": "x", "size": 1}, torch.device("cuda:0")) is None
