"""A micro-batch on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prime_rl.trainer.packing import HostBatch, parts


@dataclass(frozen=True)
class MicroBatch:
    """T packed tokens of D documents, L loss tokens, K streams.

    `loss_index` are the positions whose hidden state predicts a loss token, `labels` those tokens.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarting in every document
    cu_seqlens: Tensor  # [D + 1] int32
    max_seqlen: int
    loss_index: Tensor  # [L] int64
    labels: Tensor  # [L] int64
    inv_temperature: Tensor  # [L] float32
    streams: Tensor  # [K, L] float32

    def documents(self) -> tuple[Tensor, int]:
        """The document of each loss token, [L] int64, and their number D."""
        return torch.searchsorted(self.cu_seqlens.long(), self.loss_index, right=True) - 1, len(self.cu_seqlens) - 1


def pinned(batches: Sequence[HostBatch], device: torch.device) -> list[HostBatch]:
    """The same batches where `device` copies from fastest: for a GPU in page-locked memory, so that the copies run beside everything else."""
    if device.type != "cuda":
        return list(batches)
    return [replace(batch, ints=batch.ints.pin_memory(), floats=batch.floats.pin_memory()) for batch in batches]


def to_device(batch: HostBatch, device: torch.device) -> MicroBatch:
    """Bring a micro-batch to the device in two copies. From page-locked memory nothing waits for them."""
    ints = batch.ints.to(device, non_blocking=True)
    floats = batch.floats.to(device, non_blocking=True)
    input_ids, position_ids, loss_index, labels, cu_seqlens = parts(ints, batch.int_counts)
    inv_temperature, streams = parts(floats, batch.float_counts)
    return MicroBatch(
        input_ids,
        position_ids,
        cu_seqlens.int(),
        batch.max_seqlen,
        loss_index,
        labels,
        inv_temperature,
        streams.view(batch.sizes[3], batch.sizes[1]),
    )
