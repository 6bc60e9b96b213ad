"""The hash of a tensor's bytes: xxh3-128 of them, or, where they are more than a chunk, of the chunks' hashes one after the other.

xxh3 goes from the first byte to the last, so that a large tensor, an embedding say, would keep one thread at it long after all others are done:
311 MB of Qwen3-0.6B's 1,192. Imports no more than xxhash: a process that starts in a moment uses it, too.
"""

from collections.abc import Sequence

import xxhash

CHUNK_BYTES = 8 << 20
"""Part of every manifest: other chunks give other hashes."""


def chunks(size: int) -> list[tuple[int, int]]:
    """Where the chunks of so many bytes begin and end. There is at least one."""
    return [(start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)] or [(0, 0)]


def of_chunks(digests: Sequence[bytes]) -> str:
    """The hash of a tensor, as hex, from its chunks' xxh3-128."""
    return (digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))).hex()


def hash_tensor(data: memoryview | bytes) -> str:
    """The hash of a tensor with these bytes."""
    return of_chunks([xxhash.xxh3_128_digest(data[start:end]) for start, end in chunks(len(data))])
