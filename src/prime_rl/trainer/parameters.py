"""Parameters under their Hugging Face names: which rows lie on which rank, and how they get their values.

transformers holds some tensors in a different form than files do: all experts in one parameter, modules under other
names. `stored_tensors` names, for every tensor of the files, the slice of the parameter that holds it; loading and
exporting both follow it. Values come from a model directory or are random.
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prime_rl.errors import UserError, user_errors
from prime_rl.trainer.parallel import World, local_part, rows_of_rank
from prime_rl.transport.commit import UNSYNCED_BYTES

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WRAPPED = "_checkpoint_wrapped_module."  # of blocks that keep less, or keep it elsewhere


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a model's files and where it lies: `parameter[index]` (rows, rows of an expert, or all)."""

    name: str
    shape: list[int]
    parameter: Tensor
    index: tuple[int, slice] | tuple[slice] | tuple[()] = ()

    def local(self, world: World) -> tuple[Tensor, int]:
        """Return this rank's rows (a view of the parameter, maybe empty) and the index of the first."""
        local = local_part(self.parameter).detach()
        first = rows_of_rank(len(self.parameter), world)[0] if isinstance(self.parameter, DTensor) else 0
        if not self.index:
            return local, first
        if len(self.index) == 1:
            (rows,) = self.index
            start, end = (min(max(at - first, 0), local.shape[0]) for at in (rows.start, rows.stop))
            return local[start:end], max(first - rows.start, 0)
        expert, rows = self.index
        place = expert - first  # fused parameters are sharded by experts: a rank has all of one, or nothing
        if 0 <= place < local.shape[0]:
            return local[place, rows], 0
        return local.new_empty(0, *self.shape[1:]), 0

    def read(self, path: Path, file: Any, world: World) -> None:
        """Read this rank's rows from `file`, which is open at `path`. Raises UserError if it has another shape."""
        local, start = self.local(world)
        stored = file.get_slice(self.name)
        if (shape := list(stored.get_shape())) != self.shape:
            raise UserError(f"{path}: {self.name} has shape {shape}, the model's has {self.shape}")
        if local.numel():
            local.copy_(stored[start : start + local.shape[0]] if shape else file.get_tensor(self.name))


def plain_name(name: str, slot: int = 0) -> str:
    """Strip from a parameter's name what checkpointing and offloading add, and of an adapter's in `slot` the slot."""
    return re.sub(rf"(\.lora_[AB])\.{slot}\.", r"\1.", name.replace(_WRAPPED, ""))


def is_adapter(name: str) -> bool:
    """Whether a parameter or buffer of this name is part of an adapter (`lora.py`)."""
    return ".lora_" in name


def named_parameters(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by transformers' names; a tied head only as the embedding."""
    assert isinstance(policy.lm, nn.Module)
    for name, parameter in policy.lm.named_parameters():
        yield plain_name(name), parameter


class _NoCopy(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is Tensor.contiguous else function(*args, **(kwargs or {}))


def stored_tensors(policy: nn.Module, held: Collection[str] = ()) -> Iterator[StoredTensor]:
    """Yield what the model's files hold, in the order of the parameters, without adapters.

    transformers' reverse conversion, run on meta tensors, splits the parameters. `held`: names in existing files; a
    parameter held under its transformers name stays whole. Raises UserError if a tensor is no slice of a parameter.
    """
    assert isinstance(policy.lm, PreTrainedModel)
    # With routers' correction biases, which are buffers
    state: dict[str, Tensor] = policy.lm.state_dict(keep_vars=True)
    names = {value: name for name, value in reversed(state.items()) if not is_adapter(name)}
    values = {plain_name(name): value for value, name in names.items()}
    wholes = {name: torch.empty(value.shape, device="meta") for name, value in values.items()}
    origins = {whole.untyped_storage()._cdata: name for name, whole in wholes.items()}
    parts: dict[str, list[StoredTensor]] = {name: [] for name in values}
    with _NoCopy():
        stored = revert_weight_conversion(policy.lm, dict(wholes))
    for name, part in stored.items():
        origin = origins.get(part.untyped_storage()._cdata, "")
        if not origin or (index := _index(wholes[origin], part)) is None:
            raise UserError(f"files of {type(policy.lm).__name__} hold {name} in a form that the trainer cannot read")
        parts[origin].append(StoredTensor(name, list(part.shape), values[origin], index))
    for name, value in values.items():
        is_whole = name in held and not any(part.name in held for part in parts[name])
        yield from [StoredTensor(name, list(value.shape), value)] if is_whole else parts[name]


def _index(whole: Tensor, part: Tensor) -> tuple[int, slice] | tuple[slice] | tuple[()] | None:
    """Return the index of the view `part` in `whole`: all, rows, or rows of one matrix; None if none of these."""
    if part.shape == whole.shape and part.stride() == whole.stride():
        return ()
    if part.shape[1:] == whole.shape[1:] and part.stride() == whole.stride():
        row = int(part.storage_offset()) // whole.stride(0)
        return (slice(row, row + part.shape[0]),)
    if part.stride() != whole.stride()[1:] or part.shape[1:] != whole.shape[2:]:
        return None
    expert, row = divmod(int(part.storage_offset()) // whole.stride(1), whole.shape[1])
    return expert, slice(row, row + part.shape[0])


def initialize_buffers(lm: PreTrainedModel, name: str) -> None:
    """Recompute buffers that are in no checkpoint (rotary frequencies), zero integer buffers."""
    fixed = {*lm.state_dict(keep_vars=True).values()}
    for buffer in lm.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
    for parameter in lm.parameters():
        parameter._is_hf_initialized = True  # else transformers would draw values for it
    for module in lm.modules():  # the backbone writes buffers of its layers in some families
        if module is lm.model or next(module.buffers(recurse=False), None) is not None:
            lm._init_weights(module)
    for key, buffer in lm.named_buffers():
        if buffer not in fixed and buffer.is_floating_point() and buffer.isnan().any():
            raise UserError(f"model {name}: the value of its buffer {key} is neither loaded nor known to transformers")


@torch.no_grad()
def randomize(policy: nn.Module, world: World, seed: int) -> None:
    """Fill matrices with normal(0, 0.02), biases with 0, the rest with 1, for any rank count."""
    generator = torch.Generator(world.device)
    for tensor in stored_tensors(policy):
        local, start = tensor.local(world)
        if len(tensor.shape) < 2:
            local.fill_(0.0 if tensor.name.endswith("bias") else 1.0)
        elif local.numel():
            generator.manual_seed((seed * 1_000_003 + zlib.crc32(tensor.name.encode())) % 2**63)
            full = torch.randn(tensor.shape, device=world.device, generator=generator)
            local.copy_(full[start : start + local.shape[0]] * 0.02)


@torch.no_grad()
def load_weights(policy: nn.Module, directory: Path, world: World) -> None:
    """Read every parameter's rows of this rank from a model directory's safetensors files.

    Experts may be stored as the family publishes them, or as transformers holds them. Raises UserError if a tensor
    is missing or has another shape, or a file is damaged.
    """
    files = _tensor_files(directory)
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in stored_tensors(policy, files):
        if tensor.name not in files:
            raise UserError(f"model directory {directory} has no tensor {tensor.name}, which its config.json needs")
        by_file.setdefault(files[tensor.name], []).append(tensor)
    for path, tensors in by_file.items():
        with user_errors(f"{path} is damaged or unreadable", SafetensorError, OSError), safe_open(path, "pt") as file:
            for tensor in tensors:
                tensor.read(path, file, world)


def _tensor_files(directory: Path) -> dict[str, Path]:
    index = directory / "model.safetensors.index.json"
    problem = f"the weights in {directory} are damaged or unreadable"
    with user_errors(problem, SafetensorError, OSError, ValueError, KeyError):
        if index.is_file():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        return files


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, syncing about every `UNSYNCED_BYTES` and at the end."""
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
