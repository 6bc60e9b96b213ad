"""Where the bytes of a version come from and where they go, block by block: files, memory, a GPU."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from prime_rl.transport.commit import CommitError, open_file
from prime_rl.transport.delta import Bytes
from prime_rl.transport.tensor_hash import chunks, stretches
from prime_rl.transport.weights import read_header

BLOCK_BYTES = 16 << 20
"""Read, hashed and copied at once: few turns with the interpreter, and two of them a thread are page-locked."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


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


class Stretch(NamedTuple):
    """What one thread reads of a file: its data from byte `start` to `end`, where `pieces`, chunks of tensors with a hash each, lie: from byte to byte of
    the stretch."""

    start: int
    end: int
    pieces: list[tuple[int, int]]


def cut(part: Part) -> list[Stretch]:
    """All of a file. What lies between its tensors belongs to the stretch before it."""
    pieces = [
        (piece.start + start, piece.start + end)
        for piece in part.pieces
        for start, end in chunks(piece.end - piece.start)
    ]
    groups = [pieces[first:last] for first, last in stretches([end - start for start, end in pieces])]
    bounds = pairwise(
        [0, *(group[0][0] for group in groups[1:]), part.size]
    )  # one, and no group, where there is no tensor
    return [
        Stretch(first, last, [(start - first, end - first) for start, end in group])
        for group, (first, last) in zip(groups, bounds, strict=False)
    ]


class Sink(Protocol):
    """Where bytes go, block by block: read into `block`, then tell by `filled`."""

    def block(self, at: int, count: int) -> memoryview: ...
    def filled(self, at: int, count: int) -> None: ...
    def finish(self) -> None: ...


def copy_blocks(
    size: int,
    source: "Source",
    sink: Sink,
    go_on: Callable[[], None],
    see: Callable[[memoryview, int], None] = lambda block, at: None,
) -> None:
    """So many bytes, block by block. `go_on` may raise between two of them; `see` is shown each."""
    with source:
        for at in range(0, size, BLOCK_BYTES):
            go_on()
            block = sink.block(at, min(BLOCK_BYTES, size - at))
            source.fill(block, at)
            see(block, at)
            sink.filled(at, len(block))
        sink.finish()


class Source(Protocol):
    """Where the bytes of a stretch come from, block by block; `at` counts from its beginning."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exc: object) -> None: ...
    def fill(self, block: memoryview, at: int) -> None: ...


class OfFile:
    def __init__(self, part: Part, stretch: Stretch) -> None:
        self._path, self._offset = part.path, part.offset + stretch.start

    def __enter__(self) -> None:
        self._file = open_file(self._path)

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def fill(self, block: memoryview, at: int) -> None:
        _fill(block, self._file.fileno(), self._offset + at, self._path)


class OfMemory:
    def __init__(self, data: Bytes, stretch: Stretch) -> None:
        self._data = data[stretch.start : stretch.end]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass

    def fill(self, block: memoryview, at: int) -> None:
        into = np.frombuffer(block, np.uint8)
        if not np.may_share_memory(into, self._data):
            into[:] = self._data[at : at + len(block)]


class InPlace:
    """Memory of the host, which may hold the bytes already."""

    def __init__(self, data: Bytes) -> None:
        self._bytes = data.data

    def block(self, at: int, count: int) -> memoryview:
        return self._bytes[at : at + count]

    def filled(self, at: int, count: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Nowhere:
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


def empty_on_host(size: int) -> Bytes:
    """Memory for so many bytes."""
    return np.empty(size, np.uint8)


def empty_on_device(size: int, stream: Any) -> Tensor:
    """Memory for so many bytes, beside the engine's stream.

    Raises:
        torch.OutOfMemoryError: there is none.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        return torch.empty(size, dtype=torch.uint8, device=stream.device)


class OnDevice:
    """Into memory there, through two page-locked blocks by turns, on a stream of their own: the engine's goes on."""

    def __init__(self, buffer: Tensor, stream: Any) -> None:
        self._buffer, self._stream = buffer, stream
        self._blocks: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0

    def block(self, at: int, count: int) -> memoryview:
        if not self._blocks:  # in the thread that reads: no more are needed than there are threads
            self._blocks, self._copied = _page_locked(self._stream.device)
        self._copied[self._turn].synchronize()
        return self._blocks[self._turn].numpy().data[:count]

    def filled(self, at: int, count: int) -> None:
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._buffer[at : at + count].copy_(self._blocks[self._turn][:count], non_blocking=True)
            self._copied[self._turn].record(self._stream)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        for copied in self._copied:
            copied.synchronize()
        self._blocks = []


def _page_locked(device: torch.device) -> tuple[list[Tensor], list[torch.cuda.Event]]:
    """Two blocks to copy from and to by turns, and when each was last copied. torch keeps such blocks for the next version."""
    with torch.cuda.device(device):
        blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        return blocks, [torch.cuda.Event(blocking=True) for _ in range(2)]


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
