"""Losses against numbers worked out by hand, and against an independent implementation: sequence by sequence and token
by token, in float64, from samples to the loss of the step and its gradient in every log-probability."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from prime_rl.config.trainer import (
    CISPOLoss,
    CustomLoss,
    DefaultLoss,
    GRPOLoss,
    GSPOLoss,
    IPOLoss,
    LossConfig,
    PPOClipLoss,
    ReinforceLoss,
)
from prime_rl.errors import UserError
from prime_rl.trainer import policy_losses
from prime_rl.trainer.loss import STREAMS, SequenceLoss, divergence, make_loss
from prime_rl.trainer.rl import data as rl_data
from prime_rl.trainer.rl.data import document
from prime_rl.transport.rollouts import Sample
from support.losses import slopes, step_loss


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


OVERFLOWING = {
    "dropped": (1.0, [DefaultLoss(), IPOLoss(), GRPOLoss(), PPOClipLoss(), GSPOLoss()]),
    "bounded": (
        -1.0,
        [PPOClipLoss(), CISPOLoss(), ReinforceLoss(), ReinforceLoss(importance="mask", level="sequence")],
    ),
    "no advantage": (0.0, [DefaultLoss(), IPOLoss(), GRPOLoss(), PPOClipLoss(), GSPOLoss(), CISPOLoss()]),
}


@pytest.mark.parametrize(("kind", "config"), [(kind, one) for kind, (_, many) in OVERFLOWING.items() for one in many])
def test_overflowing_ratio_in_the_whole_loss(kind, config):
    """Contract: nor does it harm the components that it feeds nothing to, or a policy loss in which it has no
    advantage; the other token is trained as ever. (The loss of a negative advantage that nothing bounds is infinite
    indeed.)"""
    logprob, entropy = torch.tensor([-0.5, -0.5], requires_grad=True), torch.ones(2)
    rows = {"mask": 1.0, "logprobs": torch.tensor([-500.0, -0.5]), "rl_scale": 0.5}
    rows["advantages"] = torch.tensor([OVERFLOWING[kind][0], 1.0])
    streams = torch.stack([torch.zeros(2) + rows.get(name, 0.0) for name in STREAMS])
    loss_of = make_loss(config)
    sequences = (torch.tensor([0, 1]), 2) if isinstance(loss_of, SequenceLoss) else ()
    loss, sums = loss_of(logprob, entropy, streams, *sequences)
    (slope,) = torch.autograd.grad(loss, logprob)
    assert loss.isfinite()
    assert slope.isfinite().all()
    assert slope[1].item() == -0.5
    assert sums.isfinite().all()


def test_k3_is_bounded():
    """Contract: however far a token is below the reference, value and gradient are finite, the gradient at most 9 and
    never zero; where the reference holds it to be up to 10 times as probable, k3 is what it is defined to be. Value and
    gradient go on from there without a jump."""
    reference = torch.full((5,), -1.0)
    new = torch.tensor([-20.0, -91.0, -1e4, -1.0 - 2.302, -1.0 - 2.303], requires_grad=True)
    value = divergence(new, reference, "k3")
    slopes = torch.autograd.grad(value.sum(), new)[0]
    assert value.isfinite().all()
    assert slopes.tolist() == pytest.approx([-9, -9, -9, -9, -9], rel=2e-3)
    assert value[3:].tolist() == pytest.approx([math.expm1(2.302) - 2.302, math.expm1(2.303) - 2.303], rel=1e-5)
    assert value[0].item() == pytest.approx(9 - math.log(10) + 9 * (19 - math.log(10)))


def ragged(seed: int = 0) -> list[Sample]:
    """Samples of different lengths with streams of all components; some RL weights are 0, one group's all."""
    draw = np.random.default_rng(seed)
    samples = []
    for number, group in enumerate("abcabbd"):
        tokens = int(draw.integers(3, 15))
        mask = draw.uniform(size=tokens) < 0.7
        mask[0] = False
        samples.append(
            Sample(
                sample_id=str(number), group_id=group, task_id="0", env="env", policy_versions=[0],
                input_ids=draw.integers(0, 50, tokens), loss_mask=mask, logprobs=-draw.uniform(0.05, 3, tokens) * mask,
                advantages=float(draw.standard_normal()) * mask, temperature=1.0, reward=0.0,
                rl_weight=(draw.choice([0.0, 1.0, 0.5], tokens) * (number != 2)).tolist(),
                ce_weight=draw.choice([0.0, 1.0], tokens).tolist(),
                ref_kl_weight=draw.choice([0.0, 2.0], tokens).tolist(),
                ref_logprobs=(-draw.uniform(0.05, 3, tokens)).tolist(),
            )
        )  # fmt: skip
    return samples


def policy(samples: Sequence[Sample], seed: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Log-probability (near the sampler's if there is one) and entropy of each token by the policy, by sample."""
    draw = np.random.default_rng(seed)
    logprobs, entropies = {}, {}
    for sample in samples:
        old = np.where(np.asarray(sample.loss_mask), np.asarray(sample.logprobs), -1.0)
        new, entropy = np.minimum(old + draw.normal(0, 0.6, len(old)), -0.01), draw.uniform(0, 2, len(old))
        logprobs[sample.sample_id] = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        entropies[sample.sample_id] = torch.tensor(entropy, dtype=torch.float64, requires_grad=True)
    return logprobs, entropies


def straightforward(
    config: LossConfig, samples: Sequence[Sample], new: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> Tensor:
    """The same by definition: one scalar at a time."""
    rl_tokens = ce_tokens = ref_tokens = sequences = 0
    of_group: dict[str, int] = {}
    for s in samples:
        members = [t for t in range(1, len(s.input_ids)) if s.loss_mask[t] and s.rl_weight[t]]
        rl_tokens, sequences = rl_tokens + len(members), sequences + bool(members)
        if members:
            of_group[s.group_id] = of_group.get(s.group_id, 0) + len(members)
        ce_tokens += sum(1 for t in range(1, len(s.input_ids)) if s.ce_weight[t])
        ref_tokens += sum(1 for t in range(1, len(s.input_ids)) if s.ref_kl_weight[t])
    total = torch.zeros((), dtype=torch.float64)
    for s in samples:
        logprob, entropy = (by[s.sample_id] for by in new)
        sampled = [t for t in range(1, len(s.input_ids)) if s.loss_mask[t]]
        members = [t for t in sampled if s.rl_weight[t]]
        log_ratio = sum(logprob[t] - float(s.logprobs[t]) for t in sampled)
        for t in range(1, len(s.input_ids)):
            lp, old, adv = logprob[t], float(s.logprobs[t]), float(s.advantages[t])
            if t in members:
                value = policy_term(config, lp, old, adv, log_ratio, len(sampled))
                gap = lp - s.ref_logprobs[t]
                k3 = torch.exp(-gap) - 1 + gap
                if math.exp(-gap.item()) > 10:  # the tangent there
                    k3 = 9 - math.log(10) + 9 * (-gap - math.log(10))
                kl = {"k1": gap.detach() * lp, "k2": gap**2 / 2, "k3": k3}[config.kl_estimator or "k3"]
                if config.kl_estimator == "k1":
                    kl = kl + gap.detach() * (1 - lp.detach())
                value = value + config.kl_coef * kl - config.entropy_coef * entropy[t]
                share = {
                    "token": 1 / rl_tokens,
                    "sequence": 1 / (len(members) * sequences),
                    "group": 1 / (of_group[s.group_id] * len(of_group)),
                    "fixed": 1 / ((config.fixed_length or 1) * sequences),
                }[config.normalization]
                total = total + s.rl_weight[t] * share * value
            if s.ce_weight[t]:
                total = total - s.ce_weight[t] * lp / ce_tokens
            if s.ref_kl_weight[t]:
                far = math.exp(lp.item()) - math.exp(old) < -0.2
                gain = 0.0 if far else s.ref_logprobs[t] - lp.item()
                value = 1e-3 * (lp - old) ** 2 - gain * torch.exp(lp - old)
                total = total + s.ref_kl_weight[t] * value / ref_tokens
    return total


def policy_term(config: LossConfig, lp: Tensor, old: float, adv: float, log_ratio: Any, sampled: int) -> Tensor:
    """The policy loss of one token; `log_ratio` is the sum over its sequence."""
    r, change = torch.exp(lp - old), math.exp(lp.item()) - math.exp(old)
    if config.type in ("default", "ipo"):
        if config.type == "ipo":
            drop = abs(change) > config.threshold
        else:
            drop = change > config.mask_high if adv > 0 else change < -config.mask_low
        return (0.0 if drop else -config.adv_tau * adv * r) + config.kl_tau * (lp - old) ** 2
    if config.type in ("grpo", "ppo_clip", "gspo"):
        ratio = torch.exp(log_ratio / sampled) if config.type == "gspo" else r
        low, high = 1 - config.clip_low, 1 + config.clip_high
        held = min(max(ratio.item(), low), high) * adv
        if config.type == "ppo_clip" and adv < 0 and min(ratio.item() * adv, held) < config.dual_clip * adv:
            return torch.tensor(-config.dual_clip * adv)
        return torch.tensor(-held) if held < ratio.item() * adv else -ratio * adv
    if config.type == "cispo":
        return -min(max(r.item(), 1 - config.clip_low), 1 + config.clip_high) * adv * lp
    logs = {"token": (lp - old).item(), "sequence": log_ratio.item(), "geometric": log_ratio.item() / sampled}
    ratio = math.exp(logs[config.level])
    if config.importance == "mask":
        weight = ratio if config.least <= ratio <= config.most else 0.0
    else:
        weight = 1.0 if config.importance == "none" else min(ratio, config.most)
    return -weight * adv * lp


CONFIGS: dict[str, LossConfig] = {
    name: TypeAdapter(LossConfig).validate_python(values)
    for name, values in {
        "default": {"type": "default"},
        "default, other values": {"type": "default", "mask_low": 0.05, "mask_high": 0.1, "adv_tau": 0.7, "kl_tau": 0.3},
        "ipo": {"type": "ipo", "threshold": 0.1},
        "grpo": {"type": "grpo"},
        "dapo": {"type": "grpo", "clip_high": 0.4},
        "dr grpo": {"type": "grpo", "normalization": "fixed", "fixed_length": 32},
        "grpo, sequences": {"type": "grpo", "normalization": "sequence"},
        "dapo, groups": {"type": "grpo", "clip_high": 0.4, "normalization": "group"},
        "cispo, groups, kl, entropy": {"type": "cispo", "normalization": "group", "kl_coef": 0.3, "entropy_coef": 0.1},
        "gspo, groups": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.05, "normalization": "group"},
        "ppo_clip": {"type": "ppo_clip", "dual_clip": 1.5},
        "gspo": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.05},
        "gspo, tokens": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.05, "normalization": "token"},
        "cispo": {"type": "cispo", "clip_low": 0.3, "clip_high": 0.3},
        "tis": {"type": "reinforce", "high": 1.2},
        "icepop": {"type": "reinforce", "importance": "mask", "low": 0.7, "high": 1.5},
        "none": {"type": "reinforce", "importance": "none"},
        "sequence tis": {"type": "reinforce", "level": "sequence", "high": 1.2},
        "sequence mis": {"type": "reinforce", "importance": "mask", "level": "sequence", "low": 0.3, "high": 3.0},
        "geometric mis": {"type": "reinforce", "importance": "mask", "level": "geometric", "low": 0.9, "high": 1.1},
        "kl k1": {"type": "grpo", "kl_coef": 0.3, "kl_estimator": "k1"},
        "kl k2": {"type": "cispo", "kl_coef": 0.3, "kl_estimator": "k2", "normalization": "sequence"},
        "kl k3, entropy": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.3, "entropy_coef": 0.2},
    }.items()
}
every_loss = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@every_loss
def test_against_an_independent_implementation(config, world):
    """Contract: the step's loss and gradient are those of a loop over sequences and tokens by the definitions."""
    for seed in range(5):
        samples = ragged(seed)
        new = policy(samples, seed)
        got, want = step_loss(config, samples, new, world), straightforward(config, samples, new)
        assert got.item() == pytest.approx(want.item(), rel=1e-5)  # streams are float32
        np.testing.assert_allclose(slopes(got, new).numpy(), slopes(want, new).numpy(), rtol=1e-4, atol=1e-7)


@every_loss
def test_partition_does_not_matter(config, world, monkeypatch):
    """Contract: one micro-batch, one of each sample, another order, or two ranks: the same loss and gradient."""
    samples = ragged()
    new = policy(samples)
    whole = step_loss(config, samples, new, world)
    want = slopes(whole, new).numpy()

    shares, counts = [samples[:3], samples[3:]], list[list[float]]()
    monkeypatch.setattr(rl_data, "sum_over_ranks", lambda world, values: counts.append(list(values)) or list(values))
    for share in shares:
        step_loss(config, share, new, world)
    both = [one + other for one, other in zip(*counts, strict=True)]
    monkeypatch.setattr(rl_data, "sum_over_ranks", lambda world, values: both)
    of_ranks = sum((step_loss(config, share, new, world) for share in shares), torch.zeros(()))
    monkeypatch.undo()
    packs = [[i] for i in range(7)], [[6, 0], [3, 2, 5], [], [4, 1]]
    for got in (of_ranks, *(step_loss(config, samples, new, world, pack) for pack in packs)):
        assert got.item() == pytest.approx(whole.item(), rel=1e-6)
        np.testing.assert_allclose(slopes(got, new).numpy(), want, rtol=1e-5, atol=1e-9)


def plain_gradient(logprob: Tensor, old: Tensor, advantage: Tensor, *, weight: float = 1.0) -> Tensor:
    return -weight * advantage * logprob


def whole_sequences(
    logprob: Tensor, old: Tensor, advantage: Tensor, sequences: policy_losses.Sequences
) -> tuple[Tensor, Tensor]:
    ratio = sequences.mean(logprob - old).exp()
    return -ratio * advantage, ratio > 1e9


NO_LOSS = r"that is not the loss of each token, floats of shape \(2,\)"
GIVEN: dict[str, tuple[Callable[..., Any], str]] = {
    "one too many": (lambda loss: loss[:, None], NO_LOSS),
    "one for all": (lambda loss: loss.mean(), NO_LOSS),
    "nothing": (lambda loss: None, "gave a NoneType " + NO_LOSS),
    "weights": (lambda loss: (loss, torch.zeros_like(loss)), NO_LOSS),
    "detached": (lambda loss: loss.detach(), "failed on two tokens: RuntimeError"),
    "infinite": (lambda loss: loss / 0, "must be finite"),
}


def misshaped(logprob: Tensor, old: Tensor, advantage: Tensor, *, kind: str) -> Any:
    return GIVEN[kind][0](-advantage * logprob)


@pytest.mark.parametrize(
    ("custom", "same"),
    [
        (CustomLoss(path=f"{__name__}:plain_gradient", args={"weight": 1.0}), ReinforceLoss(importance="none")),
        (CustomLoss(path=f"{__name__}:whole_sequences"), GSPOLoss(clip_low=1, clip_high=1e9, normalization="token")),
        (CustomLoss(path=f"{__file__}:plain_gradient"), ReinforceLoss(importance="none")),
    ],
    ids=["tokens", "sequences", "file"],
)
def test_a_loss_of_ones_own(custom, same, world):
    """Contract: a function from a module or a file stands in for the policy loss, of tokens or of sequences."""
    samples = ragged()
    new = policy(samples)
    got, want = (slopes(step_loss(config, samples, new, world), new) for config in (custom, same))
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-12)


@pytest.mark.parametrize("kind", GIVEN)
def test_what_a_loss_of_ones_own_gives_is_checked(kind):
    """Contract: said with the setting's name before anything is trained. (How functions are loaded: test_importing.)"""
    with pytest.raises(UserError, match=GIVEN[kind][1]) as caught:
        make_loss(CustomLoss(path=f"{__name__}:misshaped", args={"kind": kind}))
    assert str(caught.value).startswith("loss.path: ")


def test_a_reference_that_samples_do_not_have():
    """Contract: a divergence from nothing is refused, naming the sample and the setting."""
    sample = replace(ragged()[0], ref_logprobs=None, ref_kl_weight=None)
    document(sample)
    with pytest.raises(UserError, match=r"sample 0 has no ref_logprobs, which loss\.kl_coef needs"):
        document(sample, reference=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "grpo", "normalization": "fixed"}, "fixed_length"),
        ({"type": "grpo", "fixed_length": 8}, "fixed_length"),
        ({"type": "reinforce", "low": 0.5}, "low has no effect: importance is truncate"),
        ({"type": "reinforce", "importance": "none", "high": 2.0}, "high has no effect"),
        ({"type": "reinforce", "importance": "none", "level": "sequence"}, "level sequence has no effect"),
        ({"type": "reinforce", "importance": "mask", "low": 5.0}, "low 5.0 is not below high 5.0"),
        ({"type": "reinforce", "importance": "mask", "level": "sequence", "low": 2.0}, "low 2.0 is not below high 2.0"),
    ],
)
def test_settings_without_effect_are_refused(values, message):
    """Contract: what is given counts, or is refused."""
    with pytest.raises(ValueError, match=message):
        TypeAdapter(LossConfig).validate_python(values)
