"""The hash of a tensor's bytes: their xxh3-128 or, if they are more than a chunk, that of the chunks' hashes in order.

Several threads can hash one tensor so: the embedding is a quarter of Qwen3-0.6B. Imports no more than xxhash.
"""

from collections.abc import Sequence

import xxhash

CHUNK_BYTES = 8 << 20
"""Part of every manifest: other chunks give other hashes."""


def chunks(size: int) -> list[tuple[int, int]]:
    """The start and end of every chunk of so many bytes. There is at least one."""
    return [(start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)] or [(0, 0)]


def of_chunks(digests: Sequence[bytes]) -> str:
    """The hash of a tensor, in hex, from the xxh3-128 of its chunks."""
    return (digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))).hex()
