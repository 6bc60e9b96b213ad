"""Hashing on a GPU gives what xxhash gives. (At every border between its rules: tests/unit/transport/interpreted_device_hash.py.)"""

import pytest
import torch
import xxhash

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
device_hash = pytest.importorskip("prime_rl.transport.device_hash")  # imports Triton
pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
SIZES = [16, 240, 248, 1024, 2056, 9 * 1024, 1 << 20, (32 << 20) - 8, 32 << 20, 1007, 5 << 20]


def test_as_xxhash_does() -> None:
    """Contract: pieces of all sizes, at even and odd words and within one."""
    data = torch.randint(0, 256, (sum(SIZES),), dtype=torch.uint8, device=DEVICE)
    pieces = data.split(SIZES)
    assert device_hash.digests(pieces) == [xxhash.xxh3_128_digest(piece.cpu().numpy().data) for piece in pieces]


def test_it_is_used() -> None:
    """Contract: no GPU that we know of falls back to the host."""
    assert device_hash.works_on(DEVICE)


def test_a_passing_lack_of_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a GPU that somebody else had filled for a moment hashes the next version."""

    def full(pieces: object) -> None:
        raise torch.OutOfMemoryError("scripted")

    device_hash._works_on.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(device_hash, "_digests", full)
        piece = torch.ones(1 << 20, dtype=torch.uint8, device=DEVICE)
        assert device_hash.digests([piece]) == [xxhash.xxh3_128_digest(bytes(piece.cpu().numpy()))]
        assert not device_hash.works_on(DEVICE)
    assert device_hash.works_on(DEVICE)
