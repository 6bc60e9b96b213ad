"""Giving every parameter and buffer of a freshly allocated model its value: from a model directory, or random."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.trainer.names import StoredTensor, stored_tensors
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import one_line


def initialize_buffers(lm: PreTrainedModel, name: str) -> None:
    """Recompute buffers that no checkpoint carries (rotary frequencies), set counters to zero; allocation left them undefined."""
    for buffer in lm.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
    for module in lm.modules():
        if next(module.buffers(recurse=False), None) is not None:
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

    Experts may lie there one by one, as models are published, or fused as transformers holds them.

    Raises:
        UserError: a tensor is missing or has another shape, or a file is damaged.
    """
    files = _tensor_files(directory)
    wanted: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for tensor in stored_tensors(policy):
        found = _find(tensor, files, directory)
        wanted.setdefault(files[found], []).append((found, tensor))
    for path, tensors in wanted.items():
        try:
            with safe_open(path, "pt") as file:
                for found, tensor in tensors:
                    local, start = tensor.local(world)
                    if local.numel():
                        local.copy_(_read(file, path, found, tensor, start, local.shape[0]))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or unreadable: {one_line(error)}") from error


def _find(tensor: StoredTensor, files: dict[str, Path], directory: Path) -> str:
    """The name under which the files hold a tensor, or the fused one that it is a part of."""
    names = [tensor.name] if tensor.expert is None else [tensor.name, tensor.expert.fused]
    # A checkpoint of the backbone alone lacks the "model." prefix; one of a tied model may hold the shared matrix as its head.
    for name in (*names, *(name.removeprefix("model.") for name in names)):
        if name in files:
            return name
    raise UserError(f"model directory {directory} has no tensor {tensor.name}, which its config.json needs")


def _read(file: Any, path: Path, found: str, tensor: StoredTensor, start: int, count: int) -> Tensor:
    """Rows [start, start + count) of a tensor, from the open file that holds it as `found`."""
    stored = file.get_slice(found)
    expert = tensor.expert if tensor.expert is not None and tensor.expert.fused.endswith(found) else None
    shape = tensor.shape if expert is None else list(tensor.parameter.shape)
    if list(stored.get_shape()) != shape:
        raise UserError(f"{path}: {found} has shape {list(stored.get_shape())}, config.json says {shape}")
    rows: Tensor = stored[start : start + count] if expert is None else stored[expert.index, expert.rows]
    return rows


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor in a model directory."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        found: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"the weights in {directory} are damaged or unreadable: {one_line(error)}") from error
