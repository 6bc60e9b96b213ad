"""Reading a version onto a GPU beside generation: every bit arrives, and the memory is others' again once it is dropped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.inference import staging
from prime_rl.inference.staging import Staging
from prime_rl.transport.commit import stage
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.weights import hash_directory, manifest_extra, version_dir, weights_manifest

DEVICE = torch.device("cuda:0")
SECONDS = 60.0
FILES = 6  # more than are read at once


def commit(root: Path) -> Path:
    extra: dict[str, Any] = {}
    with stage(version_dir(root, 1), step=1, producer="trainer", extra=extra) as tmp:
        for number in range(FILES):
            tensors = {
                f"{number}.{name}": torch.randn(size, 1024).bfloat16() for name, size in (("a", 20_000), ("b", 1))
            }
            save_file(tensors, tmp / f"model-{number}.safetensors")
        extra |= manifest_extra(1, 0, hash_directory(tmp))
    return version_dir(root, 1)


@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_read_is_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Contract: chunks that go through pinned memory overwrite nothing that is still being copied; without room on the GPU the host
    keeps what is read; what is dropped takes no memory."""
    if place == "host":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    directory = commit(tmp_path)
    before = torch.cuda.memory_allocated(DEVICE)
    read = Staging(directory, weights_manifest(directory).hash, DEVICE, Subscriber())
    read.wait(SECONDS)
    assert read.place == place
    expected = {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}
    found = dict(read.tensors)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.device.type == ("cuda" if place == "device" else "cpu")
        assert torch.equal(x.cpu(), expected[name])
    del found, x
    read.drop()
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_without_memory_on_the_gpu_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where somebody else takes the memory in the last moment, the host keeps what is read."""

    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("scripted")

    monkeypatch.setattr(staging.torch, "zeros", full)
    directory = commit(tmp_path)
    read = Staging(directory, weights_manifest(directory).hash, DEVICE, Subscriber())
    read.wait(SECONDS)
    assert read.place == "host"
    read.drop()
