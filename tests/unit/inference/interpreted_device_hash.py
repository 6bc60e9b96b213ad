"""Run by `test_device_hash.py` with TRITON_INTERPRET=1."""

import random

import pytest
import torch
import xxhash

from prime_rl.inference import device_hash

# At every border between the rules: short ones, stripes, blocks, the blocks of a turn; last stripes at odd words.
SIZES = [
    0, 1, 8, 16, 17, 128, 129, 232, 240, 241, 247, 248, 256, 264, 1016, 1024, 1032, 1080, 1088, 1152, 2048, 2056, 8 * 1024, 8 * 1024 + 8, 9 * 1024, 20_000,
]  # fmt: skip


@pytest.mark.parametrize("offset", [0, 3, 8])
def test_as_xxhash_does(offset: int) -> None:
    """Pieces of all sizes at once, wherever they begin, have the hashes that xxhash gives them."""
    pieces, at = [], offset
    for size in SIZES:
        pieces.append((at, at + size))
        at += size + random.Random(size).choice([0, 8, 13])
    data = torch.frombuffer(bytearray(random.Random(0).randbytes(at)), dtype=torch.uint8)
    found = device_hash.digests([data[start:end] for start, end in pieces])
    assert found == [xxhash.xxh3_128_digest(data[start:end].numpy().tobytes()) for start, end in pieces]


def test_products_and_sums_beyond_64_bits() -> None:
    most = torch.full((4096,), 255, dtype=torch.uint8)
    expected = [xxhash.xxh3_128_digest(bytes([255]) * size) for size in (4096, 4088)]
    assert device_hash.digests([most, most[:4088]]) == expected
