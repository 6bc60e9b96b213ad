"""The loss of a token, and what an RL step measures of its loss tokens.

A policy loss (`policy_losses.py`) and the components beside it are each weighted by a stream of their own. Everything
that depends on the algorithm arrives as per-token streams; a loss is a pure function of them. `STREAMS` names the rows of
the streams tensor of RL batches; `environment` is for metrics alone. The `*_scale` rows already hold weight / (the
component's denominator in the whole step, over all ranks), so that summing is averaging: no rank and no micro-batch needs
to know about the others.

Metrics are plain sums over tokens, so chunks, micro-batches and ranks add up, and only one vector [M] travels. Means and
standard deviations come from sums of values and of squares; least, greatest and percentiles from histograms of entropy
and log ratio. Buckets are equally wide in asinh(value / 1e-4), ten to each factor e: a value read off is the middle of
its bucket, within 5.2 % (or 5e-6) of the true one. The ratio and both estimates of the mismatch are functions of the log
ratio. What is beyond the last bucket counts as that in the sums too, so that one ratio that overflows does not make them
infinite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.importing import load_function, takes
from prime_rl.trainer import policy_losses
from prime_rl.trainer.policy_losses import Sequences

if TYPE_CHECKING:
    from prime_rl.config.trainer import LossConfig
    from prime_rl.trainer.lm_head import TokenLoss


Floats = npt.NDArray[np.float64]

SLOTS = (
    16  # environments with metrics of their own; part of the compiled loss, which a step's own number would recompile
)

_LINEAR, _PER_E = 1e-4, 10
_LAST = 130  # 1e-4 · sinh(13) = 22: hardly any log ratio of a sampled token is beyond, and no entropy
_MOST = _LINEAR * math.sinh(_LAST / _PER_E)
_BUCKETS = 2 * _LAST + 1

_MIDDLES = _LINEAR * np.sinh(np.arange(-_LAST, _LAST + 1) / _PER_E)  # [_BUCKETS]

# Sums over the tokens of a component, on the loss mask or off it.
_COMPONENTS = ("ref_kl_tokens", "ref_kl", "nll_tokens", "nll")
# Sets of tokens beside the loss mask's of each slot: of those in the policy loss, and in the loss towards a reference.
_GROUPS = ("kept", "dropped", "ref_kept", "ref_dropped")
_VALUES = ("entropy", "mismatch_kl", "mismatch_kl_k1", "importance_ratio")
# Tokens in the policy loss, and those of them that it drops: less probable than to their sampler, or not; of positive or
# negative advantage.
_COUNTS = ("acting", "low", "high", "positive", "negative")
# Each set has a row of the table: its number of tokens, sums of values, sums of squares, counts.
_TABLE = (SLOTS + len(_GROUPS), 1 + 2 * len(_VALUES) + len(_COUNTS))
# Of each slot's entropy and log ratio, and of the log ratio of tokens that the policy loss keeps, and drops.
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
"""The tokens that a loss acts on [N] bool, and those that it takes no gradient from [N] bool, on whatever tokens."""


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
        environment: The slot of each token's environment; those beyond the last share it.
        policy: What the policy loss acts on; of these, tokens of `mask` count.
        reference: What the loss towards a reference (`ref_kl`) acts on, on the mask or off it.
    """
    entropy, log_ratio = _clamped(entropy), _clamped(logprob - old)
    mask = mask.to(log_ratio.dtype)
    slot = environment.long().clamp(0, SLOTS - 1)
    of_slot = (slot == torch.arange(SLOTS, device=slot.device)[:, None]) * mask
    acting, dropped = policy[0] * mask, policy[0] * policy[1] * mask
    parts = [dropped * part for part in (log_ratio < 0, log_ratio >= 0, advantage > 0, advantage < 0)]
    pulled = [(reference[0] & ~reference[1]).to(mask.dtype), (reference[0] & reference[1]).to(mask.dtype)]
    groups = torch.cat([of_slot, torch.stack([acting - dropped, dropped, *pulled])])
    # The ratio is near 1, so its squares would cancel: its distance from 1 is added up.
    values = torch.stack([entropy, mismatch_kl(log_ratio), -log_ratio, torch.expm1(log_ratio)])
    table = (
        groups @ torch.cat([torch.ones_like(mask)[None], values, values.square(), torch.stack([acting, *parts])]).t()
    )
    of_entropy, of_ratio = _bucket(entropy), _bucket(log_ratio)
    rows = [slot, SLOTS + slot, 2 * SLOTS + (dropped != 0).long()]
    indices = [row * _BUCKETS + bucket for row, bucket in zip(rows, (of_entropy, of_ratio, of_ratio), strict=True)]
    # Counts are integers, so the order in which a GPU adds them does not matter.
    counts = torch.zeros(_HISTOGRAMS[0] * _BUCKETS, dtype=mask.dtype, device=mask.device)
    counts = counts.index_add(0, torch.cat(indices), torch.cat([mask, mask, acting]))
    return torch.cat([table.flatten(), counts])


def _clamped(values: Tensor) -> Tensor:
    """`values` up to the last bucket, NaN as 0: the loss shows what is wrong, and other tokens' sums stay theirs."""
    return values.nan_to_num(0.0).clamp(-_MOST, _MOST)


def _bucket(values: Tensor) -> Tensor:
    """The bucket of each `_clamped` value, int64."""
    return (torch.asinh(values / _LINEAR) * _PER_E).round().long() + _LAST


def component_sums(divergence: Tensor, pulled: Tensor, logprob: Tensor, imitated: Tensor) -> Tensor:
    """Sums [4] over the tokens that a reference model pulls (`pulled` [N] bool) and those of cross-entropy (`imitated`)."""
    # What a token without a reference diverges from is arbitrary, and may be infinite.
    apart = torch.where(pulled, divergence, 0.0)
    return torch.stack([pulled.sum(), apart.sum(), imitated.sum(), -torch.where(imitated, logprob, 0.0).sum()])


def describe(environments: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Name the metrics of an RL step from its sums over all ranks: its loss, `component_sums`, `token_sums`.

    A mean over no tokens is left out. Environments have metrics of their own where there are several.

    Args:
        environments: The run's, in the order of their slots. Of more than slots, those in the last slot have none.
    """
    numbers = np.asarray(sums, dtype=np.float64)
    components, table, histograms = np.split(numbers[1:], np.cumsum([len(_COMPONENTS), _TABLE[0] * _TABLE[1]]))
    rows, counts = table.reshape(_TABLE), histograms.reshape(_HISTOGRAMS)
    entropy, log_ratio, kept, dropped = counts[:SLOTS], counts[SLOTS:-2], counts[-2], counts[-1]
    whole = rows[:SLOTS].sum(0)
    group = dict(zip(_GROUPS, rows[SLOTS:], strict=True))

    metrics = {"loss/mean": float(numbers[0])}  # divided by the global count already
    metrics |= _distribution("entropy/all", "entropy", whole, entropy.sum(0))
    metrics |= _distribution("mismatch_kl/all", "mismatch_kl", whole, log_ratio.sum(0))
    metrics |= _distribution("mismatch_kl_k1", "mismatch_kl_k1", whole, log_ratio.sum(0))
    metrics |= _distribution("importance_ratio", "importance_ratio", whole, log_ratio.sum(0))
    metrics |= _distribution("masked_mismatch_kl", "mismatch_kl", group["dropped"], dropped)
    metrics |= _distribution("unmasked_mismatch_kl", "mismatch_kl", group["kept"], kept)
    if len(environments) > 1:
        for slot, name in enumerate(environments[: SLOTS if len(environments) <= SLOTS else SLOTS - 1]):
            for value in _VALUES:
                histogram = entropy if value == "entropy" else log_ratio
                metrics |= _distribution(f"{value}/{name}", value, rows[slot], histogram[slot])
            metrics |= _dropped(rows[slot], f"/{name}")
    if "entropy/all/mean" in metrics:  # the two means that the console shows, and one relative to the other
        entropy_mean, mismatch = metrics["entropy/all/mean"], metrics["mismatch_kl/all/mean"]
        metrics |= {"entropy/mean": entropy_mean, "mismatch_kl/mean": mismatch}
        metrics |= {"kl_ent_ratio/mean": mismatch / entropy_mean} if entropy_mean > 0 else {}
    ref_kl_tokens, ref_kl_sum, nll_tokens, nll = components
    kept_ref, dropped_ref, column = group["ref_kept"], group["ref_dropped"], 1 + _VALUES.index("mismatch_kl")
    fractions = {
        "ref_kl": (ref_kl_sum, ref_kl_tokens),
        "nll": (nll, nll_tokens),
        "ref_kl/is_masked": (dropped_ref[0], kept_ref[0] + dropped_ref[0]),
        "ref_kl/masked_mismatch_kl": (dropped_ref[column], dropped_ref[0]),
        "ref_kl/unmasked_mismatch_kl": (kept_ref[column], kept_ref[0]),
    }
    return metrics | _dropped(whole) | _means(fractions)


_PERCENTILES = {"min": 0, "p10": 10, "median": 50, "p90": 90, "p99": 99, "max": 100}


def _distribution(name: str, value: str, row: Floats, counts: Floats) -> dict[str, float]:
    """Mean and standard deviation of one value from a row of the table, the rest from the histogram of entropy or log
    ratio. Empty for no tokens."""
    tokens, column = row[0], 1 + _VALUES.index(value)
    if tokens < 1:
        return {}
    mean, square = float(row[column] / tokens), float(row[column + len(_VALUES)] / tokens)
    middles = _OF_LOG_RATIO[value](_MIDDLES) if value in _OF_LOG_RATIO else _MIDDLES
    order = np.argsort(middles, kind="stable")
    upto = np.cumsum(counts[order])
    # The least value that so many percent of the tokens do not exceed
    ranks = np.ceil(np.array(list(_PERCENTILES.values())) * upto[-1] / 100).clip(min=1)
    read = dict(zip(_PERCENTILES, middles[order][np.searchsorted(upto, ranks)].tolist(), strict=True))
    centre = 1.0 if value == "importance_ratio" else 0.0
    values = {"mean": centre + mean, "std": math.sqrt(max(square - mean * mean, 0.0)), **read}
    return {f"{name}/{key}": number for key, number in values.items()}


def _means(fractions: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Each sum divided by its count, without those over no tokens."""
    return {f"{name}/mean": float(part / count) for name, (part, count) in fractions.items() if count > 0}


def _dropped(row: Floats, suffix: str = "") -> dict[str, float]:
    """Of the tokens in the policy loss the fraction that it drops, in all and by whether their probability fell or rose;
    and of these the fraction with positive and negative advantages."""
    acting, low, high, positive, negative = row[-len(_COUNTS) :].tolist()
    fractions = {
        "is_masked": (low + high, acting),
        "is_masked_low": (low, acting),
        "is_masked_high": (high, acting),
        "masked_advantage_positive": (positive, low + high),
        "masked_advantage_negative": (negative, low + high),
    }
    return _means({f"{name}{suffix}": fraction for name, fraction in fractions.items()})


STREAMS = ("mask", "logprobs", "advantages", "ref_logprobs", "environment", "rl_scale", "ce_scale", "ref_kl_scale")

# By type: (logprob, sampler's logprob, advantage, config[, sequences]) -> (loss per token [N], dropped from the policy gradient [N] bool)
_POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "default": policy_losses.default,
    "ipo": policy_losses.ipo,
    "grpo": policy_losses.grpo,
    "ppo_clip": policy_losses.ppo_clip,
    "gspo": policy_losses.gspo,
    "cispo": policy_losses.cispo,
    "reinforce": policy_losses.reinforce,
}


@dataclass(frozen=True)
class SequenceLoss:
    """A loss that couples the tokens of a sequence: of all loss tokens of a micro-batch at once, not of a chunk of them.

    Args:
        of: (logprob [N], entropy [N], streams [K, N], sequences) -> (summed loss, sums [M])
    """

    of: Callable[[Tensor, Tensor, Tensor, Sequences], tuple[Tensor, Tensor]]

    def __call__(
        self, logprob: Tensor, entropy: Tensor, streams: Tensor, document: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """`document` [N]: the sequence of each token, of `count`."""
        return self.of(logprob, entropy, streams, Sequences(document, streams[STREAMS.index("mask")], count))


def make_loss(config: "LossConfig") -> "TokenLoss | SequenceLoss":
    """The RL loss of `config`: its policy loss, plus cross-entropy and reference-KL terms where their streams say so.

    Raises:
        UserError: a custom loss cannot be imported, does not take its arguments, or gives no loss of tokens.
    """
    policy_loss, coupled = _policy_loss(config)

    def loss_of(
        logprob: Tensor, entropy: Tensor, streams: Tensor, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        mask, old, advantage, reference, environment, rl_scale, ce_scale, ref_kl_scale = streams.unbind()
        rl, dropped = policy_loss(logprob, old, advantage, **({} if sequences is None else {"sequences": sequences}))
        if config.kl_coef:
            defined = torch.where(rl_scale != 0, reference, logprob.detach())  # other tokens may have none
            rl = rl + config.kl_coef * divergence(logprob, defined, config.kl_estimator or "k3")
        if config.entropy_coef:
            rl = rl - config.entropy_coef * entropy
        # Tokens of weight 0 are taken out: the ratio of one that the policy loss bounds may overflow, and 0 · inf is not 0.
        pull = ref_kl(logprob, torch.where(ref_kl_scale != 0, old, logprob.detach()), reference)
        loss = (rl * rl_scale - logprob * ce_scale + pull * ref_kl_scale).sum()
        with torch.no_grad():
            pulled = (ref_kl_scale != 0) | (rl_scale != 0) if config.kl_coef else ref_kl_scale != 0
            # Not bounded as the penalty is: what is reported is an estimate without bias.
            k3 = torch.expm1(reference - logprob) + logprob - reference
            components = component_sums(k3, pulled, logprob, ce_scale != 0)
            acted = (rl_scale != 0, dropped), (ref_kl_scale != 0, ref_kl_drops(logprob, old))
            sums = token_sums(logprob, entropy, old, advantage, mask, environment, *acted)
            return loss, torch.cat([loss[None], components, sums])

    return SequenceLoss(loss_of) if coupled else loss_of


def _policy_loss(config: "LossConfig") -> tuple[Callable[..., tuple[Tensor, Tensor]], bool]:
    """The policy loss, and whether it couples the tokens of a sequence: then it takes `sequences`."""
    if config.type == "custom":
        function = load_function(config.path, config.args, positional=3, key="loss.path", offered=("sequences",))
        coupled = takes(function, "sequences")
        of_tokens = partial(_custom, function, config.path, config.args)
        _try_out(of_tokens, config.path, coupled)
        return of_tokens, coupled
    coupled = config.type == "gspo" or (config.type == "reinforce" and config.level != "token")
    return partial(_POLICY_LOSSES[config.type], config=config), coupled


def _custom(
    function: Callable[..., Any], path: str, args: dict[str, Any], *tensors: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The user's loss of each token, and which tokens it dropped, if it says so. Raises UserError for anything else.

    Only what the host knows is checked: this neither waits for a device nor keeps the loss from being compiled.
    """
    result, shape = function(*tensors, **more, **args), tensors[0].shape
    none_dropped = torch.zeros_like(tensors[0], dtype=torch.bool)
    loss, dropped = result if isinstance(result, tuple) and len(result) == 2 else (result, none_dropped)
    fit = all(isinstance(each, Tensor) and each.shape == shape for each in (loss, dropped))
    if not fit or not loss.is_floating_point() or dropped.dtype != torch.bool:
        raise UserError(
            f"loss.path: {path!r} gave a {type(result).__name__} that is not the loss of each token, floats of shape "
            f"{tuple(shape)}, nor a tuple of that and which tokens are dropped, bools of the same shape"
        )
    return loss, dropped


def _try_out(policy_loss: Callable[..., tuple[Tensor, Tensor]], path: str, coupled: bool) -> None:
    """Call a loss of the user's own on a few tokens of two sequences before anything is trained with it.

    The last token is of another component: no log-probability of a sampler, no advantage. Raises UserError if it fails,
    or gives no loss of each token that is finite and depends on the policy.
    """
    logprob = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], device="cpu", requires_grad=True)
    old = torch.tensor([-0.6, -0.9, -2.0, -0.3, 0.0], device="cpu")
    advantage = torch.tensor([1.0, 1.0, -0.5, -0.5, 0.0], device="cpu")
    document, mask = torch.tensor([0, 0, 1, 1, 1], device="cpu"), (advantage != 0).to(advantage.dtype)
    more = {"sequences": Sequences(document, mask, 2)} if coupled else {}
    gradient = None
    try:
        with torch.enable_grad():
            loss, _ = policy_loss(logprob, old, advantage, **more)
            if loss.requires_grad:
                (gradient,) = torch.autograd.grad(loss.sum(), logprob, allow_unused=True)
    except UserError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"loss.path: {path!r} failed on a few tokens: {type(error).__name__}: {error}") from error
    if gradient is None:
        raise UserError(f"loss.path: {path!r} gave a loss that has no gradient in its first argument")
    if not (loss.isfinite().all() and gradient.isfinite().all()):
        raise UserError(
            f"loss.path: {path!r} gave {loss.tolist()} with gradient {gradient.tolist()} for tokens the last of which is "
            "of another component (advantage 0, sampler's log-probability 0): all must be finite"
        )


_STEEPEST = 10.0  # times as probable to the reference as to the policy


def divergence(logprob: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) from tokens of the policy (Schulman 2020, a blog post).

        k1 = logprob - reference,  k2 = k1² / 2,  k3 = exp(-k1) - 1 + k1

    k2 and k3 are differentiated as they stand; on the policy's own tokens k2's gradient is the divergence's, k3's is its
    only to first order (Liu et al. 2025, arXiv:2510.01555). On tokens of an older policy both are approximations. k1's own
    gradient is zero on average, so it gets the score function's, k1 · ∇ logprob: the same as k2's.

    k3 grows with reference / policy, without bound: where that is above 10, it goes on as its tangent, so a token's
    gradient is at most 9, and never zero where the two differ (clamping the value would drop the farthest tokens).
    """
    gap = logprob - reference
    if estimator == "k1":
        return gap.detach() * (1 + logprob - logprob.detach())
    if estimator == "k2":
        return gap.square() / 2
    near = (-gap).clamp(max=math.log(_STEEPEST))  # before the exponential, which would overflow: 0 · inf is not 0
    return torch.expm1(near) + _STEEPEST * (-gap - near) + gap


def ref_kl(logprob: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """Policy gradient towards a reference model: the default loss with the (detached) reference log-ratio as its advantage.

    Constants (drop below -0.2, regulariser 1e-3) are PRIME-RL's. The policy's log-probability is taken at the sample's
    temperature, as everywhere: the reference's has to be of the same one. Dropped tokens keep the regulariser.
    """
    log_ratio = logprob - old
    with torch.no_grad():
        dropped = ref_kl_drops(logprob, old)
        advantage = torch.where(dropped, 0.0, reference - logprob)
    return 1e-3 * log_ratio.square() - advantage * torch.where(dropped, 0.0, log_ratio).exp()


def ref_kl_drops(logprob: Tensor, old: Tensor) -> Tensor:
    """Tokens [N] bool that `ref_kl` takes no gradient from: their probability fell too far."""
    return logprob.exp() - old.exp() < -0.2


def cross_entropy(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """The token loss of supervised training.

    streams [1, N]: weight / (loss tokens of the whole step). sums [2]: loss, entropy (both weighted).
    """
    loss = -(logprob * streams[0]).sum()
    return loss, torch.stack([loss.detach(), (entropy * streams[0]).sum().detach()])
