"""The loss of a token: a policy loss (`policy_losses.py`) and the components beside it, each weighted by a stream of its own.

Everything that depends on the algorithm arrives as per-token streams; a loss is a pure function of them. `STREAMS` names the rows of the
streams tensor of RL batches; `environment` is for metrics alone. The `*_scale` rows already hold weight / (the component's denominator in the whole step, over all ranks), so
that summing is averaging: no rank and no micro-batch needs to know about the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prime_rl.importing import load_function, takes
from prime_rl.trainer import policy_losses
from prime_rl.trainer.loss_metrics import component_sums, token_sums
from prime_rl.trainer.policy_losses import Sequences

if TYPE_CHECKING:
    from prime_rl.config.losses import LossConfig
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
        UserError: a custom loss cannot be imported, or does not take its arguments.
    """
    policy_loss, coupled = _policy_loss(config)

    def loss_of(
        logprob: Tensor, entropy: Tensor, streams: Tensor, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        mask, old, advantage, reference, environment, rl_scale, ce_scale, ref_kl_scale = streams.unbind()
        rl, dropped = policy_loss(logprob, old, advantage, **({} if sequences is None else {"sequences": sequences}))
        if config.kl_coef:
            there = torch.where(rl_scale != 0, reference, logprob.detach())  # other tokens may have none
            rl = rl + config.kl_coef * divergence(logprob, there, config.kl_estimator)
        if config.entropy_coef:
            rl = rl - config.entropy_coef * entropy
        loss = (rl * rl_scale - logprob * ce_scale + ref_kl(logprob, old, reference) * ref_kl_scale).sum()
        with torch.no_grad():
            pulled = (ref_kl_scale != 0) | (rl_scale != 0) if config.kl_coef else ref_kl_scale != 0
            components = component_sums(divergence(logprob, reference, "k3"), pulled, logprob, ce_scale != 0)
            acted = (rl_scale != 0, dropped), (ref_kl_scale != 0, ref_kl_drops(logprob, old))
            sums = token_sums(logprob, entropy, old, advantage, mask, environment, *acted)
            return loss, torch.cat([loss[None], components, sums])

    return SequenceLoss(loss_of) if coupled else loss_of


def _policy_loss(config: "LossConfig") -> tuple[Callable[..., tuple[Tensor, Tensor]], bool]:
    """The policy loss, and whether it couples the tokens of a sequence: then it takes `sequences`."""
    if config.type == "custom":
        function = load_function(config.path, config.args, given=3, key="loss.path")
        return partial(_custom, function, config.args), takes(function, "sequences")
    coupled = config.type == "gspo" or (config.type == "reinforce" and config.level != "token")
    return partial(_POLICY_LOSSES[config.type], config=config), coupled


def _custom(
    function: Callable[..., Any], args: dict[str, Any], logprob: Tensor, old: Tensor, advantage: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """A loss of the user's own gives the loss of each token, or that and which tokens it dropped."""
    found = function(logprob, old, advantage, **more, **args)
    if isinstance(found, tuple):
        loss, dropped = found
        return loss, dropped
    return found, torch.zeros_like(logprob, dtype=torch.bool)


def divergence(logprob: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence").

        k1 = logprob - reference,  k2 = k1² / 2,  k3 = exp(-k1) - 1 + k1

    k2 and k3 are differentiated as they stand; on the policy's own tokens k2's gradient is the divergence's, k3's is its only to first order
    (Liu et al. 2025, arXiv:2510.01555). k1's own gradient is zero on average, so it gets the score function's, k1 · ∇ logprob, as if it had been
    taken off the reward: the same as k2's.
    """
    gap = logprob - reference
    if estimator == "k1":
        return gap.detach() * (1 + logprob - logprob.detach())
    return gap.square() / 2 if estimator == "k2" else torch.expm1(-gap) + gap


def ref_kl(logprob: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """Policy gradient towards a reference model: the default loss with the (detached) reference log-ratio as its advantage.

    Constants (drop below -0.2, regulariser 1e-3) are PRIME-RL's.
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
