"""A micro-batch on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prime_rl.trainer.packing import HostBatch


@dataclass(frozen=True)
class MicroBatch:
    """`HostBatch` on the device; see there for the shapes."""

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_index: Tensor
    labels: Tensor
    inv_temperature: Tensor
    streams: Tensor


def to_device(batch: HostBatch, device: torch.device) -> MicroBatch:
    """Copy a micro-batch to the device. On CUDA through pinned memory, without waiting."""

    def move(array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return MicroBatch(
        move(batch.input_ids),
        move(batch.position_ids),
        move(batch.cu_seqlens),
        batch.max_seqlen,
        move(batch.loss_index),
        move(batch.labels),
        move(batch.inv_temperature),
        move(batch.streams),
    )
