"""Reading a committed version into memory beside generation, so that the engine only stops for moving it from memory into the model.

A worker reads every file once: the bytes that are hashed are the bytes that are loaded. They are kept on the GPU where it has room beside the
engine, else in the host's memory, else not at all: then the engine reads the files itself, after they have been hashed, while it is paused.
"""

import os
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import xxhash
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.inference.blocks import (
    DTYPES,
    Arrived,
    InPlace,
    Nowhere,
    OfFile,
    OfMemory,
    OnDevice,
    Part,
    Sink,
    Source,
    Stretch,
    copy_blocks,
    cut,
    empty_on_device,
    empty_on_host,
    lay_out,
)
from prime_rl.transport.commit import CommitError
from prime_rl.transport.delta import Bytes
from prime_rl.transport.line import PairError
from prime_rl.transport.tensor_hash import of_tensors
from prime_rl.transport.weights import (
    TensorEntry,
    WeightsManifest,
    apply_changes,
    chain,
    check_tensors,
    hash_version,
    never_written,
    read_files,
    weights_manifest,
)

if TYPE_CHECKING:
    from prime_rl.inference.receiving import Receiver, Sent

T = TypeVar("T")
Place = Literal["device", "host", "nowhere"]

# Files at once: the largest is read by one thread, the others beside it. A worker shares its cores, and the interpreter with the engine.
THREADS = min(max(len(os.sched_getaffinity(0)) // 2, 4), 8)
TURN_SECONDS = 1e-4  # that the engine may keep the interpreter from a thread that has read a block and asks for it
SPARE = 2  # free memory is this many times what is kept there, at least: others need some, too


class Dropped(Exception):
    """Nobody wants what is being read any more."""


@dataclass(frozen=True)
class Held:
    """The tensors of the version with this hash in the host's memory, file by file, for the next version to tell its changes of."""

    hash: str
    parts: list[Part]
    data: list[Bytes]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(part.size for part in self.parts)


class Staging:
    """One version that a thread reads for this worker, from its construction on. `drop` it, or what it holds stays.

    Args:
        directory: A committed version.
        digest: The hash that it must have.
        device: Of the model.
        keep: Whether to keep what is read, where there is room.
        on_device: Whether the device's memory may be used for that.
        verify: Whether to read it all the same where there is none. One worker of an engine does.
        sharing: Workers that share the host's memory.
        held: What the worker holds of the version before. It is this one's from now on, and worth nothing if that fails.
        receiver: Gets what was never written from the trainer; such a version has to be kept.

    Attributes:
        place: Where it is kept.
        held: What the worker may hold on to for the next version, once this one is read; None where no changes are told.
        received: Whether it was never written.
    """

    def __init__(
        self, directory: Path, digest: str, device: torch.device, *, keep: bool = True, on_device: bool = True, verify: bool = True, sharing: int = 1,
        held: Held | None = None, receiver: "Receiver | None" = None,
    ) -> None:  # fmt: skip
        self.directory, self.digest = directory, digest
        self.place: Place = "nowhere"
        self.received = False
        self.seconds = 0.0
        self._device, self._keep, self._verify, self._sharing = device, keep, verify, sharing
        self._may_use_device = on_device and device.type == "cuda"
        self.held: Held | None = None
        self._before = held
        self._receiver = receiver
        self._dropped = threading.Event()
        self._tensors: list[tuple[str, Tensor]] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._done: Future[None] = self._thread.submit(self._read)
        self._done.add_done_callback(_let_go)
        self._thread.shutdown(wait=False)

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """How far it is, after at most so many seconds: `{"state": "reading"}`, `{"state": "failed", "why", "unsent"}` or `{"state": "ready", "place", "seconds"}`.

        `unsent`: it is the sender's doing, and may succeed another time."""
        if not wait_for_futures([self._done], timeout=seconds).done:
            return {"state": "reading"}
        if (error := self._done.exception(timeout=0)) is not None:
            return {
                "state": "failed",
                "why": str(error) or type(error).__name__,
                "unsent": isinstance(error, PairError),
            }
        return {"state": "ready", "place": self.place, "seconds": self.seconds}

    def wait(self, seconds: float) -> None:
        """Until everything is read.

        Raises:
            UserError: it is not, after so many seconds.
            Exception: what reading it failed with.
        """
        try:
            self._done.result(timeout=seconds)
        except FutureTimeout as error:
            if self._done.done():
                raise
            raise UserError(f"{self.directory} could not be read within {seconds:.0f} s") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What was read, in the order of the files, each with its name in them. Nothing where it was kept nowhere."""
        yield from self._tensors

    def drop(self) -> None:
        """Stop reading, and give the memory back: at once, or when the block at hand is read."""
        self._dropped.set()
        self._tensors = []

    def _read(self) -> None:
        """In the thread."""
        with _short_turns():
            self._read_all()

    def _read_all(self) -> None:
        began = time.perf_counter()
        manifest = weights_manifest(self.directory)
        if manifest.hash != self.digest:
            raise CommitError(f"{self.directory} holds {manifest.hash[:12]}, not {self.digest[:12]}")
        if manifest.sender is not None:
            tensors = self._receive(manifest)
        elif manifest.delta is None:
            self._before = None
            tensors = self._read_parts(manifest)
        else:
            tensors = self._read_held(manifest)
        self.seconds = time.perf_counter() - began
        self._tensors = tensors
        if self._dropped.is_set():  # meanwhile
            self._tensors = []

    def _read_parts(self, manifest: WeightsManifest) -> list[tuple[str, Tensor]]:
        """A version that is there in full."""
        parts = lay_out(manifest.files)
        self.place = self._choose(sum(part.size for part in parts))
        if self.place == "nowhere" and not self._verify:
            return []
        return self._read_into(manifest, parts, self._make_buffers(parts), [partial(OfFile, part) for part in parts])

    def _read_held(self, manifest: WeightsManifest) -> list[tuple[str, Tensor]]:
        """One of those that tell changes: brought about in the host's memory, where it is held for the next one."""
        before, self._before = self._before, None
        links = chain(manifest, None if before is None else before.hash)
        changes: list[WeightsManifest]
        if before is not None and before.hash == manifest.hash:
            changes = []  # the same once more
        elif links[-1].builds_on is not None:
            changes = links
        else:
            *changes, full = links
            before = None  # before there is another one
            before = self._begin(full)
        if not self._keep or before is None:
            if self._verify:
                check_tensors(manifest, hash_version(manifest))
            return []
        _side_by_side(partial(self._apply, changes), zip(before.parts, before.data, strict=True))
        buffers: list[Tensor | None] = []
        if self._on_device(before.size):
            self.place = "device"
            buffers = self._make_buffers(before.parts)
        if self.place != "device":  # or somebody else took the GPU's memory
            self.place = "host"
            buffers = [torch.from_numpy(data) for data in before.data]
        tensors = self._read_into(manifest, before.parts, buffers, [partial(OfMemory, data) for data in before.data])
        self.held = Held(manifest.hash, before.parts, before.data)
        return tensors

    def _begin(self, full: WeightsManifest) -> Held | None:
        """A version that is there in full, in the host's memory; None where there is no room."""
        parts = lay_out(full.files)
        if not self._keep or SPARE * self._sharing * sum(part.size for part in parts) > available_bytes():
            return None
        return Held(full.hash, parts, _side_by_side(self._read_bytes, zip(parts)))

    def _read_bytes(self, part: Part) -> Bytes:
        data = empty_on_host(part.size)
        copy_blocks(part.size, OfFile(part, Stretch(0, part.size, [])), InPlace(data), self._go_on)
        return data

    def _apply(self, changes: Sequence[WeightsManifest], part: Part, data: Bytes) -> None:
        self._go_on()
        apply_changes(changes, part.path.name, data, {piece.name: (piece.start, piece.end) for piece in part.pieces})

    def _receive(self, manifest: WeightsManifest) -> list[tuple[str, Tensor]]:
        """A version that was never written: from the trainer's sender."""
        self._before, self.received = None, True
        if self._receiver is None:
            raise CommitError(never_written(self.directory))
        sent = self._receiver.source(manifest)
        self.place = self._choose(sum(part.size for part in sent.parts))
        if self.place == "nowhere":
            why = "there is no memory here to receive them" if self._keep else "inference.stage_weights is off"
            raise UserError(f"{never_written(self.directory)}, and {why}")
        buffers = self._make_buffers(sent.parts)
        if sent.from_gpu and self.place == "device":
            return self._views_of(manifest, sent.parts, buffers, self._receive_on_gpu(sent, buffers))
        sources = [partial(sent.source, part) for part in sent.parts]
        return self._read_into(manifest, sent.parts, buffers, sources, sent.at_once)

    def _receive_on_gpu(self, sent: "Sent", buffers: "Sequence[Tensor | None]") -> list[list[bytes]]:
        """From GPU to GPU, and hashed as it lies there: a file's tensors while the next ones arrive."""

        def receive(part: Part, buffer: Tensor) -> Tensor:
            sent.receive_on_gpu(part, buffer, self._go_on)
            return buffer

        def check(stretch: Stretch, buffer: Tensor) -> list[bytes]:
            arrived = Arrived(buffer[stretch.start : stretch.end], self._stream)
            return self._read_stretch(stretch, arrived, arrived)

        with _threads(sent.at_once) as receiving, _threads(THREADS) as hashing:
            arriving = [_submit(receiving, receive, *each) for each in zip(sent.parts, buffers, strict=True)]
            checked = []
            for part, future in zip(sent.parts, arriving, strict=True):
                buffer = future.result()  # bounded: as in `_threads`
                checked += [_submit(hashing, check, stretch, buffer) for stretch in cut(part)]
            return [future.result() for future in checked]  # bounded: as in `_threads`

    def _read_into(
        self,
        manifest: WeightsManifest,
        parts: Sequence[Part],
        buffers: "Sequence[Tensor | None]",
        sources: "Sequence[Callable[[Stretch], Source]]",
        at_once: int | None = None,
    ) -> list[tuple[str, Tensor]]:
        """Each file's tensors from what makes a source of a stretch of it."""

        def read(stretch: Stretch, source: Callable[[Stretch], Source], buffer: Tensor | None) -> list[bytes]:
            return self._read_stretch(stretch, source(stretch), self._sink(stretch, buffer))

        every = zip(parts, sources, buffers, strict=True)
        each = [(stretch, source, buffer) for part, source, buffer in every for stretch in cut(part)]
        return self._views_of(manifest, parts, buffers, _side_by_side(read, each, at_once=at_once))

    def _views_of(
        self,
        manifest: WeightsManifest,
        parts: Sequence[Part],
        buffers: "Sequence[Tensor | None]",
        digests: Sequence[list[bytes]],
    ) -> list[tuple[str, Tensor]]:
        """The tensors, whose chunks were found to have these hashes.

        Raises:
            CommitError: they are not the version's.
        """
        pieces = [(part.path.name, piece) for part in parts for piece in part.pieces]
        hashes = of_tensors(
            (piece.end - piece.start for _, piece in pieces), (digest for group in digests for digest in group)
        )
        found = {
            piece.name: TensorEntry(file, piece.dtype, piece.shape, value)
            for (file, piece), value in zip(pieces, hashes, strict=True)
        }
        check_tensors(manifest, found)
        return [each for part, buffer in zip(parts, buffers, strict=True) for each in _views(part, buffer)]

    def _on_device(self, size: int) -> bool:
        return self._may_use_device and SPARE * size <= torch.cuda.mem_get_info(self._device)[0]

    def _go_on(self) -> None:
        if self._dropped.is_set():
            raise Dropped(f"{self.directory} is not wanted any more")

    def _choose(self, size: int) -> Place:
        if not self._keep:
            return "nowhere"
        if self._on_device(size):
            return "device"
        return "host" if SPARE * size * self._sharing <= available_bytes() else "nowhere"

    def _make_buffers(self, parts: Sequence[Part]) -> "list[Tensor | None]":
        if self.place == "device":
            try:
                return [empty_on_device(part.size, self._stream) for part in parts]
            except torch.OutOfMemoryError:  # somebody else took it
                self.place = "host"
        if self.place == "host":
            return [torch.from_numpy(empty_on_host(part.size)) for part in parts]
        return [None for _ in parts]

    def _sink(self, stretch: Stretch, buffer: Tensor | None) -> Sink:
        if buffer is None:
            return Nowhere()
        there = buffer[stretch.start : stretch.end]
        return OnDevice(there, self._stream) if there.is_cuda else InPlace(there.numpy())

    def _read_stretch(self, stretch: Stretch, source: "Source", sink: Sink) -> list[bytes]:
        """The hashes of its chunks."""
        digests = [xxhash.xxh3_128() for _ in stretch.pieces]
        see = partial(_hash, stretch.pieces, digests)
        copy_blocks(stretch.end - stretch.start, source, sink, self._go_on, see)
        return [digest.digest() for digest in digests]


@contextmanager
def _short_turns() -> Iterator[None]:
    """Give the interpreter to a waiting thread sooner. By default that takes 5 ms, three times a block: longer than to read and to hash it.

    Who finds turns that are short leaves them alone: where two versions are read at a time the end of the first ends it for both."""
    before = sys.getswitchinterval()
    if before <= TURN_SECONDS:
        yield
        return
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def tensors_of(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version that tells changes, one file after the other built from those that it builds on.

    Raises:
        CommitError: one of those is gone.
    """
    manifest = weights_manifest(directory)
    parts = {part.path.name: part for part in lay_out(chain(manifest)[-1].files)}
    for file, data in read_files(manifest):
        yield from _views(parts[file], torch.from_numpy(data[parts[file].offset :]))


def _side_by_side(work: Callable[..., T], each: Iterable[tuple[Any, ...]], *, at_once: int | None = None) -> list[T]:
    """`work` with each of these arguments, several at once."""
    with _threads(at_once or THREADS) as threads:
        futures = [_submit(threads, work, *arguments) for arguments in each]
        return [future.result() for future in futures]  # bounded: as in `_threads`


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """So many threads. What has not begun when the block ends, with a failure, is not begun."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="stage")
    try:
        yield threads
    finally:
        # Whoever waits for a version drops it in the end, and then each stops at its next block.
        threads.shutdown(cancel_futures=True)  # bounded: see above


def _submit(threads: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> "Future[T]":
    future = threads.submit(work, *args)
    future.add_done_callback(_let_go)
    return future


def _hash(pieces: Sequence[tuple[int, int]], digests: Sequence[Any], block: memoryview, at: int) -> None:
    """Go on with the hashes of those pieces that `block`, which begins at byte `at`, has bytes of."""
    end = at + len(block)
    for index in range(bisect_right(pieces, at, key=lambda piece: piece[1]), len(pieces)):
        first, last = pieces[index]
        if first >= end:
            break
        digests[index].update(block[max(first, at) - at : min(last, end) - at])


def _let_go(done: "Future[Any]") -> None:
    """A failure remembers what its functions held: all that was read, until somebody collects garbage."""
    error = None if done.cancelled() else done.exception(timeout=0)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _views(part: Part, buffer: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors within a file's bytes; one that lies askew of its type is copied."""
    if buffer is None:
        return
    for piece in part.pieces:
        data, dtype = buffer[piece.start : piece.end], DTYPES[piece.dtype]
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()
            if data.is_cuda:
                torch.cuda.synchronize(data.device)  # cloned on another stream than it will be used on
        yield piece.name, data.view(dtype).view(piece.shape)
