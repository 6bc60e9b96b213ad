"""Training state on disk is data: nothing in a file is executed, and a state that does not fit is refused."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from prime_rl.errors import UserError
from prime_rl.trainer import dcp
from prime_rl.trainer.parallel import World, background_world
from support import trainer as support

world = support.world
Make = Callable[[], dcp.State]


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def make(world: World) -> Make:
    """A small training state, sharded as FSDP2 does it."""

    def make() -> dcp.State:
        weight = DTensor.from_local(torch.arange(12.0).reshape(4, 3), world.mesh, [Shard(0)], run_check=False)
        optimizer = {"state": {"w": {"step": torch.tensor(3.0), "exp_avg": weight * 2}}}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None, "params": ["w"]}]
        return {"model": {"w": weight}, "optimizer": {**optimizer, "param_groups": groups}}

    return make


def zeros(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros(value) for value in state]
    return (0.0, 0.0) if isinstance(state, tuple) else 0.0 if isinstance(state, float) else state


def saved(state: dcp.State, tmp_path: Path) -> Path:
    dcp.save(state, tmp_path / "state")
    return tmp_path / "state"


def test_what_is_saved_is_loaded(make: Make, world: World, tmp_path: Path) -> None:
    """Shards, plain tensors and plain values come back as they were; where they were written is not told."""
    directory = saved(make(), tmp_path)
    state = zeros(make())
    dcp.load(state, directory, world)
    torch.testing.assert_close(state["model"]["w"].to_local(), torch.arange(12.0).reshape(4, 3))
    assert state["optimizer"]["param_groups"] == make()["optimizer"]["param_groups"]
    assert state["optimizer"]["state"]["w"]["step"] == 3
    assert str(tmp_path).encode() not in (directory / ".metadata").read_bytes()


def test_code_in_the_metadata_is_refused(make: Make, world: World, tmp_path: Path) -> None:
    """A pickle that would call something is refused before it does, as the whole file or within real metadata."""
    directory = saved(make(), tmp_path)
    metadata = dcp.read_metadata(directory)
    metadata.planner_data = Malicious(tmp_path / "owned")
    for content in (Malicious(tmp_path / "owned"), metadata):
        (directory / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(UserError, match=r"\.metadata is refused: it names (posix|os)\.mkdir"):
            dcp.load(make(), directory, world)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.ops", "pathlib.Path", "torch.serialization.load"]
)
def test_only_metadata_is_admitted(name: str, make: Make, tmp_path: Path) -> None:
    """Nothing is found by name but the classes of metadata and torch's dtypes, however harmless or near it is."""
    directory = saved(make(), tmp_path)
    module, _, attribute = name.rpartition(".")
    (directory / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(UserError, match="which is no part of a checkpoint's metadata"):
        dcp.read_metadata(directory)


def test_code_among_the_values_is_refused(make: Make, world: World, tmp_path: Path) -> None:
    """An entry that is no tensor may hold plain values only."""
    state = make()
    state["optimizer"]["param_groups"][0]["lr"] = Malicious(tmp_path / "owned")
    directory = saved(state, tmp_path)
    with pytest.raises(UserError, match="cannot be loaded"):
        dcp.load(make(), directory, world)
    assert not (tmp_path / "owned").exists()


def test_files_elsewhere_are_not_read(make: Make, tmp_path: Path) -> None:
    """Metadata may only name files beside it."""
    directory = saved(make(), tmp_path)
    metadata = dcp.read_metadata(directory)
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="names ../secret"):
        dcp.read_metadata(directory)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1})], ids=["empty", "garbage", "other"])
def test_broken_metadata(content: bytes, make: Make, tmp_path: Path) -> None:
    """Bytes that are no metadata are one clear line."""
    directory = saved(make(), tmp_path)
    (directory / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata is refused"):
        dcp.read_metadata(directory)
    (directory / ".metadata").unlink()
    with pytest.raises(UserError, match="is missing"):
        dcp.read_metadata(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.update(more=torch.zeros(2)),
            r"model.more is not there in the checkpoint and \[2\] in the model",
        ),
        (
            lambda model: model.update(w=torch.zeros(4, 4)),
            r"model.w is \[4, 3\] in the checkpoint and \[4, 4\] in the model",
        ),
        (lambda model: model.clear(), r"model.w is \[4, 3\] in the checkpoint and not there in the model"),
    ],
    ids=["more", "other shape", "fewer"],
)
def test_another_model(
    change: Callable[[dict[str, Any]], None], message: str, make: Make, world: World, tmp_path: Path
) -> None:
    """A state of another model is refused whichever has more parameters, before anything is overwritten."""
    directory = saved(make(), tmp_path)
    state = make()
    change(state["model"])
    with pytest.raises(UserError, match=f"does not fit this model: {message}"):
        dcp.load(state, directory, world)


def test_copies_do_not_change(make: Make, world: World) -> None:
    """A copy is one also of what lies in host memory already; it goes into the buffers that were reserved, and so does the next."""
    apart = background_world(world, 60)
    copies = dcp.HostCopy(apart)
    state = make()
    copies.reserve(state)
    reserved = set(copies._buffers)
    first = copies.take(state)
    copies.before_update()
    copies.synchronize()
    assert set(copies._buffers) == reserved
    for tensor in (state["model"]["w"].to_local(), state["optimizer"]["state"]["w"]["step"]):
        tensor.add_(1)
    assert first["model"]["w"].device_mesh is apart.mesh
    torch.testing.assert_close(first["model"]["w"].to_local(), torch.arange(12.0).reshape(4, 3))
    assert first["optimizer"]["state"]["w"]["step"] == 3
    second = copies.take(state)
    assert second["optimizer"]["state"]["w"]["step"] == 4
    assert second["model"]["w"].to_local().data_ptr() == first["model"]["w"].to_local().data_ptr()
