"""Gradients of a single rank: added up where they are, with the bits of torch's own reduction."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from prime_rl.trainer import model as trainer_model
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import collate, to_device
from prime_rl.trainer.parallel import SingleRankReduction
from prime_rl.trainer.parameters import named_parameters
from support import trainer as support

world, make_policy = support.world, support.make_policy
tied_model, untied_model, moe_model = support.tied_model, support.untied_model, support.moe_model

CPU = torch.device("cpu")
GROUPS = [support.random_documents((17, 30)), support.random_documents((25,))]


def backward(policy: Policy, micro_batch: int) -> None:
    policy(to_device(collate(GROUPS[micro_batch], 1), CPU), cross_entropy)[0].backward()


def gradients(masters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: master.grad.to_local() for name, master in masters.items()}


def addresses(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Watched(SingleRankReduction):
    """Remembers what FSDP was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.given.append(super().allocate(size, dtype=dtype, device=device))
        return self.given[-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", ["tied_model", "untied_model", "moe_model"])
def test_the_same_bits_as_torch(
    which: str,
    dtype: str,
    make_policy: Callable[..., Policy],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over two steps of two micro-batches, where weights stay gathered (no FSDP) and where they are freed. With FSDP gradients lie after the first
    one where they were put to be sent, and the second is added there."""
    directory = request.getfixturevalue(which)
    watched: list[Watched] = []

    def make() -> Watched:
        watched.append(Watched())
        return watched[-1]

    monkeypatch.setattr(trainer_model, "SingleRankReduction", make)
    kept = make_policy(directory, dtype=dtype, reshard_after_forward=False)
    freed = make_policy(directory, dtype=dtype, reshard_after_forward=True)
    (reduction,) = watched
    monkeypatch.setattr(FSDPModule, "set_custom_reduce_scatter", lambda unit, comm: None)
    torchs = make_policy(directory, dtype=dtype, reshard_after_forward=True)
    policies = kept, freed, torchs
    kept_masters, freed_masters, torchs_masters = (dict(named_parameters(policy)) for policy in policies)

    units = len(freed.lm.model.layers) + len(freed.hookless) + 2  # the final norm and the root
    for _ in range(2):
        reduction.given.clear()
        for policy in policies:
            policy.zero_grad()
        for micro_batch in range(2):
            for policy in policies:
                for unit in policy.units:
                    unit.set_reshard_after_backward(micro_batch == 1)
                backward(policy, micro_batch)
            sent, received = reduction.given[0::2], reduction.given[1::2]
            assert all(a is b for a, b in zip(sent, received, strict=True))
            assert len(sent) == (micro_batch + 1) * units
            assert addresses(list(gradients(freed_masters).values())) == addresses(sent[:units])
            for name, gradient in gradients(torchs_masters).items():
                assert gradient.dtype == torch.float32
                for masters in (kept_masters, freed_masters):
                    assert torch.equal(gradients(masters)[name], gradient), name
        for policy in policies:
            for parameter in policy.parameters():  # masters again, since the step's last backward
                parameter.to_local().detach().mul_(1.01)
