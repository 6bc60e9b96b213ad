"""A checksum of tensors in memory, in plain torch operations that give the same result on every device.

The words of a tensor (64 bits each) are multiplied by odd numbers that depend on their places, and summed modulo 2^64.
Integers wrap the same way on every device and in every order, so the result is exact. One changed word always changes
the sum; other damage (exchanged tensors, a missing block) is missed with a probability of about 2^-64. It guards
against accidents, not against forgery.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes: every tensor begins at a multiple of it, as in torch's own allocator, and is padded with zeros."""
_COLUMNS = ALIGNMENT // 8
_CHUNK_ROWS = 1 << 17  # 64 MiB multiplied at once: the products take as much again


def checksums(buffer: Tensor, places: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The checksum of every tensor in a buffer, as 16 hex digits.

    Args:
        buffer: uint8 [B], on any device, with zeros between two tensors.
        places: The start of each tensor, a multiple of `ALIGNMENT`, and its size, both in bytes.
    """
    names = list(places)
    if not names:
        return {}
    device = buffer.device
    starts = torch.tensor([start // ALIGNMENT for start, _ in places.values()], device=device)
    ends = torch.tensor([-(-(start + size) // ALIGNMENT) for start, size in places.values()], device=device)
    words = buffer.view(torch.int64).view(-1, _COLUMNS)
    columns = _odd(torch.arange(_COLUMNS, device=device) + 1)
    rows = torch.cat([(chunk * columns).sum(1) for chunk in words.split(_CHUNK_ROWS)])
    place = torch.arange(len(rows), device=device)
    # Counted from the tensor's own beginning, so that its checksum does not depend on what lies before it.
    tensor = (torch.searchsorted(starts, place, right=True) - 1).clamp_(min=0)
    weighted = rows * _odd(_mix(place - starts[tensor] + 1))
    total = torch.cat([weighted.new_zeros(1), weighted.cumsum(0)])
    sums = (total[ends] - total[starts]).tolist()
    return {name: f"{value % (1 << 64):016x}" for name, value in zip(names, sums, strict=True)}


def _mix(values: Tensor) -> Tensor:
    """Spread small integers over 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014), with signed shifts."""
    values = values * -7046029254386353131
    values = (values ^ (values >> 30)) * -4658895280553007687
    values = (values ^ (values >> 27)) * -7723592293110705685
    return values ^ (values >> 31)


def _odd(values: Tensor) -> Tensor:
    return _mix(values) | 1
