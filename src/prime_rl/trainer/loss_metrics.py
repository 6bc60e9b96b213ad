"""What an RL step tells about its loss tokens: sums made on the device, and the metrics that the host makes of them.

Everything is a plain sum over tokens, so chunks, micro-batches and ranks add up and one vector [M] is all that travels. A mean and a standard
deviation come from sums of values and of squares. What is no sum (least and greatest value, percentiles) is read off histograms.

Their buckets are equally wide in asinh(value / 1e-4): linear around 0, logarithmic beyond, ten to each factor e. A value read off is the
middle of its bucket, so it is within 5.2 % of the true one (or within 5e-6, if that is more). Entropy and the log ratio have histograms; the ratio and
both estimates of the mismatch are functions of the log ratio, and as exact as its bucket allows. What is beyond the last bucket counts as that in the
sums too, so that one ratio that overflows does not make them infinite, nor, times a 0, those of tokens that it is none of.
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
_MOST = _LINEAR * math.sinh(_LAST / _PER_E)
_BUCKETS = 2 * _LAST + 1

_MIDDLES = _LINEAR * np.sinh(np.arange(-_LAST, _LAST + 1) / _PER_E)  # [_BUCKETS]

# What is added up of tokens off the loss mask, too, each over the tokens of its own component.
_COMPONENTS = ("ref_kl_tokens", "ref_kl", "nll_tokens", "nll")
# Sets of tokens, beside one of the loss mask for every slot: of those in the policy loss, and of those in the loss towards a reference.
_GROUPS = ("kept", "dropped", "ref_kept", "ref_dropped")
_VALUES = ("entropy", "mismatch_kl", "mismatch_kl_k1", "importance_ratio")
# How many tokens are in the policy loss, and how many of these it drops: less probable than to their sampler, or not; of positive or negative advantage.
_COUNTS = ("acting", "low", "high", "positive", "negative")
# Each set has a row of the table: its number of tokens, sums of values, sums of squares, counts.
_TABLE = (SLOTS + len(_GROUPS), 1 + 2 * len(_VALUES) + len(_COUNTS))
# Of each slot's entropy, of each slot's log ratio, and of the log ratio of tokens that the policy loss keeps, and drops.
_HISTOGRAMS = (2 * SLOTS + 2, _BUCKETS)

_OF_LOG_RATIO: dict[str, Callable[[Floats], Floats]] = {
    "mismatch_kl": lambda log_ratio: np.expm1(log_ratio) - log_ratio,
    "mismatch_kl_k1": lambda log_ratio: -log_ratio,
    "importance_ratio": np.exp,
}


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler ‖ trainer), r - log r - 1 ≥ 0 (Schulman's k3)."""
    return torch.expm1(log_ratio) - log_ratio


Acted = tuple[Tensor, Tensor]
"""The tokens that a loss acts on [N] bool, and those that it takes no gradient from, some of which may be others [N] bool."""


def token_sums(
    logprob: Tensor,
    entropy: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    environment: Tensor,
    policy: Acted,
    reference: Acted,
) -> Tensor:
    """The sums over the tokens of `mask`, all [N]: the table and the histograms, flat.

    Args:
        environment: The slot of each token's environment; what is beyond the last shares it.
        policy: What the policy loss acts on; of these, tokens of `mask` count.
        reference: What the loss towards a reference (`ref_kl`) acts on, on the mask or off it.
    """
    entropy, log_ratio = _held(entropy), _held(logprob - old)
    mask = mask.to(log_ratio.dtype)
    slot = environment.long().clamp(0, SLOTS - 1)
    of_slot = (slot == torch.arange(SLOTS, device=slot.device)[:, None]) * mask
    acting, gone = policy[0] * mask, policy[0] * policy[1] * mask
    parts = [gone * part for part in (log_ratio < 0, log_ratio >= 0, advantage > 0, advantage < 0)]
    pulled = [(reference[0] & ~reference[1]).to(mask.dtype), (reference[0] & reference[1]).to(mask.dtype)]
    groups = torch.cat([of_slot, torch.stack([acting - gone, gone, *pulled])])
    # The ratio is near 1, so its squares would cancel: its distance from 1 is added up.
    values = torch.stack([entropy, mismatch_kl(log_ratio), -log_ratio, torch.expm1(log_ratio)])
    table = (
        groups @ torch.cat([torch.ones_like(mask)[None], values, values.square(), torch.stack([acting, *parts])]).t()
    )
    of_entropy, of_ratio = _bucket(entropy), _bucket(log_ratio)
    rows = [slot, SLOTS + slot, 2 * SLOTS + (gone != 0).long()]
    places = [row * _BUCKETS + of for row, of in zip(rows, (of_entropy, of_ratio, of_ratio), strict=True)]
    # Counts are integers, so the order in which a GPU adds them does not matter.
    counts = torch.zeros(_HISTOGRAMS[0] * _BUCKETS, dtype=mask.dtype, device=mask.device)
    counts = counts.index_add(0, torch.cat(places), torch.cat([mask, mask, acting]))
    return torch.cat([table.flatten(), counts])


def _held(values: Tensor) -> Tensor:
    """`values`, those beyond the last bucket at it, and what is not a number at 0: other tokens' sums stay theirs, and the loss will say what is wrong."""
    return values.nan_to_num(0.0).clamp(-_MOST, _MOST)


def _bucket(values: Tensor) -> Tensor:
    """The bucket of each value that is `_held`, int64."""
    return (torch.asinh(values / _LINEAR) * _PER_E).round().long() + _LAST


def component_sums(divergence: Tensor, pulled: Tensor, logprob: Tensor, imitated: Tensor) -> Tensor:
    """Sums [4] over the tokens that a reference model pulls (`pulled` [N] bool) and over those of cross-entropy (`imitated`)."""
    # What a token without a reference diverges from is arbitrary, and may be infinite.
    apart = torch.where(pulled, divergence, 0.0)
    return torch.stack([pulled.sum(), apart.sum(), imitated.sum(), -torch.where(imitated, logprob, 0.0).sum()])


def describe(environments: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The metrics that an RL step's sums are (its loss, `component_sums`, `token_sums`), added up over all ranks.

    What is a mean over no tokens is left out. Environments have metrics of their own where there are several.

    Args:
        environments: Names of all of the run's, in the order of their slots. If there are more than slots, those in the last one are not told apart.
    """
    numbers = np.asarray(sums, dtype=np.float64)
    components, table, histograms = np.split(numbers[1:], np.cumsum([len(_COMPONENTS), _TABLE[0] * _TABLE[1]]))
    rows, counts = table.reshape(_TABLE), histograms.reshape(_HISTOGRAMS)
    entropy, log_ratio, kept, dropped = counts[:SLOTS], counts[SLOTS:-2], counts[-2], counts[-1]
    whole = rows[:SLOTS].sum(0)
    group = dict(zip(_GROUPS, rows[SLOTS:], strict=True))

    found = {"loss/mean": float(numbers[0])}  # divided by the global count already
    found |= _distribution("entropy/all", "entropy", whole, entropy.sum(0))
    found |= _distribution("mismatch_kl/all", "mismatch_kl", whole, log_ratio.sum(0))
    found |= _distribution("mismatch_kl_k1", "mismatch_kl_k1", whole, log_ratio.sum(0))
    found |= _distribution("importance_ratio", "importance_ratio", whole, log_ratio.sum(0))
    found |= _distribution("masked_mismatch_kl", "mismatch_kl", group["dropped"], dropped)
    found |= _distribution("unmasked_mismatch_kl", "mismatch_kl", group["kept"], kept)
    if len(environments) > 1:
        for slot, name in enumerate(environments[: SLOTS if len(environments) <= SLOTS else SLOTS - 1]):
            found |= _distribution(f"entropy/{name}", "entropy", rows[slot], entropy[slot])
            found |= _distribution(f"mismatch_kl/{name}", "mismatch_kl", rows[slot], log_ratio[slot])
            found |= _distribution(f"mismatch_kl_k1/{name}", "mismatch_kl_k1", rows[slot], log_ratio[slot])
            found |= _distribution(f"importance_ratio/{name}", "importance_ratio", rows[slot], log_ratio[slot])
            found |= _shares(rows[slot], f"/{name}")
    return found | _shares(whole) | _of_reference(group) | _components(components) | _short_names(found)


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


def _share(name: str, part: float, whole: float) -> dict[str, float]:
    """Nothing of nothing."""
    return {f"{name}/mean": float(part / whole)} if whole > 0 else {}


def _shares(row: Floats, of: str = "") -> dict[str, float]:
    """Shares of dropped tokens: of all in the policy loss, those whose probability fell and those whose rose; and what advantages dropped tokens have.

    Args:
        of: What is appended to the names.
    """
    by = dict(zip(_COUNTS, row[-len(_COUNTS) :].tolist(), strict=True))
    dropped = by["low"] + by["high"]
    return (
        _share(f"is_masked{of}", dropped, by["acting"])
        | _share(f"is_masked_low{of}", by["low"], by["acting"])
        | _share(f"is_masked_high{of}", by["high"], by["acting"])
        | _share(f"masked_advantage_positive{of}", by["positive"], dropped)
        | _share(f"masked_advantage_negative{of}", by["negative"], dropped)
    )


def _of_reference(group: Mapping[str, Floats]) -> dict[str, float]:
    """What the loss towards a reference drops, and the mismatch of these tokens and of the others."""
    kept, dropped, place = group["ref_kept"], group["ref_dropped"], 1 + _VALUES.index("mismatch_kl")
    return (
        _share("ref_kl/is_masked", dropped[0], kept[0] + dropped[0])
        | _share("ref_kl/masked_mismatch_kl", dropped[place], dropped[0])
        | _share("ref_kl/unmasked_mismatch_kl", kept[place], kept[0])
    )


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
