"""A version of weights has one identity, and any change to it is found."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from prime_rl.transport.commit import CommitError, stage
from prime_rl.transport.weights import (
    hash_directory,
    manifest_extra,
    verify_weights,
    version_dir,
    version_hash,
    weights_manifest,
    write_base_version,
)


def make_model(directory, seed=0):
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {
        "a.weight": rng.normal(size=(4, 3)).astype(np.float32),
        "b.weight": rng.normal(size=(4, 3)).astype(np.float32),
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"seed": seed}))
    return directory


def publish(root, version, seed=0):
    final = version_dir(root, version)
    model = make_model(root.parent / f"model-{seed}", seed)
    extra = manifest_extra(version, 1, hash_directory(model))
    with stage(final, step=version, producer="trainer", extra=extra) as path:
        for file in model.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    return final


def test_a_committed_version_verifies(tmp_path):
    """Identity: version, incarnation and one hash over all tensors."""
    directory = publish(tmp_path / "weights", 4)
    manifest = verify_weights(directory)
    assert (manifest.version, manifest.incarnation, manifest.base) == (4, 1, None)
    assert manifest.hash == version_hash(hash_directory(directory))


def test_the_hash_depends_on_every_tensor_and_on_which_name_it_has(tmp_path):
    """Swapped layers or another model are another hash."""
    tensors = hash_directory(make_model(tmp_path / "model"))
    swapped = {"a.weight": tensors["b.weight"], "b.weight": tensors["a.weight"]}
    assert version_hash(tensors) != version_hash(swapped)
    assert version_hash(tensors) != version_hash({"a.weight": tensors["a.weight"]})


def flip_a_bit(directory):
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def swap_tensors(directory):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-96] + data[-48:] + data[-96:-48])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "tensor b.weight"),
        (swap_tensors, "tensor a.weight"),
        (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-8]), "bytes"),
        (lambda d: (d / "config.json").write_text('{"seed": 1}'), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "missing"),
    ],
)
def test_damaged_weights_are_refused_by_name(tmp_path, damage, message):
    """A flipped bit, swapped tensors, truncation, a changed config: all found before anything is loaded."""
    directory = publish(tmp_path / "weights", 1)
    damage(directory)
    with pytest.raises(CommitError, match=message):
        verify_weights(directory)


def test_version_zero_names_the_base_without_a_copy(tmp_path):
    """Version 0 is a manifest with hashes and the base path; writing it again changes nothing."""
    model = make_model(tmp_path / "model")
    first = write_base_version(tmp_path / "weights", model)
    assert write_base_version(tmp_path / "weights", model) == first
    assert first.files == model.resolve()
    assert [path.name for path in version_dir(tmp_path / "weights", 0).iterdir()] == ["manifest.json"]
    assert verify_weights(version_dir(tmp_path / "weights", 0)) == first


def test_another_base_model_in_the_same_run_is_refused(tmp_path):
    """A run directory belongs to one base model."""
    write_base_version(tmp_path / "weights", make_model(tmp_path / "model"))
    with pytest.raises(CommitError, match="another base model"):
        write_base_version(tmp_path / "weights", make_model(tmp_path / "other", seed=1))


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{nope", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_broken_safetensors_file_is_one_clear_error(tmp_path, content):
    """A truncated or malformed file is named, not a stack trace."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CommitError, match="model.safetensors"):
        hash_directory(tmp_path)


def test_a_committed_directory_that_is_no_version_is_refused(tmp_path):
    """A rollout batch is not taken for weights."""
    with stage(tmp_path / "step_1", step=1, producer="orchestrator"):
        pass
    with pytest.raises(CommitError, match="not as a version of weights"):
        weights_manifest(tmp_path / "step_1")
