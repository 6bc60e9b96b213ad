"""The files of a version: which tensor lies where in them, and how the ranks write, flush and hash them beside the steps that follow.

Nothing is gathered. A safetensors file is a header and byte ranges, and a tensor that is sharded by rows is one contiguous range per rank: each rank
writes its own.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import xxhash

from prime_rl.host_memory import local_ranks
from prime_rl.trainer.names import StoredTensor
from prime_rl.trainer.source import Source
from prime_rl.transport.commit import CommitError, disk_errors
from prime_rl.transport.tensor_hash import chunks, of_chunks
from prime_rl.transport.weights import INDEX, TensorEntry, version_hash

FILE = "model.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FILE_BYTES = 256 << 20  # a file holds more only where one tensor does
_LEAST_FILE_BYTES = 64 << 20
_FILES = 16  # of a small model, or more: of those who write to one file the kernel lets one in at a time
_THREADS = 8  # at most
_BLOCK = 1 << 24  # bytes read at once
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_COPIED = {"manifest.json", INDEX}  # the first is ours when the source is a committed version itself

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """A tensor's place: its file, the first byte there, and how many."""

    file: str
    shape: list[int]
    start: int
    size: int


class Range(NamedTuple):
    """Bytes `start` to `end` of a host buffer, and where they belong in the file."""

    start: int
    end: int
    offset: int


def layout(tensors: Sequence[StoredTensor], dtype: torch.dtype) -> tuple[dict[str, bytes], dict[str, Slot]]:
    """The safetensors header of every file with its length, and the place of every tensor."""
    size_of = {tensor.name: math.prod(tensor.shape) * dtype.itemsize for tensor in tensors}
    most = min(FILE_BYTES, max(sum(size_of.values()) // _FILES, _LEAST_FILE_BYTES))
    groups: list[list[StoredTensor]] = [[]]
    taken = 0  # bytes of the last group
    for tensor in tensors:
        if groups[-1] and taken + size_of[tensor.name] > most:
            groups.append([])
            taken = 0
        groups[-1].append(tensor)
        taken += size_of[tensor.name]
    headers, slots = {}, {}
    for number, group in enumerate(groups, 1):
        file = FILE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        ends = list(accumulate(size_of[tensor.name] for tensor in group))
        headers[file] = header = _header(dtype, group, ends)
        for tensor, end in zip(group, ends, strict=True):
            size = size_of[tensor.name]
            slots[tensor.name] = Slot(file, tensor.shape, len(header) + end - size, size)
    return headers, slots


def _header(dtype: torch.dtype, tensors: Sequence[StoredTensor], ends: Sequence[int]) -> bytes:
    described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    for tensor, start, end in zip(tensors, [0, *ends], ends, strict=False):
        described[tensor.name] = {"dtype": DTYPE_NAMES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def allocate(directory: Path, headers: Mapping[str, bytes], slots: Mapping[str, Slot]) -> None:
    """Make the files, with headers and of their full size, and their index where there are several."""
    sizes = {slot.file: slot.start + slot.size for slot in slots.values()}  # the last tensor of a file ends it
    with disk_errors(directory):
        for file, header in headers.items():
            with open(directory / file, "wb") as opened:
                opened.write(header)
                opened.truncate(sizes[file])
        if len(headers) > 1:
            total = sum(slot.size for slot in slots.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: slot.file for name, slot in slots.items()},
            }
            (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def write_ranges(buffer: memoryview, directory: Path, files: Mapping[str, Sequence[Range]]) -> None:
    """Write ranges of a host buffer into files that are there already, and have them on the disk.

    Raises:
        OSError: with the path of the file.
    """

    def write(file: str) -> None:
        path = os.fspath(directory / file)
        try:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                for start, end, offset in files[file]:
                    while start < end:  # one call writes at most 2 GiB
                        written = os.pwrite(descriptor, buffer[start:end], offset)
                        start, offset = start + written, offset + written
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error

    _side_by_side([partial(write, file) for file in files])


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in as few ranges as possible: a single rank's file is one."""
    found: list[Range] = []
    for start, end, offset in ranges:
        if found and found[-1].end == start and found[-1].offset + found[-1].end - found[-1].start == offset:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(Range(start, end, offset))
    return found


def hash_files(directory: Path, slots: Mapping[str, Slot]) -> dict[str, str]:
    """The xxh3-128 of tensors as they lie there: what was written is read again, so that every rank's bytes are seen to have arrived.

    Raises:
        OSError: a file cannot be read, or ends too soon.
    """

    def hash_chunk(path: Path, start: int, end: int) -> bytes:
        digest = xxhash.xxh3_128()
        with open(path, "rb") as file:
            file.seek(start)
            while start < end:
                data = file.read(min(_BLOCK, end - start))
                if not data:
                    raise CommitError(f"{path} ends at byte {start} of {end}")
                digest.update(data)
                start += len(data)
        return digest.digest()

    tasks = [
        partial(hash_chunk, directory / slot.file, slot.start + first, slot.start + last)
        for slot in slots.values()
        for first, last in chunks(slot.size)
    ]
    digests = iter(_side_by_side(tasks))
    return {name: of_chunks([next(digests) for _ in chunks(slot.size)]) for name, slot in slots.items()}


def file_hashes(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """A file's hash in the manifest is that of its tensors' hashes."""
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        files.setdefault(entry.file, {})[name] = entry
    return {file: version_hash(entries) for file, entries in files.items()}


def copy_model_files(source: Source, directory: Path, dtype: torch.dtype) -> None:
    """Config, generation config and tokenizer beside the tensors."""
    with disk_errors(directory):
        if source.directory is not None:
            for pattern in _COPIED:
                for path in source.directory.glob(pattern):
                    if path.name not in _NOT_COPIED:
                        shutil.copyfile(path, directory / path.name)
        else:
            source.config.save_pretrained(directory)
        config = directory / "config.json"
        described = json.loads(config.read_text())
        described.pop("torch_dtype", None)  # the older spelling
        described["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(described, indent=2) + "\n")


def _side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Several at once: the disk and xxh3 run without the interpreter."""
    threads = min(max((os.cpu_count() or 1) // local_ranks() - 4, 2), _THREADS, len(tasks))
    if threads < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(threads, thread_name_prefix="export") as pool:  # bounded: by the disk, as one would be
        return list(pool.map(lambda task: task(), tasks))
