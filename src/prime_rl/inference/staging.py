"""Reading a committed version into memory beside generation, so that the engine only stops for moving it from memory into the model.

A worker reads every file once: the bytes that are hashed are the bytes that are loaded. They are kept on the GPU where it has room beside the
engine, and hashed there; else in the host's memory, else not at all: then the engine reads the files itself, after they have been hashed, while it is
paused.
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
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import xxhash
from loguru import logger
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.inference.blocks import (
    DTYPES,
    InPlace,
    Nowhere,
    OfFile,
    OfMemory,
    OnDevice,
    Part,
    Piece,
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
from prime_rl.transport.tensor_hash import chunks, of_tensors
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
ALIGNMENT = 512  # bytes, as torch's own allocator has it
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
        self._blocks = 0  # a sign of progress: threads may count over each other
        self._tensors: list[tuple[str, Tensor]] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._done: Future[None] = self._thread.submit(self._read)
        self._done.add_done_callback(_let_go)
        self._thread.shutdown(wait=False)

    def answer(self, seconds: float = 0.0) -> dict[str, Any]:
        """How far it is, after at most so many seconds: `{"state": "reading", "blocks"}`, `{"state": "failed", "why", "unsent"}` or `{"state": "ready", "place", "seconds"}`.

        `unsent`: it is the sender's doing, and may succeed another time."""
        if not wait_for_futures([self._done], timeout=seconds).done:
            return {"state": "reading", "blocks": self._blocks}
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
                check_tensors(manifest, hash_version(manifest, self._go_on))
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
        sent.meet(on_device=self.place == "device")
        try:
            return self._receive_into(manifest, sent, buffers)
        except CommitError as error:
            logger.warning("{}: asking for it once more, as it may have been spoilt on its way", error)
            return self._receive_into(manifest, sent, buffers)

    def _receive_into(
        self, manifest: WeightsManifest, sent: "Sent", buffers: "Sequence[Tensor | None]"
    ) -> list[tuple[str, Tensor]]:
        """Raises CommitError where it is not what the manifest says."""
        if sent.from_gpu:
            return self._receive_on_gpu(manifest, sent, [buffer for buffer in buffers if buffer is not None])
        sources = [partial(sent.source, part) for part in sent.parts]
        return self._read_into(manifest, sent.parts, buffers, sources, sent.at_once)

    def _receive_on_gpu(
        self, manifest: WeightsManifest, sent: "Sent", buffers: Sequence[Tensor]
    ) -> list[tuple[str, Tensor]]:
        """From GPU to GPU, or from one memory of a GPU to another."""
        receive = partial(sent.receive_on_gpu, go_on=self._go_on)
        with _threads(sent.at_once) as threads:
            arriving = [_submit(threads, receive, group) for group in sent.groups(buffers)]
            return self._finish(manifest, sent.parts, buffers, arriving)

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
            return self._read_stretch(stretch, source(stretch), buffer)

        every = zip(parts, sources, buffers, strict=True)
        with _threads(at_once or THREADS) as threads:
            reading = [
                _submit(threads, read, stretch, source, buffer)
                for part, source, buffer in every
                for stretch in cut(part)
            ]
            return self._finish(manifest, parts, buffers, reading)

    def _finish(
        self,
        manifest: WeightsManifest,
        parts: Sequence[Part],
        buffers: "Sequence[Tensor | None]",
        reading: "Sequence[Future[Any]]",
    ) -> list[tuple[str, Tensor]]:
        """The tensors, once all that is being read is there; each future of it says the hashes of its chunks, or nothing where they lie on the GPU.

        Raises:
            CommitError: they are not the version's.
        """
        pieces = [(part, piece, buffer) for part, buffer in zip(parts, buffers, strict=True) for piece in part.pieces]
        tensors = {  # beforehand: the engine waits for what is done after the last byte, and shares the interpreter
            piece.name: _tensor(piece, buffer)
            for _, piece, buffer in pieces
            if buffer is not None and not _is_askew(piece, buffer)
        }
        there = [chunk for _, piece, buffer in pieces for chunk in _chunks_on_device(piece, buffer)]
        read = [future.result() for future in reading]  # bounded: as in `_threads`
        digests = self._hash_there(there) if there else [digest for group in read for digest in group]
        hashes = of_tensors((piece.end - piece.start for _, piece, _ in pieces), digests)
        found = {
            piece.name: TensorEntry(part.path.name, piece.dtype, piece.shape, value)
            for (part, piece, _), value in zip(pieces, hashes, strict=True)
        }
        check_tensors(manifest, found)
        return [
            (piece.name, tensors[piece.name] if piece.name in tensors else _tensor(piece, buffer))
            for _, piece, buffer in pieces
            if buffer is not None
        ]

    def _hash_there(self, chunks_there: Sequence[Tensor]) -> list[bytes]:
        from prime_rl.transport import device_hash

        assert self._stream is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return device_hash.digests(chunks_there)

    def _on_device(self, size: int) -> bool:
        if not self._may_use_device or SPARE * size > torch.cuda.mem_get_info(self._device)[0]:
            return False
        from prime_rl.transport import device_hash  # imports Triton, which a CPU has no use for

        with torch.cuda.stream(self._stream):
            return device_hash.works_on(self._device)

    def _go_on(self) -> None:
        if self._dropped.is_set():
            raise Dropped(f"{self.directory} is not wanted any more")
        self._blocks += 1

    def _choose(self, size: int) -> Place:
        if not self._keep:
            return "nowhere"
        if self._on_device(size):
            return "device"
        return "host" if SPARE * size * self._sharing <= available_bytes() else "nowhere"

    def _make_buffers(self, parts: Sequence[Part]) -> "list[Tensor | None]":
        if self.place == "device":
            try:
                return _split(empty_on_device(sum(_room(part.size) for part in parts), self._stream), parts)
            except torch.OutOfMemoryError:  # somebody else took it
                self.place = "host"
        if self.place == "host":
            return [torch.from_numpy(empty_on_host(part.size)) for part in parts]
        return [None for _ in parts]

    def _read_stretch(self, stretch: Stretch, source: Source, buffer: Tensor | None) -> list[bytes]:
        """The hashes of its chunks; nothing where it is on the GPU, and hashed there."""
        there = None if buffer is None else buffer[stretch.start : stretch.end]
        count = stretch.end - stretch.start
        if there is not None and there.is_cuda:
            copy_blocks(count, source, OnDevice(there, self._stream), self._go_on)
            return []
        digests = [xxhash.xxh3_128() for _ in stretch.pieces]
        see = partial(_hash, stretch.pieces, digests)
        copy_blocks(count, source, Nowhere() if there is None else InPlace(there.numpy()), self._go_on, see)
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
        buffer = torch.from_numpy(data[parts[file].offset :])
        yield from ((piece.name, _tensor(piece, buffer)) for piece in parts[file].pieces)


def _side_by_side(work: Callable[..., T], each: Iterable[tuple[Any, ...]]) -> list[T]:
    """`work` with each of these arguments, several at once."""
    with _threads(THREADS) as threads:
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


def _room(size: int) -> int:
    """For so many bytes, so that what comes after them is aligned as well."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _split(memory: Tensor, parts: Sequence[Part]) -> "list[Tensor | None]":
    """Of one allocation, a buffer for each file."""
    starts = accumulate((_room(part.size) for part in parts), initial=0)
    return [memory[start : start + part.size] for start, part in zip(starts, parts, strict=False)]


def _chunks_on_device(piece: Piece, buffer: Tensor | None) -> list[Tensor]:
    """What of a tensor is hashed by itself, where that is on a GPU."""
    if buffer is None or not buffer.is_cuda:
        return []
    return [buffer[piece.start + start : piece.start + end] for start, end in chunks(piece.end - piece.start)]


def _is_askew(piece: Piece, buffer: Tensor) -> bool:
    """Whether a tensor does not lie as its type asks for."""
    return bool((buffer.data_ptr() + piece.start) % DTYPES[piece.dtype].itemsize)


def _tensor(piece: Piece, buffer: Tensor) -> Tensor:
    """One that lies within a file's bytes, or a copy where it lies askew there."""
    data = buffer[piece.start : piece.end]
    if _is_askew(piece, buffer):
        data = data.clone()
        if data.is_cuda:
            torch.cuda.synchronize(data.device)  # cloned on another stream than it will be used on
    return data.view(DTYPES[piece.dtype]).view(piece.shape)
