"""Each optimizer's update against its formula, in float64; what checkpoints restore; schedules and clipping."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prime_rl.config.trainer import (
    AdamW,
    ConstantScheduler,
    CosineScheduler,
    LinearScheduler,
    Muon,
    OptimConfig,
)
from prime_rl.trainer import optim
from prime_rl.trainer.optim import build_optimizer, clip_gradients, learning_rate
from support import optim as support
from support import trainer
from support.forking import on_ranks

world = trainer.world
CONFIGS = [AdamW(lr=1e-2), Muon(lr=1e-2)]


def updated(config: OptimConfig, steps: int = 4) -> dict[str, Tensor]:
    model = support.make_toy()
    return support.train(model, build_optimizer(model, config), range(steps))


def test_adamw():
    got = updated(AdamW(lr=1e-2, betas1=0.8, betas2=0.9, weight_decay=0.3))
    for name, value, gradients in support.start_and_gradients():
        want = support.adamw(value, gradients, 1e-2, (0.8, 0.9), 0.3)
        torch.testing.assert_close(got[name].double(), want, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_a_checkpoint_restores_every_bit(config, world, tmp_path, monkeypatch):
    """Two steps, then two by an optimizer that was given the checkpoint of the first, are the same bits as four on the
    device, wherever the states lie; chunks end within parameters, and outnumber the places on the device."""
    monkeypatch.setattr(optim, "CHUNK", 1024)
    plain = support.make_toy(48)
    whole = support.train(plain, build_optimizer(plain, config), range(4))
    for before, after in ((False, True), (True, False)):
        model, resumed = support.make_toy(48), support.make_toy(48, seed=1)
        optimizer, other = (
            build_optimizer(each, config.model_copy(update={"offload": offload}))
            for each, offload in ((model, before), (resumed, after))
        )
        support.train(model, optimizer, range(2))
        support.save(model, optimizer, tmp_path / f"{before}", world)
        support.load(resumed, other, tmp_path / f"{before}", world)
        for name, value in support.train(resumed, other, range(2, 4)).items():
            assert torch.equal(value, whole[name]), name


TOLERANCE = 1e-5  # relative, of each parameter after all steps


def newton_schulz(matrix: Tensor) -> Tensor:
    """What five of Jordan's iterations make of a matrix: his polynomial, applied to each singular value."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ vh


@pytest.mark.parametrize("together", [1, 1 << 24], ids=["one by one", "batched"])
def test_muon(together, monkeypatch):
    """By the formula: momentum, look-ahead, orthogonalization of each matrix by itself (gate and up apart, each expert
    apart), scale, decay. Embeddings, head, norms and biases are AdamW's."""
    monkeypatch.setattr(optim, "_TOGETHER", together)
    got = updated(Muon(lr=1e-2, momentum=0.8, weight_decay=0.3))
    for name, value, gradients in support.start_and_gradients():
        if name in ("embed_tokens.weight", "lm_head.weight") or name.endswith(("norm.weight", "bias")):
            value, gradients = support.adamw(value, gradients, 1e-2, (0.9, 0.95), 0.3), []
        momentum, parts = torch.zeros_like(value), 2 if name.endswith("gate_up_proj") else 1
        for gradient in gradients:
            momentum = 0.8 * momentum + 0.2 * gradient
            ahead = 0.2 * gradient + 0.8 * momentum
            matrices = ahead.reshape(-1, value.shape[-2] // parts, value.shape[-1])
            scale = 0.2 * max(matrices.shape[-2:]) ** 0.5
            update = torch.stack([newton_schulz(matrix) for matrix in matrices]).view(value.shape)
            value = value * (1 - 1e-2 * 0.3) - 1e-2 * scale * update
        torch.testing.assert_close(got[name].double(), value, rtol=1e-5, atol=1e-5)


def test_any_number_of_ranks_makes_the_same_updates(tmp_path):
    """Four steps on one rank, on two (states in host memory), on two replicas of two, and on four after two: the same.
    The shapes divide unevenly among the ranks, and some ranks have no rows at all."""
    settings = {"type": "muon", "lr": 1e-2}
    runs: list[dict[str, Any]] = [
        {"out": "two", "ranks": 2, "settings": {**settings, "offload": True}},
        {"out": "replicas", "ranks": 4, "settings": settings, "replicate": 2},
        {"out": "resumed", "ranks": 4, "settings": settings, "checkpoint": str(tmp_path / "two" / "state")},
    ]
    for run in runs:
        run["out"] = str(tmp_path / run["out"])
        Path(run["out"]).mkdir()
    on_ranks("support.optim:run_rank", runs, tmp_path / "log")

    model = support.make_toy()
    want = support.train(model, build_optimizer(model, support.optim_config(**settings)), range(support.STEPS))
    for run in runs:
        got = torch.load(Path(run["out"]) / "parameters.pt")
        assert got.keys() == want.keys()
        for name, value in want.items():
            difference = (got[name] - value).norm() / value.norm()
            assert difference < TOLERANCE, f"{run['out']}: {name} differs by {difference:.1e}"


SETTINGS: dict[str, Any] = {"warmup_steps": 2, "decay_steps": 4, "min_lr": 1.0}
RISE = [4.5, 9.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (ConstantScheduler(warmup_steps=4), [2.25, 4.5, 6.75, 9.0, 9.0, 9.0]),
        (LinearScheduler(**SETTINGS), [*RISE, 7.0, 5.0, 3.0, 1.0]),
        (CosineScheduler(warmup_steps=1, min_lr=1.0), [9.0, 5 + 8**0.5, 5.0, 5 - 8**0.5, 1.0]),
        (LinearScheduler(warmup_steps=0, decay_steps=0, min_lr=0.5), [9.0, 9.0, 9.0]),
    ],
)
def test_learning_rate(scheduler, rates):
    """Rise to the peak without a first step of zero, stay, fall; the last step runs at min_lr if there is a fall."""
    got = [learning_rate(scheduler, 9.0, step, len(rates)) for step in range(len(rates))]
    assert got == pytest.approx(rates)


@pytest.mark.parametrize(("limit", "after"), [(1.0, 1.0), (None, 5.0), (10.0, 5.0)])
def test_clip(limit, after):
    """The joint norm is returned as it was and limited to max_norm; None does not clip."""
    model = nn.Linear(1, 2)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0], [0.0]]), torch.tensor([0.0, 4.0])
    assert clip_gradients(model, limit).item() == pytest.approx(5.0)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(after, rel=1e-5)
