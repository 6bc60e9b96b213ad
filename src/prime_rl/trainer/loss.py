"""The loss of a token: a policy loss (`policy_losses.py`) and the components beside it, each weighted by a stream of its own.

Everything that depends on the algorithm arrives as per-token streams; a loss is a pure function of them. `STREAMS` names the rows of the
streams tensor of RL batches; `environment` is for metrics alone. The `*_scale` rows already hold weight / (the component's denominator in the whole step, over all ranks), so
that summing is averaging: no rank and no micro-batch needs to know about the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.importing import load_function, takes
from prime_rl.trainer import policy_losses
from prime_rl.trainer.loss_metrics import component_sums, token_sums
from prime_rl.trainer.policy_losses import Sequences

if TYPE_CHECKING:
    from prime_rl.config.trainer import LossConfig
    from prime_rl.trainer.lm_head import TokenLoss

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
            there = torch.where(rl_scale != 0, reference, logprob.detach())  # other tokens may have none
            rl = rl + config.kl_coef * divergence(logprob, there, config.estimator)
        if config.entropy_coef:
            rl = rl - config.entropy_coef * entropy
        # Taken out of what is weighted with 0: the ratio of a token that the policy loss bounds may overflow here, and 0 · inf is not 0.
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
        function = load_function(config.path, config.args, given=3, key="loss.path", offered=("sequences",))
        coupled = takes(function, "sequences")
        of_tokens = partial(_custom, function, config.path, config.args)
        _try_out(of_tokens, config.path, coupled)
        return of_tokens, coupled
    coupled = config.type == "gspo" or (config.type == "reinforce" and config.level != "token")
    return partial(_POLICY_LOSSES[config.type], config=config), coupled


def _custom(
    function: Callable[..., Any],
    path: str,
    args: dict[str, Any],
    logprob: Tensor,
    old: Tensor,
    advantage: Tensor,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """A loss of the user's own gives the loss of each token, or that and which tokens it dropped.

    What is looked at is known on the host, so that this neither waits for a device nor keeps the loss from being compiled.

    Raises:
        UserError: it gives anything else.
    """
    found = function(logprob, old, advantage, **more, **args)
    loss, dropped = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, Tensor) or loss.shape != logprob.shape or not loss.is_floating_point():
        raise UserError(
            f"loss.path: {path!r} gave {_kind(found)} for {tuple(logprob.shape)} tokens: the loss of each token is needed, "
            "a tensor of floats of that shape, or that and which tokens are dropped"
        )
    if dropped is None:
        return loss, torch.zeros_like(logprob, dtype=torch.bool)
    if not isinstance(dropped, Tensor) or dropped.shape != logprob.shape or dropped.dtype != torch.bool:
        raise UserError(
            f"loss.path: {path!r} gave, beside the loss, {_kind(dropped)} for {tuple(logprob.shape)} tokens: "
            "which tokens are dropped is a tensor of bool of that shape"
        )
    return loss, dropped


def _kind(value: object) -> str:
    """What a function gave, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(map(_kind, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def _try_out(policy_loss: Callable[..., tuple[Tensor, Tensor]], path: str, coupled: bool) -> None:
    """Call a loss of the user's own once, on a few tokens of two sequences on the host, before anything is trained with it.

    The last token is of another component, as such tokens come: no log-probability of a sampler, no advantage.

    Raises:
        UserError: it fails, does not give the loss of each token, or the loss does not depend on the policy.
    """
    logprob = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], device="cpu", requires_grad=True)
    old = torch.tensor([-0.6, -0.9, -2.0, -0.3, 0.0], device="cpu")
    advantage = torch.tensor([1.0, 1.0, -0.5, -0.5, 0.0], device="cpu")
    document, mask = torch.tensor([0, 0, 1, 1, 1], device="cpu"), (advantage != 0).to(advantage.dtype)
    more = {"sequences": Sequences(document, mask, 2)} if coupled else {}
    try:
        with torch.enable_grad():
            loss, _ = policy_loss(logprob, old, advantage, **more)
            gradient = torch.autograd.grad(loss.sum(), logprob, allow_unused=True)[0] if loss.requires_grad else None
    except UserError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"loss.path: {path!r} failed on a few tokens: {type(error).__name__}: {error}") from error
    if gradient is None:
        raise UserError(
            f"loss.path: {path!r} gave a loss that has no gradient in its first argument: nothing would be trained"
        )
    if not (loss.isfinite().all() and gradient.isfinite().all()):
        raise UserError(
            f"loss.path: {path!r} gave {loss.tolist()} with gradient {gradient.tolist()} for tokens the last of which is of another component "
            "(advantage 0, sampler's log-probability 0): all must be finite"
        )


_STEEPEST = 10.0  # times as probable to the reference as to the policy


def divergence(logprob: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence", a blog post).

        k1 = logprob - reference,  k2 = k1² / 2,  k3 = exp(-k1) - 1 + k1

    k2 and k3 are differentiated as they stand; on the policy's own tokens k2's gradient is the divergence's, k3's is its only to first order
    (Liu et al. 2025, arXiv:2510.01555). Tokens of an older policy are not the policy's own: there both are approximations, k2's too. k1's own gradient is
    zero on average, so it gets the score function's, k1 · ∇ logprob, as if it had been taken off the reward: the same as k2's.

    k3 grows with reference / policy, without bound: where that is above 10, it goes on as its tangent. (Others clamp the value, which lets go of the very
    tokens that are farthest below the reference.) So a token's gradient is at most 9, and never zero where the two differ.
    """
    gap = logprob - reference
    if estimator == "k1":
        return gap.detach() * (1 + logprob - logprob.detach())
    if estimator == "k2":
        return gap.square() / 2
    near = (-gap).clamp(
        max=math.log(_STEEPEST)
    )  # taken out before the exponential: it would overflow, and 0 · inf is not 0
    return torch.expm1(near) + _STEEPEST * (-gap - near) + gap


def ref_kl(logprob: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """Policy gradient towards a reference model: the default loss with the (detached) reference log-ratio as its advantage.

    Constants (drop below -0.2, regulariser 1e-3) are PRIME-RL's. The policy's log-probability is taken at the sample's temperature, as everywhere: the
    reference's has to be of the same one. Dropped tokens keep the regulariser.
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
    """The token loss of supervised training. streams [1, N]: weight / (loss tokens of the whole step). sums [2]: loss, entropy (both weighted)."""
    loss = -(logprob * streams[0]).sum()
    return loss, torch.stack([loss.detach(), (entropy * streams[0]).sum().detach()])
