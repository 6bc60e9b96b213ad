"""The loss of a token, and what an RL step measures of its loss tokens.

A policy loss (`policy_losses.py`) and the components beside it are each weighted by a stream of their own. Everything
that depends on the algorithm arrives as per-token streams; a loss is a pure function of them. `STREAMS` names the rows
of the streams tensor of RL batches. The `*_scale` rows already hold weight / (the component's denominator in the whole
step, over all ranks), so that summing is averaging: no rank and no micro-batch needs to know about the others.

Metrics are sums over tokens, and few maxima, so `lm_head.merge_sums` puts chunks, micro-batches and ranks together, and
only one vector [M] travels. A log ratio or an entropy beyond 22 counts as 22: one that overflows must not spoil sums.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prime_rl.config.trainer import LossConfig
from prime_rl.errors import UserError
from prime_rl.importing import load_function
from prime_rl.trainer import policy_losses
from prime_rl.trainer.lm_head import MAXIMA, TokenLoss
from prime_rl.trainer.policy_losses import Sequences

_MOST = 22.0  # hardly any log ratio of a sampled token is beyond, and no entropy

# Sums over the tokens of a component, on the loss mask or off it.
_COMPONENTS = ("ref_kl_tokens", "ref_kl", "nll_tokens", "nll")
_GROUPS = ("mask", "kept", "dropped")  # tokens of the loss mask, and of these those that the policy loss acts on
_VALUES = ("entropy", "mismatch_kl", "mismatch_kl_k1", "importance_ratio")
_COUNTS = ("low", "high")  # dropped tokens that are less probable than to their sampler, or not


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler ‖ trainer), r - log r - 1 ≥ 0 (Schulman's k3)."""
    return torch.expm1(log_ratio) - log_ratio


def token_sums(logprob: Tensor, entropy: Tensor, old: Tensor, mask: Tensor, acting: Tensor, dropped: Tensor) -> Tensor:
    """The number of tokens and the sums of values over each of the groups, flat; the counts; the largest of each value.
    Of what the policy loss is `acting` on, tokens of `mask` count; `dropped` is what it takes no gradient from."""
    entropy, log_ratio = _clamped(entropy), _clamped(logprob - old)
    mask = mask.to(log_ratio.dtype)
    kept, dropped = acting * ~dropped * mask, acting * dropped * mask
    parts = [dropped * part for part in (log_ratio < 0, log_ratio >= 0)]
    groups = torch.stack([mask, kept, dropped])
    # The ratio is near 1, so its squares would cancel: its distance from 1 is added up.
    values = torch.stack([entropy, mismatch_kl(log_ratio), -log_ratio, torch.expm1(log_ratio)])
    columns = torch.cat([torch.ones_like(mask)[None], values])
    # The last column stands for no tokens.
    largest = torch.where(mask > 0, values, -torch.inf)
    largest = torch.cat([largest, largest.new_full((len(_VALUES), 1), -torch.inf)], 1)
    return torch.cat([(groups @ columns.t()).flatten(), torch.stack(parts).sum(1), largest.amax(1)])


def _clamped(values: Tensor) -> Tensor:
    """`values` up to the bound, NaN as 0: the loss shows what is wrong, and other tokens' sums stay theirs."""
    return values.nan_to_num(0.0).clamp(-_MOST, _MOST)


def describe(sums: Sequence[float]) -> dict[str, float]:
    """Name the metrics of an RL step from its sums over all ranks: its loss, those of components, `token_sums`. A mean
    over no tokens is left out."""
    groups = (f"{value}/{group}" for group in _GROUPS for value in ("tokens", *_VALUES))
    largest = (f"{value}/largest" for value in _VALUES)
    total = dict(zip(("loss", *_COMPONENTS, *groups, *_COUNTS, *largest), sums, strict=True))
    metrics = {"loss/mean": float(total["loss"])}  # divided by the global count already
    tokens, kept, dropped = (total[f"tokens/{group}"] for group in _GROUPS)
    for value in _VALUES if tokens else ():
        name = f"{value}/all" if value in ("entropy", "mismatch_kl") else value
        offset = value == "importance_ratio"  # of which the distance from 1 is added up
        metrics |= {
            f"{name}/mean": offset + total[f"{value}/mask"] / tokens,
            f"{name}/max": offset + total[f"{value}/largest"],
        }
    if tokens:  # the two means that the console shows
        metrics |= {f"{value}/mean": metrics[f"{value}/all/mean"] for value in ("entropy", "mismatch_kl")}
    fractions = {
        "masked_mismatch_kl": (total["mismatch_kl/dropped"], dropped),
        "unmasked_mismatch_kl": (total["mismatch_kl/kept"], kept),
        "is_masked": (dropped, kept + dropped),
        "is_masked_low": (total["low"], kept + dropped),
        "is_masked_high": (total["high"], kept + dropped),
        "ref_kl": (total["ref_kl"], total["ref_kl_tokens"]),
        "nll": (total["nll"], total["nll_tokens"]),
    }
    return metrics | {f"{name}/mean": part / count for name, (part, count) in fractions.items() if count > 0}


STREAMS = ("mask", "logprobs", "advantages", "ref_logprobs", "rl_scale", "ce_scale", "ref_kl_scale")


@dataclass(frozen=True)
class SequenceLoss:
    """A loss that couples the tokens of a sequence: of all loss tokens of a micro-batch at once, not of chunks."""

    # (logprob [N], entropy [N], streams [K, N], sequences) -> (summed loss, sums [M])
    of: Callable[[Tensor, Tensor, Tensor, Sequences], tuple[Tensor, Tensor]]

    def __call__(
        self, logprob: Tensor, entropy: Tensor, streams: Tensor, document: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """`document` [N]: the sequence of each token, of `count`."""
        return self.of(logprob, entropy, streams, Sequences(document, streams[STREAMS.index("mask")], count))


def make_loss(config: LossConfig) -> TokenLoss | SequenceLoss:
    """The RL loss of `config`: its policy loss, plus cross-entropy and reference-KL terms where their streams say so.
    Raises UserError if a custom loss cannot be imported, does not take its arguments, or gives no loss of tokens."""
    policy_loss: Callable[..., tuple[Tensor, Tensor]]
    if config.type == "custom":
        function = load_function(config.path, config.args, positional=3, key="loss.path", offered=("sequences",))
        coupled = "sequences" in inspect.signature(function).parameters
        policy_loss = partial(_custom, function, config.path, config.args)
        _try_out(policy_loss, config.path, coupled)
    else:
        coupled = config.type == "gspo" or (config.type == "reinforce" and config.level != "token")
        policy_loss = partial(getattr(policy_losses, config.type), config=config)

    def loss_of(
        logprob: Tensor, entropy: Tensor, streams: Tensor, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        mask, old, advantage, reference, rl_scale, ce_scale, ref_kl_scale = streams.unbind()
        rl, dropped = policy_loss(logprob, old, advantage, **({} if sequences is None else {"sequences": sequences}))
        if config.kl_coef:
            defined = torch.where(rl_scale != 0, reference, logprob.detach())  # other tokens may have none
            rl = rl + config.kl_coef * divergence(logprob, defined, config.kl_estimator or "k3")
        if config.entropy_coef:
            rl = rl - config.entropy_coef * entropy
        # Tokens of weight 0 are taken out: the ratio of one that the policy loss bounds may overflow; 0 · inf is not 0.
        pull = ref_kl(logprob, torch.where(ref_kl_scale != 0, old, logprob.detach()), reference)
        loss = (rl * rl_scale - logprob * ce_scale + pull * ref_kl_scale).sum()
        with torch.no_grad():
            pulled = (ref_kl_scale != 0) | (rl_scale != 0) if config.kl_coef else ref_kl_scale != 0
            # Not bounded as the penalty is: what is reported is an estimate without bias.
            k3 = torch.expm1(reference - logprob) + logprob - reference
            imitated = ce_scale != 0
            # What a token without a reference diverges from is arbitrary, and may be infinite.
            components = [pulled, torch.where(pulled, k3, 0.0), imitated, -torch.where(imitated, logprob, 0.0)]
            sums = token_sums(logprob, entropy, old, mask, rl_scale != 0, dropped)
            return loss, torch.cat([torch.stack([loss, *(part.sum() for part in components)]), sums])

    return SequenceLoss(loss_of) if coupled else loss_of


def _custom(
    function: Callable[..., Any], path: str, args: dict[str, Any], *tensors: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The user's loss of each token, and which tokens it dropped, if it says so. Raises UserError for anything else.
    Only what the host knows is checked: this neither waits for a device nor keeps the loss from being compiled."""
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
    """Try a user's loss on two tokens, one of another component (no sampler's log-probability, no advantage). Raises
    UserError if its gradient cannot be computed or is not finite."""
    logprob = torch.tensor([-0.5, -3.0], device="cpu", requires_grad=True)
    old, advantage, mask = torch.tensor([[-0.6, 0.0], [1.0, 0.0], [1.0, 0.0]], device="cpu")
    more = {"sequences": Sequences(torch.zeros(2, dtype=torch.int64, device="cpu"), mask, 1)} if coupled else {}
    try:
        with torch.enable_grad():
            loss, _ = policy_loss(logprob, old, advantage, **more)
            (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    except UserError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"loss.path: {path!r} failed on two tokens: {type(error).__name__}: {error}") from error
    if not (loss.isfinite().all() and gradient.isfinite().all()):
        raise UserError(
            f"loss.path: {path!r} gave {loss.tolist()} with gradient {gradient.tolist()} for two tokens, the second of "
            "another component (advantage 0, sampler's log-probability 0): all must be finite"
        )


_STEEPEST = 10.0  # times as probable to the reference as to the policy


def divergence(logprob: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) from tokens of the policy (Schulman 2020, a blog post).

        k1 = logprob - reference,  k2 = k1² / 2,  k3 = exp(-k1) - 1 + k1

    k2 and k3 are differentiated as they stand; on the policy's own tokens k2's gradient is the divergence's, k3's only
    to first order (Liu et al. 2025, arXiv:2510.01555). On tokens of an older policy both are approximations. k1's own
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
    """Return a policy gradient towards a reference model: the default loss, its advantage the detached log-ratio.

    Constants (drop below -0.2, regulariser 1e-3) are PRIME-RL's. The policy's log-probability is taken at the sample's
    temperature, as everywhere: the reference's has to be of the same one. Dropped tokens keep the regulariser.
    """
    with torch.no_grad():
        dropped = logprob.exp() - old.exp() < -0.2
        advantage = reference - logprob
    return policy_losses.masked_ratio(logprob - old, advantage, dropped, adv_tau=1.0, kl_tau=1e-3)


def cross_entropy(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """The token loss of supervised training. streams [1, N]: weight / (loss tokens of the whole step). sums: loss,
    entropy (both weighted), no maxima."""
    loss = -(logprob * streams[0]).sum()
    sums = torch.stack([loss.detach(), (entropy * streams[0]).sum().detach()])
    return loss, torch.cat([sums, sums.new_zeros(MAXIMA)])
