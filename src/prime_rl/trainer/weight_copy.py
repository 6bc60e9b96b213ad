"""Copies of the weights in the exported dtype, taken between two steps and read beside the next one.

`RowCopies`: each rank's own rows in host memory, to be written into files. `GatheredCopy`: whole tensors on rank 0,
gathered layer by layer, to be published from its GPU or its host memory.
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
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import StoredTensor, local_rows, stored_tensors
from prime_rl.trainer.weight_files import DTYPE_NAMES, Range, layout
from prime_rl.transport.exchange import layout as buffer_layout
from prime_rl.transport.exchange import shared_buffer
from prime_rl.transport.weights import TensorEntry

CHUNK_BYTES = 128 << 20  # of device memory that casting takes, or more, so that there are at most so many chunks:
CHUNKS = 48
"""A GPU queues about 55 copies; enqueueing one more blocks. With 60 chunks (4B model) the loop stood still until the
step before was done, and the GPU after that."""
DEVICE_SHARE = 1 / 8
"""Of the GPU's memory, the published copy takes at most this much; a larger one lies in host memory."""


@dataclass(frozen=True)
class Copy:
    """A copy that a stream of the GPU may still be making."""

    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    host_seconds: float = 0.0

    def before_update(self) -> None:
        """Have the device change the weights only after they are copied. The host does not wait."""
        if self.events is not None:
            torch.cuda.current_stream().wait_event(self.events[1])

    def finish(self) -> float:
        """Wait until the copy is complete; return the seconds that it took. May be called in any thread."""
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
    """This rank's rows of every stored tensor, in the exported dtype, in one host `buffer`."""

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.tensors = list(stored_tensors(policy))
        self.headers, self.slots = layout(self.tensors, dtype)
        self.file_bytes = sum(slot.size for slot in self.slots.values())
        self.files: dict[str, list[Range]] = {}  # which ranges of the buffer belong into which file
        self._parameters: list[nn.Parameter] = []
        self._ends: list[int] = []  # of this rank's rows of each parameter in the buffer, in elements
        if world.writes:
            self._lay_out()
        self._elements = self._ends[-1] if self._ends else 0
        self.buffer = memoryview(b"")  # of `allocate`
        self._filled = torch.empty(0, dtype=dtype)  # the same as elements
        self._locked = False
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device)
            self._chunk = torch.empty(0, dtype=dtype, device=world.device)

    def _lay_out(self) -> None:
        """Place the tensors of a parameter one after the other, as their rows are in the parameter."""
        at, itemsize = 0, self.dtype.itemsize
        for parameter, tensors in _by_parameter(self.tensors):
            for tensor in tensors:
                (rows, first), slot = tensor.local(self.world), self.slots[tensor.name]
                if rows.numel():
                    offset = slot.start + first * (slot.size // tensor.shape[0])
                    end = at + rows.numel()
                    self.files.setdefault(slot.file, []).append(Range(at * itemsize, end * itemsize, offset))
                    at = end
            self._parameters.append(parameter)
            self._ends.append(at)
        # Ranks that start at different files do not wait for each other.
        names, first = list(self.files), self.world.rank * len(self.files) // max(self.world.size, 1)
        self.files = {name: self.files[name] for name in names[first:] + names[:first]}

    def allocate(self) -> None:
        """Make the buffer. Page-locking gigabytes takes seconds: a thread may do it beforehand."""
        size = self._elements * self.dtype.itemsize
        if self.buffer.nbytes == size:
            return
        try:
            self.buffer = memoryview(mmap.mmap(-1, size))
        except OSError as error:
            raise UserError(f"no {size:,} bytes of host memory for the weights ({error.strerror})") from error
        self._filled = torch.frombuffer(self.buffer, dtype=self.dtype)
        if self.world.device.type != "cuda":
            return
        with torch.cuda.device(self.world.device):  # a new thread has another one
            # Exactly so many bytes: torch's own allocator would round up to a power of two.
            failed = int(torch.cuda.cudart().cudaHostRegister(self._filled.data_ptr(), size, 0))
        if failed:
            logger.warning("host memory for exports cannot be page-locked (CUDA error {}): exports are slow", failed)
        self._locked = not failed

    @torch.no_grad()
    def copy(self) -> Copy:
        """Copy the weights as they are now. On a GPU this only enqueues: see `Copy.before_update`."""
        self.allocate()
        if self.world.device.type != "cuda":
            began = time.perf_counter()
            for parameter, start, end in zip(self._parameters, [0, *self._ends], self._ends, strict=False):
                self._filled[start:end].copy_(self._local(parameter))
            return Copy(host_seconds=time.perf_counter() - began)
        size = min(max(CHUNK_BYTES // self.dtype.itemsize, -(-self._elements // CHUNKS)), self._elements)
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):
            began_event = _event(self._stream)
            if not self._chunk.numel():
                self._chunk = torch.empty(size, dtype=self.dtype, device=self.world.device)
            for first in range(0, self._elements, max(size, 1)):
                chunk = self._chunk[: min(size, self._elements - first)]
                self._cast(first, chunk)
                self._filled[first : first + len(chunk)].copy_(chunk, non_blocking=True)
            return Copy((began_event, _event(self._stream)))

    def _cast(self, first: int, chunk: Tensor) -> None:
        """Fill a chunk that begins at element `first` of the buffer."""
        into, rows = [], []
        for parameter, start, end in zip(self._parameters, [0, *self._ends], self._ends, strict=False):
            low, high = max(start, first), min(end, first + len(chunk))
            if low < high:
                into.append(chunk[low - first : high - first])
                rows.append(self._local(parameter)[low - start : high - start])
        torch._foreach_copy_(into, rows)

    def _local(self, parameter: nn.Parameter) -> Tensor:
        return local_rows(parameter, self.world)[0].reshape(-1)

    def close(self) -> None:
        """Free the buffer; nothing may be copying into it any more."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._filled.data_ptr())
        self._locked, self._filled, self.buffer = False, torch.empty(0, dtype=self.dtype), memoryview(b"")


class GatheredCopy:
    """Whole tensors on rank 0, in one buffer on its GPU, or in host memory if they are a large share of the GPU's.

    Attributes:
        tensors: Name, dtype and shape of each, in the order of the buffer; `places` in it, `size` bytes in all.
        files: Which ranges of the buffer belong into which file.
        handle: Opens the buffer for other processes on this GPU, if the driver can.
    """

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype) -> None:
        self.world, self.dtype = world, dtype
        self.stored = list(stored_tensors(policy))
        self.tensors = {each.name: TensorEntry("", DTYPE_NAMES[dtype], list(each.shape), "") for each in self.stored}
        self.headers, self.slots = layout(self.stored, dtype)
        self.places, self.size = buffer_layout(self.tensors)
        self.files: dict[str, list[Range]] = {}
        for name, slot in self.slots.items():
            start, size = self.places[name]
            self.files.setdefault(slot.file, []).append(Range(start, start + size, slot.start))
        self._lock = threading.Lock()  # bounded: held for a copy between device and host
        self.buffer = torch.empty(0, dtype=torch.uint8)  # on the other ranks, for good
        self.handle: str | None = None

    def allocate(self) -> None:
        """Make the buffer, on rank 0."""
        if not self.world.is_main or self.buffer.numel():
            return
        device = self.world.device
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
        stream = torch.cuda.current_stream(self.world.device) if self.world.device.type == "cuda" else None
        began, began_event = time.perf_counter(), None if stream is None else _event(stream)
        if self.world.writes:  # the others hold replicas of the same rows
            with self._lock:
                for parameter, tensors in _by_parameter(self.stored):
                    self._take(self._whole(parameter), tensors)
        if stream is None or began_event is None:
            return Copy(host_seconds=time.perf_counter() - began)
        return Copy((began_event, _event(stream)))

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
        for tensor in tensors if self.world.is_main else ():
            start, size = self.places[tensor.name]
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
