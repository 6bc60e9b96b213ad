"""Losses and their metrics on the GPU: what float64 on the CPU gives, of one sequence or of all tokens at once, without a wait for the device."""

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from prime_rl.config.trainer import LossConfig
from prime_rl.trainer.loss import STREAMS, SequenceLoss, describe, make_loss

TOKENS, SEQUENCES = 5000, 37
CONFIGS = [
    {"type": "default"},
    {"type": "ipo", "entropy_coef": 0.1},
    {"type": "grpo", "clip_high": 0.28, "kl_coef": 0.1},
    {"type": "ppo_clip", "kl_coef": 0.1, "kl_estimator": "k1"},
    {"type": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    {"type": "cispo", "kl_coef": 0.1, "kl_estimator": "k2"},
    *(
        {"type": "reinforce", "importance": importance, "level": level}
        for importance in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    ),
]


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, streams [K, N] in float64, and the sequence of each token; some sequences have none."""
    draw = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(TOKENS, generator=draw).double() - 0.01
    new = (old + 0.02 * torch.randn(TOKENS, generator=draw)).clamp(max=-1e-3)
    rows = {
        "mask": (torch.rand(TOKENS, generator=draw) < 0.8).double(),
        "logprobs": old,
        "advantages": torch.randn(TOKENS, generator=draw).double(),
        "ref_logprobs": old - 0.3 * torch.rand(TOKENS, generator=draw),
        "ce_scale": (torch.rand(TOKENS, generator=draw) < 0.1) / TOKENS,
        "ref_kl_scale": (torch.rand(TOKENS, generator=draw) < 0.1) / TOKENS,
    }
    rows["rl_scale"] = rows["mask"] / TOKENS
    streams = torch.stack([rows[name].double() for name in STREAMS])
    document = torch.randint(0, SEQUENCES // 2, (TOKENS,), generator=draw).mul(2).sort().values
    return new, torch.rand(TOKENS, generator=draw).double(), streams, document


@pytest.mark.parametrize("values", CONFIGS, ids=lambda values: "-".join(map(str, values.values())))
def test_against_float64(values: dict[str, object]) -> None:
    """Contract: loss and gradient in float32 on the GPU are those of float64 to 1e-4, metrics of distributions to 1 %, and nothing waits."""
    loss_of = make_loss(TypeAdapter(LossConfig).validate_python(values))
    new, entropy, streams, document = numbers()

    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        logprob = new.to(device, dtype).requires_grad_()
        rest = entropy.to(device, dtype), streams.to(device, dtype)
        more = (document.to(device), SEQUENCES) if isinstance(loss_of, SequenceLoss) else ()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            loss, sums = loss_of(logprob, *rest, *more)
            (gradient,) = torch.autograd.grad(loss, logprob)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return loss.detach(), gradient, sums

    loss, gradient, sums = run("cuda", torch.float32)
    want, exactly, counted = run("cpu", torch.float64)
    assert loss.item() == pytest.approx(want.item(), rel=1e-4, abs=1e-6)
    off = (gradient.cpu().double() - exactly).norm() / exactly.norm()
    assert off < 1e-4
    got, expected = describe(sums.tolist()), describe(counted.tolist())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=0.01, abs=1e-6), name
