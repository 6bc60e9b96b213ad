"""A version of weights has one identity, whoever hashes it in whatever chunks, and any change to it is found."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from prime_rl.inference.staging import Staging
from prime_rl.transport import weights
from prime_rl.transport.commit import CommitError, step_dir
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.weights import (
    hash_directory,
    verify_weights,
    version_hash,
    weights_manifest,
    write_base_version,
)
from support.committing import commit_empty, commit_weights

CHUNK = 1000


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HASH_CHUNK_BYTES", CHUNK)


def make_model(directory: Path, seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(4, 3, generator=generator) for name in ("a.weight", "b.weight")}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"seed": seed}))
    return directory


def publish(root: Path, version: int, **changes: object) -> Path:
    return commit_weights(root, version, make_model, incarnation=1, **changes)


def test_a_committed_version_verifies(tmp_path):
    """Identity: version, incarnation and one hash over all tensors, each with its name."""
    directory = publish(tmp_path / "weights", 4)
    manifest, tensors = verify_weights(directory), hash_directory(directory)
    assert (manifest.version, manifest.incarnation, manifest.base) == (4, 1, None)
    assert manifest.hash == version_hash(tensors)
    swapped = {"a.weight": tensors["b.weight"], "b.weight": tensors["a.weight"]}
    assert len({version_hash(each) for each in (tensors, swapped, {"a.weight": tensors["a.weight"]})}) == 3


def flip_a_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def swap_tensors(data: bytes) -> bytes:
    return data[:-96] + data[-48:] + data[-96:-48]


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip_a_bit, "tensor b.weight"), (swap_tensors, "tensor a.weight"), (lambda data: data[:-8], "bytes")],
)
def test_damaged_weights_are_refused_by_name(tmp_path, damage, message):
    file = publish(tmp_path / "weights", 1) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CommitError, match=message):
        verify_weights(file.parent)
    directory = publish(tmp_path / "others", 1)
    (directory / "config.json").write_text('{"seed": 1}')
    with pytest.raises(CommitError, match="config.json"):
        verify_weights(directory)


def test_version_zero_names_the_base_without_a_copy(tmp_path):
    """A manifest with hashes and the base path; writing it again changes nothing, and a run has one base model."""
    model, root = make_model(tmp_path / "model"), tmp_path / "weights"
    first = write_base_version(root, model)
    assert write_base_version(root, model) == first
    assert first.files == model.resolve()
    assert [path.name for path in step_dir(root, 0).iterdir()] == ["manifest.json"]
    assert verify_weights(step_dir(root, 0)) == first
    with pytest.raises(CommitError, match="another base model"):
        write_base_version(root, make_model(tmp_path / "other", seed=1))


def test_what_is_not_a_version_that_this_release_wrote_is_one_clear_error(tmp_path):
    """Another release's version is not damaged, a rollout batch no weights."""
    for version, changes in enumerate(({"hash_chunk": None}, {"tmpfs": {"directory": "/dev/shm"}}), start=1):
        with pytest.raises(CommitError, match="another release"):
            weights_manifest(publish(tmp_path / "weights", version, **changes))
    commit_empty(tmp_path / "step_1", 1, "orchestrator")
    with pytest.raises(CommitError, match="not as a version of weights"):
        weights_manifest(tmp_path / "step_1")


def by_hand(data: bytes) -> str:
    if len(data) <= CHUNK:
        return xxhash.xxh3_128(data).hexdigest()
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return xxhash.xxh3_128(b"".join(bytes.fromhex(xxhash.xxh3_128(part).hexdigest()) for part in parts)).hexdigest()


def test_writers_and_readers_agree(small_chunks, tmp_path):
    """Contract: whoever reads a file back, and a server that stages it hash the same."""
    sizes = {"a": 9 * CHUNK, "b": 10, "c": 20, "none": 0, "d": 9 * CHUNK + 7}
    tensors = {name: torch.randint(0, 256, (size,), dtype=torch.uint8) for name, size in sizes.items()}
    directory = commit_weights(tmp_path, 1, lambda place: save_file(tensors, place / "model.safetensors"))
    want = {name: by_hand(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    assert {name: entry.xxh3 for name, entry in hash_directory(directory).items()} == want

    read = Staging(directory, weights_manifest(directory).hash, torch.device("cpu"), Subscriber())
    assert read.answer(60.0)["state"] == "ready"
    assert {name: by_hand(tensor.numpy().tobytes()) for name, tensor in read.tensors} == want
