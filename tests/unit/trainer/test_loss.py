"""Losses against numbers worked out by hand and against an independent float64 implementation."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from prime_rl.config.trainer import DefaultLoss, GRPOLoss
from prime_rl.trainer import loss as losses
from prime_rl.trainer.loss import STREAMS, SUMS, cross_entropy, make_token_loss


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_default_by_hand() -> None:
    """One token a case: kept, dropped high, dropped low, zero advantage in the low branch."""
    old = tensor(math.log(0.5), math.log(0.5), math.log(0.5), math.log(0.5))
    new = tensor(math.log(0.6), math.log(0.8), math.log(0.2), math.log(0.2))
    advantage = tensor(2.0, 2.0, -1.0, 0.0)
    value, dropped = losses.default(new, old, advantage, 0.2, 0.2, 1.0, 1e-3)
    assert dropped.tolist() == [False, True, True, True]
    # r = 1.2 and log r = 0.18232…: -2 · 1.2 + 0.001 · 0.0332411; dropped tokens keep the regulariser alone.
    assert value.tolist() == pytest.approx(
        [-2.4 + 3.32411e-5, 1e-3 * math.log(1.6) ** 2, 1e-3 * math.log(0.4) ** 2, 1e-3 * math.log(0.4) ** 2], abs=1e-9
    )


def test_default_masks_by_direction() -> None:
    """A large fall does not drop a token with positive advantage, nor a large rise one with negative advantage."""
    old, new = tensor(math.log(0.5), math.log(0.5)), tensor(math.log(0.1), math.log(0.9))
    _, dropped = losses.default(new, old, tensor(1.0, -1.0), 0.2, 0.2, 1.0, 0.0)
    assert not dropped.any()


def test_grpo_by_hand() -> None:
    """Ratio 1.5: clipped at 1.2 for a gain, free for a loss. Ratio 0.5: the other way round."""
    new, old = tensor(*[math.log(1.5)] * 2, *[math.log(0.5)] * 2), tensor(0, 0, 0, 0)
    value, clipped = losses.grpo(new, old, tensor(1, -1, 1, -1), 0.2, 0.2)
    assert value.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert clipped.tolist() == [True, False, False, True]


def test_overflowing_ratio_of_a_dropped_token() -> None:
    """A token that the sampler held to be impossible has an infinite ratio: dropped or clipped, it harms neither value nor gradient."""
    logprob = torch.tensor([-0.5, -0.5], requires_grad=True)
    old, advantage = torch.tensor([-500.0, -0.5]), torch.tensor([1.0, 1.0])
    for value, dropped in (
        losses.default(logprob, old, advantage, 0.2, 0.2, 1.0, 0.0),
        losses.grpo(logprob, old, advantage, 0.2, 0.2),
    ):
        assert dropped.tolist() == [True, False]
        assert torch.autograd.grad(value.sum(), logprob)[0].tolist() == [0.0, -1.0]
        assert value.isfinite().all()


def test_mismatch_kl_by_hand() -> None:
    """k3: r - log r - 1, zero for equal policies."""
    got = losses.mismatch_kl(tensor(0.0, math.log(2), -1.0), tensor(0.0, 0.0, -1.0))
    assert got.tolist() == pytest.approx([0.0, 2 - math.log(2) - 1, 0.0])


def random_streams(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    old = -rng.uniform(0.05, 3, tokens)
    new = np.minimum(old + rng.normal(0, 0.6, tokens), -0.01)
    mask = rng.uniform(size=tokens) < 0.7
    rows = {
        "mask": mask,
        "logprobs": old * mask,
        "advantages": rng.standard_normal(tokens) * mask,
        "ref_logprobs": -rng.uniform(0.05, 3, tokens),
        "rl_scale": mask * rng.choice([0.0, 1.0, 0.5], tokens) / 11,
        "ce_scale": rng.choice([0.0, 1.0], tokens) / 7,
        "ref_kl_scale": rng.choice([0.0, 2.0], tokens) / 5,
    }
    return new, rng.uniform(0, 2, tokens), np.stack([np.asarray(rows[name], dtype=np.float64) for name in STREAMS])


def reference(config: DefaultLoss | GRPOLoss, new: np.ndarray, streams: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and its derivative with respect to every log-probability, token by token, in plain Python floats."""
    total, slopes = 0.0, []
    for lp, (_, old, adv, ref, w_rl, w_ce, w_ref) in zip(new, streams.T, strict=True):
        log_r, r = lp - old, math.exp(lp - old)
        d = math.exp(lp) - math.exp(old)
        if config.type == "default":
            drop = d > config.mask_high if adv > 0 else d < -config.mask_low
            value = (0 if drop else -config.adv_tau * adv * r) + config.kl_tau * log_r**2
            slope = (0 if drop else -config.adv_tau * adv * r) + 2 * config.kl_tau * log_r
        else:
            low, high = 1 - config.clip_low, 1 + config.clip_high
            active = (adv > 0 and r > high) or (adv < 0 and r < low)
            value, slope = -min(max(r, low), high) * adv if active else -r * adv, 0 if active else -r * adv
        keep = 0.0 if d < -0.2 else ref - lp
        value_ref, slope_ref = -keep * r + 1e-3 * log_r**2, -keep * r + 2e-3 * log_r
        total += w_rl * value - w_ce * lp + w_ref * value_ref
        slopes.append(w_rl * slope - w_ce + w_ref * slope_ref)
    return total, np.array(slopes)


@pytest.mark.parametrize(
    "config",
    [
        DefaultLoss(),
        DefaultLoss(mask_low=0.05, mask_high=0.1, adv_tau=0.7, kl_tau=0.3),
        GRPOLoss(),
        GRPOLoss(clip_high=0.4),
    ],
)
def test_against_independent_float64(config: DefaultLoss | GRPOLoss) -> None:
    """Loss, gradient and metric sums of every component equal a loop over tokens with the gradient written out."""
    new, entropy, streams = random_streams(200)
    logprob = torch.tensor(new, requires_grad=True)
    loss, sums = make_token_loss(config)(logprob, torch.tensor(entropy), torch.tensor(streams))
    want, slopes = reference(config, new, streams)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(loss, logprob)[0].numpy(), slopes, rtol=1e-10, atol=1e-14)
    mask, old = streams[0], streams[1]
    log_r = new - old
    by_name = dict(zip(SUMS, sums.tolist(), strict=True))
    assert by_name["loss"] == pytest.approx(want)
    assert by_name["entropy"] == pytest.approx((entropy * mask).sum())
    assert by_name["mismatch_kl"] == pytest.approx(((np.exp(log_r) - log_r - 1) * mask).sum())
    assert 0 < by_name["is_masked"] < mask.sum()


def test_cross_entropy() -> None:
    """SFT: weighted negative log-probability."""
    loss, sums = cross_entropy(tensor(-1.0, -2.0), tensor(0.5, 0.25), tensor(0.5, 0.25)[None])
    assert loss.item() == 1.0
    assert sums.tolist() == [1.0, 0.3125]
