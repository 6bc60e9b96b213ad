"""Versions that are loaded by recorded copies: what `load_weights` would load, or `load_weights` itself."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from prime_rl.inference.copy_plan import CopyPlan

Rule = Callable[[nn.Parameter, Tensor], object]


def copy(parameter: nn.Parameter, tensor: Tensor) -> None:
    parameter.data.narrow(0, 2, 3).copy_(tensor)


class Model(nn.Module):
    """Two stacked tensors in one parameter, whose padding is zeroed, and one tensor that `rule` loads."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.stacked, self.other = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
        self.rule, self.calls = rule, 0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.calls += 1
        by_name = dict(tensors)
        self.stacked.data[:2].copy_(by_name["a"].view(4, 2).t())
        self.stacked.data[2:5].copy_(by_name["b"])
        self.stacked.data[5:].zero_()
        self.rule(self.other, by_name["c"])


def staged(seed: int, rows: int = 3) -> list[tuple[str, Tensor]]:
    buffer = torch.randn(8 + 12 + rows * 4, generator=torch.Generator().manual_seed(seed))
    a, b, c = buffer.split([8, 12, rows * 4])
    return [("a", a.view(2, 4)), ("b", b.view(3, 4)), ("c", c.view(rows, 4))]


def loaded(model: Model, seed: int) -> bool:
    """Whether a fresh model that loads this version has the same parameters."""
    other = Model(model.rule)
    with torch.no_grad():
        other.load_weights(staged(seed))
    return all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_recorded_copies_load_the_next_versions() -> None:
    """Contract: two versions go through `load_weights`; later ones need no call of it and give the same parameters."""
    model = Model(copy)
    plan = CopyPlan(model, staged(1))
    assert loaded(model, 1)
    for seed in (2, 3, 4):
        assert plan.matches(model, staged(seed))
        plan.load(staged(seed))
        assert loaded(model, seed)
    assert plan.exact
    assert model.calls == 2


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(lambda parameter, tensor: parameter.data[:3].copy_(tensor * 2), id="scaled"),
        pytest.param(lambda parameter, tensor: parameter.data[:3].copy_(torch.cat([tensor])), id="assembled"),
        pytest.param(lambda parameter, tensor: parameter.data[:3].add_(tensor), id="added"),
        pytest.param(lambda parameter, tensor: parameter.data.fill_(tensor[0, 0].item()), id="read"),
        pytest.param(lambda parameter, tensor: parameter.data.copy_(tensor[0]), id="broadcast"),
        pytest.param(lambda parameter, tensor: setattr(parameter, "data", tensor.clone()), id="made anew"),
        pytest.param(lambda parameter, tensor: copy(parameter, tensor) or parameter.data.mul_(2), id="changed after"),
        pytest.param(lambda parameter, tensor: copy(parameter, tensor) or parameter.data[2].zero_(), id="zeroed after"),
        pytest.param(lambda parameter, tensor: copy(parameter, torch.tensor(tensor.tolist())), id="through Python"),
        pytest.param(
            lambda parameter, tensor: ThreadPoolExecutor().submit(copy, parameter, tensor).result(), id="another thread"
        ),
    ],
)
def test_a_loader_that_computes_is_called_for_every_version(rule: Rule) -> None:
    """Contract: whatever is not a copy is not replayed: every version goes through `load_weights`."""
    model = Model(rule)
    plan = CopyPlan(model, staged(1))
    for seed in (2, 3):
        model.other.data.fill_(1)
        plan.load(staged(seed))
        assert loaded(model, seed)
    assert not plan.exact
    assert model.calls == 3


def test_another_layout_and_another_parameter_do_not_match() -> None:
    """Contract: copies are recorded again for tensors of other shapes, and for a model with new parameters."""
    model = Model(copy)
    plan = CopyPlan(model, staged(1))
    assert plan.matches(model, staged(2))
    assert not plan.matches(model, staged(2)[:2])
    assert not plan.matches(model, [(name.upper(), tensor) for name, tensor in staged(2)])
    assert not plan.matches(model, [(name, tensor.half()) for name, tensor in staged(2)])
    assert not plan.matches(Model(copy), staged(2))
    model.other = nn.Parameter(torch.ones(6, 4))
    assert not plan.matches(model, staged(2))
