"""This rank's rows of the weights on the host: copied from the device beside the steps that follow, hashed, written, sent."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor, nn

from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.trainer.host_buffers import Arrivals, HostBuffers
from prime_rl.trainer.model_files import Slot, layout
from prime_rl.trainer.names import local_rows, stored_tensors
from prime_rl.trainer.parallel import World, agree, on_main
from prime_rl.trainer.row_files import Holding, Range, Row
from prime_rl.trainer.sender import Offer, Sender
from prime_rl.transport.addresses import own_address
from prime_rl.transport.device_memory import DeviceCopy
from prime_rl.transport.shared import BACKEND as SHARED
from prime_rl.transport.shared import CUDA_IPC, describe, open_memory

CHUNK_BYTES = 128 << 20  # of device memory that casting takes, or more, so that there are at most so many chunks:
CHUNKS = 48
"""A GPU takes about 55 copies into its queue; whoever hands over one more waits for it. Measured: with 60 chunks of a 4B model the loop stood still until
the step before was done, and the GPU after that."""
STAGING_SHARE = 0.25
"""Of the host's available memory, two staging buffers take at most this much."""


class Staging:
    """This rank's rows of every stored tensor, in the exported type, in buffers on the host that are made once; `copy` fills them by turns.

    Args:
        shared: The buffers are shared with a process that writes them out (None: beside a GPU, where they are page-locked as well, and where they
            are sent).
        told, sent: Versions tell what has changed, or are sent. Either needs whole tensors in the memory of the host, not rows: several ranks, all of
            one host, put their rows together there (`open_whole`).
        on_device: Of a single rank on a GPU, there is a copy there, too, which is hashed, sent or lent; with it there is one buffer.

    Attributes:
        own: The buffers. With two of them a version may be copied while the one before it is still being written.
        whole: Buffers with all rows of all ranks, tensor after tensor: a single rank's own. None where they are not needed.
        sender: Sends what `whole` holds (`open_sender`).
    """

    def __init__(
        self,
        policy: nn.Module,
        world: World,
        dtype: torch.dtype,
        *,
        shared: bool | None = None,
        told: bool = False,
        sent: bool = False,
        on_device: bool = False,
    ) -> None:
        assert not on_device or (world.device.type == "cuda" and world.size == 1), (
            "rows of several ranks are no tensors"
        )
        self.world, self.dtype, self._sent = world, dtype, sent
        self.tensors = list(stored_tensors(policy))
        self.headers, self.slots = layout(self.tensors, dtype)
        self.files: dict[str, list[Row]] = {}  # this rank's rows
        self.parameters: list[nn.Parameter] = []
        self.ends: list[int] = []  # of this rank's rows of each parameter in the buffer, in elements
        if world.writes:
            self._lay_out()
        self.elements = self.ends[-1] if self.ends else 0
        shared = world.device.type == "cuda" or sent if shared is None else shared
        self.own = HostBuffers(self.elements * dtype.itemsize, shared=shared)
        self.whole: HostBuffers | None = self.own if world.size == 1 else None
        self.whole_files = self.files if world.size == 1 else whole_files(self.slots)
        if self.whole is None and (told or sent):
            self.whole = HostBuffers(self.file_bytes, shared=True)
        self.sender: Sender | None = None
        self._has_copy = on_device
        self._there: DeviceCopy | None = None
        self._hashes_there, self._from_host = False, True  # some server may read the host's memory
        self.written: Written | None = None  # for versions that tell what has changed since
        self._filled: list[Tensor] = []
        self._copies = 0
        self._locked: list[Tensor] = []
        if world.device.type == "cuda":
            self._stream, self._aside = torch.cuda.Stream(world.device), torch.cuda.Stream(world.device)
            self._chunk = torch.empty(0, dtype=dtype, device=world.device)
            self._shares: list[list[Share]] = []

    def _lay_out(self) -> None:
        """The tensors of a parameter lie there one after the other, as their rows do in the parameter: it is copied as a whole."""
        start, itemsize = 0, self.dtype.itemsize
        for _, tensors in groupby(self.tensors, key=lambda tensor: id(tensor.parameter)):
            for tensor in tensors:
                (rows, first), slot = tensor.local(self.world), self.slots[tensor.name]
                if rows.numel():
                    offset = slot.start + first * (slot.size // slot.shape[0])
                    row = Row(tensor.name, start * itemsize, rows.numel() * itemsize, offset)
                    self.files.setdefault(slot.file, []).append(row)
                start += rows.numel()
            self.parameters.append(tensor.parameter)
            self.ends.append(start)

    @property
    def file_bytes(self) -> int:
        """What a version takes on the disk, all ranks together."""
        return sum(slot.size for slot in self.slots.values())

    def _local(self, parameter: nn.Parameter) -> Tensor:
        return local_rows(parameter, self.world)[0].reshape(-1)

    @property
    def assembles(self) -> bool:
        """Whether the rows of several ranks are put together."""
        return self.whole not in (None, self.own)

    def double(self) -> None:
        """Have two buffers, before there are any; two of the whole where servers read one while the other is filled."""
        self.own.count = 2
        if self.whole is not None and self._sent:
            self.whole.count = 2

    def affords_two(self) -> bool:
        """Whether the host has memory for a second buffer beside what else is needed there. Of one that lies on the GPU as well there is one."""
        taken = 2 * local_ranks() * self.own.stride
        if self.whole is not None and self.assembles:
            taken += 2 * self.whole.stride  # two of them, or one and what is held of it
        return self.own.shared and not self._has_copy and taken <= STAGING_SHARE * available_bytes()

    def allocate(self) -> None:
        """Make the buffers. Page-locking gigabytes takes seconds: a thread may do it beforehand."""
        if self._filled:
            return
        filled = [
            torch.frombuffer(buffer, dtype=self.dtype) if self.elements else torch.empty(0, dtype=self.dtype)
            for buffer in self.own.allocate()
        ]
        if self.world.device.type == "cuda" and self.elements:
            with torch.cuda.device(self.world.device):  # a thread does not know it
                self._lock(filled)
                if self._has_copy:
                    self._make_copy()
        self._filled = filled

    def open_whole(self, world: World) -> None:
        """Let the ranks have the memory together that they put their rows into: rank 0 makes it, the others open it. Every rank calls it, where
        they have one.

        Raises:
            UserError: there is no such memory, or not for all of them.
        """
        whole = self.whole
        if whole is None or not self.assembles:
            return

        def make() -> dict[str, int | str]:
            whole.allocate()
            assert whole.memory is not None
            return describe(whole.memory, whole.bytes)

        def adopt() -> None:
            if not world.is_main:
                memory = open_memory(described, writable=True)
                if memory is None:
                    raise UserError(
                        "the trainer's ranks cannot open each other's memory, as weights that are sent, or told by their changes, ask for: set "
                        "trainer.weights.transport.type filesystem"
                    )
                whole.adopt(memory)

        described = on_main(world, make)
        agree(world, adopt)

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

    @property
    def next_buffer(self) -> int:
        """The buffer that `copy` fills next."""
        return self._copies % self.own.count

    @torch.no_grad()
    def copy(self) -> "Copy":
        """Copy the weights as they are now. On a GPU this only enqueues: see `Copy.before_update`."""
        self.allocate()
        index = self.next_buffer
        buffer = self._filled[index]
        if self.world.device.type != "cuda":
            began = time.perf_counter()
            for parameter, start, end in zip(self.parameters, [0, *self.ends], self.ends, strict=False):
                buffer[start:end].copy_(self._local(parameter))
            self._copies += 1
            return Copy(index, time.perf_counter() - began)
        size = min(max(CHUNK_BYTES // self.dtype.itemsize, -(-self.elements // CHUNKS)), self.elements)
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):
            if not self._shares and size:
                self._shares = chunk_shares(self.ends, size)
                if self._there is None:
                    self._chunk = torch.empty(size, dtype=self.dtype, device=self.world.device)
            bounds = [(first, min(first + size, self.elements)) for first in range(0, self.elements, max(size, 1))]
            rows = [self._local(parameter) for parameter in self.parameters]
            moments = [self._moment()]
            cast = None
            if self._there is None:
                for (first, last), shares in zip(bounds, self._shares, strict=True):
                    chunk = self._chunk[: last - first]
                    _cast(rows, shares, first, chunk)
                    moments.append(self._moment())
                    buffer[first:last].copy_(chunk, non_blocking=True)
                    moments.append(self._moment())
            else:
                there = self._there.tensor.view(self.dtype)
                for (first, last), shares in zip(bounds, self._shares, strict=True):
                    _cast(rows, shares, first, there[first:last])
                cast = self._moment()
                for first, last in bounds:
                    moments.append(moments[-1] if len(moments) > 1 else cast)
                    buffer[first:last].copy_(there[first:last], non_blocking=True)
                    moments.append(self._moment())
        self._copies += 1  # not where something failed: the other buffer may still be read
        return Copy(index, 0.0, moments, size, cast)

    def _make_copy(self) -> None:
        from prime_rl.transport import device_hash  # imports Triton, which a CPU has no use for

        self._there = DeviceCopy(self.own.size, self.world.device)
        with torch.cuda.stream(self._aside):
            self._hashes_there = device_hash.works_on(self.world.device)

    def _moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return event

    def write(self, copied: "Copy", directory: Path, how: Holding | None = None) -> dict[str, str]:
        """Write this rank's rows as they arrive, each at its place: several files at once, a file by one writer at a time, whatever the disk can do.
        Where there are whole tensors: its share of the files.

        Args:
            how: Hold them, and write what has changed where it says since when. Of whole tensors.

        Returns:
            The hashes of whole tensors.

        Raises:
            NotHeld: it is not known what has changed.
        """
        rank, size = self.world.rank, self.world.size
        if self.whole is not None:
            names = list(self.whole_files)
            share = names[rank * len(names) // size : (rank + 1) * len(names) // size]  # side by side, as they are held
            files = {name: self.whole_files[name] for name in share}
            return self.whole.write(
                self._place(copied), directory, files, self._arrivals(copied), hashing=True, how=how
            )
        assert how is None, "of rows it is not told what has changed"
        names = list(self.files)
        first = rank * len(names) // size  # ranks that start at different files do not wait for each other
        files = {name: self.files[name] for name in names[first:] + names[:first]}
        return self.own.write(copied.buffer, directory, files, self._arrivals(copied), hashing=False)

    def write_whole(self, copied: "Copy", directory: Path) -> None:
        """Write all files, by this rank alone."""
        assert self.whole is not None, "of rows there are only this rank's"
        self.whole.write(self._place(copied), directory, self.whole_files, self._arrivals(copied), hashing=False)

    def hash_staged(self, copied: "Copy") -> dict[str, str]:
        """The hashes of this rank's share of the whole tensors as they arrive. Nothing is written."""
        assert self.whole is not None, "of rows there are no tensors' hashes"
        if self._there is not None and self._hashes_there:
            return self._hash_there(copied)
        rows = [row for rows in self.whole_files.values() for row in rows][self.world.rank :: self.world.size]
        return self.whole.hash(self._place(copied), rows, self._arrivals(copied))

    def _hash_there(self, copied: "Copy") -> dict[str, str]:
        """Before the host has it, where that is asked for what comes from the GPU alone."""
        from prime_rl.transport import device_hash

        assert self._there is not None
        assert copied.cast is not None
        rows = [(row.tensor, row.start, row.size) for rows in self.whole_files.values() for row in rows]
        copied.cast.synchronize()
        # Not behind what the training computes.
        with torch.cuda.device(self.world.device), torch.cuda.stream(self._aside):
            hashes = device_hash.of_rows(self._there.tensor, rows)
        if self._from_host:
            copied.finish()
        return hashes

    def assemble(self, copied: "Copy") -> None:
        """Put this rank's rows, as they arrive, to those of the others.

        Raises:
            UserError: there is not as much memory.
        """
        assert self.whole is not None
        places = {row.tensor: row.start for rows in self.whole_files.values() for row in rows}
        rows = [
            row._replace(offset=places[row.tensor] + row.offset - self.slots[row.tensor].start)
            for rows in self.files.values()
            for row in rows
        ]
        arrivals = partial(copied.arrivals, self.dtype.itemsize)
        try:
            self.own.copy(copied.buffer, self.whole, self._place(copied), rows, arrivals)
        except OSError as error:
            raise UserError(f"the ranks' weights cannot be put together in host memory ({error.strerror})") from error

    def _place(self, copied: "Copy") -> int:
        """The buffer of the whole that this copy has."""
        assert self.whole is not None
        return copied.buffer % self.whole.count

    def _arrivals(self, copied: "Copy") -> Arrivals:
        if self.assembles:  # before all ranks have put their rows there nobody reads them
            return lambda: iter([sys.maxsize])
        return partial(copied.arrivals, self.dtype.itemsize)

    def open_sender(self, transport: ProcessGroupTransport) -> None:
        """Start a process that sends what the whole buffers hold, of rank 0.

        Raises:
            UserError: it cannot listen where it is to.
        """
        self.allocate()
        assert self.whole is not None, "whole tensors are sent"
        assert self.whole.memory is not None, "only what is shared is sent"
        on_gpu = self.world.device.type == "cuda"
        backends: tuple[str, ...] = (transport.backend,)
        if transport.backend == "auto":
            backends = (SHARED, "nccl" if on_gpu else "gloo")
        if transport.backend == CUDA_IPC:
            backends = (CUDA_IPC, SHARED)  # for a server that has no room on the GPU
        if "nccl" in backends and not on_gpu:
            raise UserError("trainer.weights.transport.backend nccl needs a trainer on a GPU: leave it at auto")
        self.sender = Sender(
            self.whole.memory,
            self.whole.bytes,
            host=transport.host or own_address(),
            port=transport.port,
            backends=backends,
            device=str(self.world.device) if "nccl" in backends else "cpu",
            timeout=transport.timeout,
            lent=None if self._there is None else self._there.described,
        )
        self._from_host = SHARED in backends or not self._hashes_there

    def offer(self, copied: "Copy", version: int, life: int, digest: str) -> None:
        """Let servers ask for what this copy has staged, which is all there."""
        assert self.sender is not None
        assert self.whole is not None
        self.sender.offer(Offer(version, life, digest, self._place(copied) * self.whole.stride, self.file_bytes))

    def retire(self) -> None:
        """Let nobody ask any more for what the next `copy` writes over."""
        if self.sender is not None and self.whole is not None:
            self.sender.retire(self.next_buffer * self.whole.stride)

    def hash_files(self, directory: Path, tensors: Sequence[str]) -> dict[str, str]:
        """The hashes of whole tensors, as they lie in the files."""
        ranges = [Range(name, self.slots[name].file, self.slots[name].start, self.slots[name].size) for name in tensors]
        return self.own.hash_files(directory, ranges)

    def close_sender(self) -> None:
        """Who is being sent to gets no more."""
        if self.sender is not None:
            self.sender.close()

    def abandon(self) -> None:
        """Keep whoever still writes out of a buffer from going on. The buffers stay."""
        for buffers in self._all_buffers():
            buffers.abandon()

    def close(self) -> None:
        """Give the buffers back. Nothing may be copying into them any more."""
        self.close_sender()
        for buffer in self._locked:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._filled, self._locked = [], []
        for buffers in self._all_buffers():
            buffers.close()

    def _all_buffers(self) -> list[HostBuffers]:
        return [self.own, self.whole] if self.whole is not None and self.assembles else [self.own]


def whole_files(slots: Mapping[str, Slot]) -> dict[str, list[Row]]:
    """The rows of every tensor in a buffer that holds tensor after tensor."""
    files: dict[str, list[Row]] = {}
    at = 0
    for name, slot in slots.items():
        files.setdefault(slot.file, []).append(Row(name, at, slot.size, slot.start))
        at += slot.size
    return files


def _cast(rows: Sequence[Tensor], shares: "Sequence[Share]", first: int, chunk: Tensor) -> None:
    """Fill a chunk, which begins at element `first` of the buffer."""
    torch._foreach_copy_(
        [chunk[share.start - first : share.end - first] for share in shares],
        [rows[share.parameter][share.offset : share.offset + share.end - share.start] for share in shares],
    )


class Share(NamedTuple):
    """What a chunk of the staging buffer holds of one parameter: elements `start` to `end` of the buffer, from `offset` of the parameter's rows on."""

    parameter: int
    start: int
    end: int
    offset: int


def chunk_shares(ends: Sequence[int], size: int) -> list[list[Share]]:
    """For every chunk of `size` elements of the staging buffer, what it holds of the parameters that end at `ends`."""
    shares: list[list[Share]] = [[] for _ in range(-(-ends[-1] // size))]
    for index, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        start = first
        while start < last:
            end = min((start // size + 1) * size, last)
            shares[start // size].append(Share(index, start, end, start - first))
            start = end
    return shares


@dataclass(frozen=True)
class Copy:
    """Copying into the staging buffer with this index that is done, in so many seconds, or that a stream of the GPU is at, `chunk` elements after the
    other: between the moments it casts and copies by turns."""

    buffer: int
    seconds: float
    moments: Sequence[torch.cuda.Event] = ()
    chunk: int = 0
    cast: torch.cuda.Event | None = None  # all, where that is before anything is copied

    def before_update(self) -> None:
        """Let the device change the weights only after they are copied. The host does not wait."""
        if self.moments:
            torch.cuda.current_stream().wait_event(self.cast or self.moments[-1])

    def arrivals(self, itemsize: int) -> Iterator[int]:
        """Wait for one chunk after the other; each time the bytes that the buffer holds, in the end more than any."""
        for number, moment in enumerate(self.moments[2::2], 1):
            moment.synchronize()
            yield number * self.chunk * itemsize
        yield sys.maxsize

    def finish(self) -> tuple[float, float]:
        """Wait until all is there. Returns the seconds of casting and of copying."""
        if not self.moments:
            return self.seconds, 0.0
        self.moments[-1].synchronize()
        seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.moments)]
        return sum(seconds[0::2]), sum(seconds[1::2])


class Written(NamedTuple):
    """A committed version whose rows are held, and how many versions tell no more than changes since one that is there in full."""

    version: int
    hash: str
    rows: str
    changes: int
