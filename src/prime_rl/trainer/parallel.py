"""The ranks of one trainer: process group, mesh, and the few collectives that the loop needs on the host."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_rl.errors import UserError
from prime_rl.transport.commit import CommitError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among the ranks.

    Args:
        mesh: Has the one dimension `dp`, over which parameters and data are sharded.
        group: The ranks' process group for the host's collectives; None is the default one, which the loop uses.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def choose_device(device: str) -> str:
    """`auto`, `cpu` or `cuda` → `cpu` or `cuda`. Raises UserError when a GPU is asked for and there is none."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU (driver missing, CUDA_VISIBLE_DEVICES empty, or a CPU build)")
    return device


def init_world(device: str, timeout: float) -> World:
    """Join the process group that torchrun's variables describe, or make one of a single process when there are none.

    Args:
        timeout: Seconds after which a collective that a rank never joined fails.
    """
    kind = choose_device(device)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
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
    # The device type is named: on a machine with a CUDA build and no GPU, torch would guess "cuda".
    return World(rank, size, here, init_device_mesh(kind, (size,), mesh_dim_names=("dp",)))


def close_world() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def background_world(world: World, timeout: float) -> World:
    """The same ranks with a gloo group of their own on host memory, so that a thread's collectives never meet the loop's. Every rank calls it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return replace(world, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), group=group)


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Sum host numbers over the ranks, in float64 (exact for counts)."""
    total = torch.tensor(values, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(total, group=world.group)
    return total.tolist()


# Values travel between ranks as JSON: what arrives is data, never code. (torch's own object collectives unpickle; only its checkpoint
# planner still uses them, see `dcp.py`.)


def broadcast(world: World, value: T | None) -> T:
    """Rank 0's value, on every rank. JSON's types only: tuples arrive as lists, keys as strings."""
    if world.size == 1:
        return value  # type: ignore[return-value]
    data = _encode(value) if world.is_main else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, src=0, group=world.group)
    data = data if world.is_main else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=world.group)
    return _decode(data)


def gather(world: World, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. JSON's types only."""
    if world.size == 1:
        return [value]
    data = _encode(value)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=world.group)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: data.numel()] = data
    boxes = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(boxes, padded, group=world.group)
    return [_decode(box[: int(size)]) for box, size in zip(boxes, sizes, strict=True)]


def _encode(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def on_main(world: World, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and give its result (JSON's types only) to every rank. A UserError or CommitError there is raised as UserError on
    every rank alike. The others wait in a collective meanwhile, so `action` must end within its timeout."""
    outcome: tuple[T | None, str | None] | None = None
    if world.is_main:
        try:
            outcome = action(), None
        except (UserError, CommitError) as error:
            outcome = None, str(error)
    value, message = broadcast(world, outcome)
    if message is not None:
        raise UserError(message)
    return value  # type: ignore[return-value]


def agree(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank; when it raises UserError or CommitError on one, every rank raises the first such error."""
    value, message = None, None
    try:
        value = action()
    except (UserError, CommitError) as error:
        message = str(error)
    failed = [text for text in gather(world, message) if text is not None]
    if failed:
        raise UserError(failed[0])
    return value  # type: ignore[return-value]


def rows_of_rank(rows: int, world: World) -> tuple[int, int]:
    """The rows [start, end) of a parameter that FSDP2 gives this rank: equal runs of ceil(rows / ranks), the last ones short or empty."""
    run = -(-rows // world.size)
    return min(world.rank * run, rows), min((world.rank + 1) * run, rows)
