"""The ranks of one trainer: process group, mesh, and the few collectives that the loop needs on the host."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prime_rl.errors import UserError
from prime_rl.transport.commit import CommitError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. `mesh` has the one dimension `dp`, over which parameters and data are sharded."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

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


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Sum host numbers over the ranks, in float64 (exact for counts)."""
    total = torch.tensor(values, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(total)
    return total.tolist()


def broadcast(world: World, value: T | None) -> T:
    """Rank 0's picklable value, on every rank."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[return-value]


def gather(world: World, value: T) -> list[T]:
    """Every rank's picklable value, in the order of ranks, on every rank."""
    if world.size == 1:
        return [value]
    boxes: list[T | None] = [None] * world.size
    dist.all_gather_object(boxes, value)  # torch prefers the CPU backend for objects
    return boxes  # type: ignore[return-value]


def on_main(world: World, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and give its result to every rank. A UserError or CommitError there is raised as UserError on every rank alike."""
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
