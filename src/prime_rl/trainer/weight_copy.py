"""The copy of the weights in the exported dtype, taken between two steps and read beside the next one, and its files.

Whole tensors are gathered layer by layer on rank 0, which publishes them from this copy, or writes them into files.
"""

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prime_rl.config.trainer import LoRAConfig
from prime_rl.errors import UserError
from prime_rl.host_memory import local_ranks
from prime_rl.trainer.lora import adapter_tensors, adapters, peft_config
from prime_rl.trainer.parallel import Moment, World, local_part, now, page_lock
from prime_rl.trainer.parameters import DTYPE_NAMES, stored_tensors, write_tensors
from prime_rl.trainer.source import Source
from prime_rl.transport.commit import disk_errors
from prime_rl.transport.exchange import layout, shared_buffer, tensor_views
from prime_rl.transport.weights import ADAPTER_CONFIG, ADAPTER_FILE, INDEX, TensorEntry, hash_tensors

DEVICE_SHARE = 1 / 8  # of the GPU's memory, most that the copy takes; a larger one lies in host memory
FILE_BYTES = 256 << 20  # a file holds more only if one tensor does
_LEAST_FILE_BYTES = 64 << 20
_FILES = 16  # of a small model, or more: the kernel lets one thread at a time write to a file
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_NOT_COPIED = {"manifest.json", INDEX}  # present if the source is a committed version itself


class WeightCopy:
    """Whole tensors on rank 0: in one buffer on its GPU, if `gpu` allows, or in host memory if that share is large.

    Of a policy with adapters they are the adapters, or with `lora.serve` merged the sums of weights and adapters.

    Attributes:
        tensors: Name, dtype and shape of each, in the order of the buffer; `ranges` in it, `size` bytes in all.
        handle: Opens the buffer for other processes on this GPU, if the driver can.
    """

    def __init__(
        self, policy: nn.Module, world: World, dtype: torch.dtype, *, gpu: bool = False, lora: LoRAConfig | None = None
    ) -> None:
        self.world, self.dtype, self._gpu = world, dtype, gpu
        self._policy, self._lora = policy, lora
        self._sums = {weight: merge for each in adapters(policy) for weight, merge in each.weights()}
        self.is_adapter = lora is not None and lora.serve == "adapter"
        self.stored = list(adapter_tensors(policy) if self.is_adapter else stored_tensors(policy))
        kinds = {True: DTYPE_NAMES[dtype], False: "F32"}  # buffers stay exact: they decide between experts
        exported = ((t, kinds[isinstance(t.parameter, nn.Parameter)]) for t in self.stored)
        self.tensors = {t.name: TensorEntry("", kind, t.shape, "") for t, kind in exported}
        self.ranges, self.size = layout(self.tensors)
        self.buffer = torch.empty(0, dtype=torch.uint8)  # stays empty on the other ranks
        self.handle: str | None = None

    def allocate(self) -> None:
        """Make the buffer, on rank 0. Pinning gigabytes takes seconds: a thread may do it beforehand."""
        device = self.world.device
        if not self.world.is_main or self.buffer.numel():
            return
        if self._gpu and on_device(self.size, device):
            self.buffer, self.handle = shared_buffer(self.size, device)
            return
        try:
            self.buffer = torch.zeros(self.size, dtype=torch.uint8)
        except RuntimeError as error:
            raise UserError(f"no {self.size:,} bytes of host memory for the weights") from error
        if device.type == "cuda":
            with torch.cuda.device(device):  # a new thread has another one
                if failed := page_lock(self.buffer, owner=self):
                    logger.warning("the copy of the weights cannot be pinned (CUDA error {}): it is slow", failed)

    @torch.no_grad()
    def copy(self) -> tuple[Moment, Moment]:
        """Gather the weights as they are now, layer by layer; every rank calls it. Returns when that begins and ends.

        On a GPU this only enqueues, in the order of the training's own work.
        """
        self.allocate()
        views = dict(tensor_views(self.buffer, self.tensors)) if self.world.is_main else {}
        began, targets, parts = now(self.world.device), list[Tensor](), list[Tensor]()
        if self.world.writes:  # the others hold replicas of the same rows
            for _, group in groupby(self.stored, key=lambda tensor: id(tensor.parameter)):
                tensors = list(group)
                parameter = tensors[0].parameter
                whole = self._whole(parameter)
                if not self.is_adapter and parameter in self._sums:
                    whole = self._sums[parameter](whole, self._whole)
                if not self.world.is_main:
                    continue
                targets += [views[tensor.name] for tensor in tensors]
                parts += [whole[tensor.index] for tensor in tensors]
                if not self.is_adapter:  # a gathered layer is not kept; adapters are hundreds of small tensors
                    torch._foreach_copy_(targets, parts, non_blocking=True)
                    targets, parts = [], []
        if targets:
            torch._foreach_copy_(targets, parts, non_blocking=True)
        return began, now(self.world.device)

    def _whole(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or self.world.shards == 1:
            return local_part(parameter).detach()
        cast: Any = parameter if self._sums else parameter.to(self.dtype)  # before it travels, unless it is summed up
        return cast.full_tensor()

    def to_host(self) -> Tensor:
        """Copy the buffer to host memory, on rank 0, in any thread, between the end of a copy and the next one."""
        if not self.buffer.is_cuda:
            return self.buffer.clone()
        host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(self.buffer.device), torch.cuda.stream(torch.cuda.Stream(self.buffer.device)):
            host.copy_(self.buffer)
        return host

    def write_files(self, host: Tensor, source: Source, directory: Path) -> dict[str, TensorEntry]:
        """Write a copy in host memory as a model directory, files, config and tokenizer; return the tensors' hashes.

        The files are read back, to see what has arrived. Raises UserError if the disk is full.
        """
        views = dict(tensor_views(host, self.tensors))
        tensors = {ADAPTER_FILE: list(self.tensors)} if self.is_adapter else tensors_by_file(self.ranges)
        if self.is_adapter:
            with disk_errors(directory):
                (directory / ADAPTER_CONFIG).write_text(json.dumps(self.adapter_config(source), indent=2) + "\n")
        else:
            copy_model_files(source, directory, self.dtype)

        def write(file: str) -> dict[str, TensorEntry]:
            path = directory / file
            with disk_errors(path):
                write_tensors(path, {name: views[name] for name in tensors[file]})
                return hash_tensors(path)

        # Several files at a time: the disk and xxh3 do not hold the interpreter.
        threads = min(max((os.cpu_count() or 1) // local_ranks() - 4, 2), 8, len(tensors))
        with ThreadPoolExecutor(threads, thread_name_prefix="export") as pool:  # bounded: by the disk
            hashed = {name: entry for entries in pool.map(write, tensors) for name, entry in entries.items()}
        if len(tensors) > 1:
            total = sum(size for _, size in self.ranges.values())
            weight_map = {name: entry.file for name, entry in hashed.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            with disk_errors(directory):
                (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        return hashed

    def adapter_config(self, source: Source) -> dict[str, Any]:
        """Return PEFT's description of the adapters."""
        assert self._lora is not None
        return peft_config(self._policy, self._lora, source.name)


def on_device(size: int, device: torch.device) -> bool:
    """Whether a copy of so many bytes may lie in the GPU's own memory."""
    return device.type == "cuda" and size <= DEVICE_SHARE * torch.cuda.get_device_properties(device).total_memory


# ---- files


def tensors_by_file(ranges: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    """Distribute tensors, given with their starts and sizes, over files of similar size, in their order."""
    limit = min(FILE_BYTES, max(sum(size for _, size in ranges.values()) // _FILES, _LEAST_FILE_BYTES))
    groups: list[list[str]] = [[]]
    end = 0
    for name, (_, size) in ranges.items():
        if groups[-1] and end + size > limit:
            groups.append([])
            end = 0
        groups[-1].append(name)
        end += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def copy_model_files(source: Source, directory: Path, dtype: torch.dtype) -> None:
    """Copy config, generation config and tokenizer into a version's directory."""
    with disk_errors(directory):
        if source.directory is None:
            source.config.save_pretrained(directory)
        else:
            for path in (path for pattern in _COPIED for path in source.directory.glob(pattern)):
                if path.name not in _NOT_COPIED:
                    shutil.copyfile(path, directory / path.name)
        config = directory / "config.json"
        described = json.loads(config.read_text())
        described.pop("torch_dtype", None)  # the older spelling
        described["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(described, indent=2) + "\n")
