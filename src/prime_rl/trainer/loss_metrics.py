"""What an RL step tells about its loss tokens: sums made on the device, and the metrics that the host makes of them.

Everything is a plain sum over tokens, so chunks, micro-batches and ranks add up and one vector [M] is all that travels. A mean and a standard
deviation come from sums of values and of squares. What is no sum (least and greatest value, percentiles) is read off histograms.

Their buckets are equally wide in asinh(value / 1e-4): linear around 0, logarithmic beyond, ten to each factor e. A value read off is the
middle of its bucket, so it is within 5.2 % of the true one (or within 5e-6, if that is more). Entropy and the log ratio have histograms; the ratio and
both estimates of the mismatch are functions of the log ratio, and as exact as its bucket allows.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]

SLOTS = 16
"""Environments that are told apart. The number is part of the compiled loss: were it a step's own, the loss would be compiled again."""

_LINEAR, _PER_E = 1e-4, 10
_LAST = 130  # 1e-4 · sinh(13) = 22: hardly any log ratio of a sampled token is beyond, and no entropy; one that is counts as that
_BUCKETS = 2 * _LAST + 1

_MIDDLES = _LINEAR * np.sinh(np.arange(-_LAST, _LAST + 1) / _PER_E)  # [_BUCKETS]

# What is added up of tokens off the loss mask, too, each over the tokens of its own component.
_COMPONENTS = ("ref_kl_tokens", "ref_kl", "nll_tokens", "nll")
# Sets of tokens of the loss mask, beside one for every slot; each has a row of the table: their number, sums of values, sums of squares.
_GROUPS = ("kept", "dropped_low", "dropped_high", "dropped_positive", "dropped_negative")
_VALUES = ("entropy", "mismatch_kl", "mismatch_kl_k1", "importance_ratio")
_TABLE = (SLOTS + len(_GROUPS), 1 + 2 * len(_VALUES))
# Of each slot's entropy, of each slot's log ratio, and of the log ratio of dropped tokens.
_HISTOGRAMS = (2 * SLOTS + 1, _BUCKETS)

_OF_LOG_RATIO: dict[str, Callable[[Floats], Floats]] = {
    "mismatch_kl": lambda log_ratio: np.expm1(log_ratio) - log_ratio,
    "mismatch_kl_k1": lambda log_ratio: -log_ratio,
    "importance_ratio": np.exp,
}


def mismatch_kl(logprob: Tensor, old: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler ‖ trainer), r - log r - 1 ≥ 0 (Schulman's k3)."""
    log_ratio = logprob - old
    return torch.expm1(log_ratio) - log_ratio


def token_sums(
    logprob: Tensor,
    entropy: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    environment: Tensor,
    dropped: Tensor,
) -> Tensor:
    """The sums over the tokens of `mask`, all [N]: the table and the histograms, flat.

    Args:
        environment: The slot of each token's environment; what is beyond the last shares it.
        dropped: Tokens that the policy loss took no gradient from.
    """
    log_ratio = logprob - old
    mask = mask.to(log_ratio.dtype)
    gone, slot = dropped * mask, environment.long().clamp(0, SLOTS - 1)
    of_slot = (slot == torch.arange(SLOTS, device=slot.device)[:, None]) * mask
    parts = [log_ratio < 0, log_ratio >= 0, advantage > 0, advantage < 0]
    groups = torch.cat([of_slot, torch.stack([mask - gone, *(gone * part for part in parts)])])
    # The ratio is near 1, so its squares would cancel: its distance from 1 is added up.
    values = torch.stack([entropy, mismatch_kl(logprob, old), -log_ratio, torch.expm1(log_ratio)])
    table = groups @ torch.cat([torch.ones_like(mask)[None], values, values.square()]).t()
    of_entropy, of_ratio = _bucket(entropy), _bucket(log_ratio)
    places = [slot * _BUCKETS + of_entropy, (SLOTS + slot) * _BUCKETS + of_ratio, 2 * SLOTS * _BUCKETS + of_ratio]
    # Counts are integers, so the order in which a GPU adds them does not matter.
    counts = torch.zeros(_HISTOGRAMS[0] * _BUCKETS, dtype=mask.dtype, device=mask.device)
    counts = counts.index_add(0, torch.cat(places), torch.cat([mask, mask, gone]))
    return torch.cat([table.flatten(), counts])


def _bucket(values: Tensor) -> Tensor:
    """The bucket of each value, int64. One that is not a number must not lead out of the histogram: the loss will say what is wrong."""
    place = (torch.asinh(values / _LINEAR) * _PER_E).round().clamp(-_LAST, _LAST)
    return place.nan_to_num(0.0).long() + _LAST


def component_sums(divergence: Tensor, pulled: Tensor, logprob: Tensor, imitated: Tensor) -> Tensor:
    """Sums [4] over the tokens that a reference model pulls (`pulled` [N] bool) and over those of cross-entropy (`imitated`)."""
    # What a token without a reference diverges from is arbitrary, and may be infinite.
    apart = torch.where(pulled, divergence, 0.0)
    return torch.stack([pulled.sum(), apart.sum(), imitated.sum(), -torch.where(imitated, logprob, 0.0).sum()])


def describe(environments: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The metrics that an RL step's sums are (its loss, `component_sums`, `token_sums`), added up over all ranks.

    What is a mean over no tokens is left out. Environments have metrics of their own where a step has several.

    Args:
        environments: Names, in the order of their slots. If there are more than slots, those in the last one are not told apart.
    """
    numbers = np.asarray(sums, dtype=np.float64)
    components, table, histograms = np.split(numbers[1:], np.cumsum([len(_COMPONENTS), _TABLE[0] * _TABLE[1]]))
    rows, counts = table.reshape(_TABLE), histograms.reshape(_HISTOGRAMS)
    entropy, log_ratio, dropped = counts[:SLOTS], counts[SLOTS:-1], counts[-1]
    whole = rows[:SLOTS].sum(0)
    group = dict(zip(_GROUPS, rows[SLOTS:], strict=True))
    gone = group["dropped_low"] + group["dropped_high"]

    found = {"loss/mean": float(numbers[0])}  # divided by the global count already
    found |= _distribution("entropy/all", "entropy", whole, entropy.sum(0))
    found |= _distribution("mismatch_kl/all", "mismatch_kl", whole, log_ratio.sum(0))
    found |= _distribution("mismatch_kl_k1", "mismatch_kl_k1", whole, log_ratio.sum(0))
    found |= _distribution("importance_ratio", "importance_ratio", whole, log_ratio.sum(0))
    found |= _distribution("masked_mismatch_kl", "mismatch_kl", gone, dropped)
    found |= _distribution("unmasked_mismatch_kl", "mismatch_kl", group["kept"], log_ratio.sum(0) - dropped)
    if len(environments) > 1:
        for slot, name in enumerate(environments[: SLOTS if len(environments) <= SLOTS else SLOTS - 1]):
            found |= _distribution(f"entropy/{name}", "entropy", rows[slot], entropy[slot])
            found |= _distribution(f"mismatch_kl/{name}", "mismatch_kl", rows[slot], log_ratio[slot])
    return found | _shares(whole, gone, group) | _components(components) | _short_names(found)


_PERCENTILES = {"min": 0, "p10": 10, "median": 50, "p90": 90, "p99": 99, "max": 100}


def _distribution(name: str, value: str, row: Floats, counts: Floats) -> dict[str, float]:
    """Mean and standard deviation of one value from a row of the table, the rest from the histogram of the entropy or log ratio. Nothing for no tokens."""
    tokens, place = row[0], 1 + _VALUES.index(value)
    if tokens < 1:
        return {}
    mean, square = float(row[place] / tokens), float(row[place + len(_VALUES)] / tokens)
    middles = _OF_LOG_RATIO[value](_MIDDLES) if value in _OF_LOG_RATIO else _MIDDLES
    order = np.argsort(middles, kind="stable")
    upto = np.cumsum(counts[order])
    # The least value that so many percent of the tokens do not exceed
    ranks = np.ceil(np.array(list(_PERCENTILES.values())) * upto[-1] / 100).clip(min=1)
    read = dict(zip(_PERCENTILES, middles[order][np.searchsorted(upto, ranks)].tolist(), strict=True))
    centre = 1.0 if value == "importance_ratio" else 0.0
    found = {"mean": centre + mean, "std": math.sqrt(max(square - mean * mean, 0.0)), **read}
    return {f"{name}/{key}": number for key, number in found.items()}


def _shares(whole: Floats, gone: Floats, group: Mapping[str, Floats]) -> dict[str, float]:
    """Shares of dropped tokens: of all, those whose probability fell and those whose rose; and what advantages dropped tokens have."""
    parts = {
        "is_masked": (gone, whole),
        "is_masked_low": (group["dropped_low"], whole),
        "is_masked_high": (group["dropped_high"], whole),
        "masked_advantage_positive": (group["dropped_positive"], gone),
        "masked_advantage_negative": (group["dropped_negative"], gone),
    }
    return {f"{name}/mean": float(part[0] / of[0]) for name, (part, of) in parts.items() if of[0] > 0}


def _components(sums: Floats) -> dict[str, float]:
    """Means over the tokens of the components beside the policy loss."""
    by = dict(zip(_COMPONENTS, sums.tolist(), strict=True))
    return {f"{name}/mean": by[name] / by[f"{name}_tokens"] for name in ("ref_kl", "nll") if by[f"{name}_tokens"] > 0}


def _short_names(found: Mapping[str, float]) -> dict[str, float]:
    """The two means that the console shows, and the mismatch relative to the entropy."""
    if "entropy/all/mean" not in found:
        return {}
    entropy, mismatch = found["entropy/all/mean"], found["mismatch_kl/all/mean"]
    ratio = {"kl_ent_ratio/mean": mismatch / entropy} if entropy > 0 else {}
    return {"entropy/mean": entropy, "mismatch_kl/mean": mismatch, **ratio}
