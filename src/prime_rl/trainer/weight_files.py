"""Safetensors files of a version: where each tensor lies, and how the ranks write and hash them.

Nothing is gathered. A safetensors file is a header and byte ranges, and a tensor that is sharded by rows is one
contiguous range per rank: each rank writes its own.
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
from typing import Any, NamedTuple, TypeVar

import torch

from prime_rl.host_memory import local_ranks
from prime_rl.trainer.parameters import StoredTensor
from prime_rl.trainer.source import Source
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.weights import INDEX, hash_tensors

FILE = "model.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FILE_BYTES = 256 << 20  # a file holds more only if one tensor does
_LEAST_FILE_BYTES = 64 << 20
_FILES = 16  # of a small model, or more: the kernel lets one thread at a time write to a file
_THREADS = 8  # at most
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_COPIED = {"manifest.json", INDEX}  # there if the source is a committed version itself

T = TypeVar("T")


@dataclass(frozen=True)
class Slot:
    """A tensor's place: its file, its first byte there, and its size in bytes."""

    file: str
    start: int
    size: int


class Range(NamedTuple):
    """Bytes `start` to `end` of a host buffer, and their offset in the file."""

    start: int
    end: int
    offset: int


def layout(tensors: Sequence[StoredTensor], dtype: torch.dtype) -> tuple[dict[str, bytes], dict[str, Slot]]:
    """The safetensors header of every file, with its length in front, and the place of every tensor."""
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
        described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        for tensor, start, end in zip(group, [0, *ends], ends, strict=False):
            described[tensor.name] = {"dtype": DTYPE_NAMES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        for tensor, start, end in zip(group, [0, *ends], ends, strict=False):
            slots[tensor.name] = Slot(file, len(headers[file]) + start, end - start)
    return headers, slots


def allocate(directory: Path, headers: Mapping[str, bytes], slots: Mapping[str, Slot]) -> None:
    """Create the files in their full size, with headers, and their index if there are several."""
    sizes = {slot.file: slot.start + slot.size for slot in slots.values()}  # the last tensor of a file ends it
    with disk_errors(directory):
        for file, header in headers.items():
            with open(directory / file, "wb") as opened:
                opened.write(header)
                opened.truncate(sizes[file])
        if len(headers) > 1:
            total = sum(slot.size for slot in slots.values())
            weight_map = {name: slot.file for name, slot in slots.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def write_ranges(buffer: memoryview, directory: Path, files: Mapping[str, Sequence[Range]]) -> None:
    """Write ranges of a host buffer into files that exist already, and sync these. UserError if the disk is full."""

    def write(file: str) -> None:
        path = os.fspath(directory / file)
        try:
            with open(path, "r+b", buffering=0) as opened:
                for start, end, offset in files[file]:
                    while start < end:  # one call writes at most 2 GiB
                        written = os.pwrite(opened.fileno(), buffer[start:end], offset)
                        start, offset = start + written, offset + written
                os.fsync(opened.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error

    with disk_errors(directory):
        _in_threads([partial(write, file) for file in files])


def hash_files(directory: Path, files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read files back, to see that the bytes of every rank have arrived; the fields of each tensor's `TensorEntry`."""
    with disk_errors(directory):
        hashed = _in_threads([partial(hash_tensors, directory / file) for file in files])
    return {name: vars(entry) for tensors in hashed for name, entry in tensors.items()}


def copy_model_files(source: Source, directory: Path, dtype: torch.dtype) -> None:
    """Copy config, generation config and tokenizer into a version's directory."""
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


def _in_threads(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run several tasks at a time: the disk and xxh3 do not hold the interpreter."""
    threads = min(max((os.cpu_count() or 1) // local_ranks() - 4, 2), _THREADS, len(tasks))
    if threads < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(threads, thread_name_prefix="export") as pool:  # bounded: by the disk
        return list(pool.map(lambda task: task(), tasks))
