"""The training state as named tensors: what it consists of, its copy in host memory, and its files.

Each rank writes the rows that it holds into a file of its own, `rank_<r>.safetensors`; `index.json` has the shapes of
the whole tensors. Rows are divided by a rule (`rows_of_ranks`), so that any number of ranks finds its rows in the files
of any other. A checkpoint is data, never code.
"""

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from prime_rl.errors import UserError, user_errors
from prime_rl.trainer.optim import ShardedOptimizer
from prime_rl.trainer.parallel import World, agree, local_part, rows_of_rank, rows_of_ranks
from prime_rl.trainer.parameters import plain_name, write_tensors
from prime_rl.transport.commit import disk_errors

_INDEX = "index.json"


class StateTensor(NamedTuple):
    """This rank's rows of a tensor, and the shape of the whole; [] of what is whole on every rank, as numbers are."""

    local: Tensor
    shape: list[int]


State = dict[str, StateTensor]


@torch.no_grad()
def training_state(model: nn.Module, optimizer: ShardedOptimizer) -> State:
    """Views of what is trained, of its optimizer states and of routers' correction biases, to be read on the host."""
    optimizer.settle()
    state = {}
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name, shape = plain_name(full_name), list(parameter.shape)
        state[f"model.{name}"] = StateTensor(local_part(parameter).detach(), shape)
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = StateTensor(value, shape if value.ndim else [])
    for full_name, buffer in model.state_dict(keep_vars=True).items():
        if not isinstance(buffer, nn.Parameter) and buffer.is_floating_point():
            state[f"model.{plain_name(full_name)}"] = StateTensor(buffer, [])
    return state


# ---- the copy


class HostCopy:
    """Copies of the training state in host memory, in buffers that are made once (pinned for a GPU: full speed).

    A GPU copies on a stream of its own, beside the forward and backward of the next step: `before_update` must come
    before the state changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, dict[str, Tensor]()
        self._copied: torch.cuda.Event | None = None
        self._module = torch.get_device_module(device)  # torch.cpu's streams do nothing
        self._stream = self._module.Stream(device)
        self.closed = False  # nothing more is reserved

    def reserve(self, state: State) -> None:
        """Allocate the buffers beforehand: pinning takes about a second for each GB. `take` says what cannot be."""
        with suppress(RuntimeError):
            for name, tensor in state.items():
                if self.closed:
                    return
                self._buffer(name, tensor.local)

    def take(self, state: State) -> State:
        """Begin a copy, which is whole after `synchronize`. The next call overwrites it."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            copied = {
                name: StateTensor(self._buffer(name, local).copy_(local, non_blocking=True), shape)
                for name, (local, shape) in state.items()
            }
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event(blocking=True)
                self._copied.record()
        return copied

    def before_update(self) -> None:
        """Let the device change the state only after it is copied. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def synchronize(self) -> None:
        """Wait until the copy is whole. Any thread may."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self._buffers[name]


# ---- the files


def save(state: State, directory: Path, world: World) -> None:
    """Write this rank's file into `directory`; rank 0 writes the index as well. Every rank calls it.

    Raises UserError, on every rank, if the disk is full, fails, or may not be written to.
    """
    tensors = {name: local for name, (local, shape) in state.items() if world.is_main or shape}
    shapes = {name: shape for name, (_, shape) in state.items()}

    def write() -> None:
        with disk_errors(directory):
            directory.mkdir(exist_ok=True)
            if world.writes:
                write_tensors(_rank_file(directory, world.rank), tensors)
            if world.is_main:
                index = {"shards": world.shards, "shapes": shapes}
                (directory / _INDEX).write_text(json.dumps(index))

    agree(world, write)


@torch.no_grad()
def load(state: State, directory: Path, world: World) -> None:
    """Fill `state` from `directory`, whatever the number of ranks that wrote it.

    Raises UserError, if the files are damaged or of an older format, or of another model.
    """
    kinds = SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError
    with user_errors(f"{directory} cannot be loaded into this model", *kinds):
        index = json.loads((directory / _INDEX).read_text())
        ours, saved = {name: tensor.shape for name, tensor in state.items()}, index["shapes"]
        for name in sorted(saved.keys() | ours.keys()):
            if saved.get(name) == ours.get(name):
                continue
            same = "; optim.type must be the same as when it was saved"
            raise UserError(
                f"{directory} does not fit this model: {name} has shape {saved.get(name)} in the checkpoint and "
                f"{ours.get(name)} in the model (None: it is missing){same if name.startswith('optimizer.') else ''}"
            )
        with ExitStack() as exit_stack:
            paths = [_rank_file(directory, rank) for rank in range(index["shards"])]
            files = [exit_stack.enter_context(safe_open(path, "pt")) for path in paths]
            for name, (local, shape) in state.items():
                if not shape:
                    local.copy_(files[0].get_tensor(name))
                    continue
                first, end = rows_of_rank(shape[0], world)
                for file, (start, stop) in zip(files, rows_of_ranks(shape[0], len(files)), strict=True):
                    low, high = max(first, start), min(end, stop)
                    if low < high:
                        local[low - first : high - first].copy_(file.get_slice(name)[low - start : high - start])


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.safetensors"
