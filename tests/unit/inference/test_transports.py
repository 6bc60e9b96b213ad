"""Versions that tell changes, and those whose tensors lie in memory, on the side of the server: the very tensors, or one line and the old weights."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prime_rl.transport.delta import WORD_BYTES, delta_file, encode, write_delta
from prime_rl.transport.memory import in_memory
from safetensors.torch import save_file

from prime_rl.inference import blocks, staging
from prime_rl.inference.places import Places, Refused
from prime_rl.inference.staging import Held, Staging, tensors_of
from prime_rl.inference.weights import WeightsExtension, source_of
from prime_rl.transport.commit import CommitError, prune, stage
from prime_rl.transport.weights import (
    BuildsOn,
    hash_directory,
    manifest_extra,
    read_files,
    read_header,
    verify_weights,
    version_dir,
    weights_manifest,
)

CPU = torch.device("cpu")
SECONDS = 60.0
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)


def tensors_at(version: int) -> dict[str, Tensors]:
    """By file. Each version changes some."""
    rng = torch.Generator().manual_seed(0)
    files = {
        "model-1.safetensors": {"a": torch.randn(200, 200, generator=rng), "empty": torch.empty(0, 3)},
        "model-2.safetensors": {"b": torch.randn(9000, generator=rng).bfloat16(), "same": torch.arange(70_001)},
    }
    for tensor in (files["model-1.safetensors"]["a"], files["model-2.safetensors"]["b"]):
        tensor.view(-1)[: 7 * version] += version
    return files


def publish(root: Path, version: int, on: int | None = None) -> Path:
    """Commit a version: in full, or what has changed since `on`."""
    scratch = root.parent / f"scratch-{version}"
    scratch.mkdir(exist_ok=True)
    for file, tensors in tensors_at(version).items():
        save_file(tensors, scratch / file)
    built = BuildsOn(on, None if on is None else weights_manifest(version_dir(root, on)).hash)
    extra = manifest_extra(version, 0, hash_directory(scratch), delta=built)
    before = {} if on is None else dict(read_files(weights_manifest(version_dir(root, on))))
    with stage(version_dir(root, version), step=version, producer="trainer", extra=extra) as tmp:
        for path in scratch.iterdir():
            if on is None:
                shutil.copyfile(path, tmp / path.name)
            else:
                write_delta(tmp / delta_file(path.name), changes(path, before[path.name]))
    return version_dir(root, version)


def changes(path: Path, old: Any) -> dict[str, bytes]:
    header, offset = read_header(path)
    new, told = np.fromfile(path, np.uint8), {}
    for name, entry in header.items():
        place = slice(*(offset + at for at in entry["data_offsets"]))
        told[name] = encode(old[place], new[place], WORD_BYTES.get(entry["dtype"], 1))
    return told


def read(directory: Path, held: Held | None = None, **options: Any) -> Staging:
    began = Staging(directory, weights_manifest(directory).hash, CPU, held=held, **options)
    began.wait(SECONDS)
    return began


def check(tensors: Any, version: int) -> None:
    expected = {name: tensor for file in tensors_at(version).values() for name, tensor in file.items()}
    found = dict(tensors)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Versions 1 … 4, of which 1 is there in full."""
    weights = tmp_path / "weights"
    publish(weights, 1)
    for version in (2, 3, 4):
        publish(weights, version, on=version - 1)
    return weights


def test_what_is_held_is_not_read_again(root: Path) -> None:
    """Contract: a worker that holds the version before needs nothing but the changes, and each version is the very tensors."""
    before = read(version_dir(root, 1))
    check(before.tensors(), 1)
    for version in (2, 3, 4):
        shutil.rmtree(version_dir(root, version - 1))
        after = read(version_dir(root, version), before.held)
        check(after.tensors(), version)
        assert (after.place, after.answer()["state"]) == ("host", "ready")
        before = after


@pytest.mark.parametrize("holds", [None, 1, 2])
def test_who_missed_versions_goes_back_to_a_full_one(root: Path, holds: int | None) -> None:
    """Contract: a worker that holds nothing, or a version further back, reads what lies between, by itself."""
    held = None if holds is None else read(version_dir(root, holds)).held
    check(read(version_dir(root, 4), held).tensors(), 4)


def test_without_memory_it_is_built_file_by_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where nothing may be kept, or there is no room, the version is verified by the one who does, and built again to be loaded."""
    for options, available in (({"keep": False}, 1 << 40), ({}, 1000)):
        monkeypatch.setattr(staging, "available_bytes", lambda room=available: room)
        done = read(version_dir(root, 4), **options)
        assert (done.place, list(done.tensors()), done.held) == ("nowhere", [], None)
    files, told = source_of(version_dir(root, 4))
    assert files == version_dir(root, 4)
    check(told, 4)
    assert source_of(version_dir(root, 1)) == (version_dir(root, 1), None)
    flip(version_dir(root, 3) / "model-1.delta")
    with pytest.raises(CommitError):
        read(version_dir(root, 4), keep=False)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("holds", [False, True])
def test_a_flipped_bit(root: Path, holds: bool) -> None:
    """Contract: changes that were damaged are refused by name, and what was held is worth nothing any more: the next version is right, from a full one."""
    held = read(version_dir(root, 2)).held if holds else None
    whole = (version_dir(root, 3) / "model-1.delta").read_bytes()
    flip(version_dir(root, 3) / "model-1.delta")
    failed = Staging(version_dir(root, 3), weights_manifest(version_dir(root, 3)).hash, CPU, held=held)
    with pytest.raises(CommitError, match="step_3"):
        failed.wait(SECONDS)
    assert (failed.answer()["state"], list(failed.tensors()), failed.held) == ("failed", [], None)
    (version_dir(root, 3) / "model-1.delta").write_bytes(whole)
    check(read(version_dir(root, 4), failed.held).tensors(), 4)


def test_a_missing_foundation(root: Path) -> None:
    """Contract: where what a version builds on was removed, one line says so; it is not needed by who holds a later one."""
    held = read(version_dir(root, 3)).held
    prune(version_dir(root, 1))
    with pytest.raises(CommitError, match="step_2 tells what has changed since version 1, which is not there"):
        read(version_dir(root, 4))
    check(read(version_dir(root, 4), held).tensors(), 4)


def test_the_worker_holds_what_it_read_last(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what was read is held whether it was loaded or not; what failed, or is being read, is not."""
    worker = object.__new__(WeightsExtension)
    worker.device, worker.rank = CPU, 0
    worker.vllm_config = type(
        "Config", (), {"parallel_config": type("P", (), {"world_size": 1, "data_parallel_size": 1})}
    )

    def take(version: int) -> None:
        directory = version_dir(root, version)
        worker.prime_stage(str(directory), weights_manifest(directory).hash, True)
        assert worker.prime_held is None
        assert worker.prime_staging is not None
        worker.prime_staging.wait(SECONDS)

    take(1)
    worker.prime_unstage()
    assert worker.prime_held is not None
    assert worker.prime_held.hash == weights_manifest(version_dir(root, 1)).hash
    shutil.rmtree(version_dir(root, 1))
    take(2)
    check(worker.prime_staging.tensors(), 2)  # type: ignore[union-attr]
    flip(version_dir(root, 3) / "model-2.delta")
    with pytest.raises(CommitError):
        take(3)
    worker.prime_unstage()
    assert worker.prime_held is None


def test_no_link_of_a_chain_needs_a_safetensors_file(root: Path) -> None:
    """Contract: such a directory is never taken for a model; its tensors are verified through what it builds on."""
    assert list(version_dir(root, 4).glob("*.safetensors*")) == []
    assert verify_weights(version_dir(root, 4)).builds_on == 3
    check(tensors_of(version_dir(root, 4)), 4)


# ---- memory


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """One whose tensors lie in memory."""
    place, final = tmp_path / "tmpfs" / "run" / "step_5", tmp_path / "weights" / "step_5"
    with stage(place, step=5, producer="trainer") as tmp:
        for file, tensors in tensors_at(5).items():
            save_file(tensors, tmp / file)
        nonce = tmp.name.rpartition("-")[2]
    extra = manifest_extra(5, 0, hash_directory(place)) | {"memory": asdict(in_memory(place, nonce))}
    with stage(final, step=5, producer="trainer", extra=extra) as tmp:
        (tmp / "config.json").write_text("{}")
    return final


def test_tensors_in_memory(version: Path, tmp_path: Path) -> None:
    """Contract: they are read from there."""
    check(read(version).tensors(), 5)
    assert source_of(version) == (tmp_path / "tmpfs" / "run" / "step_5", None)


def test_memory_is_allowed_by_name(version: Path, tmp_path: Path) -> None:
    """Contract: a manifest leads a server no further than it may go."""
    memory = weights_manifest(version).memory
    assert memory is not None
    root = version.parent
    Places(root, tmpfs=tmp_path / "tmpfs").check_memory(version, memory)
    Places(None).check_memory(version, memory)
    with pytest.raises(Refused, match="--weights-tmpfs"):
        Places(root).check_memory(version, memory)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(Path(memory.directory) / "model-1.safetensors", elsewhere)
    (Path(memory.directory) / "model-1.safetensors").symlink_to(elsewhere / "model-1.safetensors")
    with pytest.raises(Refused, match="outside"):
        Places(root, tmpfs=tmp_path / "tmpfs").check_memory(version, memory)


def test_who_does_not_see_the_memory_says_so(version: Path, tmp_path: Path) -> None:
    """Contract: one line, which names the host, on another one as well as where they are gone."""
    shutil.rmtree(tmp_path / "tmpfs")
    with pytest.raises(CommitError, match="lie in memory of .* is not there: they are gone"):
        verify_weights(version)
    with pytest.raises((CommitError, FileNotFoundError)):
        read(version)
    manifest = version / "manifest.json"
    memory = weights_manifest(version).memory
    assert memory is not None
    manifest.write_text(manifest.read_text().replace(f'"{memory.host}"', '"another"'))
    with pytest.raises(CommitError, match="of another, and .* is not there: weights.transport.tmpfs is for servers on"):
        verify_weights(version)
