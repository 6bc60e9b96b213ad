"""Versions that are sent, by every way that a CPU has: real processes, no engine. What arrives is what was offered, or one clear reason."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prime_rl.transport.line import BLOCK_BYTES, Line, PairError, introduce
from prime_rl.transport.shared import describe, open_memory

from prime_rl.errors import UserError
from prime_rl.inference import blocks, receiving, staging
from prime_rl.inference.receiving import Receiver, sent_parts
from prime_rl.inference.staging import Staging
from prime_rl.transport import shared
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest
from prime_rl.wait import wait
from support.sending import SendingTrainer

CPU = torch.device("cpu")
SECONDS = 120.0  # a bound for what takes moments, also on a machine that is busy with other things
SIZE = 1 << 20  # of a buffer
BACKENDS = ["gloo", "shared-memory"]
SHAPES = {"a.safetensors": {"embed": [500, 300], "empty": [0, 7]}, "b.safetensors": {"w": [123, 457], "norm": [1000]}}


class Trainer(SendingTrainer):
    """Sends one version of random tensors after the other."""

    def __init__(
        self, root: Path, *backends: str, timeout: float = SECONDS, port: int = 0, device: str = "cpu"
    ) -> None:
        super().__init__(root, SIZE, timeout, port, backends, device)
        self.version = 0

    def commit(self, **options: Any) -> Path:
        """The next version."""
        self.version += 1
        tensors = expected(self.version)
        files = {file: {name: tensors[name] for name in shapes} for file, shapes in SHAPES.items()}
        return self.send(self.version, files, **options)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors begin, end and lie within blocks."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 50_000)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Iterator[Trainer]:
    """One for all tests that leave its sender alone: a process takes seconds to start."""
    made = Trainer(tmp_path_factory.mktemp("run") / "weights", backend)
    yield made
    made.close()


@pytest.fixture
def start_trainer(tmp_path: Path, backend: str) -> Iterator[Callable[..., Trainer]]:
    """Start trainers whose senders may come to harm, all with the same run directory."""
    made: list[Trainer] = []

    def start(**options: Any) -> Trainer:
        made.append(Trainer(tmp_path / "weights", backend, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


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


def assert_same(found: dict[str, torch.Tensor], directory: Path) -> None:
    wanted = expected(weights_manifest(directory).version)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_what_is_received_is_what_was_offered(trainer: Trainer, receiver: Receiver) -> None:
    """Contract: every version arrives bit by bit, also the one before the newest; connections are kept in between."""
    directories = [trainer.commit() for _ in range(2)]
    for directory in (*directories, directories[0]):
        assert_same(receive(directory, receiver), directory)
    kept = {id(pair) for _, pair in receiver._idle}
    assert_same(receive(directory := trainer.commit(), receiver), directory)
    assert {id(pair) for _, pair in receiver._idle} >= kept


def fails(directory: Path, receiver: Receiver | None, says: str, kind: type[Exception] = PairError) -> None:
    read = begin(directory, receiver)
    with pytest.raises(kind, match=says):
        read.wait(SECONDS)
    assert read.answer()["state"] == "failed"
    assert read.answer()["unsent"] == (kind is PairError)
    assert list(read.tensors()) == []


def wait_received(directory: Path, receiver: Receiver) -> None:
    """Try again where the time-out is shorter than what a sender takes to start."""

    def arrives() -> bool:
        try:
            assert_same(receive(directory, receiver), directory)
        except PairError:
            return False
        return True

    wait(arrives, subject="the version", owner="the sender", seconds=SECONDS)


def at_receive(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Have `act` called once, by the thread that has just received this many blocks of a version: it has the end of its part still to come, however
    late the blocks are hashed."""
    blocks, lock, receive = itertools.count(1), threading.Lock(), receiving._OfSender.fill

    def counting(*args: Any) -> None:
        receive(*args)
        with lock:
            due = next(blocks) == number
        if due:
            act()

    monkeypatch.setattr(receiving._OfSender, "fill", counting)


def at_block(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Have `act` called once, when so many blocks of a version were received."""
    blocks, lock, hash_block = 0, threading.Lock(), staging._hash

    def counting(*args: Any) -> None:
        nonlocal blocks
        hash_block(*args)
        with lock:
            blocks += 1
            due = blocks == number
        if due:
            act()

    monkeypatch.setattr(staging, "_hash", counting)


ASK = """
import os, sys, torch
from pathlib import Path
from prime_rl.inference.receiving import connect, sent_parts
from prime_rl.transport.weights import weights_manifest
manifest = weights_manifest(Path(sys.argv[1]))
sender, part = manifest.sender, sent_parts(manifest)[0]
pair = connect(sender, torch.device("cpu"))
pair.line.tell(20, version=manifest.version, life=0, hash=manifest.hash, start=0, count=part.size, block=10_000)
pair.receive(memoryview(bytearray(10_000)))
print("in the middle", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Callable[[Path], "subprocess.Popen[str]"]]:
    """Start processes that have received one block of many and go no further."""
    started: list[subprocess.Popen[str]] = []

    def start(directory: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", ASK, str(directory)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(SECONDS)


def test_several_receive_at_the_same_time(trainer: Trainer) -> None:
    """Contract: servers and workers do not wait for each other, nor know of each other."""
    directory = trainer.commit()
    receivers = [Receiver(CPU) for _ in range(3)]
    reads = [begin(directory, receiver) for receiver in receivers]
    for read in reads:
        read.wait(SECONDS)
        assert_same(dict(read.tensors()), directory)
    for receiver in receivers:
        receiver.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_gone_or_hangs_holds_nobody_up(
    trainer: Trainer, receiver: Receiver, reader: Callable[[Path], "subprocess.Popen[str]"], how: signal.Signals
) -> None:
    """Contract: a receiver that is killed or stopped in the middle costs the others nothing, and the trainer no more than the moment it gives."""
    directory, pid = trainer.commit(), trainer.sender.pid
    reader(directory).send_signal(how)
    assert_same(receive(directory, receiver), directory)
    trainer.commit()
    later = trainer.commit()  # into the memory that the other one is reading
    assert_same(receive(later, receiver), later)
    assert trainer.sender.pid == pid


def test_the_sender_is_killed_in_the_middle(
    start_trainer: Callable[..., Trainer], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: that ends the transfer with one reason; another process takes its place, and the next attempt gets all of it."""
    trainer = start_trainer()
    directory, pid = trainer.commit(), trainer.sender.pid
    assert pid is not None
    receive(
        directory, receiver
    )  # from now on it has its connections: one that is being made ends with the time-out only
    with monkeypatch.context() as patch:
        at_receive(patch, 3, lambda: os.kill(pid, signal.SIGKILL))
        fails(directory, receiver, "the transfer failed|the other side|memory is not there any more")
    wait(lambda: trainer.sender.pid not in (None, pid), subject="other process", owner="the trainer", seconds=SECONDS)
    assert_same(receive(directory, receiver), directory)


def test_the_sender_is_killed_between_large_blocks(
    tmp_path: Path, backend: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: its end is seen where a block was announced that never comes, and where the group does not see it: no receiver waits for the time-out."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
    files = {
        f"{name}.safetensors": {name: torch.full((5 * BLOCK_BYTES // 2,), 1, dtype=torch.uint8)} for name in "abcd"
    }
    with closing(SendingTrainer(tmp_path, 10 * BLOCK_BYTES, 2 * SECONDS, backends=(backend,))) as trainer:
        directory, pid = trainer.send(1, files), trainer.sender.pid
        assert pid is not None
        receive(directory, receiver)
        with monkeypatch.context() as patch:
            at_receive(patch, 4, lambda: os.kill(pid, signal.SIGKILL))
            fails(directory, receiver, "the transfer failed|the other side")


def test_a_sender_that_ends_whenever_it_is_started(start_trainer: Callable[..., Trainer]) -> None:
    """Contract: it is not started for ever, and the trainer hears of it with the next version."""
    trainer, killed = start_trainer(), set()
    trainer.commit()

    def ended() -> bool:
        if (pid := trainer.sender.pid) is not None and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return trainer.sender.pid is None and len(killed) == 3

    wait(ended, subject="end", owner="the trainer", seconds=SECONDS)
    with pytest.raises(UserError, match="has ended .*killed by SIGKILL.*version 2"):
        trainer.commit()


def test_a_sender_that_hangs(
    start_trainer: Callable[..., Trainer], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: the receiver gives up after the time-out, the trainer replaces it when it wants its memory, and all goes on."""
    trainer = start_trainer(timeout=2.0)
    directory, pid = trainer.commit(), trainer.sender.pid
    assert pid is not None

    wait_received(directory, receiver)
    with monkeypatch.context() as patch:
        at_receive(patch, 3, lambda: os.kill(pid, signal.SIGSTOP))
        fails(directory, receiver, "[Tt]imed out|said nothing|no gloo group|closed")
    os.kill(pid, signal.SIGSTOP)  # on a busy machine this time-out may have passed before the third block
    trainer.commit()
    directory = trainer.commit()
    wait(lambda: trainer.sender.pid not in (None, pid), subject="other process", owner="the trainer", seconds=SECONDS)
    wait_received(directory, receiver)


def test_a_token_that_is_not_the_senders(trainer: Trainer, receiver: Receiver, heard: pytest.LogCaptureFixture) -> None:
    """Contract: who does not know the token gets nothing, the trainer's log says so, and no log holds the token."""
    directory = trainer.commit(address=replace(trainer.sender.address, token="0" * 32))
    fails(directory, receiver, "does not know this token")
    wait(lambda: "without knowing the token" in heard.text, subject="warning", owner="the trainer", seconds=SECONDS)
    assert trainer.sender.address.token not in heard.text + repr(trainer.sender.address)


def test_what_is_no_question_for_weights(trainer: Trainer, receiver: Receiver) -> None:
    """Contract: strangers that speak anything else are passed over; a question beyond the version's end is refused."""
    directory = trainer.commit()
    with socket.create_connection(("127.0.0.1", trainer.sender.address.port), SECONDS) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert_same(receive(directory, receiver), directory)
    manifest = weights_manifest(directory)
    part = sent_parts(manifest)[-1]
    with (
        pytest.raises(PairError, match="bytes, not"),
        receiver.part(manifest, part.offset, part.size + 1) as pair,
    ):
        pair.receive(memoryview(bytearray(10)))


@pytest.mark.parametrize(
    "said", [b"[" * 60_000, b'{"proof": "\\ud800"}', b'{"proof": 1e999}', b"null", b"x" * 70_000], ids=str
)
def test_what_is_no_introduction(
    trainer: Trainer, receiver: Receiver, said: bytes, heard: pytest.LogCaptureFixture
) -> None:
    """Contract: whatever a stranger says in place of its proof costs it the connection, and the sender a line in the log."""
    directory, pid = trainer.commit(), trainer.sender.pid
    with socket.create_connection(("127.0.0.1", trainer.sender.address.port), SECONDS) as stranger:
        stranger.sendall(said + b"\n")
        stranger.settimeout(SECONDS)
        while stranger.recv(4096):
            pass
    wait(lambda: "sending weights: " in heard.text, subject="warning", owner="the trainer", seconds=SECONDS)
    assert_same(receive(directory, receiver), directory)
    assert trainer.sender.pid == pid


def test_where_the_memory_cannot_be_had(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: who cannot open the sender's memory gets the version through a process group where the sender has one, else one clear line."""
    for backends in (("shared-memory", "gloo"), ("shared-memory",)):
        with closing(Trainer(tmp_path / backends[-1], *backends)) as trainer:
            directory = trainer.commit()
            assert receiver.backend(trainer.sender.address) == "shared-memory"
            assert [pair.backend for _, pair in receiver._idle] == ["shared-memory"]
            receiver.close()
            with monkeypatch.context() as patch:
                patch.setattr(shared, "open_memory", lambda described: None)
                if "gloo" in backends:
                    assert_same(receive(directory, receiver), directory)
                    assert {pair.backend for _, pair in receiver._idle} == {"gloo"}
                else:
                    fails(directory, receiver, "offers shared-memory, which cannot be used here")
                    patch.setattr(receiving, "is_elsewhere", lambda described: True)
                    fails(directory, receiver, "offers shared-memory, which cannot be used here", UserError)
        receiver.close()


@pytest.mark.parametrize("wrong", ["boot", "process", "descriptor", "device", "inode", "size", "none", "text"])
def test_no_other_memory_is_taken_for_the_senders(wrong: str) -> None:
    """Contract: a number that means something else here, as in another container, opens nothing."""
    memory = os.memfd_create("own")
    os.truncate(memory, 1000)
    os.pwrite(memory, b"here", 500)
    described: dict[str, Any] = {**describe(memory, 1000)}
    opened = open_memory(described)
    assert opened is not None
    assert os.pread(opened, 4, 500) == b"here"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(opened, b"x", 0)  # not to be written
    os.close(opened)
    if wrong not in ("none", "text"):
        # No process has such a number; the next one may be a child of ours, that has inherited this very memory.
        other = {"boot": "x", "process": 2**31 - 1}
        described[wrong] = other[wrong] if wrong in other else described[wrong] + 1
    assert open_memory(None if wrong == "none" else {"process": "x"} if wrong == "text" else described) is None
    assert holds("own") == 1
    os.close(memory)


def test_nothing_is_held_of_a_sender_that_is_gone(start_trainer: Callable[..., Trainer], receiver: Receiver) -> None:
    """Contract: between two versions a receiver keeps no hold on the sender's memory, which may be most of what the host has."""
    trainer = start_trainer()
    before = holds()  # it is this process, too
    assert_same(receive(directory := trainer.commit(), receiver), directory)
    assert receiver._idle
    assert holds() == before


def holds(name: str = "test") -> int:
    """How often this process has memory of this name open or mapped."""
    links = [path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(f"memfd:{name}" in link for link in [*links, *Path("/proc/self/maps").read_text().splitlines()])


def test_a_group_that_cannot_be_made(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: who needs what the sender's host does not have hears why; the others go on."""
    with closing(Trainer(tmp_path / "weights", "shared-memory", "nccl", device="cuda:0")) as trainer:
        directory, pid = trainer.commit(), trainer.sender.pid
        with monkeypatch.context() as patch:
            patch.setattr(shared, "open_memory", lambda described: None)
            patch.setattr(receiving, "introduce", partial(_introduce, backend="nccl"))
            fails(directory, receiver, "no nccl group can be made by the sender")
        assert_same(receive(directory, receiver), directory)
        assert trainer.sender.pid == pid


def _introduce(line: Line, *, token: str, choose: Any, seconds: float, backend: str) -> str:
    return introduce(line, token=token, choose=lambda hello: backend, seconds=seconds)


def test_a_slow_receiver_is_not_given_up(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the time-out is for seconds without progress, however long a part takes altogether."""
    with closing(Trainer(tmp_path / "weights", "shared-memory", timeout=3.0)) as trainer:
        directory, fill = trainer.commit(), staging._hash
        wait_received(directory, receiver)

        def slowly(*args: Any) -> None:
            time.sleep(0.6)
            fill(*args)

        monkeypatch.setattr(staging, "_hash", slowly)
        turns = max(part.size for part in sent_parts(weights_manifest(directory))) / blocks.BLOCK_BYTES
        assert turns * 0.6 > 2 * 3.0
        read = begin(directory, receiver)
        read.wait(SECONDS)
        assert_same(dict(read.tensors()), directory)


@pytest.mark.parametrize("what", ["a version before the last two", "another life", "another hash"])
def test_what_is_not_there(trainer: Trainer, receiver: Receiver, what: str) -> None:
    """Contract: a version that is superseded, or is of another history, is not given, and the answer says what is there."""
    manifest = weights_manifest(trainer.commit())
    if what == "another life":
        manifest = replace(manifest, incarnation=1)
    elif what == "another hash":
        manifest = replace(manifest, hash="0" * 32)
    else:
        trainer.commit()
        trainer.commit()
    with (
        pytest.raises(PairError, match="not there any more: superseded .there is: "),
        receiver.part(manifest, 0, blocks.BLOCK_BYTES) as pair,
    ):
        pair.receive(memoryview(bytearray(blocks.BLOCK_BYTES)))


def test_superseded_in_the_middle(trainer: Trainer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: who is slow is told that its version is superseded; what it has is given to nobody, and the next version arrives."""
    directory = trainer.commit()
    trainer.commit()
    with monkeypatch.context() as patch:
        at_block(patch, 3, trainer.commit)
        # Who asks a moment later for another part of it hears the second.
        fails(directory, receiver, "is superseded: its memory is needed for a newer one|superseded .there is: ")
    directory = version_dir(trainer.root, trainer.version)
    assert_same(receive(directory, receiver), directory)


def test_a_trainer_that_starts_again(start_trainer: Callable[..., Trainer], receiver: Receiver) -> None:
    """Contract: what the manifest says is asked, not who was asked before: at the same address, with another token."""
    first = start_trainer()
    directory = first.commit()
    assert_same(receive(directory, receiver), directory)
    first.sender.close()
    fails(directory, receiver, "no sender of weights answers")
    again = start_trainer(port=first.sender.address.port)
    again.life, again.version = 1, 1
    assert_same(receive(directory := again.commit(), receiver), directory)


def test_wrong_bytes_are_refused(trainer: Trainer, receiver: Receiver) -> None:
    """Contract: what arrives is hashed against the manifest, tensor by tensor, as files are."""
    fails(trainer.commit(spoil=True), receiver, "tensor norm is not the one its manifest describes", CommitError)


def test_what_is_spoilt_on_its_way_is_asked_for_once_more(
    trainer: Trainer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: one wrong bit of a transfer costs that transfer, not the version."""
    fill, blocks_filled = receiving._OfSender.fill, itertools.count()

    def spoilt(source: Any, block: memoryview, at: int) -> None:
        fill(source, block, at)
        if next(blocks_filled) == 1:
            block[7] ^= 1

    monkeypatch.setattr(receiving._OfSender, "fill", spoilt)
    assert_same(receive(directory := trainer.commit(), receiver), directory)
    assert next(blocks_filled) > 1


def test_who_cannot_receive_says_so(trainer: Trainer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: whoever looks for tensors that were never written says that, in one line."""
    directory = trainer.commit()
    fails(directory, None, "never written", CommitError)
    with pytest.raises(CommitError, match="never written"):
        verify_weights(directory)
    monkeypatch.setattr(staging, "available_bytes", lambda: 0)
    fails(directory, receiver, "no memory here to receive them", UserError)


def test_what_is_not_wanted_any_more(trainer: Trainer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: dropping ends the transfer, and a connection that is within it is not used for the next."""
    directory = trainer.commit()
    with monkeypatch.context() as patch:
        at_block(patch, 2, lambda: read.drop())
        read = begin(directory, receiver)
        with pytest.raises(staging.Dropped):
            read.wait(SECONDS)
    assert_same(receive(directory := trainer.commit(), receiver), directory)


def test_a_port_that_is_taken(trainer: Trainer, start_trainer: Callable[..., Trainer]) -> None:
    """Contract: one line, before anything is trained."""
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{trainer.sender.address.port}"):
        start_trainer(port=trainer.sender.address.port)
