"""Metrics of loss tokens against numpy on the tokens themselves."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prime_rl.config.trainer import DefaultLoss, GRPOLoss
from prime_rl.trainer.lm_head import add_up, fused_token_loss
from prime_rl.trainer.loss import STREAMS, describe, make_loss
from prime_rl.trainer.packing import Document, collate, to_device

Tokens = dict[str, np.ndarray]


def draw_tokens(seed: int, count: int = 700, spread: float = 0.4) -> Tokens:
    """Tokens, some off the mask; the policy is near their sampler or, for the last ones, the very
    same."""
    draw = np.random.default_rng(seed)
    mask = draw.uniform(size=count) < 0.7
    old = -draw.uniform(0.01, 4, count) * mask
    new = np.minimum(np.where(mask, old, -2.0) + draw.normal(0, spread, count) * (np.arange(count) < count - 50), -1e-3)
    return {
        "new": new, "entropy": draw.gamma(0.3, 1.0, count), "mask": mask, "logprobs": old,
        "advantages": draw.choice([-1.0, 0.0, 2.0], count) * mask,
        "ref_logprobs": -draw.uniform(0.01, 4, count), "rl_scale": mask * (draw.uniform(size=count) < 0.8) / count,
        "ce_scale": (draw.uniform(size=count) < 0.2) / 7, "ref_kl_scale": (draw.uniform(size=count) < 0.3) / 3,
    }  # fmt: skip


def stack(tokens: Tokens) -> Tensor:
    return torch.tensor(np.stack([np.asarray(tokens[name], dtype=np.float64) for name in STREAMS]))


def sums_of(tokens: Tokens, config: Any = None, dtype: torch.dtype = torch.float64) -> Tensor:
    logprob, entropy = (torch.tensor(tokens[name]).to(dtype) for name in ("new", "entropy"))
    return make_loss(config or DefaultLoss())(logprob, entropy, stack(tokens).to(dtype))[1]


def subset(tokens: Tokens, chosen: Any) -> Tokens:
    return {name: values[chosen] for name, values in tokens.items()}


@pytest.mark.parametrize("seed", range(3))
def test_against_numpy(seed: int) -> None:
    """Contract: every metric is what its name says of the tokens of the loss mask; what the policy loss drops, of those
    that it acts on."""
    tokens = draw_tokens(seed)
    got = describe(sums_of(tokens).tolist())
    on = subset(tokens, tokens["mask"])
    x, advantage = on["new"] - on["logprobs"], on["advantages"]
    k3, change = np.expm1(x) - x, np.exp(on["new"]) - np.exp(on["logprobs"])
    acting = on["rl_scale"] != 0
    dropped = acting & np.where(advantage > 0, change > 0.2, change < -0.2)
    assert 0 < dropped.sum() < acting.sum() < len(x)
    values = {"entropy/all": on["entropy"], "mismatch_kl/all": k3, "importance_ratio": np.exp(x), "mismatch_kl_k1": -x}
    for name, numbers in values.items():
        assert got[f"{name}/mean"] == pytest.approx(numbers.mean(), rel=1e-9, abs=1e-12)
        assert got[f"{name}/max"] == pytest.approx(numbers.max())
    assert got["is_masked/mean"] == pytest.approx(dropped[acting].mean())
    assert got["is_masked_low/mean"] == pytest.approx((dropped & (x < 0))[acting].mean())
    assert got["is_masked_high/mean"] == pytest.approx((dropped & (x >= 0))[acting].mean())
    for name, part in (("masked_mismatch_kl", dropped), ("unmasked_mismatch_kl", acting & ~dropped)):
        assert got[f"{name}/mean"] == pytest.approx(k3[part].mean())
    assert (got["entropy/mean"], got["mismatch_kl/mean"]) == (got["entropy/all/mean"], got["mismatch_kl/all/mean"])


def of_reference(tokens: Tokens) -> dict[str, float]:
    """What the loss towards a reference drops, with numpy, and the mismatch there and elsewhere."""
    x, change = tokens["new"] - tokens["logprobs"], np.exp(tokens["new"]) - np.exp(tokens["logprobs"])
    pulled, dropped, k3 = tokens["ref_kl_scale"] != 0, change < -0.2, np.expm1(x) - x
    assert 0 < (pulled & dropped).sum() < pulled.sum()
    return {
        "ref_kl/is_masked/mean": dropped[pulled].mean(),
        "ref_kl/masked_mismatch_kl/mean": k3[pulled & dropped].mean(),
        "ref_kl/unmasked_mismatch_kl/mean": k3[pulled & ~dropped].mean(),
    }


def test_a_step_without_policy_loss_masks_nothing() -> None:
    """Contract: what the policy loss would drop of tokens that it does not act on is no number; the mask of
    distillation has its own, on its tokens alone."""
    tokens = draw_tokens(0)
    assert describe(sums_of(tokens).tolist()).items() >= approximately(of_reference(tokens)).items()
    mask = tokens["mask"]
    distilled = {**tokens, "rl_scale": 0 * mask, "ref_kl_scale": mask * 1.0, "advantages": 0 * mask}
    got = describe(sums_of(distilled).tolist())
    assert got.items() >= approximately(of_reference(distilled)).items()
    assert {name for name in got if "masked" in name} == of_reference(distilled).keys()
    assert "mismatch_kl/all/mean" in got


def approximately(values: dict[str, float]) -> dict[str, Any]:
    return {name: pytest.approx(value) for name, value in values.items()}


def test_components_against_numpy() -> None:
    """Contract: `ref_kl` and `nll` are means over the tokens of their components, on the mask or off it, and `loss` is
    the loss."""
    tokens = draw_tokens(0)
    gap = tokens["new"] - tokens["ref_logprobs"]
    apart = np.exp(-gap) - 1 + gap
    pulled, on = tokens["ref_kl_scale"] != 0, tokens["rl_scale"] != 0
    for config, members in ((DefaultLoss(), pulled), (GRPOLoss(kl_coef=0.1), pulled | on)):
        loss = make_loss(config)(torch.tensor(tokens["new"]), torch.tensor(tokens["entropy"]), stack(tokens))[0]
        got = describe(sums_of(tokens, config).tolist())
        assert got["loss/mean"] == loss.item()
        assert got["ref_kl/mean"] == pytest.approx(apart[members].mean())
        assert got["nll/mean"] == pytest.approx(-tokens["new"][tokens["ce_scale"] != 0].mean())
    alone = {**tokens, "ref_kl_scale": 0 * gap, "ce_scale": 0 * gap, "ref_logprobs": np.full(len(gap), 900.0)}
    assert not {"ref_kl/mean", "nll/mean"} & describe(sums_of(alone).tolist()).keys()


def test_sums_add_up_over_packing_and_chunks() -> None:
    """Contract: the head's chunks and the micro-batches that documents are packed into do not show in the metrics."""
    draw = np.random.default_rng(0)
    documents = []
    for number, length in enumerate((9, 2, 40, 17, 1, 23)):
        tokens = draw_tokens(number, length)
        rows = np.stack([np.asarray(tokens[name], dtype=np.float32) for name in STREAMS])
        documents.append(Document(draw.integers(0, 31, length), rows[0] > 0, 1.0, rows))
    weight, embedding = (torch.tensor(draw.standard_normal((31, 8))) for _ in range(2))
    found = []
    for packs, chunk in (([range(6)], 1000), ([range(6)], 7), ([[3, 0], [], [5, 1, 2], [4]], 5)):
        parts = []
        for pack in packs:
            batch = to_device(collate([documents[i] for i in pack], len(STREAMS)), torch.device("cpu"))
            hidden = embedding[batch.input_ids[batch.loss_index]]
            head = hidden, weight, batch.labels, batch.inv_temperature.double(), batch.streams.double()
            parts.append(fused_token_loss(*head, make_loss(DefaultLoss()), chunk)[1])
        found.append(describe(add_up(parts).tolist()))
    assert {"mismatch_kl/all/mean", "mismatch_kl/all/max"} <= found[0].keys()
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert list(other.values()) == pytest.approx(list(found[0].values()), rel=1e-9)


def test_what_is_a_mean_over_nothing_is_left_out() -> None:
    """Contract: no tokens, or none that were dropped, give no number instead of one that means nothing."""
    tokens = draw_tokens(0)
    assert describe(sums_of(subset(tokens, slice(0))).tolist()) == {"loss/mean": 0}
    kept = describe(sums_of({**tokens, "new": tokens["logprobs"]}).tolist())
    assert kept["is_masked/mean"] == 0
    assert (kept["mismatch_kl/all/max"], kept["importance_ratio/mean"], kept["importance_ratio/max"]) == (0, 1, 1)
    assert not {"masked_mismatch_kl/mean"} & kept.keys()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 50.0, -500.0])
def test_what_is_not_finite_stays_where_it_is(bad: float) -> None:
    """Contract: a token whose numbers overflow or are none leaves the metrics finite: that something is wrong is the
    loss's to say. Off the mask it changes none."""
    tokens = draw_tokens(0)
    for on_mask in (True, False):
        spoilt = {name: values.copy() for name, values in tokens.items()}
        place = np.flatnonzero(tokens["mask"] == on_mask)[0]
        for name in ("new", "entropy"):
            spoilt[name][place] = bad
        for name in ("ref_kl_scale", "ce_scale"):  # what these say of the token is infinite indeed
            spoilt[name][place] = tokens[name][place] = 0
        want, got = (describe(sums_of(each, dtype=torch.float32).tolist()) for each in (tokens, spoilt))
        assert [name for name, value in got.items() if not math.isfinite(value) and name != "loss/mean"] == []
        if not on_mask:
            want.pop("loss/mean"), got.pop("loss/mean")
            assert got == {name: pytest.approx(value, rel=1e-6) for name, value in want.items()}
