"""The ranks of one trainer: process group, mesh, and the few collectives that the loop needs on the host."""

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from prime_rl.errors import UserError

T = TypeVar("T")

# The mesh's dimensions. Whoever needs one asks for it by name, so that a later kind of parallelism can add its own.
REPLICATE, SHARD = "dp_replicate", "dp_shard"


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. Every rank trains on data of its own. The ranks form `replicas` groups of
    consecutive ranks; each group holds the whole training state, sharded by rows among its ranks (HSDP)."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # has the dimension `dp_shard`, and before it `dp_replicate` where there are several replicas
    group: dist.ProcessGroup | None = None  # for the host's collectives; None is the default one, which the loop uses
    replicas: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the state."""
        return self.size // self.replicas

    @property
    def writes(self) -> bool:
        """Whether this rank writes its rows to disk: what replicas have in common is written by the first."""
        return self.rank < self.shards

    def use_device(self) -> None:
        """Make the device a new thread's current one, to which memory that the thread pins belongs."""
        torch.get_device_module(self.device).set_device(self.device)


def init_world(device: str, timeout: float, replicate: int = 1) -> World:
    """Join the process group that torchrun's variables describe, or make one of a single process when there are none.

    Args:
        timeout: Seconds after which a collective that a rank never joined fails.
        replicate: Replicas of the training state, each sharded over as many ranks.

    Raises UserError if there is no such device, or the ranks cannot be divided among the replicas.
    """
    # The loop releases the interpreter with every operator, and would wait 5 ms (Python's default) to take it back from
    # a thread that packs or exports: on small steps longer than the GPU takes for what is queued.
    sys.setswitchinterval(1e-4)
    # Read when CUDA starts. The loop launches more kernels than a queue holds by default (about a thousand); launches
    # between two steps would find it full, and the GPU would wait for the next step: 2.2 % of a step's time with the
    # logprob check, 0.7 % with longer queues (0.6B, H200).
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU (driver missing, CUDA_VISIBLE_DEVICES empty, or a CPU build)")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if size % replicate:
        raise UserError(f"{size} ranks cannot form model.dp_replicate = {replicate} groups of equal size")
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"rank {rank} needs GPU {local_rank}, but only {torch.cuda.device_count()} are visible")
        torch.cuda.set_device(local_rank)
    # The host-side collectives below use gloo on every kind of machine, so that they never wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    here = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if replicate > 1:
        mesh = _replicated_mesh(kind, size, replicate, limit)
    else:  # the device type is named: on a machine with a CUDA build and no GPU, torch would guess "cuda"
        mesh = init_device_mesh(kind, (size,), mesh_dim_names=(SHARD,))
    return World(rank, size, here, mesh, replicas=replicate)


def close_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def background_world(world: World, timeout: float) -> World:
    """The same ranks with a gloo group of their own, for a thread's collectives on host memory. Every rank calls it."""
    if world.size == 1:
        return world
    return replace(world, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))


def _replicated_mesh(kind: str, size: int, replicas: int, limit: timedelta) -> DeviceMesh:
    """Return replicas of consecutive ranks, each sharded. Their groups have the time limit (torch's: the default)."""
    ranks = torch.arange(size).reshape(replicas, -1)
    lines = ranks.T.tolist(), ranks.tolist()  # ranks with the same rows, ranks of the same replica
    groups = [dist.new_subgroups_by_enumeration(each, timeout=limit)[0] for each in lines]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Sum host numbers over the ranks, in float64 (exact for counts)."""
    total = torch.tensor(values, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(total, group=world.group)
    return total.tolist()


# Values travel between ranks as JSON: what arrives is data, never code. (torch's own object collectives unpickle.)


def gather(world: World, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. Of JSON's types: tuples become lists, keys strings."""
    if world.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=world.group)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: data.numel()] = data
    boxes = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(boxes, padded, group=world.group)
    return [json.loads(box[: int(size)].numpy().tobytes()) for box, size in zip(boxes, sizes, strict=True)]


def on_main(world: World, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and give its result (JSON's types only) to every rank.

    A UserError there is raised on every rank. The others wait in a collective: `action` must end within its timeout.
    """
    return gather(world, agree(world, lambda: action() if world.is_main else None))[0]  # type: ignore[return-value]


def agree(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it raises UserError on one, every rank raises the first one."""
    value, message = None, None
    try:
        value = action()
    except UserError as error:
        message = str(error)
    failed = [text for text in gather(world, message) if text is not None]
    if failed:
        raise UserError(failed[0])
    return value  # type: ignore[return-value]


def rows_of_ranks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """The rows [start, end) of each rank, as FSDP2 divides them: equal runs, the last ones short or empty."""
    run = -(-rows // ranks)
    return [(min(rank * run, rows), min((rank + 1) * run, rows)) for rank in range(ranks)]


def rows_of_rank(rows: int, world: World) -> tuple[int, int]:
    return rows_of_ranks(rows, world.shards)[world.rank % world.shards]


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class SingleRankReduction:
    """In place of FSDP's reduce-scatter for a single rank: what is sent is what is received, without torch's copy.

    FSDP asks for memory twice for every unit that it reduces: for what is sent and then, on the stream on which it
    reduces, for what is received (`ReduceScatter` of `FSDPModule.set_custom_reduce_scatter`).
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None
        self._reducing: torch.cuda.Stream | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same tensor twice."""
        if self._sent is not None:
            (buffer, self._sent) = self._sent, None
            self._reducing = torch.cuda.current_stream(device) if device.type == "cuda" else None
            return buffer
        if self._reducing is not None:
            # The memory just freed may still be read there, where gradients of several micro-batches are added up.
            torch.cuda.current_stream(device).wait_stream(self._reducing)
        self._sent = torch.empty(*size, dtype=dtype, device=device)
        return self._sent

    def __call__(self, *arguments: object, **options: object) -> None:
        raise AssertionError("a single rank sends nothing")


Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """Return a moment on the device's own time line, which the host may be ahead of: an event on a GPU, or a time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def seconds(start: Moment, end: Moment) -> float:
    """Wait until a device has passed two of its moments; return the seconds between them. Any thread may call it."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert not isinstance(start, float)
    assert not isinstance(end, float)
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class ToHost:
    """A tensor on its way from the device to the host. Nothing waits for the device before `read`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._copied = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def read(self) -> Tensor:
        """Wait for it. Any thread may."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


def page_lock(buffer: Tensor, owner: object) -> int:
    """Pin a buffer, which torch would round up to a power of two, while `owner` exists; return CUDA's error, or 0."""
    runtime, size = torch.cuda.cudart(), buffer.numel() * buffer.element_size()
    error = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)) if size else 0
    if size and not error:
        weakref.finalize(owner, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return error
