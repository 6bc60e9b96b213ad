"""Reading a version into memory: the very bytes that were hashed, or nothing. GPU: benchmarks/weight_sync.py."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_rl.inference import staging
from prime_rl.inference.staging import Staging, WeightsExtension
from prime_rl.transport import weights
from prime_rl.transport.commit import prune
from prime_rl.transport.exchange import ExchangeError, Subscriber, layout
from prime_rl.transport.weights import weights_manifest
from support.committing import commit_weights

CPU = torch.device("cpu")
SECONDS = 60.0
FILES = {
    "model-1.safetensors": {"a": torch.arange(40_000.0).reshape(200, 200), "empty": torch.empty(0, 3)},
    "model-2.safetensors": {"b": torch.randn(3, 1).bfloat16(), "c": torch.arange(70_001).byte(), "d": torch.tensor(7)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read and hashed in several chunks, of which the last is smaller."""
    monkeypatch.setattr(weights, "HASH_CHUNK_BYTES", 30_000)


def commit(root: Path, shift: int = 0) -> Path:
    def write(directory: Path) -> None:
        for file, tensors in FILES.items():
            save_file({name: tensor + shift for name, tensor in tensors.items()}, directory / file)

    return commit_weights(root, 1, write)


def begin(directory: Path, **options: Any) -> Staging:
    return Staging(directory, weights_manifest(directory).hash, CPU, Subscriber(), **options)


def test_what_is_read_is_what_the_files_hold(tmp_path: Path) -> None:
    """Contract: every tensor arrives bit by bit, of every size, across chunks, with dtype and shape, in file order."""
    directory = commit(tmp_path)
    read = begin(directory)
    answer = read.answer(SECONDS)
    expected = {name: tensor for file in FILES for name, tensor in load_file(directory / file).items()}
    assert [name for name, _ in read.tensors] == list(weights_manifest(directory).tensors)
    assert len(read.tensors) == len(expected)
    for name, tensor in read.tensors:
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(tensor, expected[name])
    assert (answer["state"], answer["place"]) == ("ready", "host")


def _change(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda directory: (directory / file).write_bytes(change((directory / file).read_bytes()))


_flip = _change("model-2.safetensors", lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": _flip,
    "cut": _change("model-1.safetensors", lambda data: data[:-100]),
    "lost": lambda directory: (directory / "model-1.safetensors").unlink(),
    "swapped names": _change(
        "model-2.safetensors", lambda data: data.replace(b'"c"', b'"x"').replace(b'"d"', b'"c"').replace(b'"x"', b'"d"')
    ),
}


@pytest.mark.parametrize("sharing", [1, 1 << 40], ids=["kept", "only hashed"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: Callable[[Path], object], sharing: int) -> None:
    """Contract: a version whose files differ from its manifest is never given out, kept in memory or only hashed."""
    directory = commit(tmp_path)
    damage(directory)
    read = begin(directory, sharing=sharing)
    answer = read.answer(SECONDS)
    assert (answer["state"], answer["retry"]) == ("failed", False)
    assert str(directory) in answer["why"]
    assert list(read.tensors) == []


def test_without_room_the_version_is_hashed_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where memory is short nothing is kept; the one who verifies has hashed it, the others read nothing."""
    directory = commit(tmp_path)
    size = layout(weights_manifest(directory).tensors)[1]
    for available, sharing, place in ((2 * size, 1, "host"), (2 * size - 1, 1, "nowhere"), (2 * size, 2, "nowhere")):
        monkeypatch.setattr(staging, "available_bytes", lambda available=available: available)
        read = begin(directory, sharing=sharing)
        assert read.answer(SECONDS)["place"] == place
        assert bool(list(read.tensors)) == (place == "host")
    _flip(directory)
    assert begin(directory, sharing=2, verify=False).answer(SECONDS)["state"] == "ready"
    assert begin(directory, sharing=2).answer(SECONDS)["state"] == "failed"


class Worker(WeightsExtension):
    device, rank = CPU, 0
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self, load: Callable[[Any], object]) -> None:
        self.prime_reload = load  # type: ignore[method-assign]


def test_files_that_are_replaced_while_vllm_reads_them_are_not_served(tmp_path: Path) -> None:
    """Contract: what was hashed was loaded, even if a new incarnation of the trainer commits the version meanwhile."""
    directory = commit(tmp_path)
    identity = {"version": 1, "hash": weights_manifest(directory).hash, "weight_dir": str(directory)}

    def load(source: Any) -> None:
        assert source == directory
        prune(directory)
        commit(tmp_path, shift=1)

    worker = Worker(load)
    with pytest.raises(ExchangeError, match="committed anew"):
        worker.prime_load(1, str(directory), identity, (1 << 40, True, SECONDS))
    assert worker.prime_served() is None


def test_a_load_that_stages_loads_what_is_verified_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a version that is damaged, or not staged in time, is not loaded: the answer says so."""
    directory, go_on, loaded = commit(tmp_path), Event(), list[list[str]]()
    manifest, worker = weights_manifest(directory), Worker(lambda source: loaded.append([name for name, _ in source]))

    def load(seconds: float) -> Any:
        options = 1, True, seconds
        return worker.prime_load(1, str(directory), {"version": 1, "hash": manifest.hash}, options)["state"]

    assert (load(SECONDS), loaded) == ("loaded", [[*manifest.tensors]])
    progress = Staging._progress
    monkeypatch.setattr(Staging, "_progress", lambda self: go_on.wait(SECONDS) and progress(self))
    assert load(0.01) == "reading"
    go_on.set()
    _flip(directory)
    assert (load(SECONDS), len(loaded)) == ("failed", 1)
