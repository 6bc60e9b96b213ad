"""What the files of a model hold and what its parameters hold: the same numbers under other names, whoever holds which rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from conftest import make_tiny_model
from prime_rl.trainer.parallel import REPLICATE, SHARD, World
from prime_rl.trainer.parameters import load_weights, randomize, stored_tensors
from prime_rl.trainer.source import find_model

EXPERTS = 5


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), experts=EXPERTS, tied=False)


@contextmanager
def one_of(ranks: int, rank: int, replicas: int) -> Iterator[World]:
    """The world as one rank of several sees it, without the others: nothing may be exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        shape, names = ((replicas, ranks // replicas), (REPLICATE, SHARD)) if replicas > 1 else ((ranks,), (SHARD,))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        yield World(rank, ranks, torch.device("cpu"), mesh, replicas=replicas)
    finally:
        dist.destroy_process_group()


class Holder(nn.Module):
    """What a policy is to those who ask for its parameters."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self) -> None:
        """FSDP asks for one."""


def pieces(
    model: Path, fill: Callable[[nn.Module, World], None], ranks: int, replicas: int = 1
) -> dict[str, list[tuple[int, Tensor]]]:
    """Of every stored tensor the rows that ranks which write give for it, each with its first row, in the order of the ranks."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for rank in range(ranks):
        with one_of(ranks, rank, replicas) as here:
            with torch.device("meta"):
                lm = AutoModelForCausalLM.from_config(find_model(str(model)).config, dtype=torch.float32)
            policy = Holder(lm)
            fully_shard(policy, mesh=here.mesh)
            policy.to_empty(device="cpu")
            fill(policy, here)
            for tensor in stored_tensors(policy) if here.writes else ():
                rows, first = tensor.local(here)
                assert list(rows.shape[1:]) == tensor.shape[1:], tensor.name
                found.setdefault(tensor.name, [])
                if rows.numel():
                    found[tensor.name].append((first, rows.clone()))
    return found


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (7, 1), (4, 2), (2, 2)])
def test_every_row_once(ranks: int, replicas: int, moe_model: Path) -> None:
    """However many ranks share the rows, also unevenly or with more ranks than experts, they read all of them, and write each once."""
    held = pieces(moe_model, lambda policy, here: load_weights(policy, moe_model, here), ranks, replicas)
    published = load_file(moe_model / "model.safetensors")
    assert held.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(torch.cat([rows for _, rows in held[name]]), tensor), name
        ends = [first + len(rows) for first, rows in held[name]]
        assert [0, *ends[:-1]] == [first for first, _ in held[name]], name
        if ".experts." in name:
            assert len(held[name]) == 1, name


def test_random_weights_know_no_ranks(moe_model: Path) -> None:
    """Random weights are the same for one seed on any number of ranks, and no two experts are alike."""
    one, three = (pieces(moe_model, lambda policy, here: randomize(policy, here, 5), ranks) for ranks in (1, 3))
    for name, held in one.items():
        assert torch.equal(held[0][1], torch.cat([rows for _, rows in three[name]])), name
    first, second = (one[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"][0][1] for i in (0, 1))
    assert not torch.equal(first, second)
