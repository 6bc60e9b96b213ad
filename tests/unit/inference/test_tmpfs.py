"""Versions whose tensors lie in a tmpfs, on the side of the server: the very tensors, or one line and the old weights."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.inference.staging import Staging, files_of
from prime_rl.inference.version_files import AllowedRoots, Rejected
from prime_rl.transport.commit import CommitError, stage
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.tmpfs import in_tmpfs
from prime_rl.transport.weights import hash_directory, manifest_extra, verify_weights, weights_manifest

CPU = torch.device("cpu")
SECONDS = 60.0
TENSORS = {"model-1.safetensors": {"a": torch.randn(200, 200)}, "model-2.safetensors": {"b": torch.arange(70_001)}}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    place, final = tmp_path / "tmpfs" / "run" / "step_5", tmp_path / "weights" / "step_5"
    with stage(place, step=5, producer="trainer") as tmp:
        for file, tensors in TENSORS.items():
            save_file(tensors, tmp / file)
        nonce = tmp.name.rpartition("-")[2]
    extra = manifest_extra(5, 0, hash_directory(place)) | {"tmpfs": asdict(in_tmpfs(place, nonce))}
    with stage(final, step=5, producer="trainer", extra=extra) as tmp:
        (tmp / "config.json").write_text("{}")
    return final


def read(version: Path) -> dict[str, torch.Tensor]:
    staging = Staging(version, weights_manifest(version).hash, CPU, Subscriber())
    staging.wait(SECONDS)
    return dict(staging.tensors)


def test_tensors_are_read_from_there(version: Path, tmp_path: Path) -> None:
    """Contract: they are staged, and restored, from there."""
    found = read(version)
    expected = {name: tensor for tensors in TENSORS.values() for name, tensor in tensors.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    identity = {"version": 5, "hash": weights_manifest(version).hash}
    assert files_of(version, identity) == tmp_path / "tmpfs" / "run" / "step_5"


def test_a_tmpfs_is_allowed_by_name(version: Path, tmp_path: Path) -> None:
    """Contract: a manifest leads a server no further than it may go."""
    tmpfs = weights_manifest(version).tmpfs
    assert tmpfs is not None
    root = version.parent
    AllowedRoots(root, tmpfs=tmp_path / "tmpfs").check(str(version), 5)
    AllowedRoots(None).check(str(version), 5)
    with pytest.raises(Rejected, match="--weights-tmpfs"):
        AllowedRoots(root).check(str(version), 5)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(Path(tmpfs.directory) / "model-1.safetensors", elsewhere)
    (Path(tmpfs.directory) / "model-1.safetensors").symlink_to(elsewhere / "model-1.safetensors")
    with pytest.raises(Rejected, match="outside"):
        AllowedRoots(root, tmpfs=tmp_path / "tmpfs").check(str(version), 5)


def test_a_server_that_does_not_see_the_tmpfs_says_so(version: Path, tmp_path: Path) -> None:
    """Contract: one line, which names the host, on another one as well as where they are gone."""
    shutil.rmtree(tmp_path / "tmpfs")
    with pytest.raises(CommitError, match="is not there: they are gone"):
        verify_weights(version)
    with pytest.raises((CommitError, FileNotFoundError)):
        read(version)
    manifest = version / "manifest.json"
    tmpfs = weights_manifest(version).tmpfs
    assert tmpfs is not None
    manifest.write_text(manifest.read_text().replace(f'"{tmpfs.host}"', '"another"'))
    with pytest.raises(CommitError, match="of another, and .* is not there: .* is for servers on"):
        verify_weights(version)
