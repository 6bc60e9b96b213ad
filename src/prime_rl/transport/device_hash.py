"""xxh3-128 of bytes that lie on a GPU, by the GPU: what is proven is what the model gets, and no byte of it comes back to the host.

XXH3 (its specification: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, seed 0, the default secret) adds the 16 stripes of 64 bytes of a
block to eight sums, which are then scrambled: what the stripes of many blocks add up to is computed at once, and only the scrambling goes from block to
block. Several thousand pieces are hashed beside each other.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
import xxhash
from loguru import logger
from torch import Tensor

from prime_rl.transport.tensor_hash import chunks, of_tensors

Words = npt.NDArray[np.uint64]

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_MX1 = 0x165667919E3779F9
_SUMS = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_LAST_AT = len(_SECRET) - 64 - 7  # the part of the secret that the last stripe meets

_SMALLEST = 241  # bytes: shorter ones have other rules
_WORD, _STRIPE, _BLOCK = 8, 64, 1024  # bytes
_BLOCKS = 8  # of a piece, whose bytes are under way at once
_TRIED = 3 * _BLOCKS * _BLOCK + 3 * _STRIPE + 24  # bytes of what is hashed to see whether it works


@triton.jit
def _sums_of(addresses, sizes, table, out, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The eight sums of one piece: of `sizes` bytes, at `addresses`."""
    piece = tl.program_id(0)
    first = tl.load(addresses + piece).to(tl.pointer_type(tl.uint64))
    size = tl.load(sizes + piece)
    lane, stripe, block = tl.arange(0, 8), tl.arange(0, 16), tl.arange(0, BLOCKS)
    key_s8 = tl.load(table + stripe[:, None] + lane[None, :])
    scramble_8 = tl.load(table + 16 + lane)
    sums_8 = tl.load(table + 32 + lane)
    whole = (size - 1) // 1024
    for at in range(0, whole, BLOCKS):
        place_bs8 = (at + block)[:, None, None] * 128 + stripe[None, :, None] * 8 + lane[None, None, :]
        there = (at + block)[:, None, None] < whole
        word_bs8 = tl.load(first + place_bs8, there, 0)
        swapped_bs8 = tl.load(first + (place_bs8 ^ 1), there, 0)  # a stripe's word is added to its neighbour's sum
        mixed_bs8 = word_bs8 ^ key_s8[None, :, :]
        added_b8 = tl.sum((mixed_bs8 & 0xFFFFFFFF) * (mixed_bs8 >> 32) + swapped_bs8, 1)
        for index in tl.static_range(BLOCKS):
            if at + index < whole:
                sums_8 += tl.sum(tl.where((block == index)[:, None], added_b8, 0), 0)
                sums_8 = (sums_8 ^ (sums_8 >> 47) ^ scramble_8) * 2654435761
    # What is left: whole stripes, then the last one, which may have been among those.
    rest = (size - 1 - whole * 1024) // 64
    place_s8 = whole * 128 + stripe[:, None] * 8 + lane[None, :]
    there = (stripe < rest)[:, None]
    mixed_s8 = tl.load(first + place_s8, there, 0) ^ key_s8
    swapped_s8 = tl.load(first + (place_s8 ^ 1), there, 0)
    sums_8 += tl.sum(tl.where(there, (mixed_s8 & 0xFFFFFFFF) * (mixed_s8 >> 32) + swapped_s8, 0), 0)
    place_8 = size // 8 - 8 + lane
    mixed_8 = tl.load(first + place_8) ^ tl.load(table + 24 + lane)
    # The last stripe may begin at an odd word: its neighbours are counted from its beginning.
    sums_8 += (mixed_8 & 0xFFFFFFFF) * (mixed_8 >> 32) + tl.load(first + size // 8 - 8 + (lane ^ 1))
    tl.store(out + piece * 8 + lane, sums_8)


def digests(pieces: Sequence[Tensor]) -> list[bytes]:
    """xxh3-128 of each of these bytes on a GPU. Enqueued on the current stream, and waited for."""
    try:
        return _digests(pieces)
    except torch.OutOfMemoryError:  # somebody else took what little that needs
        return [_on_host(piece) for piece in pieces]


def of_rows(data: Tensor, rows: Iterable[tuple[str, int, int]]) -> dict[str, str]:
    """The hashes of tensors by their names, which lie in `data` from some byte on, so many bytes (`tensor_hash`). Where as `digests`."""
    named = list(rows)
    pieces = [data[at + first : at + last] for _, at, size in named for first, last in chunks(size)]
    return dict(
        zip((name for name, *_ in named), of_tensors((size for *_, size in named), digests(pieces)), strict=True)
    )


def _digests(pieces: Sequence[Tensor]) -> list[bytes]:
    fit = [piece for piece in pieces if _fits(piece)]
    there = iter(_hash(fit) if fit else [])
    return [next(there) if _fits(piece) else _on_host(piece) for piece in pieces]


def _on_host(piece: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(piece.cpu().numpy().data)


def works_on(device: torch.device) -> bool:
    """Whether this device hashes as xxhash does; if not, it is said why, once. The first call compiles. Without memory for the trial it does not, this time."""
    try:
        return _works_on(device)
    except torch.OutOfMemoryError:
        return False


@cache
def _works_on(device: torch.device) -> bool:
    try:
        with torch.cuda.device(device):
            words = torch.arange(_TRIED // _WORD, device=device) * (_PRIME64_1 - (1 << 64))
            pieces = words.view(torch.uint8).split([248, 1032, _TRIED - 1280])
            right = _digests(pieces) == [_on_host(piece) for piece in pieces]
            why = "hashes are wrong there"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever Triton raises: no compiler on the host, a GPU that it does not know
        right, why = False, str(error)
    if not right:
        logger.warning("new weights are hashed in host memory, not on the GPU: {}", why)
    return right


def _fits(piece: Tensor) -> bool:
    """Whether it consists of words, and is not short."""
    return len(piece) >= _SMALLEST and not piece.data_ptr() % _WORD and not len(piece) % _WORD


def _hash(pieces: Sequence[Tensor]) -> list[bytes]:
    device = pieces[0].device
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], device=device)
    sums = torch.empty(len(pieces), 8, dtype=torch.uint64, device=device)
    table = torch.from_numpy(_table()).to(device)
    _sums_of[(len(pieces),)](addresses, torch.from_numpy(sizes).to(device), table, sums, _BLOCKS, num_warps=4)
    return _finish(sums.cpu().numpy(), sizes.astype(np.uint64))


@cache
def _table() -> Words:
    """The secret's words, of which the last eight scramble; those that the last stripe meets; what the sums begin with."""
    last = np.frombuffer(_SECRET[_LAST_AT : _LAST_AT + _STRIPE], "<u8")
    return np.concatenate([np.frombuffer(_SECRET, "<u8"), last, np.array(_SUMS, np.uint64)])


def _finish(sums: Words, sizes: Words) -> list[bytes]:
    """The hashes of pieces of these sizes from their sums."""
    low = _merge(sums, _SECRET[11:], sizes * np.uint64(_PRIME64_1))
    high = _merge(sums, _SECRET[len(_SECRET) - _STRIPE - 11 :], ~(sizes * np.uint64(_PRIME64_2)))
    return [digest.tobytes() for digest in np.stack([high, low], 1).astype(">u8")]


def _merge(sums: Words, secret: bytes, begin: Words) -> Words:
    mixed = sums ^ np.frombuffer(secret[:_STRIPE], "<u8")
    merged = begin + _fold(mixed[:, 0::2], mixed[:, 1::2]).sum(1, dtype=np.uint64)
    merged ^= merged >> np.uint64(37)
    merged *= np.uint64(_PRIME_MX1)
    return merged ^ (merged >> np.uint64(32))


def _fold(a: Words, b: Words) -> Words:
    """The two halves of the product of 128 bits, one over the other."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    middle = (a_low * b_low >> half) + (a_high * b_low & mask) + a_low * b_high
    return (a * b) ^ (a_high * b_high + (a_high * b_low >> half) + (middle >> half))
