"""Muon: the orthogonalization, the update, and that the number of ranks does not matter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_rl.config.trainer import Muon
from prime_rl.trainer import optim
from prime_rl.trainer.optim import build_optimizer, orthogonalize
from support import optim as support
from support.processes import REPOSITORY, Command

SECONDS = 300.0
TOLERANCE = 1e-5  # relative, of each parameter after all steps


def newton_schulz(matrix: Tensor) -> Tensor:
    """What five of Jordan's iterations make of a matrix: his polynomial, applied to each singular value."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ vh


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (3, 7), (1, 9)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_orthogonalize(shape: tuple[int, int], scale: float) -> None:
    """The singular vectors stay, the singular values that are not tiny get into [0.7, 1.2], whatever the size of the input."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(side, min(shape), generator=generator)).Q for side in shape)
    values = torch.linspace(1.0, 0.2, min(shape))
    x_BRC = ((left * values) @ right.T * scale)[None].repeat(2, 1, 1)
    got = orthogonalize(x_BRC)[1].double()
    turned = left.T.double() @ got @ right.double()
    assert torch.linalg.matrix_norm(turned - turned.diag().diag()) < 1e-3
    assert 0.68 <= turned.diag().min() <= turned.diag().max() <= 1.2
    torch.testing.assert_close(got, newton_schulz(x_BRC[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("together", [1, 1 << 24], ids=["one by one", "batched"])
def test_update(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum, look-ahead, orthogonalization of each matrix by itself (gate and up apart, each expert apart), scale, decay: by the formula."""
    monkeypatch.setattr(optim, "_TOGETHER", together)
    model = support.make_toy()
    start = {name: value.double() for name, value in support.parameters(model).items()}
    gradients: list[dict[str, Tensor]] = []
    for step in range(3):
        support.set_gradients(model, step)
        gradients.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
    config = Muon(lr=1e-2, momentum=0.8, weight_decay=0.3)
    got = support.train(model, build_optimizer(model, config), range(3))
    for kind, parts in (("up.weight", 1), ("down.weight", 1), ("gate_up_proj", 2), ("down_proj", 1)):
        (name,) = [name for name in got if name.startswith("layers.1.") and name.endswith(kind)]
        value, momentum = start[name], torch.zeros_like(start[name])
        for gradient in gradients:
            momentum = 0.8 * momentum + 0.2 * gradient[name]
            ahead = 0.2 * gradient[name] + 0.8 * momentum
            matrices = ahead.reshape(-1, value.shape[-2] // parts, value.shape[-1])
            scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
            update = torch.stack([newton_schulz(matrix) for matrix in matrices]).view(value.shape)
            value = value * (1 - 1e-2 * 0.3) - 1e-2 * scale * update
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-5)


def test_any_number_of_ranks_makes_the_same_updates(tmp_path: Path) -> None:
    """Four steps on one rank, on two (states in host memory), on two replicas of two, and two on four ranks after two on two: the same parameters.

    The shapes divide unevenly among the ranks, and some ranks have no rows at all.
    """
    settings = {"type": "muon", "lr": 1e-2}
    runs: list[dict[str, Any]] = [
        {"out": "two", "ranks": 2, "settings": {**settings, "offload": True}},
        {"out": "replicas", "ranks": 4, "settings": settings, "replicate": 2},
        {"out": "resumed", "ranks": 4, "settings": settings, "checkpoint": str(tmp_path / "two" / "state")},
    ]
    for run in runs:
        run["out"] = str(tmp_path / run["out"])
        Path(run["out"]).mkdir()
    env = {"PYTHONPATH": str(REPOSITORY / "tests")}
    with Command("ranks", json.dumps(runs), log=tmp_path / "log", module="support.optim", env=env) as command:
        command.succeed(SECONDS)

    model = support.make_toy()
    want = support.train(model, build_optimizer(model, support.optim_config(**settings)), range(support.STEPS))
    for run in runs:
        got = torch.load(Path(run["out"]) / "parameters.pt")
        assert got.keys() == want.keys()
        for name, value in want.items():
            difference = (got[name] - value).norm() / value.norm()
            assert difference < TOLERANCE, f"{run['out']}: {name} differs by {difference:.1e}"
