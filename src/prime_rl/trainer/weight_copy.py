"""Copies of the weights in the exported dtype, made between two steps: the loop goes on, and what is done with a copy is done beside it.

`RowCopies`: each rank's own rows in host memory, to be written into files. `GatheredCopy`: whole tensors on rank 0, gathered layer by layer, to be
published from its GPU or its host memory.
"""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.trainer.names import StoredTensor, local_rows, stored_tensors
from prime_rl.trainer.parallel import World
from prime_rl.trainer.weight_files import DTYPE_NAMES, Range, joined, layout
from prime_rl.transport.exchange import layout as buffer_layout
from prime_rl.transport.exchange import shared_buffer
from prime_rl.transport.weights import TensorEntry

CHUNK_BYTES = 128 << 20  # of device memory that casting takes, or more, so that there are at most so many chunks:
CHUNKS = 48
"""A GPU takes about 55 copies into its queue; whoever hands over one more waits for it. Measured: with 60 chunks of a 4B model the loop stood still until
the step before was done, and the GPU after that."""
STAGING_SHARE = 0.25
"""Of the host's available memory, two buffers take at most this much."""
DEVICE_SHARE = 1 / 8
"""Of the GPU's memory, the published copy takes at most this much; a larger one lies in host memory."""


@dataclass(frozen=True)
class Copy:
    """A copy into a buffer, which a stream of the GPU may still be at."""

    buffer: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    host_seconds: float = 0.0

    def before_update(self) -> None:
        """Let the device change the weights only after they are copied. The host does not wait."""
        if self.events is not None:
            torch.cuda.current_stream().wait_event(self.events[1])

    def finish(self) -> float:
        """Wait until all is there. Returns the seconds that it took. Any thread may."""
        if self.events is None:
            return self.host_seconds
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3


def _event(stream: Any) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event


def _by_parameter(tensors: Sequence[StoredTensor]) -> Iterator[tuple[nn.Parameter, list[StoredTensor]]]:
    for _, group in groupby(tensors, key=lambda tensor: id(tensor.parameter)):
        of_parameter = list(group)
        yield of_parameter[0].parameter, of_parameter


class RowCopies:
    """This rank's rows of every stored tensor, in the exported dtype, in host buffers that are made once and filled by turns.

    Attributes:
        count: Buffers: with two of them a version may be copied while the one before it is still being written.
        files: What of a buffer belongs where in which file.
    """

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype, self.count = world, dtype, 1
        self.tensors = list(stored_tensors(policy))
        self.headers, self.slots = layout(self.tensors, dtype)
        self.file_bytes = sum(slot.size for slot in self.slots.values())
        self.files: dict[str, list[Range]] = {}
        self._parameters: list[nn.Parameter] = []
        self._ends: list[int] = []  # of this rank's rows of each parameter in the buffer, in elements
        if world.writes:
            self._lay_out()
        self._elements = self._ends[-1] if self._ends else 0
        self._buffers: list[memoryview] = []
        self._filled: list[Tensor] = []
        self._locked: list[Tensor] = []
        self._copies = 0
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device)
            self._chunk = torch.empty(0, dtype=dtype, device=world.device)

    def _lay_out(self) -> None:
        """The tensors of a parameter lie one after the other, as their rows do in the parameter: it is copied as a whole."""
        at, itemsize = 0, self.dtype.itemsize
        for parameter, tensors in _by_parameter(self.tensors):
            for tensor in tensors:
                (rows, first), slot = tensor.local(self.world), self.slots[tensor.name]
                if rows.numel():
                    offset = slot.start + first * (slot.size // slot.shape[0])
                    end = at + rows.numel()
                    self.files.setdefault(slot.file, []).append(Range(at * itemsize, end * itemsize, offset))
                    at = end
            self._parameters.append(parameter)
            self._ends.append(at)
        self.files = {file: joined(ranges) for file, ranges in self.files.items()}
        names, first = list(self.files), self.world.rank * len(self.files) // max(self.world.size, 1)
        # Ranks that start at different files do not wait for each other.
        self.files = {name: self.files[name] for name in names[first:] + names[:first]}

    def affords_two(self) -> bool:
        """Whether the host has memory for a second buffer beside what else is needed there."""
        size = self._elements * self.dtype.itemsize
        on_gpu = self.world.device.type == "cuda"
        return on_gpu and 2 * local_ranks() * size <= STAGING_SHARE * available_bytes()

    def allocate(self) -> None:
        """Make the buffers. Page-locking gigabytes takes seconds: a thread may do it beforehand.

        Raises:
            UserError: the host has no such memory.
        """
        if self._filled:
            return
        size = self._elements * self.dtype.itemsize
        try:
            self._buffers = [memoryview(mmap.mmap(-1, max(size, 1)))[:size] for _ in range(self.count)]
        except OSError as error:
            raise UserError(
                f"no {self.count * size:,} bytes of host memory for the weights ({error.strerror})"
            ) from error
        filled = [
            torch.frombuffer(buffer, dtype=self.dtype) if size else torch.empty(0, dtype=self.dtype)
            for buffer in self._buffers
        ]
        if self.world.device.type == "cuda" and size:
            with torch.cuda.device(self.world.device):  # a thread does not know it
                self._lock(filled)
        self._filled = filled

    def _lock(self, buffers: Sequence[Tensor]) -> None:
        """Exactly so many bytes: torch's own allocator of page-locked memory would round up to a power of two."""
        for buffer in buffers:
            failed = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
            if failed:
                logger.warning(
                    "host memory for exports cannot be page-locked (CUDA error {}): exports will be slow", failed
                )
                return
            self._locked.append(buffer)

    @torch.no_grad()
    def copy(self) -> Copy:
        """Copy the weights as they are now. On a GPU this only enqueues: see `Copy.before_update`."""
        self.allocate()
        index = self._copies % self.count
        buffer = self._filled[index]
        if self.world.device.type != "cuda":
            began = time.perf_counter()
            for parameter, start, end in zip(self._parameters, [0, *self._ends], self._ends, strict=False):
                buffer[start:end].copy_(self._local(parameter))
            self._copies += 1
            return Copy(index, None, time.perf_counter() - began)
        size = min(max(CHUNK_BYTES // self.dtype.itemsize, -(-self._elements // CHUNKS)), self._elements)
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):
            began_event = _event(self._stream)
            if not self._chunk.numel():
                self._chunk = torch.empty(size, dtype=self.dtype, device=self.world.device)
            for first in range(0, self._elements, max(size, 1)):
                chunk = self._chunk[: min(size, self._elements - first)]
                self._cast(first, chunk)
                buffer[first : first + len(chunk)].copy_(chunk, non_blocking=True)
            ended = _event(self._stream)
        self._copies += 1  # not where something failed: the other buffer may still be read
        return Copy(index, (began_event, ended))

    def _cast(self, first: int, chunk: Tensor) -> None:
        """Fill a chunk, which begins at element `first` of the buffer."""
        into, rows = [], []
        for parameter, start, end in zip(self._parameters, [0, *self._ends], self._ends, strict=False):
            low, high = max(start, first), min(end, first + len(chunk))
            if low < high:
                into.append(chunk[low - first : high - first])
                rows.append(self._local(parameter)[low - start : high - start])
        torch._foreach_copy_(into, rows)

    def _local(self, parameter: nn.Parameter) -> Tensor:
        return local_rows(parameter, self.world)[0].reshape(-1)

    def bytes_of(self, copied: Copy) -> memoryview:
        """What `files` speaks of. The copy must have finished."""
        return self._buffers[copied.buffer]

    def close(self) -> None:
        """Nothing may be copying into the buffers any more."""
        for buffer in self._locked:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._filled, self._locked, self._buffers = [], [], []


class GatheredCopy:
    """Whole tensors on rank 0, in one buffer on its GPU, or in host memory where they take more than a share of the GPU.

    Attributes:
        tensors: Name, dtype and shape of each, in the order of the buffer; `places`, of `size` bytes in all.
        handle: Opens the buffer for other processes on this GPU, if they can.
        lock: Held while the buffer is written to, or read to be written to files.
    """

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.stored = list(stored_tensors(policy))
        self.tensors = {
            tensor.name: TensorEntry("", DTYPE_NAMES[dtype], list(tensor.shape), "") for tensor in self.stored
        }
        self.headers, self.slots = layout(self.stored, dtype)
        self.places, self.size = buffer_layout(self.tensors)
        self.lock = threading.Lock()  # bounded: held for a copy between device and host
        self.buffer: Tensor | None = None
        self.handle: str | None = None

    def allocate(self) -> None:
        """Rank 0 makes the buffer."""
        if not self.world.is_main or self.buffer is not None:
            return
        device = self.world.device
        if device.type == "cuda" and on_device(self.size, device):
            self.buffer, self.handle = shared_buffer(self.size, device)
        else:
            self.buffer = torch.zeros(self.size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    @torch.no_grad()
    def copy(self) -> Copy:
        """Gather the weights as they are now, layer by layer; every rank calls it. On a GPU this only enqueues, in the order of the training's own work."""
        self.allocate()
        stream = torch.cuda.current_stream(self.world.device) if self.world.device.type == "cuda" else None
        began, began_event = time.perf_counter(), None if stream is None else _event(stream)
        if self.world.writes:  # the others hold replicas of the same rows
            with self.lock:
                for parameter, tensors in _by_parameter(self.stored):
                    self._take(self._whole(parameter), tensors)
        if stream is None or began_event is None:
            return Copy(0, None, time.perf_counter() - began)
        return Copy(0, (began_event, _event(stream)))

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter.detach()
        if self.world.shards == 1:
            return parameter.to_local().detach()
        # Cast before it travels.
        local = parameter.to_local().detach().to(self.dtype)
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        ).full_tensor()

    def _take(self, whole: Tensor, tensors: Sequence[StoredTensor]) -> None:
        if self.buffer is None:
            return
        for tensor in tensors:
            start, size = self.places[tensor.name]
            into = self.buffer[start : start + size].view(self.dtype).view(tensor.shape)
            value = whole if tensor.expert is None else whole[tensor.expert.index, tensor.expert.rows]
            into.copy_(value, non_blocking=True)

    def to_host(self) -> Tensor:
        """A copy of the buffer in host memory, on rank 0. Any thread may ask for it, once the copy has finished."""
        assert self.buffer is not None
        if not self.buffer.is_cuda:
            with self.lock:
                return self.buffer.clone()
        host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(self.buffer.device), torch.cuda.stream(torch.cuda.Stream(self.buffer.device)):
            with self.lock:
                host.copy_(self.buffer)
        return host

    def ranges(self) -> dict[str, list[Range]]:
        """What of the buffer belongs where in which file."""
        files: dict[str, list[Range]] = {}
        for name, slot in self.slots.items():
            start, size = self.places[name]
            files.setdefault(slot.file, []).append(Range(start, start + size, slot.start))
        return files


def on_device(size: int, device: torch.device) -> bool:
    """Whether a copy of so many bytes is published from the GPU's own memory."""
    return device.type == "cuda" and size <= DEVICE_SHARE * torch.cuda.get_device_properties(device).total_memory
