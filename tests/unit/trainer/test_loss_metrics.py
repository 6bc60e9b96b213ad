"""Metrics of loss tokens against numpy on the tokens themselves."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prime_rl.config.trainer import DefaultLoss
from prime_rl.trainer.lm_head import fused_token_loss, merge_sums
from prime_rl.trainer.loss import STREAMS, describe, make_loss
from prime_rl.trainer.packing import Document, collate, to_device

Tokens = dict[str, np.ndarray]


def draw_tokens(seed: int, count: int = 700, spread: float = 0.4) -> Tokens:
    """Tokens, some off the mask; the policy is near their sampler or, for the last ones, the very same."""
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


def expected(tokens: Tokens, kl_coef: float) -> dict[str, float]:
    """With numpy: means and maxima of the tokens that each name speaks of; of none there is no number."""
    new, advantage, on = tokens["new"], tokens["advantages"], tokens["mask"]
    x, change = new - tokens["logprobs"], np.exp(new) - np.exp(tokens["logprobs"])
    gap, k3 = new - tokens["ref_logprobs"], np.expm1(x) - x
    with np.errstate(over="ignore"):
        apart = np.exp(-gap) - 1 + gap
    acting, pulled = on & (tokens["rl_scale"] != 0), tokens["ref_kl_scale"] != 0
    dropped = acting & np.where(advantage > 0, change > 0.2, change < -0.2)
    everywhere = {
        "entropy/all": tokens["entropy"], "mismatch_kl/all": k3, "importance_ratio": np.exp(x), "mismatch_kl_k1": -x
    }  # fmt: skip
    means = {
        **{name: (values, on) for name, values in everywhere.items()},
        "entropy": (tokens["entropy"], on),
        "mismatch_kl": (k3, on),
        "is_masked": (dropped, acting),
        "is_masked_low": (dropped & (x < 0), acting),
        "is_masked_high": (dropped & (x >= 0), acting),
        "masked_mismatch_kl": (k3, dropped),
        "unmasked_mismatch_kl": (k3, acting & ~dropped),
        "ref_kl": (apart, pulled | acting if kl_coef else pulled),
        "nll": (-new, tokens["ce_scale"] != 0),
    }
    largest = {f"{name}/max": values[on].max() for name, values in everywhere.items() if on.any()}
    return largest | {f"{name}/mean": values[of].mean() for name, (values, of) in means.items() if of.any()}


DRAWN = draw_tokens(0)
NONE = np.zeros(len(DRAWN["mask"]))
CASES: dict[str, Tokens] = {
    **{f"drawn {seed}": draw_tokens(seed) for seed in range(3)},
    "only distilled": {**DRAWN, "rl_scale": NONE, "ref_kl_scale": DRAWN["mask"] * 1.0, "advantages": NONE},
    "only reinforced": {**DRAWN, "ref_kl_scale": NONE, "ce_scale": NONE, "ref_logprobs": NONE + 900},
    "of the sampler": {**DRAWN, "new": DRAWN["logprobs"]},
    "none": {name: values[:0] for name, values in DRAWN.items()},
}


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("tokens", CASES.values(), ids=CASES.keys())
def test_against_numpy(tokens: Tokens, kl_coef: float) -> None:
    """Contract: every metric is its name's of its tokens, on the mask or off; means over nothing are left out."""
    config = DefaultLoss(kl_coef=kl_coef)
    loss = make_loss(config)(torch.tensor(tokens["new"]), torch.tensor(tokens["entropy"]), stack(tokens))[0].item()
    values = {"loss/mean": loss} | expected(tokens, kl_coef)
    got = describe(sums_of(tokens, config).tolist())
    assert got == {name: pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True) for name, value in values.items()}


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
        found.append(describe(merge_sums(parts).tolist()))
    assert {"mismatch_kl/all/mean", "mismatch_kl/all/max"} <= found[0].keys()
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert list(other.values()) == pytest.approx(list(found[0].values()), rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 50.0, -500.0])
def test_what_is_not_finite_stays_where_it_is(bad: float) -> None:
    """Contract: a token that overflows or is NaN leaves metrics finite (the loss shows it); off the mask, the same."""
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
