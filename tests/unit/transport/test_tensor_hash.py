"""The hash of a tensor: the same whoever makes it, in whatever pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from prime_rl.inference.staging import Staging
from prime_rl.trainer.weight_copy import Range, hash_files, write_ranges
from prime_rl.transport import weights
from prime_rl.transport.commit import CommitError, stage
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.weights import chunks, hash_directory, manifest_extra, of_chunks, version_dir, weights_manifest

CHUNK = 1000


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "HASH_CHUNK_BYTES", CHUNK)
        yield


def by_hand(data: bytes) -> str:
    if len(data) <= CHUNK:
        return xxhash.xxh3_128(data).hexdigest()
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return xxhash.xxh3_128(b"".join(bytes.fromhex(xxhash.xxh3_128(part).hexdigest()) for part in parts)).hexdigest()


@given(st.binary(max_size=5 * CHUNK))
def test_value(data: bytes) -> None:
    """Of a small tensor it is xxh3-128 of its bytes, as ever; of a large one that of its chunks' hashes."""
    digests = [xxhash.xxh3_128_digest(data[start:end]) for start, end in chunks(len(data))]
    assert of_chunks(digests) == by_hand(data)


def test_writers_and_readers_agree(tmp_path: Path) -> None:
    """Contract: who writes them and reads them back, and a server that reads the file, all find the same."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for name, size in {"a": 9 * CHUNK, "b": 10, "c": 20, "none": 0, "d": 9 * CHUNK + 7}.items()
    }
    extra: dict[str, Any] = {}
    with stage(version_dir(tmp_path, 1), step=1, producer="trainer", extra=extra) as directory:
        save_file(tensors, directory / "model.safetensors")
        extra |= manifest_extra(1, 0, hash_directory(directory))
    directory = version_dir(tmp_path, 1)
    want = {name: by_hand(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    assert {name: entry.xxh3 for name, entry in hash_directory(directory).items()} == want

    read = Staging(directory, weights_manifest(directory).hash, torch.device("cpu"), Subscriber())
    read.wait(60.0)
    assert {name: by_hand(tensor.numpy().tobytes()) for name, tensor in read.tensors} == want

    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(bytes(len(data)))
    write_ranges(
        torch.frombuffer(bytearray(data), dtype=torch.uint8), directory, {"model.safetensors": [Range(0, len(data), 0)]}
    )
    hashed = hash_files(directory, ["model.safetensors"])
    assert {name: entry["xxh3"] for name, entry in hashed.items()} == want


def test_hashes_that_are_made_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a version of another release is not taken for one whose bytes are wrong."""
    save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    extra = manifest_extra(1, 0, hash_directory(tmp_path))
    del extra["hash_chunk"]
    with stage(version_dir(tmp_path, 1), step=1, producer="trainer", extra=extra):
        pass
    with pytest.raises(CommitError, match="another release"):
        weights_manifest(version_dir(tmp_path, 1))
