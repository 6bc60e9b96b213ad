"""Manifests and files of policy versions: `weights/step_v` is version v.

A durable version is a Hugging Face directory whose manifest holds a hash of every tensor (`hash_tensors`). A version
that is published from the trainer's memory (`exchange.py`) is a manifest with a checksum of every tensor. One hash over
all tensors identifies a version wherever it is served. Version 0 is the base model: a manifest with its hashes and its
path. A version may also be an adapter (LoRA) beside the base model, in PEFT's format. Nothing here imports torch.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from pydantic import FiniteFloat, TypeAdapter

from prime_rl import faults
from prime_rl.errors import UserError, user_errors
from prime_rl.transport import commit
from prime_rl.transport.commit import CommitError, Manifest, Stage, disk_errors, read_manifest

INDEX = "model.safetensors.index.json"  # if there are several files: which holds which tensor
HASH_CHUNK_BYTES = 8 << 20  # part of every manifest: other chunks give other hashes
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
REFERENCE_TOKENS = 64  # of the fixed prompt


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a version: its safetensors dtype ("F32", "BF16", …) and shape."""

    file: str  # that holds it; empty while none does
    dtype: str
    shape: list[int]
    xxh3: str  # of its bytes in the file
    checksum: str = ""  # of versions that were published from memory (`exchange.checksums`), also once they are durable


class TensorRange(NamedTuple):
    """A tensor in a safetensors file, without its hash: bytes `start` to `stop` of the file."""

    entry: TensorEntry
    start: int
    stop: int


@dataclass(frozen=True)
class LogprobReference:
    """A fixed prompt of T token ids, and the trainer's log-probability (nats, temperature 1) of all but the first.

    It is in a version's manifest. A hash verifies what was read; this verifies what is computed: whoever serves the
    version scores the same prompt and compares.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[FiniteFloat, ...]


@dataclass(frozen=True)
class PublisherAddress:
    """Where workers receive a version from the trainer's memory (`exchange.Publisher`)."""

    host: str
    port: int
    token: str = field(repr=False)
    timeout: float  # seconds without progress after which either side ends a transfer


@dataclass(frozen=True)
class AdapterDescription:
    """What an adapter is beside: the hash of the base model; and its adapter_config.json."""

    base: str
    config: dict[str, Any]


@dataclass(frozen=True)
class WeightsManifest:
    """A version's identity."""

    version: int
    incarnation: int
    hash: str
    tensors: dict[str, TensorEntry]
    base: str | None  # the model directory that holds the tensors (version 0), else None
    directory: Path
    reference: LogprobReference | None = None  # None if the trainer scored none
    publisher: PublisherAddress | None = None  # who holds the tensors; None if files hold them
    adapter: AdapterDescription | None = None  # None: full weights

    @property
    def files(self) -> Path:
        """The directory that holds the tensors."""
        return Path(self.base) if self.base else self.directory


_MANIFEST = TypeAdapter(WeightsManifest)


def reference_tokens(vocabulary: int) -> list[int]:
    """Return the fixed prompt for a model with so many token ids, drawn from all of them: no tokenizer is needed."""
    digests = (xxhash.xxh3_64_intdigest(f"canary/{place}".encode()) for place in range(REFERENCE_TOKENS))
    return [digest % vocabulary for digest in digests]


def version_hash(tensors: Mapping[str, TensorEntry]) -> str:
    """Hash the tensors' names, dtypes, shapes and checksums or hashes, in the order of the names."""
    digest = xxhash.xxh3_128()
    for name, entry in sorted(tensors.items()):
        shape = ",".join(map(str, entry.shape))
        digest.update(f"{name}\0{entry.dtype}\0{shape}\0{entry.checksum or entry.xxh3}\n".encode())
    return digest.hexdigest()


def manifest_extra(
    version: int,
    incarnation: int,
    tensors: Mapping[str, TensorEntry],
    base: str | None = None,
    reference: LogprobReference | None = None,
    publisher: PublisherAddress | None = None,
    adapter: AdapterDescription | None = None,
) -> dict[str, Any]:
    """Return the `extra` of a version's manifest."""
    identity = version, incarnation, version_hash(tensors), dict(tensors), base, Path()
    manifest = WeightsManifest(*identity, reference, publisher, adapter)
    return _MANIFEST.dump_python(manifest, exclude={"directory"}) | {"hash_chunk": HASH_CHUNK_BYTES}


def weights_manifest(directory: Path, committed: Manifest | None = None) -> WeightsManifest:
    """Read a committed version's identity, without reading tensor data. `committed` is its manifest, if read already.
    Raises CommitError if it is not a committed version, or another release wrote it in a way this one cannot read."""
    extra = (committed or read_manifest(directory)).extra
    try:
        if "tensors" in extra and (extra.get("tmpfs") or extra.get("hash_chunk") != HASH_CHUNK_BYTES):
            raise CommitError(f"{directory} was written by another release of prime-rl, which this one cannot read")
        return _MANIFEST.validate_python({**extra, "directory": directory})
    except (ValueError, AttributeError) as error:
        raise CommitError(f"{directory} is committed, but not as a version of weights ({error})") from error


# PEFT's other ways to begin with an adapter (PiSSA, OLoRA, LoftQ, CorDA) change the base model's weights, too.
_BESIDE_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's adapter_config.json, PEFT's or ours. UserError if it is none, or of a kind not trained here."""
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(f"{directory} is no directory of an adapter: it has no {ADAPTER_CONFIG}")
    with user_errors(f"{path} cannot be read", OSError, ValueError):
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    plain = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _BESIDE_THE_BASE}
    for key, value in config.items():
        known = plain.get(key, () if key.startswith("use_") or key.endswith("_pattern") else None)
        if known is not None and value not in known and (value or known):
            raise UserError(f"{path} has {key} = {value}, which is not supported")
    return config


def verify_weights(directory: Path) -> WeightsManifest:
    """Hash every tensor of a durable version again. Raises CommitError naming the first tensor or file that differs."""
    committed = read_manifest(directory)
    manifest = weights_manifest(directory, committed)
    commit.verify(directory, unhashed={entry.file for entry in manifest.tensors.values()}, manifest=committed)
    check_tensors(manifest, hash_directory(manifest.files))
    return manifest


def no_tensors_message(directory: Path) -> str:
    """Return the message for a directory without safetensors files, whether published from memory or not."""
    with suppress(CommitError):
        if weights_manifest(directory).publisher is not None:
            unwritten = "they went to the servers from the trainer's memory (trainer.weights.transport memory)"
            return f"{directory} holds no tensors: {unwritten}, and were never written"
    return f"{directory} holds no safetensors files (older formats are to be converted)"


def check_tensors(manifest: WeightsManifest, actual: Mapping[str, TensorEntry]) -> None:
    """Raise CommitError naming the first tensor in a version's files that is not the one in its manifest."""
    for name in sorted(manifest.tensors.keys() | actual.keys()):
        wanted, entry = manifest.tensors.get(name), actual.get(name)
        if wanted is None or entry is None or replace(wanted, checksum="") != replace(entry, checksum=""):
            raise tensor_mismatch(manifest, name)
    check_hash(manifest)


def tensor_mismatch(manifest: WeightsManifest, name: str) -> CommitError:
    """Return the error for a tensor that is missing, not listed, or has other bytes, another type or shape."""
    return CommitError(f"{manifest.directory}: tensor {name} is not the one its manifest describes")


def check_hash(manifest: WeightsManifest) -> None:
    """Raise CommitError unless a manifest's hash is that of the tensors it lists."""
    if version_hash(manifest.tensors) != manifest.hash:
        raise CommitError(f"{manifest.directory}: the manifest's hash does not follow from its tensors")


def hash_directory(directory: Path, progress: Callable[[], None] = lambda: None) -> dict[str, TensorEntry]:
    """Hash every tensor of a model directory. Raises CommitError if it has no safetensors files, or a malformed one.
    `progress` is called between two blocks; what it raises ends the reading."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CommitError(no_tensors_message(directory))
    return {name: entry for file in files for name, entry in hash_tensors(file, progress).items()}


def hash_tensors(
    file: Path, progress: Callable[[], None] = lambda: None, store: Callable[[str, int, memoryview], None] | None = None
) -> dict[str, TensorEntry]:
    """Hash every tensor of one safetensors file, as `hash_directory`: by its xxh3-128 or, if it has several chunks of
    `HASH_CHUNK_BYTES`, by that of their hashes in order. `store` takes each block that was hashed: the
    tensor's name, the block's place in it, and its bytes, which the next block replaces."""
    hashed, memory = {}, memoryview(bytearray(HASH_CHUNK_BYTES))
    with open(file, "rb") as data:
        for name, (entry, start, stop) in read_header(file).items():
            data.seek(start)
            size, digests = stop - start, list[bytes]()
            for first in range(0, max(size, 1), HASH_CHUNK_BYTES):
                progress()
                block = memory[: size - first]
                if data.readinto(block) < len(block):
                    raise CommitError(f"{file} ended while it was read")
                digests.append(xxhash.xxh3_128_digest(block))
                if store is not None:
                    store(name, first, block)
            digest = digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))
            hashed[name] = replace(entry, xxh3=digest.hex())
    return hashed


def read_header(file: Path) -> dict[str, TensorRange]:
    """Return the tensors in a safetensors file, by name. Raises CommitError if it is truncated or malformed."""
    try:
        with open(file, "rb") as data:
            size = os.fstat(data.fileno()).st_size
            (length,) = struct.unpack("<Q", data.read(8))
            if length > size - 8:
                raise CommitError(f"{file} is truncated: its header alone is longer than the file")
            header = json.loads(data.read(length))
        header.pop("__metadata__", None)
        stored = {}
        for name, described in header.items():
            start, stop = described["data_offsets"]
            entry = TensorEntry(file.name, described["dtype"], described["shape"], "")
            stored[name] = TensorRange(entry, 8 + length + start, 8 + length + stop)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommitError(f"{file} is not a safetensors file: {error}") from error
    if (end := max((tensor.stop for tensor in stored.values()), default=0)) > size:
        raise CommitError(f"{file} is truncated: {size} bytes of {end}")
    return stored


def write_base_version(
    root: Path,
    model: Path,
    reference: LogprobReference | None = None,
    tensors: Mapping[str, TensorEntry] | None = None,
) -> WeightsManifest:
    """Commit version 0, the base model at `model` (its `tensors`, if they are hashed already), if not committed yet.
    Raises CommitError if step_0 is another model."""
    directory = commit.step_dir(root, 0)
    extra = manifest_extra(0, 0, tensors or hash_directory(model), str(model.resolve()), reference)
    if 0 not in commit.list_steps(root):
        with commit.stage(directory, step=0, producer="trainer", extra=extra):
            pass
    existing = weights_manifest(directory)
    if existing.base is None:
        raise CommitError(f"{directory} is no base model: the run began with an adapter; give its lora.adapter again")
    if existing.hash != extra["hash"]:
        raise CommitError(f"{directory} belongs to another base model ({existing.base}), not to {model}")
    return existing


def file_hashes(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the hash of each file of tensors, which is that of the tensors in it."""
    by_file: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        by_file.setdefault(entry.file, {})[name] = entry
    return {file: version_hash(entries) for file, entries in by_file.items()}


def make_durable(directory: Path, write: Callable[[Path], Mapping[str, TensorEntry]]) -> None:
    """Write a version's tensors, from memory, into its own directory. Only the trainer does so.

    The manifest is replaced last; until then the version is what it was. Its hash does not change. `write` writes the
    files of a model directory, and returns its tensors with their hashes.
    """
    committed = read_manifest(directory)
    manifest = weights_manifest(directory, committed)
    with Stage(directory) as stage, disk_errors(directory, "the version stays in memory"):
        hashed = write(stage.path)
        files = stage.sync_files(file_hashes(hashed))
        faults.point(f"make-durable:{commit.subject_of(directory)}")
        for name in files:
            os.rename(stage.path / name, directory / name)
        commit.sync(directory)
        stage.path.rmdir()
        tensors = {
            name: vars(replace(hashed[name], checksum=entry.checksum)) for name, entry in manifest.tensors.items()
        }
        extra = {key: value for key, value in committed.extra.items() if key != "publisher"} | {"tensors": tensors}
        durable = replace(committed, files=committed.files | files, extra=extra)
        commit.write_atomically(directory / commit.MANIFEST, json.dumps(vars(durable)).encode())
    faults.point(f"made-durable:{commit.subject_of(directory)}")
