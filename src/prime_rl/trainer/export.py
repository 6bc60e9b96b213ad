"""The way of the weights from the device to the disk, beside the steps that follow.

Nothing is gathered. A safetensors file is a header and byte ranges, and a tensor sharded by rows is one contiguous range per rank. Each rank casts
its own rows on the device and copies them to the host on a stream of its own (`Staging`); what has arrived is written at its place, several files
at once (`row_files.py`), and the ranks share the hashing (`write_version`); rank 0 commits.
"""

import mmap
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.monitor import log
from prime_rl.trainer.model_files import (
    DTYPE_NAMES,
    allocate,
    copy_model_files,
    file_hashes,
    layout,
    write_index,
)
from prime_rl.trainer.names import local_rows, stored_tensors
from prime_rl.trainer.parallel import World, agree, broadcast, gather, on_main
from prime_rl.trainer.row_files import (
    Held,
    Holding,
    NotHeld,
    Range,
    Row,
    WriterProcess,
    hash_ranges,
    write_held_rows,
    write_rows,
)
from prime_rl.trainer.sender import Offer, Sender
from prime_rl.trainer.source import Source
from prime_rl.transport.addresses import own_address
from prime_rl.transport.canary import Canary
from prime_rl.transport.commit import Stage, disk_errors, prune
from prime_rl.transport.delta import WORD_BYTES
from prime_rl.transport.memory import in_memory
from prime_rl.transport.shared import BACKEND as SHARED
from prime_rl.transport.weights import BuildsOn, TensorEntry, manifest_extra

logger = log.get(__name__)

CHUNK_BYTES = 128 << 20  # of device memory that casting takes, or more, so that there are at most so many chunks:
CHUNKS = 48
"""A GPU takes about 55 copies into its queue; whoever hands over one more waits for it. Measured: with 60 chunks of a 4B model the loop stood still until
the step before was done, and the GPU after that."""
STAGING_SHARE = 0.25
"""Of the host's available memory, two staging buffers take at most this much."""


class Staging:
    """This rank's rows of every stored tensor, in the exported type, in buffers on the host that are made once. What one holds is read by one thread
    at a time; `copy` fills them by turns.

    Args:
        shared: The buffers are shared with a process that writes them out (None: beside a GPU, where they are page-locked as well).

    Attributes:
        buffers: How many there are. With two, a version may be copied while the one before it is still being written.
    """

    def __init__(self, policy: nn.Module, world: World, dtype: torch.dtype, *, shared: bool | None = None) -> None:
        self.world, self.dtype = world, dtype
        self.shared = world.device.type == "cuda" if shared is None else shared
        self.tensors = list(stored_tensors(policy))
        self.headers, self.slots = layout(self.tensors, dtype)
        self.files: dict[str, list[Row]] = {}  # this rank's rows
        self.parameters: list[nn.Parameter] = []
        self.ends: list[int] = []  # of this rank's rows of each parameter in the buffer, in elements
        if world.writes:
            self._lay_out()
        self.elements = self.ends[-1] if self.ends else 0
        self.buffers = 1
        self.writer: WriterProcess | None = None
        self.written: Written | None = None  # for versions that tell what has changed since
        self._held = Held()
        self._filled: list[Tensor] = []
        self._copies = 0
        self._memory: int | None = None  # file descriptor of the buffers, where they are shared
        self._locked: list[Tensor] = []
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device)
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
    def _stride(self) -> int:
        """Bytes from one buffer to the next: whole pages, so that each can be locked by itself."""
        return -(-self.elements * self.dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE

    def affords_two(self) -> bool:
        """Whether the host has memory for a second buffer beside what else is needed there."""
        return self.shared and 2 * self._stride <= STAGING_SHARE * available_bytes() / local_ranks()

    def allocate(self) -> None:
        """Make the buffers. Page-locking gigabytes takes seconds: a thread may do it beforehand."""
        if self._filled:
            return
        if self.shared and self.elements:
            size = self.buffers * self._stride
            try:
                self._memory = os.memfd_create("weights")
                os.ftruncate(self._memory, size)
                memory = mmap.mmap(self._memory, size)
            except OSError as error:
                raise UserError(f"no {size:,} bytes of host memory for the weights ({error.strerror})") from error
            self.writer = WriterProcess(self._memory, size)
            self.writer.start()
            places = range(0, size, self._stride)
            filled = [torch.frombuffer(memory, dtype=self.dtype, count=self.elements, offset=at) for at in places]
        else:
            filled = [torch.empty(self.elements, dtype=self.dtype) for _ in range(self.buffers)]
        if self.world.device.type == "cuda" and self.elements:
            with torch.cuda.device(self.world.device):  # a thread does not know it
                self._lock(filled)
        self._filled = filled

    def _lock(self, buffers: Sequence[Tensor]) -> None:
        """Exactly so many bytes: torch's own allocator of page-locked memory would round up to a power of two."""
        for buffer in buffers:
            failed = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
            if failed:
                logger.warning(
                    "host memory for exports cannot be page-locked (CUDA error %d): exports will be slow", failed
                )
                return
            self._locked.append(buffer)

    @property
    def next_buffer(self) -> int:
        """The buffer that `copy` fills next."""
        return self._copies % self.buffers

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
            if self._chunk.numel() < size:
                self._chunk = torch.empty(size, dtype=self.dtype, device=self.world.device)
                self._shares = chunk_shares(self.ends, size)
            rows = [self._local(parameter) for parameter in self.parameters]
            moments = [self._moment()]
            for first, shares in zip(range(0, self.elements, max(size, 1)), self._shares, strict=True):
                last = min(first + size, self.elements)
                torch._foreach_copy_(
                    [self._chunk[share.start - first : share.end - first] for share in shares],
                    [rows[share.parameter][share.offset : share.offset + share.end - share.start] for share in shares],
                )
                moments.append(self._moment())
                buffer[first:last].copy_(self._chunk[: last - first], non_blocking=True)
                moments.append(self._moment())
        self._copies += 1  # not where something failed: the other buffer may still be read
        return Copy(index, 0.0, moments, size)

    def _moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return event

    def write(self, copied: "Copy", directory: Path, *, hashing: bool, how: Holding | None = None) -> dict[str, str]:
        """Write this rank's rows as they arrive, each at its place: several files at once, a file by one writer at a time, whatever the disk can do.

        Args:
            how: Hold them, and write what has changed where it says since when. Of a single rank, with hashing.

        Returns:
            With `hashing` the hash of every tensor's rows.

        Raises:
            NotHeld: it is not known what has changed.
        """
        names = list(self.files)
        first = (
            self.world.rank * len(names) // self.world.size
        )  # ranks that start at different files do not wait for each other
        files = {name: self.files[name] for name in names[first:] + names[:first]}
        if self.writer is not None:
            return self.writer.write_rows(
                directory,
                files,
                lambda: copied.arrivals(self.dtype.itemsize),
                hashing,
                first=copied.buffer * self._stride,
                how=how,
            )
        copied.finish()
        buffer = self._filled[copied.buffer].view(torch.uint8).numpy().data
        if how is not None:
            return write_held_rows(buffer, directory, files, lambda end: None, self._held, how)
        return write_rows(buffer, directory, files, arrived=lambda end: None, hashing=hashing)

    def hash_staged(self, copied: "Copy") -> dict[str, str]:
        """The hash of every tensor's rows of this rank as they arrive. Nothing is written."""
        assert self.writer is not None, "only what is shared is sent"
        rows = [row for rows in self.files.values() for row in rows]
        return self.writer.hash_rows(
            rows, lambda: copied.arrivals(self.dtype.itemsize), first=copied.buffer * self._stride
        )

    def make_sender(self, transport: ProcessGroupTransport) -> Sender:
        """A process that sends what the buffers hold.

        Raises:
            UserError: it cannot listen where it is to.
        """
        self.allocate()
        assert self._memory is not None, "only what is shared is sent"
        on_gpu = self.world.device.type == "cuda"
        backends: tuple[str, ...] = (transport.backend,)
        if transport.backend == "auto":
            backends = (SHARED, "nccl" if on_gpu else "gloo")
        if "nccl" in backends and not on_gpu:
            raise UserError("trainer.weights.transport.backend nccl needs a trainer on a GPU: use gloo")
        return Sender(
            self._memory,
            self.buffers * self._stride,
            host=transport.host or own_address(),
            port=transport.port,
            backends=backends,
            device=str(self.world.device) if "nccl" in backends else "cpu",
            timeout=transport.timeout,
        )

    def offer(self, sender: Sender, copied: "Copy", version: int, life: int, digest: str) -> None:
        """Let servers ask for what this copy has staged, which is all there."""
        sender.offer(Offer(version, life, digest, copied.buffer * self._stride, self.file_bytes))

    def retire(self, sender: Sender) -> None:
        """Let nobody ask any more for what the next `copy` writes over."""
        sender.retire(self.next_buffer * self._stride)

    def hash(self, directory: Path, tensors: Sequence[str]) -> dict[str, str]:
        """The hashes of whole tensors, as they lie in the files."""
        ranges = [Range(name, self.slots[name].file, self.slots[name].start, self.slots[name].size) for name in tensors]
        return hash_ranges(directory, ranges) if self.writer is None else self.writer.hash_ranges(directory, ranges)

    def abandon(self) -> None:
        """Keep whoever still writes out of a buffer from going on. The buffers stay."""
        if self.writer is not None:
            self.writer.abandon()

    def close(self) -> None:
        """Give the buffers back. Nothing may be copying into them any more."""
        if self.writer is not None:
            self.writer.close()
        for buffer in self._locked:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        if self._memory is not None:
            os.close(self._memory)
        self._filled, self._memory, self._locked, self.writer = [], None, [], None


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

    def before_update(self) -> None:
        """Let the device change the weights only after they are copied. The host does not wait."""
        if self.moments:
            torch.cuda.current_stream().wait_event(self.moments[-1])

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


def write_version(
    staging: Staging,
    copied: Copy,
    source: Source,
    world: World,
    final: Path,
    *,
    version: int,
    incarnation: int,
    canary: Canary | None = None,
    memory: Path | None = None,
    anchor_every: int | None = None,
    full: bool = True,
    sender: Sender | None = None,
) -> dict[str, float]:
    """Commit what is staged as `final`, with config and tokenizer of the source. Every rank calls it, perhaps in a thread.

    Args:
        copied: The copy that staged it, which may still be going on: what has arrived is written meanwhile.
        world: The ranks, with the group that the calling thread may use.
        memory: Where in memory the tensors are committed, before `final` which then only names that place (None: they lie in `final`).
        anchor_every: Hold the rows, and tell what has changed since the version before: at least one version in so many is there in full. For a
            single rank (None: every version is there in full, nothing is held).
        full: This one must be.
        sender: Servers ask it for the tensors, which are not written (a single rank's). None: they are written.

    Returns:
        Seconds of writing (and of waiting for what is written; `send` where it is offered to be sent instead), hashing and committing.

    Raises:
        UserError: the disk is full (on any rank); nothing is left under the final name.
        CommitError: `final` is committed already.
    """
    nonce = broadcast(world, secrets.token_hex(8))
    stage = agree(world, lambda: Stage(final, nonce))
    tensor_stage = stage if memory is None else agree(world, lambda: Stage(memory, nonce))
    directory = tensor_stage.path
    before, staging.written = staging.written, None
    if full or anchor_every is None or before is None or before.changes + 1 >= anchor_every:
        before = None
    try:
        began = time.perf_counter()
        how = None if anchor_every is None else Holding(nonce, None, WORD_BYTES[DTYPE_NAMES[staging.dtype]])
        written = None
        if how is not None and before is not None:
            written = _write_changes(staging, copied, directory, how._replace(since=before.rows))
        if written is None:
            before = None
            written = staging.hash_staged(copied) if sender else _write_rows(staging, copied, world, directory, how)
        wrote = time.perf_counter()
        hashes = written if world.size == 1 else _read_back(staging, world, directory)
        hashed = time.perf_counter()
        on_main(world, lambda: copy_model_files(source, stage.path, staging.dtype))
        slots, dtype = staging.slots, DTYPE_NAMES[staging.dtype]
        tensors = {name: TensorEntry(slot.file, dtype, slot.shape, hashes[name]) for name, slot in slots.items()}
        on = BuildsOn(None, None) if before is None else BuildsOn(before.version, before.hash)
        delta = None if how is None else on
        address = None if sender is None else sender.address
        extra = manifest_extra(version, incarnation, tensors, canary=canary, delta=delta, sender=address)
        known: dict[str, str] = {}
        if sender is None:
            known = file_hashes(tensors)
        else:  # before anybody knows of it
            staging.offer(sender, copied, version, incarnation, extra["hash"])
        on_main(world, lambda: _commit(stage, tensor_stage, version, extra, known))
        if how is not None:
            staging.written = Written(version, extra["hash"], nonce, 0 if before is None else before.changes + 1)
    except BaseException:
        stage.abort()
        tensor_stage.abort()
        raise
    first = "write" if sender is None else "send"
    return {first: wrote - began, "hash": hashed - wrote, "commit": time.perf_counter() - hashed}


def _commit(stage: Stage, tensor_stage: Stage, version: int, extra: dict[str, Any], known: dict[str, str]) -> None:
    """Tensors in memory first: where they are not, no version names them."""
    if tensor_stage is stage:
        stage.commit(step=version, producer="trainer", extra=extra, hashes=known)
        return
    tensor_stage.commit(step=version, producer="trainer", hashes=known)
    extra["memory"] = asdict(in_memory(tensor_stage.final, tensor_stage.nonce))
    try:
        stage.commit(step=version, producer="trainer", extra=extra)
    except BaseException:
        if not stage.final.is_dir():
            prune(tensor_stage.final)
        raise


def _write_rows(staging: Staging, copied: Copy, world: World, directory: Path, how: Holding | None) -> dict[str, str]:
    """The whole of every rank's rows, and the index."""

    def write() -> dict[str, str]:
        with disk_errors(directory):
            return staging.write(copied, directory, hashing=staging.world.size == 1, how=how)

    on_main(world, lambda: allocate(directory, staging.headers, staging.slots))
    written = agree(world, write)
    on_main(world, lambda: write_index(directory, staging.slots))
    return written


def write_staged(staging: Staging, copied: Copy, directory: Path) -> None:
    """The files of a version that was sent, while nothing else was copied where it is staged. Of a single rank.

    Raises:
        UserError: the disk is full.
    """
    _write_rows(staging, copied, staging.world, directory, None)


def _write_changes(staging: Staging, copied: Copy, directory: Path, how: Holding) -> dict[str, str] | None:
    """What has changed since the version that is held; None, and no file, where that is not known or no less than the whole."""
    try:
        with disk_errors(directory):
            written = staging.write(copied, directory, hashing=True, how=how)
    except NotHeld:
        for path in directory.iterdir():  # of a process that was killed at it
            path.unlink()
        return None
    files = list(directory.iterdir())
    if sum(path.stat().st_size for path in files) < staging.file_bytes:
        return written
    for path in files:
        path.unlink()
    return None


def _read_back(staging: Staging, world: World, directory: Path) -> dict[str, str]:
    """The hashes of all tensors as they lie there, a share of them read by each rank: this shows that every rank's bytes have arrived."""
    share = list(staging.slots)[world.rank :: world.size]

    def hash_share() -> dict[str, str]:
        with disk_errors(directory):
            return staging.hash(directory, share)

    hashes = gather(world, agree(world, hash_share))
    return {name: value for part in hashes for name, value in part.items()}
