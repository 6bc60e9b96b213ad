"""The files of a model directory that a trainer exports: which tensor lies where, and what is there beside the tensors."""

import json
import math
import mmap
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from prime_rl.trainer.names import StoredTensor
from prime_rl.trainer.source import Source
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.weights import TensorEntry, version_hash

FILE = "model.safetensors"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_COPIED = {
    "manifest.json",
    "model.safetensors.index.json",
}  # the first is ours when the source is a committed version itself
FILE_BYTES = 256 << 20  # a file of weights holds more only where one tensor does
_LEAST_FILE_BYTES = 64 << 20
_FILES = 16  # of a small model, or more: of those who write to one file the kernel lets one in at a time


@dataclass(frozen=True)
class Slot:
    """A tensor's place: its file, the first byte there, and how many."""

    file: str
    shape: list[int]
    start: int
    size: int


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
    before = 0  # bytes of all groups before this one
    for number, group in enumerate(groups, 1):
        file = FILE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        ends = list(accumulate(size_of[tensor.name] for tensor in group))
        headers[file] = header = _header(dtype, group, ends, before)
        for tensor, end in zip(group, ends, strict=True):
            size = size_of[tensor.name]
            slots[tensor.name] = Slot(file, tensor.shape, len(header) + end - size, size)
        before += ends[-1]
    return headers, slots


def _header(dtype: torch.dtype, tensors: Sequence[StoredTensor], ends: Sequence[int], before: int) -> bytes:
    """Padded so that the tensors have the same places within a page in the file as in the buffer of a single rank, where they begin at `before`: page
    after page is copied as a whole."""
    described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    for tensor, start, end in zip(tensors, [0, *ends], ends, strict=False):
        described[tensor.name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * ((before // 8 * 8 - len(text) - 8) % mmap.PAGESIZE)
    return struct.pack("<Q", len(text)) + text


def allocate(directory: Path, headers: dict[str, bytes], slots: dict[str, Slot]) -> None:
    sizes = {slot.file: slot.start + slot.size for slot in slots.values()}  # the last tensor of a file ends it
    for file, header in headers.items():
        path = directory / file
        with disk_errors(path), open(path, "wb") as opened:
            opened.write(header)
            opened.truncate(sizes[file])


def file_hashes(tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """A file's hash is that of its tensors' hashes."""
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        files.setdefault(entry.file, {})[name] = entry
    return {file: version_hash(entries) for file, entries in files.items()}


def write_index(directory: Path, slots: dict[str, Slot]) -> None:
    """Which file holds which tensor, where there are several."""
    if len({slot.file for slot in slots.values()}) > 1:
        path = directory / "model.safetensors.index.json"
        total = sum(slot.size for slot in slots.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: slot.file for name, slot in slots.items()}}
        with disk_errors(path):
            path.write_text(json.dumps(index, indent=1) + "\n")


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
