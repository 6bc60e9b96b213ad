"""Tensors as what has changed since the version before: exact to the bit, compressed with zlib.

After a small update most words of a tensor are what they were: fp32 weights that move by less than a bf16 step round to the same. Stored are the
gaps between changed words and the XOR of old and new ones, whose bytes are compressed by their places (all lowest bytes, then all second ones …).
A file `x.delta` tells all tensors of the file `x.safetensors`: the length of a JSON table as eight bytes, the table (tensor: first and last byte of
what follows), and what follows. Needs neither torch nor a manifest.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.transport.commit import CommitError, open_file

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]  # unsigned integers

DELTA_SUFFIX = ".delta"
WORD_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # all others: 1
_WORDS_AT_ONCE = 1 << 24  # bounds what encoding takes beside the tensor
_HEAD = struct.Struct("<BBxxxxxxQ")  # kind, bytes of a word, changed words
_WHOLE, _CHANGED = 0, 1
_GAP = np.dtype("<u4")
_LEVEL = 1  # beyond it zlib takes several times longer for a few percent


def delta_file(file: str) -> str:
    """The name of the file that tells the changes of `file`."""
    return f"{Path(file).stem}{DELTA_SUFFIX}"


def encode(old: Bytes, new: Bytes, word_bytes: int) -> bytes:
    """What turns `old` into `new`, which are as long; nothing where they are equal, and never more than a few bytes beyond `new` itself.

    Args:
        word_bytes: Of the tensor's type.
    """
    indices, values = _changes(old.view(f"<u{word_bytes}"), new.view(f"<u{word_bytes}"))
    if not len(indices):
        return b""
    gaps = np.diff(indices, prepend=0)
    if gaps.max() <= np.iinfo(_GAP).max:
        packed = zlib.compress(_by_place(gaps.astype(_GAP)) + _by_place(values), _LEVEL)
        if len(packed) < len(new):
            return _HEAD.pack(_CHANGED, word_bytes, len(indices)) + packed
    return _HEAD.pack(_WHOLE, 1, len(new)) + new.tobytes()


def apply(data: Bytes, told: bytes) -> None:
    """Turn `data`, in place, into what `encode` was given as `new`.

    Raises:
        CommitError: `told` does not fit `data`, or is damaged.
    """
    if not told:
        return
    try:
        kind, word_bytes, count = _HEAD.unpack_from(told)
        if kind == _WHOLE and count == len(data) == len(told) - _HEAD.size:
            data[:] = np.frombuffer(told, np.uint8, offset=_HEAD.size)
            return
        words = data.view(f"<u{word_bytes}")
        if kind != _CHANGED or not 0 < count <= len(words):
            raise CommitError(f"{count:,} changes of kind {kind} do not fit {len(data):,} bytes")
        indices, values = _unpacked(told[_HEAD.size :], count, word_bytes)
    except (struct.error, zlib.error, TypeError, ValueError) as error:
        raise CommitError(f"changes cannot be read: {error}") from error
    if indices[-1] >= len(words):
        raise CommitError(f"a change of word {indices[-1]:,} does not fit {len(words):,}")
    words[indices] ^= values


def write_delta(path: Path, told: Mapping[str, bytes]) -> None:
    """Write what each tensor of a file has become."""
    ends = np.cumsum([len(each) for each in told.values()]).tolist()
    table = {name: [end - len(each), end] for (name, each), end in zip(told.items(), ends, strict=True)}
    text = json.dumps(table, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for each in told.values():
            file.write(each)


def apply_delta(path: Path, data: Bytes, places: Mapping[str, tuple[int, int]]) -> None:
    """Apply a file of changes to the bytes of the tensors that lie at `places` in `data`.

    Raises:
        CommitError: the file is damaged or tells of other tensors; `data` is worth nothing then.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        content = file.read()
    try:
        (length,) = struct.unpack_from("<Q", content)
        table = json.loads(content[8 : 8 + length])
        spans = {name: (int(start), int(end)) for name, (start, end) in table.items()}
    except (struct.error, ValueError, TypeError, AttributeError) as error:
        raise CommitError(f"{path} cannot be read: {error}") from error
    told = memoryview(content)[8 + length :]
    if spans.keys() != places.keys() or max((end for _, end in spans.values()), default=0) != len(told):
        raise CommitError(f"{path} is truncated, or tells of other tensors than the version that it builds on")
    for name, (start, end) in spans.items():
        first, last = places[name]
        try:
            apply(data[first:last], bytes(told[start:end]))
        except CommitError as error:
            raise CommitError(f"{path}: tensor {name}: {error}") from error


def _changes(old: Words, new: Words) -> tuple[Words, Words]:
    """Where they differ, and their XOR there."""
    indices: list[Words] = [np.empty(0, np.int64)]
    values: list[Words] = [new[:0]]
    for first in range(0, len(new), _WORDS_AT_ONCE):
        differs = old[first : first + _WORDS_AT_ONCE] ^ new[first : first + _WORDS_AT_ONCE]
        found = np.flatnonzero(differs)
        indices.append(found + first)
        values.append(differs[found])
    return np.concatenate(indices), np.concatenate(values)


def _by_place(words: Words) -> bytes:
    """All first bytes, all second bytes …: those of one place have much in common."""
    return words.view(np.uint8).reshape(len(words), words.itemsize).T.tobytes()


def _unpacked(packed: bytes, count: int, word_bytes: int) -> tuple[Words, Words]:
    expected = count * (_GAP.itemsize + word_bytes)
    inflater = zlib.decompressobj()
    unpacked = np.frombuffer(inflater.decompress(packed, expected + 1), np.uint8)
    if len(unpacked) != expected or not inflater.eof:
        raise ValueError(f"{len(unpacked):,} bytes and not {expected:,}")
    gaps, values = unpacked[: count * _GAP.itemsize], unpacked[count * _GAP.itemsize :]
    words = _together(gaps, _GAP.itemsize)
    return np.cumsum(words, dtype=np.int64), _together(values, word_bytes)


def _together(by_place: Bytes, word_bytes: int) -> Words:
    """What `_by_place` was given."""
    return np.ascontiguousarray(by_place.reshape(word_bytes, -1).T).view(f"<u{word_bytes}").reshape(-1)
