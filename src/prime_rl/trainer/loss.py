"""Token losses: what a sampled token contributes, given the policy's log-probability and entropy for it.

Everything that depends on the algorithm arrives as per-token streams; a loss is a pure function of them. `STREAMS` names the rows of the
streams tensor of RL batches. The `*_scale` rows already hold weight / (number of member tokens of the component in the whole step, over all
ranks), so that summing is averaging: no rank and no micro-batch needs to know about the others.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from prime_rl.config.trainer import DefaultLoss, GRPOLoss
    from prime_rl.trainer.lm_head import TokenLoss

STREAMS = ("mask", "logprobs", "advantages", "ref_logprobs", "rl_scale", "ce_scale", "ref_kl_scale")
SUMS = ("loss", "entropy", "mismatch_kl", "is_masked")
"""What an RL token loss adds up: the loss itself, and three quantities over the tokens of `mask` (to be divided by their number)."""

RLTerm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprob, sampler's logprob, advantage), each [N] -> (loss per token [N], dropped from the policy gradient [N] bool)"""


def make_token_loss(config: "DefaultLoss | GRPOLoss") -> "TokenLoss":
    """The RL token loss of `config`: its policy-gradient term, plus cross-entropy and reference-KL terms where their streams say so."""

    def rl_term(logprob: Tensor, old: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        if config.type == "grpo":
            return grpo(logprob, old, advantage, config.clip_low, config.clip_high)
        return default(logprob, old, advantage, config.mask_low, config.mask_high, config.adv_tau, config.kl_tau)

    def token_loss(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        mask, old, advantage, reference, rl_scale, ce_scale, ref_kl_scale = streams.unbind()
        rl, dropped = rl_term(logprob, old, advantage)
        loss = (rl * rl_scale - logprob * ce_scale + ref_kl(logprob, old, reference) * ref_kl_scale).sum()
        with torch.no_grad():
            sums = [loss, (entropy * mask).sum(), (mismatch_kl(logprob, old) * mask).sum(), (dropped * mask).sum()]
            return loss, torch.stack([value.to(loss.dtype) for value in sums])

    return token_loss


def default(
    logprob: Tensor, old: Tensor, advantage: Tensor, mask_low: float, mask_high: float, adv_tau: float, kl_tau: float
) -> tuple[Tensor, Tensor]:
    """DPPO's binary mask on the change of probability, plus a squared-log-ratio regulariser (PRIME-RL's default loss).

        r = exp(logprob - old)      d = exp(logprob) - exp(old)
        dropped = d > mask_high where the advantage is positive, d < -mask_low elsewhere
        loss = -(1 - dropped) · adv_tau · advantage · r  +  kl_tau · (log r)²

    The ratio is neither clipped nor detached: the gradient flows through it. The regulariser covers dropped tokens too.
    """
    log_ratio = logprob - old
    with torch.no_grad():
        change = logprob.exp() - old.exp()
        dropped = torch.where(advantage > 0, change > mask_high, change < -mask_low)
    # A dropped token's ratio may overflow, and 0 · inf is not 0: it is taken out before the exponential.
    ratio = torch.where(dropped, 0.0, log_ratio).exp()
    return kl_tau * log_ratio.square() - torch.where(dropped, 0.0, adv_tau * advantage) * ratio, dropped


def grpo(logprob: Tensor, old: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The clipped objective of PPO on tokens, as in GRPO:  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    `dropped` are the tokens where the clip is active, which get no gradient.
    """
    log_ratio = logprob - old
    with torch.no_grad():
        ratio = log_ratio.exp()
        held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
        clipped = ratio * advantage > held
    # As above: a clipped token's ratio may overflow.
    free = torch.where(clipped, 0.0, log_ratio).exp() * advantage
    return -torch.where(clipped, held, free), clipped


def ref_kl(logprob: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """Policy gradient towards a reference model: the default loss with the (detached) reference log-ratio as its advantage.

    Constants (drop below -0.2, regulariser 1e-3) are PRIME-RL's.
    """
    log_ratio = logprob - old
    with torch.no_grad():
        dropped = logprob.exp() - old.exp() < -0.2
        advantage = torch.where(dropped, 0.0, reference - logprob)
    return 1e-3 * log_ratio.square() - advantage * torch.where(dropped, 0.0, log_ratio).exp()


def mismatch_kl(logprob: Tensor, old: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler ‖ trainer), r - log r - 1 ≥ 0 (Schulman's k3)."""
    log_ratio = logprob - old
    return torch.expm1(log_ratio) - log_ratio


def cross_entropy(logprob: Tensor, entropy: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """The token loss of supervised training. streams [1, N]: weight / (loss tokens of the whole step). sums [2]: loss, entropy (both weighted)."""
    loss = -(logprob * streams[0]).sum()
    return loss, torch.stack([loss.detach(), (entropy * streams[0]).sum().detach()])
