"""Committed policy versions, from the trainer to the servers: `weights/step_v` is version v.

A version is durable, a Hugging Face directory with xxh3-128 of every tensor (`tensor_hash.py`) in its manifest; or it is published from the trainer's
memory (`exchange.py`), and the manifest, with a checksum of every tensor, is all there is on disk. One hash over those identifies the version wherever
it is served. Version 0 is the base model: a manifest with its hashes and its path, no copy. Nothing here needs torch: a safetensors file is a header and
byte ranges.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from prime_rl import faults
from prime_rl.transport import tensor_hash
from prime_rl.transport.canary import Canary, read_canary
from prime_rl.transport.commit import (
    CommitError,
    Manifest,
    disk_errors,
    hash_file,
    list_steps,
    open_file,
    read_manifest,
    replace_manifest,
    stage,
    subject_of,
    sync,
    verify,
)
from prime_rl.transport.tensor_hash import chunks, of_chunks
from prime_rl.transport.tmpfs import InTmpfs, check_tmpfs, read_in_tmpfs

INDEX = "model.safetensors.index.json"  # where there are several files: which holds which tensor
_BLOCK = 1 << 24  # bytes read at once
_HEADER_BYTES = 100_000_000  # of a safetensors file, at most: as its own library has it


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version: its safetensors dtype ("F32", "BF16", …) and shape.

    Attributes:
        file: Where it lies, with the `xxh3` of its bytes; both are empty while it is in no file.
        checksum: Of a version that was published from memory (`checksum.py`), for good; else empty.
    """

    file: str
    dtype: str
    shape: list[int]
    xxh3: str
    checksum: str = ""


UNREACHABLE = "does not reach the trainer's publisher"
"""In what a server says of an address that it cannot connect to: then files may help (`lives.ask_for_files`)."""


@dataclass(frozen=True)
class PublisherAddress:
    """Where workers get a version from the trainer's memory (`exchange.Publisher`).

    Attributes:
        timeout: Seconds without progress after which either side gives a transfer up.
        fallback: Servers that cannot reach it may ask for files (`transport = "auto"`, see `ask_for_files`).
    """

    host: str
    port: int
    token: str = field(repr=False)
    timeout: float
    fallback: bool = False


@dataclass(frozen=True)
class WeightsManifest:
    """A version's identity.

    Attributes:
        base: The model directory that holds the tensors (version 0), else None.
        canary: None where the trainer scored none.
        tmpfs: Where in its host's memory the files lie; None where they are on a disk, or nowhere.
        publisher: Who holds the tensors that are in no file; None where files hold them.
    """

    version: int
    incarnation: int
    hash: str
    tensors: dict[str, TensorEntry]
    base: str | None
    directory: Path
    canary: Canary | None = None
    tmpfs: InTmpfs | None = None
    publisher: PublisherAddress | None = None

    @property
    def files(self) -> Path:
        """The directory that holds the tensors."""
        if self.tmpfs is not None:
            return Path(self.tmpfs.directory)
        return Path(self.base) if self.base else self.directory


def version_dir(root: Path, version: int) -> Path:
    """The final place of `version` under the weights root."""
    return root / f"step_{version}"


def newest(root: Path) -> int | None:
    """The newest committed version under `root`, or None."""
    return max(list_steps(root), default=None)


def version_hash(tensors: Mapping[str, TensorEntry]) -> str:
    """One hash over the tensors' names, dtypes, shapes and checksums or hashes, in the order of the names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        entry = tensors[name]
        shape = ",".join(map(str, entry.shape))
        digest.update(f"{name}\0{entry.dtype}\0{shape}\0{entry.checksum or entry.xxh3}\n".encode())
    return digest.hexdigest()


def manifest_extra(
    version: int,
    incarnation: int,
    tensors: Mapping[str, TensorEntry],
    base: str | None = None,
    canary: Canary | None = None,
    publisher: PublisherAddress | None = None,
) -> dict[str, Any]:
    """What a writer of weights puts into the manifest's `extra`."""
    scored = {} if canary is None else {"canary": canary.as_extra()}
    published = {} if publisher is None else {"publisher": asdict(publisher)}
    return {
        **scored,
        **published,
        "version": version,
        "incarnation": incarnation,
        "hash": version_hash(tensors),
        "hash_chunk": tensor_hash.CHUNK_BYTES,
        "tensors": {name: vars(entry) for name, entry in tensors.items()},
        "base": base,
    }


def weights_manifest(directory: Path, committed: Manifest | None = None) -> WeightsManifest:
    """A committed version's identity, without touching its tensors. `committed` is its manifest where that was read already.

    Raises:
        CommitError: the directory is not a committed version, or one that another release wrote in a way that this one cannot read.
    """
    extra = (committed or read_manifest(directory)).extra
    changes = extra.get("delta")
    if ("tensors" in extra and extra.get("hash_chunk") != tensor_hash.CHUNK_BYTES) or (
        isinstance(changes, Mapping) and changes.get("version") is not None
    ):
        raise CommitError(
            f"{directory} was written by another release of prime-rl, in a way that this one does not read: go on with that one"
        )
    try:
        tensors = {name: TensorEntry(**entry) for name, entry in extra["tensors"].items()}
        published = extra.get("publisher", extra.get("sender"))
        return WeightsManifest(
            extra["version"],
            extra["incarnation"],
            extra["hash"],
            tensors,
            extra["base"],
            directory,
            read_canary(extra),
            read_in_tmpfs(extra),
            None if published is None else PublisherAddress(**published),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommitError(f"{directory} is committed, but not as a version of weights ({error})") from error


def verify_weights(directory: Path) -> WeightsManifest:
    """Hash every tensor of a durable version again and compare.

    Raises:
        CommitError: naming the first tensor or file that differs, is missing or is not listed.
    """
    manifest = verify_small_files(directory)
    if manifest.publisher is not None:
        raise CommitError(never_written(directory))
    check_tensors(manifest, hash_directory(manifest.files))
    return manifest


def never_written(directory: Path) -> str:
    """Says why a committed version has no files: to whoever looks for them."""
    return f"{directory} holds no tensors: they went to the servers from the trainer's memory and were never written (trainer.weights.transport memory)"


def without_tensors(directory: Path) -> str:
    """Says of a directory, which may be any, why no tensors are found there."""
    try:
        published = weights_manifest(directory).publisher is not None
    except CommitError:
        published = False
    return (
        never_written(directory)
        if published
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
    if manifest.tmpfs is not None:
        check_tmpfs(directory, manifest.tmpfs)
        verify(manifest.files, hashes=False)
    tensor_files = {entry.file for entry in manifest.tensors.values()}
    for name, expected in verify(directory, hashes=False, manifest=committed).files.items():
        if name not in tensor_files and hash_file(directory / name) != expected["xxh3"]:
            raise CommitError(f"{directory / name} has other bytes than the manifest's hash says")
    return manifest


def _nothing() -> None:
    pass


def check_tensors(manifest: WeightsManifest, found: Mapping[str, TensorEntry]) -> None:
    """Compare the tensors that a version's files hold with those that its manifest describes.

    Raises:
        CommitError: naming the first tensor that differs, is missing or is not listed.
    """
    for name in sorted(manifest.tensors.keys() | found.keys()):
        wanted, entry = manifest.tensors.get(name), found.get(name)
        if wanted is None or entry is None or replace(wanted, checksum="") != replace(entry, checksum=""):
            raise CommitError(f"{manifest.directory}: tensor {name} is not the one its manifest describes")
    check_hash(manifest)


def check_hash(manifest: WeightsManifest) -> None:
    """Raise CommitError where a manifest's hash is not that of the tensors it lists."""
    if version_hash(manifest.tensors) != manifest.hash:
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


ASIDE = ".durable"


def make_durable(directory: Path, write: Callable[[Path], object]) -> None:
    """Bring the tensors of a committed version into its own directory, where they lie in a tmpfs or in the trainer's memory. Only the trainer does so.

    Until the manifest is replaced, last, the version is what it was, and so is its hash afterwards. Readers that have read the old manifest of one in
    tmpfs find nothing at its place once that is removed, and try again.

    Args:
        write: Writes the safetensors files, and their index where there are several, into a directory.

    Raises:
        CommitError: what was written is not what the manifest says.
        UserError: the disk is full; the version is what it was.
    """
    manifest = weights_manifest(directory)
    aside = directory / ASIDE
    with disk_errors(directory, "the version is in no file" if manifest.publisher else "the version stays in memory"):
        shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
        aside.mkdir()
        try:
            write(aside)
            found = hash_directory(aside)
            if manifest.publisher is None:
                check_tensors(manifest, found)
            for path in aside.iterdir():
                sync(path)
            faults.point(f"lasting:{subject_of(directory)}")
            known = read_manifest(directory)
            files = dict(known.files)
            for path in sorted(aside.iterdir()):
                files[path.name] = {"size": path.stat().st_size, "xxh3": hash_file(path)}
                os.rename(path, directory / path.name)
            sync(directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        tensors = {
            name: vars(replace(found[name], checksum=entry.checksum)) for name, entry in manifest.tensors.items()
        }
        kept = {key: value for key, value in known.extra.items() if key not in ("tmpfs", "memory", "publisher")}
        replace_manifest(directory, files, kept | {"tensors": tensors})
    faults.point(f"lasts:{subject_of(directory)}")


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
