"""Training state on disk: any number of ranks loads what any other saved, and a state that does not fit is refused."""

import json
from dataclasses import replace

import pytest
import torch

from prime_rl.errors import UserError
from prime_rl.trainer import training_state
from prime_rl.trainer.parallel import World, rows_of_rank
from prime_rl.trainer.training_state import HostCopy, State, StateTensor, load, save
from support import trainer as support

world = support.world
WEIGHT, BIAS, STEP = "model.lm.weight", "model.lm.bias", "optimizer.lm.weight.step"
WHOLE = {WEIGHT: torch.arange(21.0).reshape(7, 3), BIAS: torch.arange(2.0), STEP: torch.tensor(3.0)}


@pytest.fixture
def ranks(world, monkeypatch):
    """So many ranks, which come one after the other."""
    monkeypatch.setattr(training_state, "agree", lambda world, action: action())
    return lambda size, replicas=1: [replace(world, rank=rank, size=size, replicas=replicas) for rank in range(size)]


def part(world: World, *, empty: bool = False) -> State:
    """What a rank holds: its rows of the weights, some ranks none of the bias, and the number."""
    state = {}
    for name, tensor in WHOLE.items():
        rows = tensor[slice(*rows_of_rank(len(tensor), world))] if tensor.ndim else tensor
        state[name] = StateTensor(torch.zeros_like(rows) if empty else rows.clone(), list(tensor.shape))
    return state


@pytest.mark.parametrize("before", [(1, 1), (3, 1), (5, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("after", [(1, 1), (2, 1), (3, 1), (4, 2)], ids=str)
def test_any_number_of_ranks(before, after, ranks, tmp_path):
    """Ranks and replicas: each finds its rows wherever they lie."""
    for rank in reversed(ranks(*before)):
        save(part(rank), tmp_path / "state", rank)
    for rank in ranks(*after):
        state = part(rank, empty=True)
        load(state, tmp_path / "state", rank)
        for name, (want, _) in part(rank).items():
            assert torch.equal(state[name].local, want), name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("index.json", None, "cannot be loaded"),
        ("index.json", b"[]", "cannot be loaded"),
        ("rank_0.safetensors", b"", "cannot be loaded"),
        ("rank_0.safetensors", None, "cannot be loaded"),
        ("model.more", b"[2]", r"not fit this model: model.more has shape \[2\] in the checkpoint and None in the"),
        ("model.lm.bias", None, r"model.lm.bias has shape None in the checkpoint and \[2\] in the model"),
        ("model.lm.bias", b"[3]", r"model.lm.bias has shape \[3\] in the checkpoint and \[2\] in the model"),
        ("optimizer.lm.bias.step", b"[]", r"and None in the model .*; optim.type must be the same"),
    ],
)
def test_what_is_refused(name, content, message, world, tmp_path):
    """Damaged files and the state of another model are one clear line."""
    save(part(world), tmp_path / "state", world)
    if name.startswith(("model.", "optimizer.")):
        index = json.loads((tmp_path / "state" / "index.json").read_text())
        index["shapes"].pop(name, None)
        index["shapes"] |= {} if content is None else {name: json.loads(content)}
        name, content = "index.json", json.dumps(index).encode()
    (tmp_path / "state" / name).unlink()
    if content is not None:
        (tmp_path / "state" / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(part(world), tmp_path / "state", world)
    assert "\n" not in str(caught.value)


def test_copies_do_not_change(world):
    """A copy is one also of what lies in host memory already; all go into the buffers that were reserved."""
    copies, state = HostCopy(world.device), part(world)
    copies.reserve(state)
    reserved = {name: buffer.data_ptr() for name, buffer in copies._buffers.items()}
    for first in (0.0, 1.0):
        copied = copies.take(state)
        copies.before_update()
        copies.synchronize()
        for local, _ in state.values():
            local.add_(1)
        assert {name: tensor.local.data_ptr() for name, tensor in copied.items()} == reserved
        for name, tensor in copied.items():
            assert torch.equal(tensor.local, WHOLE[name] + first)
