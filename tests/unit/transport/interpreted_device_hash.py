"""Run by `test_device_hash.py` with TRITON_INTERPRET=1."""

import random

import pytest
import torch
import xxhash

from prime_rl.transport import device_hash, tensor_hash

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


def test_tensors_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they lie, their hashes are those that manifests have."""
    monkeypatch.setattr(tensor_hash, "CHUNK_BYTES", 1000)
    data = torch.frombuffer(bytearray(random.Random(1).randbytes(20_000)), dtype=torch.uint8)
    rows = [
        ("large", 8, 9_500),
        ("empty", 9_508, 0),
        ("small", 9_508, 16),
        ("odd", 9_999, 3_001),
        ("last", 13_000, 7_000),
    ]
    expected = {name: tensor_hash.hash_tensor(data[at : at + size].numpy().tobytes()) for name, at, size in rows}
    assert device_hash.of_rows(data, rows) == expected


def test_products_and_sums_beyond_64_bits() -> None:
    most = torch.full((4096,), 255, dtype=torch.uint8)
    expected = [xxhash.xxh3_128_digest(bytes([255]) * size) for size in (4096, 4088)]
    assert device_hash.digests([most, most[:4088]]) == expected
