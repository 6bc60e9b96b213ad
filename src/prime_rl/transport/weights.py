"""Committed policy versions, from the trainer to the engines: `weights/step_v` holds version v in Hugging Face form.

The manifest carries a hash of every tensor (`tensor_hash.py`) and one over those, which identifies the version wherever it is served. Version 0 is the
base model: a manifest with its hashes and its path, no copy. Nothing here needs torch: a safetensors file is a header and byte ranges.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from prime_rl.transport import tensor_hash
from prime_rl.transport.canary import Canary, read_canary
from prime_rl.transport.commit import (
    CommitError,
    Manifest,
    hash_file,
    list_steps,
    open_file,
    read_manifest,
    stage,
    verify,
)
from prime_rl.transport.delta import Bytes, apply_delta, delta_file
from prime_rl.transport.memory import InMemory, check_memory, read_in_memory
from prime_rl.transport.tensor_hash import chunks, hash_tensor, of_chunks

INDEX = "model.safetensors.index.json"  # where there are several files: which holds which tensor
_BLOCK = 1 << 24  # bytes read at once
_HEADER_BYTES = 100_000_000  # of a safetensors file, at most: as its own library has it


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version: its file, its safetensors dtype ("F32", "BF16", …), its shape, and the hash of its bytes."""

    file: str
    dtype: str
    shape: list[int]
    xxh3: str


@dataclass(frozen=True)
class BuildsOn:
    """The version, and its hash, whose tensors a version tells the changes of. None: it is there in full, for others to build on."""

    version: int | None
    hash: str | None


@dataclass(frozen=True)
class SenderAddress:
    """Where the tensors of a version can be asked for that were never written (`transport/line.py`). `timeout` are seconds without progress."""

    host: str
    port: int
    token: str = field(repr=False)
    timeout: float


@dataclass(frozen=True)
class WeightsManifest:
    """A version's identity. `base` is the model directory when the tensors lie there (version 0), else None. `canary` is None where the trainer
    scored none, `memory` where the tensors lie on a disk, `delta` where no version tells changes. Where there is a `sender` the tensors are in no file,
    and lie with it one after the other, in the order of `tensors`."""

    version: int
    incarnation: int
    hash: str
    tensors: dict[str, TensorEntry]
    base: str | None
    directory: Path
    canary: Canary | None = None
    memory: InMemory | None = None
    delta: BuildsOn | None = None
    sender: SenderAddress | None = None

    @property
    def builds_on(self) -> int | None:
        """The version whose tensors are needed beside what this one tells; None where it is there in full."""
        return None if self.delta is None else self.delta.version

    @property
    def files(self) -> Path:
        """The directory that holds the tensors."""
        if self.memory is not None:
            return Path(self.memory.directory)
        return Path(self.base) if self.base else self.directory


def version_dir(root: Path, version: int) -> Path:
    """The final place of `version` under the weights root."""
    return root / f"step_{version}"


def newest(root: Path) -> int | None:
    """The newest committed version under `root`, or None."""
    return max(list_steps(root), default=None)


def version_hash(tensors: dict[str, TensorEntry]) -> str:
    """One hash over the tensors' names, dtypes, shapes and hashes, in the order of the names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        entry = tensors[name]
        digest.update(f"{name}\0{entry.dtype}\0{','.join(map(str, entry.shape))}\0{entry.xxh3}\n".encode())
    return digest.hexdigest()


def manifest_extra(
    version: int,
    incarnation: int,
    tensors: dict[str, TensorEntry],
    base: str | None = None,
    canary: Canary | None = None,
    delta: BuildsOn | None = None,
    sender: SenderAddress | None = None,
) -> dict[str, Any]:
    """What a writer of weights puts into the manifest's `extra`."""
    scored = {} if canary is None else {"canary": canary.as_extra()}
    changes = {} if delta is None else {"delta": vars(delta)}
    sent = {} if sender is None else {"sender": vars(sender)}
    return (
        scored
        | changes
        | sent
        | {
            "version": version,
            "incarnation": incarnation,
            "hash": version_hash(tensors),
            "hash_chunk": tensor_hash.CHUNK_BYTES,
            "tensors": {name: vars(entry) for name, entry in tensors.items()},
            "base": base,
        }
    )


def weights_manifest(directory: Path, committed: Manifest | None = None) -> WeightsManifest:
    """A committed version's identity, without touching its tensors. `committed` is its manifest where that was read already.

    Raises:
        CommitError: the directory is not a committed version, or one whose hashes were made otherwise than here.
    """
    extra = (committed or read_manifest(directory)).extra
    if "tensors" in extra and extra.get("hash_chunk") != tensor_hash.CHUNK_BYTES:
        raise CommitError(
            f"{directory} was written by another release of prime-rl, which hashes tensors otherwise: go on with that one"
        )
    try:
        tensors = {name: TensorEntry(**entry) for name, entry in extra["tensors"].items()}
        return WeightsManifest(
            extra["version"],
            extra["incarnation"],
            extra["hash"],
            tensors,
            extra["base"],
            directory,
            read_canary(extra),
            read_in_memory(extra),
            None if extra.get("delta") is None else BuildsOn(**extra["delta"]),
            SenderAddress(**extra["sender"]) if "sender" in extra else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommitError(f"{directory} is committed, but not as a version of weights ({error})") from error


def verify_weights(directory: Path) -> WeightsManifest:
    """Hash every tensor of a committed version again and compare.

    Raises:
        CommitError: naming the first tensor or file that differs, is missing or is not listed.
    """
    manifest = verify_small_files(directory)
    if manifest.sender is not None:
        raise CommitError(never_written(directory))
    for link in chain(manifest)[1:]:
        verify_small_files(link.directory)
    check_tensors(manifest, hash_version(manifest))
    return manifest


def never_written(directory: Path) -> str:
    """Says why a committed version has no tensors: to whoever looks for them."""
    return f"{directory} holds no tensors: they were sent to the servers and never written (trainer.weights.transport process-group)"


def without_tensors(directory: Path) -> str:
    """Says of a directory, which may be any, why no tensors are found there."""
    try:
        sent = weights_manifest(directory).sender is not None
    except CommitError:
        sent = False
    return (
        never_written(directory)
        if sent
        else f"{directory} holds no safetensors files (older formats are to be converted)"
    )


def verify_small_files(directory: Path, committed: Manifest | None = None) -> WeightsManifest:
    """Check all of a committed version but its tensors' bytes: the sizes of all files, and the hashes of those that hold no tensors. `committed` is its
    manifest where that was read already.

    Raises:
        CommitError: naming the first file that differs, is missing or is not listed.
    """
    committed = committed or read_manifest(directory)
    manifest = weights_manifest(directory, committed)
    if manifest.memory is not None:
        check_memory(directory, manifest.memory)
        verify(manifest.files, hashes=False)
    tensor_files = {entry.file for entry in manifest.tensors.values()}
    tensor_files |= {delta_file(file) for file in tensor_files}
    for name, expected in verify(directory, hashes=False, manifest=committed).files.items():
        if name not in tensor_files and hash_file(directory / name) != expected["xxh3"]:
            raise CommitError(f"{directory / name} has other bytes than the manifest's hash says")
    return manifest


def chain(manifest: WeightsManifest, held: str | None = None) -> list[WeightsManifest]:
    """The version itself and those that it builds on, the newest first, to one that is there in full, or to the one that builds on `held`.

    Args:
        held: The hash of a version whose tensors the caller has.

    Raises:
        CommitError: one of them is gone, or another one than was built on.
    """
    links = [manifest]
    while (on := links[-1].delta) is not None and on.version is not None and on.hash != held:
        needed = f"{links[-1].directory} tells what has changed since version {on.version}"
        if on.version >= links[-1].version:
            raise CommitError(f"{needed}, which is not before it")
        try:
            links.append(weights_manifest(version_dir(manifest.directory.parent, on.version)))
        except CommitError as error:
            raise CommitError(f"{needed}, which is not there: {error}") from error
        if links[-1].hash != on.hash:
            raise CommitError(f"{needed} ({str(on.hash)[:12]}), and {links[-1].directory} is {links[-1].hash[:12]}")
    return links


def read_files(manifest: WeightsManifest) -> Iterator[tuple[str, Bytes]]:
    """The safetensors files of a version, each with all its bytes: as they lie there, or built from what has changed since one that is there in full.

    Raises:
        CommitError: what is told does not fit what it was told of.
        OSError: a file cannot be read.
    """
    *changes, full = chain(manifest)
    for file in sorted({entry.file for entry in manifest.tensors.values()}):
        with open_file(full.files / file) as opened:
            data = np.fromfile(opened, np.uint8)
        header, offset = read_header(full.files / file)
        apply_changes(changes, file, data[offset:], {name: entry["data_offsets"] for name, entry in header.items()})
        yield file, data


def apply_changes(
    changes: Sequence[WeightsManifest], file: str, data: Bytes, places: Mapping[str, tuple[int, int]]
) -> None:
    """Apply what versions, the newest first, tell of one file to the bytes of its tensors, which lie at `places`.

    Raises:
        CommitError: it does not fit; `data` is worth nothing then.
        OSError: a file cannot be read.
    """
    for link in reversed(changes):
        apply_delta(link.files / delta_file(file), data, places)


def _nothing() -> None:
    pass


def hash_version(manifest: WeightsManifest, go_on: Callable[[], None] = _nothing) -> dict[str, TensorEntry]:
    """Hash every tensor of a committed version. `go_on` is called between two blocks, and may raise.

    Raises:
        CommitError: a file is missing, truncated or malformed, or what the version builds on is not there.
    """
    if manifest.builds_on is None:
        return hash_directory(manifest.files, go_on)
    full, tensors = chain(manifest)[-1], {}
    for file, data in read_files(manifest):
        header, offset = read_header(full.files / file)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            go_on()
            digest = hash_tensor(data[offset + first : offset + last].data)
            tensors[name] = TensorEntry(file, entry["dtype"], entry["shape"], digest)
    return tensors


def check_tensors(manifest: WeightsManifest, found: dict[str, TensorEntry]) -> None:
    """Compare the tensors that a version's files hold with those that its manifest describes.

    Raises:
        CommitError: naming the first tensor that differs, is missing or is not listed.
    """
    for name in sorted(manifest.tensors.keys() | found.keys()):
        if found.get(name) != manifest.tensors.get(name):
            raise CommitError(f"{manifest.directory}: tensor {name} is not the one its manifest describes")
    if version_hash(found) != manifest.hash:
        raise CommitError(f"{manifest.directory}: the manifest's hash does not follow from its tensors")


def hash_directory(directory: Path, go_on: Callable[[], None] = _nothing) -> dict[str, TensorEntry]:
    """Hash every tensor of a model directory's safetensors files. `go_on` is called between two blocks, and may raise.

    Raises:
        CommitError: there are none, or one is truncated or malformed.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CommitError(without_tensors(directory))
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        tensors |= hash_tensors(file, go_on)
    return tensors


def hash_tensors(file: Path, go_on: Callable[[], None] = _nothing) -> dict[str, TensorEntry]:
    """The hash of each tensor in one safetensors file.

    Raises:
        CommitError: the file is truncated or malformed.
    """
    header, start = read_header(file)
    tensors = {}
    with open_file(file) as data:
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = TensorEntry(
                file.name, entry["dtype"], entry["shape"], _hash_range(data, start + first, last - first, file, go_on)
            )
    return tensors


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries by tensor name, and the offset of its data in bytes.

    Raises:
        CommitError: the file is truncated or malformed.
    """
    try:
        with open_file(file) as data:
            size = os.fstat(data.fileno()).st_size
            (length,) = struct.unpack("<Q", data.read(8))
            if length > size - 8:
                raise CommitError(f"{file} is truncated: its header alone is longer than the file")
            if length > _HEADER_BYTES:
                raise CommitError(
                    f"{file} is not a safetensors file: its header is longer than {_HEADER_BYTES:,} bytes"
                )
            header = json.loads(data.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommitError(f"{file} is not a safetensors file: {error}") from error
    if 8 + length + end > size:
        raise CommitError(f"{file} is truncated: {size} bytes of {8 + length + end}")
    return header, 8 + length


def write_base_version(root: Path, model: Path, canary: Canary | None = None) -> WeightsManifest:
    """Commit version 0, the base model at `model`, unless it is committed already.

    Raises:
        CommitError: version 0 stands there for another base model.
    """
    directory = version_dir(root, 0)
    tensors = hash_directory(model)
    extra = manifest_extra(0, 0, tensors, str(model.resolve()), canary)
    if 0 in list_steps(root):
        existing = weights_manifest(directory)
        if existing.hash != extra["hash"]:
            raise CommitError(f"{directory} belongs to another base model ({existing.base}), not to {model}")
        return existing
    with stage(directory, step=0, producer="trainer", extra=extra):
        pass
    return weights_manifest(directory)


def _hash_range(data: Any, offset: int, count: int, file: Path, go_on: Callable[[], None]) -> str:
    data.seek(offset)
    digests = []
    for start, end in chunks(count):
        digest, left = xxhash.xxh3_128(), end - start
        while left:
            go_on()
            block = data.read(min(left, _BLOCK))
            if not block:
                raise CommitError(f"{file} ended while it was read")
            digest.update(block)
            left -= len(block)
        digests.append(digest.digest())
    return of_chunks(digests)
