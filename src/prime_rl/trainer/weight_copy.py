"""Copies of the weights in the exported dtype, taken between two steps and read beside the next one, and their files.

`RowCopies`: each rank's own rows in host memory, to be written into files. Nothing is gathered: a safetensors file is a
header and byte ranges, and a tensor that is sharded by rows is one contiguous range per rank; each rank writes its own.
`GatheredCopy`: whole tensors on rank 0, gathered layer by layer, published from its GPU or its host memory.
"""

import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.errors import UserError
from prime_rl.host_memory import local_ranks
from prime_rl.trainer.parallel import Moment, World, now, page_lock, seconds
from prime_rl.trainer.parameters import StoredTensor, local_rows, stored_tensors
from prime_rl.trainer.source import Source
from prime_rl.transport.commit import UNSYNCED_BYTES, disk_errors
from prime_rl.transport.exchange import layout, shared_buffer
from prime_rl.transport.weights import INDEX, TensorEntry, TensorRange, hash_tensors

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK_BYTES = 128 << 20  # of device memory that casting takes, or more, so that there are at most so many chunks:
CHUNKS = 48
"""A GPU queues about 55 copies; enqueueing one more blocks. With 60 chunks (4B model) the loop stood still until the
step before was done, and the GPU after that."""
DEVICE_SHARE = 1 / 8
"""Of the GPU's memory, the published copy takes at most this much; a larger one lies in host memory."""
FILE_BYTES = 256 << 20  # a file holds more only if one tensor does
_LEAST_FILE_BYTES = 64 << 20
_FILES = 16  # of a small model, or more: the kernel lets one thread at a time write to a file
_THREADS = 8  # at most
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_COPIED = {"manifest.json", INDEX}  # present if the source is a committed version itself

T = TypeVar("T")


class Range(NamedTuple):
    """Bytes `start` to `end` of a host buffer, and their offset in the file."""

    start: int
    end: int
    offset: int


class Copy(NamedTuple):
    """When a copy began and ended: moments of the device, which may still be making it."""

    began: Moment = 0.0
    ended: Moment = 0.0

    def before_update(self) -> None:
        """Have the device change the weights only after they are copied. The host does not wait."""
        if not isinstance(self.ended, float):
            torch.cuda.current_stream().wait_event(self.ended)

    def finish(self) -> float:
        """Wait until the copy is complete; return the seconds that it took. May be called in any thread."""
        if not isinstance(self.ended, float):
            self.ended.synchronize()
        return seconds(self.began, self.ended)


def _by_parameter(tensors: Sequence[StoredTensor]) -> Iterator[tuple[nn.Parameter, list[StoredTensor]]]:
    for _, group in groupby(tensors, key=lambda tensor: id(tensor.parameter)):
        of_parameter = list(group)
        yield of_parameter[0].parameter, of_parameter


class RowCopies:
    """This rank's rows of every stored tensor, in the exported dtype, in one host `buffer`.

    Attributes:
        files: The ranges of the buffer that belong into each file.
    """

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.tensors = list(stored_tensors(policy))
        self.headers, self.slots = file_layout(self.tensors, dtype)
        files: dict[str, list[Range]] = {}
        self._rows: list[tuple[nn.Parameter, int, int]] = []  # parameter, start and end of its rows in elements
        end = 0
        for parameter, tensors in _by_parameter(self.tensors) if world.writes else ():
            start = end
            for tensor in tensors:  # in the order of their rows in the parameter
                (rows, first), slot = tensor.local(world), self.slots[tensor.name]
                if rows.numel():
                    first_byte, end = end * dtype.itemsize, end + rows.numel()
                    offset = slot.start + first * (slot.size // tensor.shape[0])
                    files.setdefault(slot.entry.file, []).append(Range(first_byte, end * dtype.itemsize, offset))
            self._rows.append((parameter, start, end))
        self._elements = end
        # Ranks that start at different files do not wait for each other.
        names, first = list(files), world.rank * len(files) // world.size
        self.files = {name: files[name] for name in names[first:] + names[:first]}
        self.buffer = torch.empty(0, dtype=dtype)
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device)
            self._chunk = torch.empty(0, dtype=dtype, device=world.device)

    def allocate(self) -> None:
        """Make the buffer. Pinning gigabytes takes seconds: a thread may do it beforehand."""
        if self.buffer.numel() == self._elements:
            return
        try:
            self.buffer = torch.empty(self._elements, dtype=self.dtype)
        except RuntimeError as error:
            size = self._elements * self.dtype.itemsize
            raise UserError(f"no {size:,} bytes of host memory for the weights") from error
        if self.world.device.type == "cuda":
            with torch.cuda.device(self.world.device):  # a new thread has another one
                failed = page_lock(self.buffer, owner=self)
            if failed:
                logger.warning("host memory for exports cannot be pinned (CUDA error {}): exports are slow", failed)

    @torch.no_grad()
    def copy(self) -> Copy:
        """Copy the weights as they are now. On a GPU this only enqueues: see `Copy.before_update`."""
        self.allocate()
        if self.world.device.type != "cuda":
            began = now(self.world.device)
            self._cast(0, self.buffer)
            return Copy(began, now(self.world.device))
        size = min(max(CHUNK_BYTES // self.dtype.itemsize, -(-self._elements // CHUNKS)), self._elements)
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):
            began = now(self.world.device)
            if not self._chunk.numel():
                self._chunk = torch.empty(size, dtype=self.dtype, device=self.world.device)
            for first in range(0, self._elements, max(size, 1)):
                chunk = self._chunk[: min(size, self._elements - first)]
                self._cast(first, chunk)
                self.buffer[first : first + len(chunk)].copy_(chunk, non_blocking=True)
            return Copy(began, now(self.world.device))

    def _cast(self, first: int, chunk: Tensor) -> None:
        """Fill a chunk that begins at element `first` of the buffer."""
        into, values = [], []
        for parameter, start, end in self._rows:
            low, high = max(start, first), min(end, first + len(chunk))
            if low < high:
                into.append(chunk[low - first : high - first])
                values.append(local_rows(parameter, self.world)[0].reshape(-1)[low - start : high - start])
        if into:
            torch._foreach_copy_(into, values)


class GatheredCopy:
    """Whole tensors on rank 0, in one buffer on its GPU, or in host memory if they are a large share of the GPU's.

    Attributes:
        tensors: Name, dtype and shape of each, in the order of the buffer; `ranges` in it, `size` bytes in all.
        files: The ranges of the buffer that belong into each file.
        handle: Opens the buffer for other processes on this GPU, if the driver can.
    """

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.stored = list(stored_tensors(policy))
        self.headers, self.slots = file_layout(self.stored, dtype)
        self.tensors = {name: replace(slot.entry, file="") for name, slot in self.slots.items()}
        self.ranges, self.size = layout(self.tensors)
        self.files: dict[str, list[Range]] = {}
        for name, slot in self.slots.items():
            start, size = self.ranges[name]
            self.files.setdefault(slot.entry.file, []).append(Range(start, start + size, slot.start))
        self._lock = threading.Lock()  # bounded: held for a copy between device and host
        self.buffer = torch.empty(0, dtype=torch.uint8)  # stays empty on the other ranks
        self.handle: str | None = None

    def allocate(self) -> None:
        """Make the buffer, on rank 0."""
        device = self.world.device
        if not self.world.is_main or self.buffer.numel():
            return
        if on_device(self.size, device):
            self.buffer, self.handle = shared_buffer(self.size, device)
        else:
            self.buffer = torch.zeros(self.size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    @torch.no_grad()
    def copy(self) -> Copy:
        """Gather the weights as they are now, layer by layer; every rank calls it.

        On a GPU this only enqueues, in the order of the training's own work.
        """
        self.allocate()
        began = now(self.world.device)
        if self.world.writes:  # the others hold replicas of the same rows
            with self._lock:
                for parameter, tensors in _by_parameter(self.stored):
                    self._take(self._whole(parameter), tensors)
        return Copy(began, now(self.world.device))

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter.detach()
        if self.world.shards == 1:
            return parameter.to_local().detach()
        local = parameter.to_local().detach().to(self.dtype)  # cast before it travels
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        ).full_tensor()

    def _take(self, whole: Tensor, tensors: Sequence[StoredTensor]) -> None:
        for tensor in tensors if self.world.is_main else ():
            start, size = self.ranges[tensor.name]
            into = self.buffer[start : start + size].view(self.dtype).view(tensor.shape)
            value = whole if tensor.expert is None else whole[tensor.expert.index, tensor.expert.rows]
            into.copy_(value, non_blocking=True)

    def to_host(self) -> Tensor:
        """Copy the buffer to host memory, on rank 0. May be called in any thread, once the copy has finished."""
        if not self.buffer.is_cuda:
            with self._lock:
                return self.buffer.clone()
        host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(self.buffer.device), torch.cuda.stream(torch.cuda.Stream(self.buffer.device)):
            with self._lock:
                host.copy_(self.buffer)
        return host


def on_device(size: int, device: torch.device) -> bool:
    """Whether a copy of so many bytes is published from the GPU's own memory."""
    return device.type == "cuda" and size <= DEVICE_SHARE * torch.cuda.get_device_properties(device).total_memory


# ---- files


def file_layout(tensors: Sequence[StoredTensor], dtype: torch.dtype) -> tuple[dict[str, bytes], dict[str, TensorRange]]:
    """Return the safetensors header of every file, with its length in front, and the slot of every tensor."""
    sizes = {tensor.name: math.prod(tensor.shape) * dtype.itemsize for tensor in tensors}
    limit = min(FILE_BYTES, max(sum(sizes.values()) // _FILES, _LEAST_FILE_BYTES))
    groups: list[list[tuple[StoredTensor, int, int]]] = [[]]  # a file's tensors, from byte to byte of its data
    end = 0
    for tensor in tensors:
        if groups[-1] and end + sizes[tensor.name] > limit:
            groups.append([])
            end = 0
        start, end = end, end + sizes[tensor.name]
        groups[-1].append((tensor, start, end))
    headers: dict[str, bytes] = {}
    slots: dict[str, TensorRange] = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        described: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        for tensor, start, end in group:
            described[tensor.name] = {"dtype": DTYPE_NAMES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        for tensor, start, end in group:
            entry = TensorEntry(file, DTYPE_NAMES[dtype], list(tensor.shape), "")
            slots[tensor.name] = TensorRange(entry, len(headers[file]) + start, len(headers[file]) + end)
    return headers, slots


def allocate_files(directory: Path, headers: Mapping[str, bytes], slots: Mapping[str, TensorRange]) -> None:
    """Create the files in their full size, with headers, and their index if there are several."""
    sizes = {slot.entry.file: slot.stop for slot in slots.values()}  # the last tensor of a file ends it
    with disk_errors(directory):
        for file, header in headers.items():
            with open(directory / file, "wb") as opened:
                opened.write(header)
                opened.truncate(sizes[file])
        if len(headers) > 1:
            total = sum(slot.size for slot in slots.values())
            weight_map = {name: slot.entry.file for name, slot in slots.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def write_ranges(buffer: Tensor, directory: Path, files: Mapping[str, Sequence[Range]]) -> None:
    """Write ranges of a host buffer into files that exist already, and sync these. UserError if the disk is full."""
    data = buffer.view(torch.uint8).numpy().data

    def write(file: str) -> None:
        path, unsynced = (directory / file).resolve(), 0
        with disk_errors(path), open(path, "r+b", buffering=0) as opened:
            for start, end, offset in files[file]:
                while start < end:
                    written = os.pwrite(opened.fileno(), data[start : min(end, start + UNSYNCED_BYTES)], offset)
                    start, offset, unsynced = start + written, offset + written, unsynced + written
                    if unsynced >= UNSYNCED_BYTES:
                        os.fdatasync(opened.fileno())
                        unsynced = 0
            os.fsync(opened.fileno())

    _in_threads([partial(write, file) for file in files])


def hash_files(directory: Path, files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read files back, to see that the bytes of every rank have arrived; the fields of each tensor's `TensorEntry`."""
    with disk_errors(directory):
        hashed = _in_threads([partial(hash_tensors, directory / file) for file in files])
    return {name: vars(entry) for tensors in hashed for name, entry in tensors.items()}


def copy_model_files(source: Source, directory: Path, dtype: torch.dtype) -> None:
    """Copy config, generation config and tokenizer into a version's directory."""
    with disk_errors(directory):
        if source.directory is None:
            source.config.save_pretrained(directory)
        else:
            for path in (path for pattern in _COPIED for path in source.directory.glob(pattern)):
                if path.name not in _NOT_COPIED:
                    shutil.copyfile(path, directory / path.name)
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
