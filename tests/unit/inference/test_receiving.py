"""Versions that are sent through a process group: real processes over gloo, no engine. What arrives is what was offered, or one clear reason."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.errors import UserError
from prime_rl.inference import staging
from prime_rl.inference.receiving import Receiver, sent_parts
from prime_rl.inference.staging import Staging
from prime_rl.trainer import sender as sending
from prime_rl.trainer.sender import Offer, Sender
from prime_rl.transport.commit import CommitError, stage
from prime_rl.transport.pairs import PairError
from prime_rl.transport.weights import (
    SenderAddress,
    TensorEntry,
    manifest_extra,
    verify_weights,
    version_dir,
    weights_manifest,
)
from prime_rl.wait import wait

CPU = torch.device("cpu")
SECONDS = 60.0
SIZE = 1 << 20  # of a buffer
SHAPES = {"a.safetensors": {"embed": [500, 300], "empty": [0, 7]}, "b.safetensors": {"w": [123, 457], "norm": [1000]}}


class Trainer:
    """What a trainer has: memory that it shares with a sender, and a run directory."""

    def __init__(self, root: Path, timeout: float = 20.0, port: int = 0) -> None:
        self.root, self.life = root, 0
        self.memory = os.memfd_create("test")
        os.ftruncate(self.memory, 2 * SIZE)
        self.sender = Sender(
            self.memory, 2 * SIZE, host="127.0.0.1", port=port, backend="gloo", device="cpu", timeout=timeout
        )

    def commit(self, version: int, address: SenderAddress | None = None, spoil: bool = False) -> Path:
        """Offer a version of random bytes, and commit what describes it. `spoil`: other bytes than it says."""
        import xxhash

        start, at = version % 2 * SIZE, 0
        generator = torch.Generator().manual_seed(version)
        tensors: dict[str, TensorEntry] = {}
        self.sender.retire(start)
        for file, shapes in SHAPES.items():
            for name, shape in shapes.items():
                data = torch.rand(shape, generator=generator).numpy().tobytes()
                os.pwrite(self.memory, data, start + at)
                tensors[name] = TensorEntry(file, "F32", shape, xxhash.xxh3_128(data).hexdigest())
                at += len(data)
        if spoil:
            os.pwrite(self.memory, b"x", start + at - 10)
        extra = manifest_extra(version, self.life, tensors, sender=address or self.sender.address)
        self.sender.offer(Offer(version, self.life, extra["hash"], start, at))
        with stage(version_dir(self.root, version), step=version, producer="trainer", extra=extra):
            pass
        return version_dir(self.root, version)

    def close(self) -> None:
        self.sender.close()
        os.close(self.memory)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors begin, end and lie within blocks."""
    monkeypatch.setattr(staging, "BLOCK_BYTES", 50_000)


@pytest.fixture
def start_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def start(**options: Any) -> Trainer:
        made.append(Trainer(tmp_path / "weights", **options))
        return made[-1]

    yield start
    for trainer in made:
        trainer.close()


@pytest.fixture
def trainer(start_trainer: Callable[..., Trainer]) -> Trainer:
    return start_trainer()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(CPU)
    yield made
    made.close()


def begin(directory: Path, receiver: Receiver | None, **options: Any) -> Staging:
    return Staging(directory, weights_manifest(directory).hash, CPU, receiver=receiver, **options)


def receive(directory: Path, receiver: Receiver | None) -> dict[str, torch.Tensor]:
    read = begin(directory, receiver)
    read.wait(SECONDS)
    return dict(read.tensors())


def expected(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.rand(shape, generator=generator) for shapes in SHAPES.values() for name, shape in shapes.items()
    }


def assert_same(found: dict[str, torch.Tensor], version: int) -> None:
    wanted = expected(version)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_what_is_received_is_what_was_offered(trainer: Trainer, receiver: Receiver) -> None:
    """Contract: every version arrives bit by bit, also the one before the newest; connections are kept in between."""
    directories = [trainer.commit(version) for version in (1, 2)]
    for version in (1, 2, 1):
        assert_same(receive(directories[version - 1], receiver), version)
    kept = {id(pair) for _, pair in receiver._idle}
    assert_same(receive(trainer.commit(3), receiver), 3)
    assert {id(pair) for _, pair in receiver._idle} == kept
