"""Training state in torch's distributed checkpoint format (DCP), without unpickling whatever a file holds.

DCP's `.metadata` is a pickle, and its planner loads whatever is no tensor with full pickle. Here the metadata may name
only the classes that it consists of, everything else is read with `weights_only`, and files are opened only beside the
metadata. A checkpoint is data, never code.
"""

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._pytree import KeyPath, tree_leaves, tree_leaves_with_path, tree_map_with_path

from prime_rl.errors import UserError
from prime_rl.trainer.parallel import World, agree, local_part
from prime_rl.transport.commit import UNSYNCED_BYTES, disk_error, disk_errors

State = dict[str, Any]

_METADATA = ".metadata"
_COMPARED = ("model", "optimizer")  # parts of a state that tell one model from another
_ADMITTED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}  # fmt: skip
_BROKEN_PICKLE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, ImportError, OverflowError,
)  # fmt: skip


def save(state: State, directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the ranks' shards of `state` into `directory`. Every rank calls it.

    The plan of who writes what is made by torch, whose own collectives pickle it between the ranks of this trainer
    (which trust each other). Raises UserError if the disk is full, fails, or may not be written to.
    """
    try:
        with disk_errors(directory):
            on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in tree_leaves(state))
            writer = _Writer(directory, per_thread_copy_ahead=10_000_000 if on_gpu else 0)
            checkpoint.save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, OSError) and (explained := disk_error(cause, directory)) is not None:
                raise explained from error
        raise


def load(state: State, directory: Path, world: World) -> None:
    """Fill `state` from `directory`, whatever the number of ranks that wrote it. Every rank calls it.

    Raises UserError if the files are damaged or hold something else than data, or the state is that of another model.
    """
    metadata = agree(world, lambda: read_metadata(directory))
    if problem := misfit(metadata, state):
        hint = "; if the model is the same, so must be optim.type, and whether there is momentum"
        hint = hint if problem.startswith("optimizer.") else ""
        raise UserError(f"{directory} does not fit this model: {problem}{hint}")
    reader = _Reader(directory, metadata)
    try:
        checkpoint.load(state, storage_reader=reader, planner=_Planner(), process_group=world.group)
    except (CheckpointException, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"{directory} cannot be loaded into this model: {_cause(error)}") from error


def read_metadata(directory: Path) -> Metadata:
    """The metadata in `directory`.

    Raises UserError if it is missing or damaged, names anything but the classes of metadata, or points elsewhere.
    """
    path = directory / _METADATA
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: this is no checkpoint of the training state") from error
    except _BROKEN_PICKLE as error:
        raise UserError(f"{path} is refused: {_cause(error)}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise UserError(f"{path} is refused: it holds no metadata of a checkpoint")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise UserError(f"{path} is refused: it names {info.relative_path}, which is not beside it")
    return metadata


def misfit(metadata: Metadata, state: State) -> str | None:
    """The first tensor that only the saved or only this model and optimizer have, or that differs in shape, if any."""
    flat, _ = flatten_state_dict({part: state[part] for part in _COMPARED})  # as DCP names what it saves
    ours = {place: tuple(tensor.shape) for place, tensor in flat.items() if isinstance(tensor, Tensor)}
    saved = {
        place: tuple(entry.size)
        for place, entry in metadata.state_dict_metadata.items()
        if place.startswith(tuple(f"{part}." for part in _COMPARED)) and isinstance(entry, TensorStorageMetadata)
    }
    for place in sorted(saved.keys() | ours.keys()):
        if saved.get(place) != ours.get(place):
            theirs, own = (list(side[place]) if place in side else "not there" for side in (saved, ours))
            return f"{place} is {theirs} in the checkpoint and {own} in the model"
    return None


class HostCopy:
    """Copies of the training state in host memory, in buffers that are made once (page-locked for a GPU: full speed).

    A GPU copies on a stream of its own, beside the forward and backward of the next step: `before_update` must come
    before the state changes.

    Args:
        world: Its mesh lies on the CPU: copies of sharded tensors are sharded over it.
    """

    def __init__(self, world: World) -> None:
        self._world, self._buffers = world, dict[KeyPath, Tensor]()
        self._copied: torch.cuda.Event | None = None
        self._module = torch.get_device_module(world.device)  # torch.cpu's streams do nothing
        self._stream = self._module.Stream(world.device)
        self.closed = False  # nothing more is reserved

    def reserve(self, state: State) -> None:
        """Allocate the buffers beforehand: page-locking takes about a second for each GB."""
        for place, value in tree_leaves_with_path(state):
            if self.closed:
                return
            if isinstance(value, Tensor):
                self._buffer(place, local_part(value))

    def take(self, state: State) -> State:
        """Begin a copy, which is whole after `synchronize`. The next call overwrites it."""
        self._stream.wait_stream(self._module.current_stream(self._world.device))
        with self._module.stream(self._stream):
            copied = tree_map_with_path(self._copy, state)
            if self._world.device.type == "cuda":
                self._copied = torch.cuda.Event(blocking=True)
                self._copied.record()
        return copied

    def before_update(self) -> None:
        """Let the device change the state only after it is copied. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._world.device).wait_event(self._copied)

    def synchronize(self) -> None:
        """Wait until the copy is whole. Any thread may."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, place: KeyPath, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value  # numbers and words do not change
        local = local_part(value)
        copy = self._buffer(place, local).copy_(local.detach(), non_blocking=True)
        if not isinstance(value, DTensor):
            return copy
        shape, stride = value.shape, value.stride()
        return DTensor.from_local(copy, self._world.mesh, value.placements, run_check=False, shape=shape, stride=stride)

    def _buffer(self, place: KeyPath, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[place] = buffer
        return buffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


class _SyncedFile(io.FileIO):
    """A file with at most `UNSYNCED_BYTES` in the page cache."""

    _unsynced = 0

    def write(self, data: Any) -> int:
        written = super().write(memoryview(data).cast("B")[: UNSYNCED_BYTES - self._unsynced])
        self._unsynced += written
        if self._unsynced >= UNSYNCED_BYTES:
            os.fdatasync(self.fileno())
            self._unsynced = 0
        return written


class _SyncedFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with io.BufferedWriter(_SyncedFile(path, mode)) as writer:
            yield writer


class _Writer(checkpoint.FileSystemWriter):
    def __init__(self, directory: Path, per_thread_copy_ahead: int) -> None:
        super().__init__(directory, per_thread_copy_ahead=per_thread_copy_ahead)
        self.fs = _SyncedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Give the other ranks the system's error, which torch's archive writer turns into one about positions."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise OSError(cause.errno, cause.strerror, cause.filename) from error
                cause = cause.__cause__ or cause.__context__
            raise

    def storage_meta(self) -> StorageMeta:
        """Leave out where the checkpoint is written."""
        return StorageMeta()


class _Reader(checkpoint.FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As the base class does it, but what is read may hold plain values only."""
        place: Any = self.original_state_dict
        *path, last = self.mappings[read_item.dest_index.fqn]
        for key in path:
            place = place[key]
        place[last] = torch.load(value, weights_only=True)


def _cause(error: BaseException) -> str:
    """An error's message on one line; of a collective failure that of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
