"""Versions from the trainer's memory, as a CPU worker gets them: what is staged was published, or one reason is given.

The protocol itself: tests/unit/transport. Between GPUs: tests/gpu/test_receiving.py.
"""

import itertools
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.inference import staging
from prime_rl.inference.staging import Memory, Staging
from prime_rl.transport import exchange
from prime_rl.transport.commit import CommitError
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.weights import verify_weights, weights_manifest
from support.publishing import SIZE, PublishingTrainer, publish_slowly, tensors

CPU = torch.device("cpu")
SECONDS = 120.0  # a bound for what takes moments, also on a machine that is busy with other things


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors begin, end and lie within blocks."""
    monkeypatch.setattr(exchange, "TCP_BLOCK_BYTES", 51_200)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[PublishingTrainer]:
    with closing(PublishingTrainer(tmp_path / "weights", SIZE, SECONDS)) as made:
        yield made


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with closing(Subscriber()) as made:
        yield made


def begin(directory: Path, subscriber: Subscriber, **options: Any) -> Staging:
    return Staging(directory, weights_manifest(directory).hash, CPU, subscriber, **options)


def assert_received(directory: Path, subscriber: Subscriber, **options: Any) -> Memory:
    read = begin(directory, subscriber, **options)
    assert read.answer(SECONDS)["place"] == "host"
    found, wanted = dict(read.tensors), tensors(weights_manifest(directory).version)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert read.memory is not None
    return read.memory


def assert_fails(directory: Path, subscriber: Subscriber, says: str, retry: bool, **options: Any) -> None:
    read = begin(directory, subscriber, **options)
    answer = read.answer(SECONDS)
    assert (answer["state"], answer["retry"]) == ("failed", retry)
    assert re.search(says, answer["why"]), answer["why"]
    assert list(read.tensors) == []


def test_wrong_bytes_are_rejected(trainer: PublishingTrainer, subscriber: Subscriber) -> None:
    """Contract: the checksums of what arrives make the hash of the manifest before any of it is given out; another
    attempt may succeed. A version's hash is that of the tensors that are loaded."""
    assert_fails(trainer.publish(1, tensors(1), spoil=True), subscriber, "what was received is not", retry=True)
    assert_received(trainer.publish(2, tensors(2)), subscriber)
    directory = trainer.publish(3, tensors(3))
    manifest, checksum = directory / "manifest.json", weights_manifest(directory).tensors["w"].checksum
    manifest.write_text(manifest.read_text().replace(checksum, "0" * 16))
    assert_fails(directory, subscriber, "hash does not follow from its tensors", retry=False)


def test_memory_is_filled_again(trainer: PublishingTrainer, subscriber: Subscriber) -> None:
    """Contract: a version of the same tensors goes where the last one was, verified without its manifest; one of other
    tensors gets memory of its own. Wrong bytes, or those of another version, are not given out."""
    memory = assert_received(trainer.publish(1, tensors(1)), subscriber)
    directory = trainer.publish(2, tensors(2))
    assert assert_received(directory, subscriber, refill=(memory, weights_manifest(directory))) is memory
    wrong = trainer.publish(3, tensors(3), spoil=True)
    refill = memory, weights_manifest(wrong)
    assert_fails(wrong, subscriber, "what was received is not", retry=True, refill=refill)
    assert_fails(directory, subscriber, "superseded", retry=True, refill=(memory, weights_manifest(directory)))
    other = replace(memory, buffer=memory.buffer[: len(memory.buffer) // 2], ranges={}, entries={}, tensors=[])
    last = trainer.publish(4, tensors(4))
    assert assert_received(last, subscriber, refill=(other, weights_manifest(last))) is not other


def test_a_worker_without_memory_for_it(
    trainer: PublishingTrainer, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: a version in no file cannot be loaded without memory to receive it; one line says what to change."""
    directory = trainer.publish(1, tensors(1))
    monkeypatch.setattr(staging, "available_bytes", lambda: 0)
    assert_fails(directory, subscriber, "never written.*no memory here to receive them", retry=False)
    with pytest.raises(CommitError, match="never written"):
        verify_weights(directory)


def at_block(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Have `act` called once, before this block of a version is received."""
    progress, blocks = Staging._progress, itertools.count(1)

    def counting(read: Staging) -> None:
        if next(blocks) == number:
            act()
        progress(read)

    monkeypatch.setattr(Staging, "_progress", counting)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_trainer_dies_or_hangs_in_the_middle(
    tmp_path: Path, trainer: PublishingTrainer, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, how: int
) -> None:
    """Contract: that ends the exchange within its deadline, with a reason; a new trainer's version arrives."""
    line, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=publish_slowly, args=(tmp_path / "first", 3.0, there), daemon=True)
    process.start()
    try:
        line.send(1)
        assert line.poll(SECONDS), "the trainer publishes nothing"
        directory, pid = line.recv(), process.pid
        assert pid is not None
        with monkeypatch.context() as patch:
            at_block(patch, 2, lambda: os.kill(pid, how))
            assert_fails(directory, subscriber, "closed the connection|is gone|made no progress for 3 s", retry=True)
    finally:
        process.kill()
        process.join(SECONDS)
    assert_received(trainer.publish(1, tensors(1)), subscriber)
