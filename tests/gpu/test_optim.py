"""Optimizers on the GPU: states that come from host memory and return beside updates, checkpoints, Muon in bfloat16."""

import pytest
import torch
from torch import Tensor, nn

from prime_rl.config.trainer import AdamW, Muon, OptimConfig
from prime_rl.trainer import optim
from prime_rl.trainer.optim import build_optimizer, is_hidden_matrix
from support import optim as support

GPU = torch.device("cuda")
CONFIGS = [AdamW(lr=1e-2), Muon(lr=1e-2)]


def toy_with_gradients(steps: int) -> tuple[nn.Module, list[list[Tensor]]]:
    """Return 10 M parameters with gradients on the GPU, so that steps follow one another without the host waiting."""
    model = support.make_toy(512).to(GPU)
    generator = torch.Generator(GPU).manual_seed(0)
    return model, [
        [torch.randn(parameter.shape, device=GPU, generator=generator) for parameter in model.parameters()]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=["adamw", "muon"])
def test_offload_changes_no_bit(config: OptimConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five consecutive steps, in many more chunks than are under way at a time; states are in pinned host memory."""
    monkeypatch.setattr(optim, "CHUNK", 1 << 17)
    monkeypatch.setattr(optim, "_TOGETHER", 1 << 18)
    results = []
    for offload in (False, True):
        model, gradients = toy_with_gradients(5)
        optimizer = build_optimizer(model, config.model_copy(update={"offload": offload}))
        for of_step in gradients:
            for parameter, gradient in zip(model.parameters(), of_step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        optimizer.settle()
        of_parameters = (optimizer.state[parameter] for parameter in model.parameters())
        states = [state for each in of_parameters for name, state in each.items() if name != "step"]
        assert all(state.is_pinned() if offload else state.is_cuda for state in states)
        results.append([tensor.cpu() for tensor in (*model.parameters(), *states)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_muon_in_bfloat16_goes_where_float32_goes() -> None:
    """Hidden matrices and experts move as far and in the direction as on a CPU in float32; AdamW's as there."""
    moved = []
    for device in (torch.device("cpu"), GPU):
        model = support.make_toy(128).to(device)
        before = support.parameters(model)
        after = support.train(model, build_optimizer(model, Muon(lr=1e-2, weight_decay=0)), range(2))
        moved.append({name: (after[name] - before[name]).flatten() for name in before})
    for name, parameter in support.make_toy(128).named_parameters():
        want, got = moved[0][name], moved[1][name]
        if is_hidden_matrix(name, parameter):
            assert torch.cosine_similarity(got, want, dim=0) > 0.99, name
            assert got.norm() == pytest.approx(want.norm().item(), rel=0.05), name
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
