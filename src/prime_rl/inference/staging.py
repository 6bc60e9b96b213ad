"""Reading a committed version into memory beside generation, so that the engine only stops for moving it from memory into the model.

A worker reads every file once: the bytes that are hashed are the bytes that are loaded. They are kept on the GPU where it has room beside the
engine, else in the host's memory, else not at all: then the engine reads the files itself, after they have been hashed, while it is paused.
"""

import math
import os
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes
from prime_rl.transport.commit import CommitError
from prime_rl.transport.pairs import PairError
from prime_rl.transport.weights import (
    TensorEntry,
    WeightsManifest,
    check_tensors,
    never_written,
    read_header,
    weights_manifest,
)

if TYPE_CHECKING:
    from prime_rl.inference.receiving import Receiver

Place = Literal["device", "host", "nowhere"]

THREADS = 4  # files at once; a worker shares its cores, and the interpreter with the engine
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


class Source(Protocol):
    """Where a version's bytes come from: `open` a part, and fill one block after the other with it, each from byte `at` of the part on."""

    parts: list[Part]
    at_once: int

    def open(self, part: Part) -> AbstractContextManager[Callable[[memoryview, int], None]]: ...


class Staging:
    """One version that a thread reads for this worker, from its construction on. `drop` it, or what it holds stays.

    Args:
        directory: A committed version.
        digest: The hash that it must have.
        device: Of the model.
        keep: Whether to keep what is read, where there is room.
        verify: Whether to read it all the same where there is none. One worker of an engine does.
        sharing: Workers that share the host's memory.
        receiver: Gets what was never written from the trainer; such a version has to be kept.

    Attributes:
        place: Where it is kept.
        received: Whether it was never written.
    """

    def __init__(
        self, directory: Path, digest: str, device: torch.device, *, keep: bool = True, verify: bool = True, sharing: int = 1,
        receiver: "Receiver | None" = None,
    ) -> None:  # fmt: skip
        self.directory, self.digest = directory, digest
        self.place: Place = "nowhere"
        self.received = False
        self.seconds = 0.0
        self._device, self._keep, self._verify, self._sharing = device, keep, verify, sharing
        self._receiver = receiver
        self._dropped = threading.Event()
        self._tensors: list[tuple[str, Tensor]] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._done: Future[None] = self._thread.submit(self._read)
        self._done.add_done_callback(_let_go)
        self._thread.shutdown(wait=False)

    def answer(self) -> dict[str, Any]:
        """How far it is: `{"state": "reading"}`, `{"state": "failed", "why", "unsent"}` or `{"state": "ready", "place", "seconds"}`.

        `unsent`: it is the sender's doing, and may succeed another time."""
        if not self._done.done():
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
        began = time.perf_counter()
        manifest = weights_manifest(self.directory)
        if manifest.hash != self.digest:
            raise CommitError(f"{self.directory} holds {manifest.hash[:12]}, not {self.digest[:12]}")
        self.received = manifest.sender is not None
        source = self._sent(manifest) if self.received else _Files(self.directory)
        parts = source.parts
        self.place = self._choose(sum(part.size for part in parts))
        if self.place == "nowhere" and self.received:
            why = "there is no memory here to receive them" if self._keep else "inference.stage_weights is off"
            raise UserError(f"{never_written(self.directory)}, and {why}")
        if self.place == "nowhere" and not self._verify:
            return
        sinks = self._make_sinks(parts)
        threads = ThreadPoolExecutor(source.at_once, thread_name_prefix="stage")
        with threads:
            found = list(threads.map(partial(self._read_part, source), parts, sinks))
        check_tensors(manifest, {name: entry for entries in found for name, entry in entries.items()})
        tensors = [each for part, sink in zip(parts, sinks, strict=True) for each in _views(part, sink.buffer)]
        self.seconds = time.perf_counter() - began
        self._tensors = tensors
        if self._dropped.is_set():  # meanwhile
            self._tensors = []

    def _choose(self, size: int) -> Place:
        if not self._keep:
            return "nowhere"
        if self._device.type == "cuda" and SPARE * size <= torch.cuda.mem_get_info(self._device)[0]:
            return "device"
        return "host" if SPARE * size * self._sharing <= available_bytes() else "nowhere"

    def _make_sinks(self, parts: Sequence[Part]) -> "list[Sink]":
        if self.place == "device":
            try:
                return [_OnDevice(part.size, self._device, self._stream) for part in parts]
            except torch.OutOfMemoryError:  # somebody else took it
                self.place = "host"
        if self.place == "host":
            return [_OnHost(part.size) for part in parts]
        return [_Nowhere() for _ in parts]

    def _sent(self, manifest: WeightsManifest) -> "Source":
        if self._receiver is None:
            raise CommitError(never_written(self.directory))
        return self._receiver.source(manifest)

    def _read_part(self, source: "Source", part: Part, sink: Sink) -> dict[str, TensorEntry]:
        digests = [xxhash.xxh3_128() for _ in part.pieces]
        with source.open(part) as fill:
            for at in range(0, part.size, BLOCK_BYTES):
                if self._dropped.is_set():
                    raise Dropped(f"{self.directory} is not wanted any more")
                block = sink.block(at, min(BLOCK_BYTES, part.size - at))
                fill(block, at)
                _hash(part.pieces, digests, block, at)
                sink.filled(at, len(block))
            sink.finish()
        return {
            piece.name: TensorEntry(part.path.name, piece.dtype, piece.shape, digest.hexdigest())
            for piece, digest in zip(part.pieces, digests, strict=True)
        }


class _OnHost:
    def __init__(self, size: int) -> None:
        self.buffer: Tensor | None = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._bytes = self.buffer.numpy().data

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


class _Files:
    """The files of a committed version."""

    at_once = THREADS

    def __init__(self, directory: Path) -> None:
        self.parts = lay_out(directory)

    @contextmanager
    def open(self, part: Part) -> Iterator[Callable[[memoryview, int], None]]:
        descriptor = os.open(part.path, os.O_RDONLY)
        try:
            yield lambda block, at: _fill(block, descriptor, part.offset + at, part.path)
        finally:
            os.close(descriptor)


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
