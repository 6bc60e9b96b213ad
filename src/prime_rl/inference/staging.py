"""Reading a committed version into memory beside generation, so that the engine only stops for moving it from memory into the model.

A worker reads every file once: the bytes that are hashed are the bytes that are loaded. They are kept on the GPU where it has room beside the
engine, else in the host's memory, else not at all: then the engine reads the files itself, after they have been hashed, while it is paused.
"""

import math
import os
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.transport.commit import CommitError
from prime_rl.transport.delta import Bytes
from prime_rl.transport.line import PairError
from prime_rl.transport.weights import (
    TensorEntry,
    WeightsManifest,
    apply_changes,
    chain,
    check_tensors,
    hash_version,
    never_written,
    read_files,
    read_header,
    weights_manifest,
)

if TYPE_CHECKING:
    from prime_rl.inference.receiving import Receiver

T = TypeVar("T")
Place = Literal["device", "host", "nowhere"]

# Files at once: the largest is read by one thread, the others beside it. A worker shares its cores, and the interpreter with the engine.
THREADS = min(max(len(os.sched_getaffinity(0)) // 2, 4), 8)
TURN_SECONDS = 1e-4  # that the engine may keep the interpreter from a thread that has read a block and asks for it
BLOCK_BYTES = (
    16 << 20
)  # read, hashed and copied at once: few turns with the interpreter, and two of them a thread are page-locked
SPARE = 2  # free memory is this many times what is kept there, at least: others need some, too
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class Dropped(Exception):
    """Nobody wants what is being read any more."""


class Piece(NamedTuple):
    """A tensor's bytes in a file, counted from where the file's data begin."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int


@dataclass(frozen=True)
class Part:
    """One file: its data begin at byte `offset`; `pieces` lie there one after the other and end within `size` bytes."""

    path: Path
    offset: int
    size: int
    pieces: list[Piece]


class Sink(Protocol):
    """Where a file's bytes go, block by block: read into `block`, then tell by `filled`. `buffer` holds them all, if anything does."""

    buffer: Tensor | None

    def block(self, at: int, count: int) -> memoryview: ...
    def filled(self, at: int, count: int) -> None: ...
    def finish(self) -> None: ...


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
        return self._read_into(manifest, parts, self._make_sinks(parts), [_OfFile(part) for part in parts])

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
        apply = partial(self._apply, changes)
        _side_by_side(apply, before.parts, before.data)
        on_device = self._on_device(before.size)
        self.place = "device" if on_device else "host"
        in_place: list[Sink] = [_InPlace(data) for data in before.data]
        sinks = self._make_sinks(before.parts) if on_device else in_place
        if self.place == "host":  # somebody else took the GPU's memory
            sinks = in_place
        tensors = self._read_into(manifest, before.parts, sinks, [_OfMemory(data) for data in before.data])
        self.held = Held(manifest.hash, before.parts, before.data)
        return tensors

    def _begin(self, full: WeightsManifest) -> Held | None:
        """A version that is there in full, in the host's memory; None where there is no room."""
        parts = lay_out(full.files)
        if not self._keep or SPARE * self._sharing * sum(part.size for part in parts) > available_bytes():
            return None
        return Held(full.hash, parts, _side_by_side(self._read_bytes, parts))

    def _read_bytes(self, part: Part) -> Bytes:
        data = np.empty(part.size, np.uint8)
        _copy(part, _OfFile(part), _InPlace(data), self._go_on)
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
        return self._read_into(manifest, sent.parts, self._make_sinks(sent.parts), sent.sources, sent.at_once)

    def _read_into(
        self,
        manifest: WeightsManifest,
        parts: Sequence[Part],
        sinks: "Sequence[Sink]",
        sources: "Sequence[Source]",
        at_once: int | None = None,
    ) -> list[tuple[str, Tensor]]:
        found = _side_by_side(self._read_part, parts, sinks, sources, at_once=at_once)
        check_tensors(manifest, {name: entry for entries in found for name, entry in entries.items()})
        return [each for part, sink in zip(parts, sinks, strict=True) for each in _views(part, sink.buffer)]

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

    def _make_sinks(self, parts: Sequence[Part]) -> "list[Sink]":
        if self.place == "device":
            try:
                return [_OnDevice(part.size, self._device, self._stream) for part in parts]
            except torch.OutOfMemoryError:  # somebody else took it
                self.place = "host"
        if self.place == "host":
            return [_InPlace(np.empty(part.size, np.uint8)) for part in parts]
        return [_Nowhere() for _ in parts]

    def _read_part(self, part: Part, sink: Sink, source: "Source") -> dict[str, TensorEntry]:
        digests = [xxhash.xxh3_128() for _ in part.pieces]
        _copy(part, source, sink, self._go_on, lambda block, at: _hash(part.pieces, digests, block, at))
        return {
            piece.name: TensorEntry(part.path.name, piece.dtype, piece.shape, digest.hexdigest())
            for piece, digest in zip(part.pieces, digests, strict=True)
        }


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


def _side_by_side(work: Callable[..., T], *items: Sequence[Any], at_once: int | None = None) -> list[T]:
    """`work` on each of the items, several at once."""
    threads = ThreadPoolExecutor(at_once or THREADS, thread_name_prefix="stage")
    with threads:  # it ends: whoever waits for a version drops it in the end, and then each stops at its next block
        return list(threads.map(work, *items))


def _copy(
    part: Part,
    source: "Source",
    sink: Sink,
    go_on: Callable[[], None],
    see: Callable[[memoryview, int], None] = lambda block, at: None,
) -> None:
    """Block by block. `go_on` may raise between two of them; `see` is shown each."""
    with source:
        for at in range(0, part.size, BLOCK_BYTES):
            go_on()
            block = sink.block(at, min(BLOCK_BYTES, part.size - at))
            source.fill(block, at)
            see(block, at)
            sink.filled(at, len(block))
        sink.finish()


class Source(Protocol):
    """Where a file's bytes come from, block by block; `at` counts from where its data begin."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> None: ...
    def fill(self, block: memoryview, at: int) -> None: ...


class _OfFile:
    def __init__(self, part: Part) -> None:
        self._part = part

    def __enter__(self) -> None:
        self._descriptor = os.open(self._part.path, os.O_RDONLY)

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def fill(self, block: memoryview, at: int) -> None:
        _fill(block, self._descriptor, self._part.offset + at, self._part.path)


class _OfMemory:
    def __init__(self, data: Bytes) -> None:
        self._data = data

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass

    def fill(self, block: memoryview, at: int) -> None:
        into = np.frombuffer(block, np.uint8)
        if not np.may_share_memory(into, self._data):
            into[:] = self._data[at : at + len(block)]


class _InPlace:
    """Memory of the host, which may hold the bytes already."""

    def __init__(self, data: Bytes) -> None:
        self.buffer: Tensor | None = torch.from_numpy(data)
        self._bytes = data.data

    def block(self, at: int, count: int) -> memoryview:
        return self._bytes[at : at + count]

    def filled(self, at: int, count: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Nowhere:
    buffer: Tensor | None = None

    def __init__(self) -> None:
        self._scratch = bytearray()

    def block(self, at: int, count: int) -> memoryview:
        if len(self._scratch) < count:
            self._scratch = bytearray(count)
        return memoryview(self._scratch)[:count]

    def filled(self, at: int, count: int) -> None:
        pass

    def finish(self) -> None:
        self._scratch = bytearray()


class _OnDevice:
    """Through two page-locked blocks by turns, on a stream of their own: the engine's goes on. torch keeps such blocks for the next version."""

    def __init__(self, size: int, device: torch.device, stream: Any) -> None:
        self._device, self._stream = device, stream
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self.buffer: Tensor | None = torch.empty(size, dtype=torch.uint8, device=device)
        self._blocks: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def block(self, at: int, count: int) -> memoryview:
        if not self._blocks:  # in the thread that reads: no more are needed than there are threads
            with torch.cuda.device(self._device):
                self._blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._copied[self._turn].synchronize()
        return self._blocks[self._turn].numpy().data[:count]

    def filled(self, at: int, count: int) -> None:
        assert self.buffer is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self.buffer[at : at + count].copy_(self._blocks[self._turn][:count], non_blocking=True)
            self._copied[self._turn].record(self._stream)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        for copied in self._copied:
            copied.synchronize()
        self._blocks = []


def lay_out(directory: Path) -> list[Part]:
    """The files of a version and what lies where in them.

    Raises:
        CommitError: a file is truncated, malformed, or holds a tensor that cannot be: of an unknown type, of another size than its shape
            says, or one that overlaps another.
    """
    parts = []
    for path in sorted(directory.glob("*.safetensors")):
        header, offset = read_header(path)
        pieces = sorted(_pieces(header, path), key=lambda piece: (piece.start, piece.end))
        for before, after in pairwise(pieces):
            if after.start < before.end:
                raise CommitError(f"{path}: tensor {after.name} overlaps {before.name}")
        parts.append(Part(path, offset, pieces[-1].end if pieces else 0, pieces))
    return parts


def _pieces(header: Mapping[str, Any], path: Path) -> Iterator[Piece]:
    for name, entry in header.items():
        piece = Piece(name, entry["dtype"], entry["shape"], *entry["data_offsets"])
        if piece.dtype not in DTYPES:
            raise CommitError(f"{path}: tensor {name} is of type {piece.dtype}, which cannot be loaded")
        if piece.start < 0 or piece.end - piece.start != math.prod(piece.shape) * DTYPES[piece.dtype].itemsize:
            raise CommitError(f"{path}: tensor {name} has {piece.end - piece.start} bytes, not what its shape says")
        yield piece


def _fill(block: memoryview, descriptor: int, offset: int, path: Path) -> None:
    done = 0
    while done < len(block):
        count = os.preadv(descriptor, [block[done:]], offset + done)
        if not count:
            raise CommitError(f"{path} ended while it was read")
        done += count


def _hash(pieces: Sequence[Piece], digests: Sequence[Any], block: memoryview, at: int) -> None:
    """Go on with the hashes of those pieces that `block`, which begins at byte `at`, has bytes of."""
    end = at + len(block)
    for index in range(bisect_right(pieces, at, key=lambda piece: piece.end), len(pieces)):
        piece = pieces[index]
        if piece.start >= end:
            break
        digests[index].update(block[max(piece.start, at) - at : min(piece.end, end) - at])


def _let_go(done: "Future[None]") -> None:
    """A failure remembers what its functions held: all that was read, until somebody collects garbage."""
    if (error := done.exception(timeout=0)) is not None:
        traceback.clear_frames(error.__traceback__)


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
