"""Parameters under their Hugging Face names: which rows lie on which rank, and how they get their values.

transformers holds some tensors in another form than the files do. `stored_tensors` names, for every tensor of the files,
the slice of the parameter that holds it; loading and exporting both follow it. Values come from a model directory or are
random.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.trainer.parallel import World, local_part, rows_of_rank
from prime_rl.trainer.source import one_line
from prime_rl.transport.commit import UNSYNCED_BYTES

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WRAPPED = "_checkpoint_wrapped_module."  # of blocks that keep less, or keep it elsewhere
# Parameters that hold a matrix of every expert, and the names of their parts in the files, one below the other.
_FUSED = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Expert:
    """Where a stored tensor lies in a fused parameter [E, rows, columns]."""

    index: int
    rows: slice


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a model's files, of `shape`, and the parameter that holds it, whole or (`expert`) as a part."""

    name: str
    shape: list[int]
    parameter: nn.Parameter
    expert: Expert | None = None

    def local(self, world: World) -> tuple[Tensor, int]:
        """This rank's rows of it (a view of the parameter, perhaps empty), and the index of their first row."""
        local, first = local_rows(self.parameter, world)
        if self.expert is None:
            return local, first
        place = self.expert.index - first  # fused parameters are sharded by experts: a rank has all of one, or nothing
        if 0 <= place < local.shape[0]:
            return local[place, self.expert.rows], 0
        return local.new_empty(0, *self.shape[1:]), 0


def plain_name(name: str) -> str:
    """A parameter's name without what checkpointing and offloading put into it."""
    return name.replace(_WRAPPED, "")


def named_parameters(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under transformers' names; a tied head appears once, as the embedding."""
    assert isinstance(policy.lm, nn.Module)
    for name, parameter in policy.lm.named_parameters():
        yield plain_name(name), parameter


def stored_tensors(policy: nn.Module) -> Iterator[StoredTensor]:
    """What the model's files hold, in the order of the parameters."""
    for name, parameter in named_parameters(policy):
        parts = next((parts for end, parts in _FUSED.items() if name.endswith(end)), None)
        if parts is None:
            yield StoredTensor(name, list(parameter.shape), parameter)
            continue
        experts, rows, columns = parameter.shape
        rows //= len(parts)
        prefix = name.rpartition(".")[0]
        for index in range(experts):
            for i, part in enumerate(parts):
                expert = Expert(index, slice(i * rows, (i + 1) * rows))
                yield StoredTensor(f"{prefix}.{index}.{part}.weight", [rows, columns], parameter, expert)


def local_rows(parameter: Tensor, world: World) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, and the index of their first row."""
    first = rows_of_rank(parameter.shape[0], world)[0] if isinstance(parameter, DTensor) else 0
    return local_part(parameter).detach(), first


def initialize_buffers(lm: PreTrainedModel, name: str) -> None:
    """Recompute buffers that no checkpoint carries (rotary frequencies), set counters to zero."""
    for buffer in lm.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
    for parameter in lm.parameters():
        parameter._is_hf_initialized = True  # else transformers would draw values for it
    for module in lm.modules():  # the backbone writes buffers of its layers in some families
        if module is lm.model or next(module.buffers(recurse=False), None) is not None:
            lm._init_weights(module)
    for key, buffer in lm.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise UserError(f"model {name}: the value of its buffer {key} is not known to transformers")


@torch.no_grad()
def randomize(policy: nn.Module, world: World, seed: int) -> None:
    """Random matrices (normal, 0.02), unit norms, zero biases: the same on any number of ranks."""
    generator = torch.Generator(world.device)
    for tensor in stored_tensors(policy):
        local, start = tensor.local(world)
        if len(tensor.shape) == 1:
            local.fill_(0.0 if tensor.name.endswith("bias") else 1.0)
        elif local.numel():
            generator.manual_seed(seed * 1_000_003 + zlib.crc32(tensor.name.encode()))
            full = torch.randn(tensor.shape, device=world.device, generator=generator)
            local.copy_(full[start : start + local.shape[0]] * 0.02)


@torch.no_grad()
def load_weights(policy: nn.Module, directory: Path, world: World) -> None:
    """Read every parameter's rows of this rank from a model directory's safetensors files.

    Experts lie there one by one, as models are published. Raises UserError if a tensor is missing or has another shape,
    or a file is damaged.
    """
    files = _tensor_files(directory)
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in stored_tensors(policy):
        if tensor.name not in files:
            raise UserError(f"model directory {directory} has no tensor {tensor.name}, which its config.json needs")
        by_file.setdefault(files[tensor.name], []).append(tensor)
    for path, tensors in by_file.items():
        try:
            with safe_open(path, "pt") as file:
                for tensor in tensors:
                    local, start = tensor.local(world)
                    stored = file.get_slice(tensor.name)
                    if (shape := list(stored.get_shape())) != tensor.shape:
                        raise UserError(f"{path}: {tensor.name} has shape {shape}, config.json says {tensor.shape}")
                    if local.numel():
                        local.copy_(stored[start : start + local.shape[0]])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or unreadable: {one_line(error)}") from error


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor in a model directory."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        return files
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"the weights in {directory} are damaged or unreadable: {one_line(error)}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with at most `UNSYNCED_BYTES` of it in the page cache, and sync it."""
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    pinned = torch.empty(UNSYNCED_BYTES if on_gpu else 0, dtype=torch.uint8, pin_memory=on_gpu)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        unsynced = 0
        for tensor in tensors.values():
            for part in tensor.contiguous().reshape(-1).view(torch.uint8).split(UNSYNCED_BYTES):
                unsynced += file.write((pinned[: len(part)].copy_(part) if part.is_cuda else part).numpy().data)
                if unsynced >= UNSYNCED_BYTES:
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
        file.flush()
        os.fsync(file.fileno())
