"""Giving every parameter and buffer of a freshly allocated model its value: from a model directory, or random."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.trainer.names import local_rows, named_parameters
from prime_rl.trainer.parallel import World
from prime_rl.trainer.source import one_line


def initialize_buffers(lm: PreTrainedModel, name: str) -> None:
    """Recompute buffers that no checkpoint carries (rotary frequencies); allocation left them undefined."""
    for buffer in lm.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module in lm.modules():
        if next(module.buffers(recurse=False), None) is not None:
            lm._init_weights(module)
    for key, buffer in lm.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise UserError(f"model {name}: the value of its buffer {key} is not known to transformers")


@torch.no_grad()
def randomize(policy: nn.Module, world: World, seed: int) -> None:
    """Random matrices (normal, 0.02), unit norms, zero biases: the same on any number of ranks."""
    for name, parameter in named_parameters(policy):
        local, start = local_rows(parameter, world)
        if parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(world.device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        full = torch.randn(parameter.shape, device=world.device, generator=generator)
        local.copy_(full[start : start + local.shape[0]] * 0.02)


@torch.no_grad()
def load_weights(policy: nn.Module, directory: Path, world: World) -> None:
    """Read every parameter's rows of this rank from a model directory's safetensors files.

    Raises:
        UserError: a tensor is missing or has another shape, or a file is damaged.
    """
    files = _tensor_files(directory)
    find = _name_finder(files, directory)
    wanted: dict[Path, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters(policy):
        stored = find(name)
        wanted.setdefault(files[stored], []).append((stored, parameter))
    for path, parameters in wanted.items():
        try:
            with safe_open(path, "pt") as file:
                for stored, parameter in parameters:
                    rows = file.get_slice(stored)
                    if list(rows.get_shape()) != list(parameter.shape):
                        raise UserError(
                            f"{path}: {stored} has shape {list(rows.get_shape())}, config.json says {list(parameter.shape)}"
                        )
                    local, start = local_rows(parameter, world)
                    if local.numel():
                        local.copy_(rows[start : start + local.shape[0]])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or unreadable: {one_line(error)}") from error


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


def _name_finder(files: dict[str, Path], directory: Path) -> Callable[[str], str]:
    def find(name: str) -> str:
        # A checkpoint of the backbone alone lacks the "model." prefix; one of a tied model may hold the shared matrix as its head.
        for candidate in (name, name.removeprefix("model.")):
            if candidate in files:
                return candidate
        raise UserError(f"model directory {directory} has no tensor {name}, which its config.json needs")

    return find
