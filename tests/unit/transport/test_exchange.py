"""Versions from the trainer's memory: bit by bit or not at all, whoever dies, hangs, lies or comes too late."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prime_rl.transport import exchange
from prime_rl.transport.commit import CommitError
from prime_rl.transport.exchange import (
    ALIGNMENT,
    Channel,
    ExchangeError,
    Publisher,
    Subscriber,
    checksums,
    layout,
    tensor_views,
)
from prime_rl.transport.weights import TensorEntry, WeightsManifest

TENSORS = {
    "embedding": TensorEntry("", "BF16", [300, 64], ""),
    "bias": TensorEntry("", "F32", [7], ""),
    "none": TensorEntry("", "F32", [0, 4], ""),
    "head": TensorEntry("", "BF16", [64, 33], ""),
}
PLACES, SIZE = layout(TENSORS)
SECONDS = 3.0


def filled(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.zeros(SIZE, dtype=torch.uint8)
    for start, size in PLACES.values():
        buffer[start : start + size] = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return buffer


@pytest.fixture
def buffer():
    return filled(0)


@pytest.fixture
def publisher(buffer, monkeypatch):
    """It holds version 3, in blocks of which there are many."""
    monkeypatch.setattr(exchange, "TCP_BLOCK_BYTES", 5000)
    made = Publisher(buffer, host="127.0.0.1", port=0, timeout=SECONDS)
    made.offer(3, 0, "hash", SIZE)
    yield made
    made.close()


def manifest(publisher: Publisher, version: int = 3, **address: object) -> WeightsManifest:
    """A version, at another address or with another token if they are given."""
    there = replace(publisher.address(), **address)
    return WeightsManifest(version, 0, "hash", TENSORS, None, Path("weights"), publisher=there)


def receive(asked: WeightsManifest, subscriber: Subscriber | None = None) -> Tensor:
    into = torch.zeros(SIZE, dtype=torch.uint8)
    assert (subscriber or Subscriber()).receive(asked, into) == "tcp"
    return into


def test_many_workers_get_every_version_bit_by_bit(publisher, buffer):
    """Contract: several at a time, each version over the same connection."""
    subscribers = [Subscriber() for _ in range(4)]
    for version in (3, 4, 5):
        if version > 3:
            publisher.withdraw()
            buffer.copy_(filled(version))
            publisher.offer(version, 0, "hash", SIZE)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(partial(receive, manifest(publisher, version)), subscribers))
        assert len(found) == 4
        assert all(torch.equal(one, buffer) for one in found)
        views = dict(tensor_views(found[0], TENSORS))
        assert {name: list(view.shape) for name, view in views.items()} == {n: e.shape for n, e in TENSORS.items()}


def test_a_version_that_is_superseded_is_refused_by_name(publisher, buffer):
    """Contract: and the connection serves the next question."""
    subscriber = Subscriber()
    with pytest.raises(ExchangeError, match="version 2 of incarnation 0 is superseded: the trainer holds version 3"):
        receive(manifest(publisher, 2), subscriber)
    assert torch.equal(receive(manifest(publisher), subscriber), buffer)
    publisher.withdraw()
    with pytest.raises(ExchangeError, match="holds none"):
        receive(manifest(publisher), subscriber)


def test_another_runs_trainer_and_one_that_is_gone_are_named(publisher):
    """Contract: without the token one gets nothing; it is written nowhere; a failed connection names both addresses."""
    with pytest.raises(ExchangeError, match="does not know this token: another run's trainer"):
        receive(manifest(publisher, token="another"))
    assert publisher.address().token not in repr(manifest(publisher))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    message = f"{socket.gethostname()} does not reach the trainer's publisher at 127.0.0.1:{port}"
    with pytest.raises(ExchangeError, match=message):
        receive(manifest(publisher, port=port))


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"[1]\n",
        b'{"token": "\\ud800"}\n',
        b"{}\n",
        b"0" * 70_000,
    ],
)
def test_strangers_disturb_nobody(words, publisher, buffer):
    """Contract: neither what one says to the publisher nor that it hangs keeps a worker from its version. Where one
    answers in the publisher's place silence ends at the deadline, anything else at once, each with one error line."""
    with socket.create_connection(("127.0.0.1", publisher.address().port)) as stranger:
        stranger.sendall(words)
        assert torch.equal(receive(manifest(publisher)), buffer)
    with socket.create_server(("127.0.0.1", 0)) as stranger, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(stranger.accept)
        connecting = threads.submit(lambda: accepted.result(30)[0].sendall(words))
        with pytest.raises(ExchangeError, match=r"^[^\n]+$"):
            receive(manifest(publisher, port=stranger.getsockname()[1]))
        connecting.result(30)


def test_a_stranger_who_dribbles_is_cut_off(publisher, buffer, monkeypatch):
    """Contract: without the token nobody keeps a thread of the publisher by sending now and then, and workers do not
    notice; one who gave it in time is not cut off."""
    monkeypatch.setattr(exchange, "_HELLO_SECONDS", 0.5)
    subscriber = Subscriber()
    receive(manifest(publisher), subscriber)
    with socket.create_connection(("127.0.0.1", publisher.address().port), 0.05) as stranger:
        for _ in range(400):  # each within the deadline of a single wait
            try:
                stranger.sendall(b"0")
                if stranger.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:  # reset
                break
        else:
            pytest.fail("the stranger is still connected")
    assert torch.equal(receive(manifest(publisher), subscriber), buffer)


class Held:
    """The first block of a version: it `began` to be sent, and goes out when it `may`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        send = Channel.send_bytes

        def hold(channel: Channel, data: memoryview) -> None:
            if len(data) == 5000:
                self.began.set()
                self.may.wait(30)
            send(channel, data)

        monkeypatch.setattr(Channel, "send_bytes", hold)


@pytest.fixture
def held(monkeypatch):
    return Held(monkeypatch)


def test_a_version_is_not_withdrawn_from_who_reads_it(publisher, buffer, held):
    """Contract: the buffer stays as it is until the reader is done."""
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(receive, manifest(publisher))
        assert held.began.wait(30)
        withdrawing = threads.submit(publisher.withdraw)
        time.sleep(0.1)
        assert not withdrawing.done()
        held.may.set()
        withdrawing.result(30)
        assert torch.equal(reading.result(30), buffer)


def test_a_reader_that_hangs_is_cut_off(publisher, held):
    """Contract: the trainer goes on after the deadline, the reader takes no version, and the next one can be had."""
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(receive, manifest(publisher))
        assert held.began.wait(30)
        publisher.withdraw()  # ends: it has a deadline
        held.may.set()
        with pytest.raises(ExchangeError):
            reading.result(30)
    publisher.offer(4, 0, "hash", SIZE)
    receive(manifest(publisher, 4))


@pytest.mark.parametrize(("dtype", "shape"), [("Q4", [2]), ("F32", [-1])])
def test_a_tensor_that_cannot_be_is_refused(dtype, shape):
    with pytest.raises(CommitError, match="cannot be loaded"):
        layout({"a": TensorEntry("", dtype, shape, "")})


@given(st.lists(st.integers(1, 3 * ALIGNMENT), min_size=1, max_size=6), st.data())
@settings(max_examples=60)
def test_a_changed_byte_changes_its_tensors_checksum_alone(sizes, data):
    """Contract: and a checksum does not depend on where in the buffer its tensor lies."""
    places, at = {}, 0
    for number, size in enumerate(sizes):
        places[str(number)] = at, size
        at += -(-size // ALIGNMENT) * ALIGNMENT
    buffer = torch.zeros(at, dtype=torch.uint8)
    for start, size in places.values():
        buffer[start : start + size] = torch.randint(0, 256, (size,), dtype=torch.uint8)
    before = checksums(buffer, places)
    shifted = {name: (start + ALIGNMENT, size) for name, (start, size) in places.items()}
    moved = checksums(torch.cat([torch.zeros(ALIGNMENT, dtype=torch.uint8), buffer]), shifted)
    assert moved == before
    name = data.draw(st.sampled_from([*places]))
    start, size = places[name]
    buffer[start + data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    after = checksums(buffer, places)
    assert {other for other in places if after[other] != before[other]} == {name}


def test_exchanged_rows_and_tensors_are_seen():
    """Contract: what sums of bytes would miss."""
    buffer = torch.randint(0, 256, (8 * ALIGNMENT,), dtype=torch.uint8)
    places = {"a": (0, 4 * ALIGNMENT), "b": (4 * ALIGNMENT, 4 * ALIGNMENT)}
    before = checksums(buffer, places)
    rows = buffer.view(8, ALIGNMENT)
    for order in ([1, 0, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]):
        assert checksums(rows[order].reshape(-1), places) != before
    words = buffer.view(torch.int64).clone()
    words[[3, 4]] = words[[4, 3]]
    assert checksums(words.view(torch.uint8), places)["a"] != before["a"]
