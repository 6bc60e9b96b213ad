"""Policy losses: the loss of a sampled token from the log-probabilities of policy and sampler and its advantage.

    r = exp(logprob - old)      the ratio

Each returns (loss [N], dropped [N] bool): the loss of every token, not yet weighted, and which tokens get no gradient
from it. A ratio that overflows must do no harm where its token is dropped or has no advantage: it is removed before the
exponential: 0 · inf is not 0.

Those that take `sequences` couple the tokens of a sequence and are evaluated on all tokens of a micro-batch at once.
"""

import torch
from torch import Tensor

from prime_rl.config.trainer import CISPOLoss, DefaultLoss, GRPOLoss, GSPOLoss, IPOLoss, PPOClipLoss, ReinforceLoss

PolicyTerm = tuple[Tensor, Tensor]


class Sequences:
    """Sums and means over the sampled tokens of each sequence, given to each token of it: [N] -> [N].

    `document` [N] int64, ascending: the sequence, of `count`, that each token belongs to; some may have no tokens.
    `mask` [N]: 1 on sampled tokens; what is added up elsewhere does not count.
    """

    def __init__(self, document: Tensor, mask: Tensor, count: int) -> None:
        self._document, self._mask = document, mask
        self._lengths = torch.zeros(count, dtype=torch.int64, device=document.device)
        self._lengths.index_add_(0, document, torch.ones_like(document))
        self._sampled = self._totals(torch.ones_like(mask)).clamp(min=1)

    def sum(self, values: Tensor) -> Tensor:
        return self._totals(values)[self._document]

    def mean(self, values: Tensor) -> Tensor:
        return (self._totals(values) / self._sampled)[self._document]

    def _totals(self, values: Tensor) -> Tensor:
        """[N] -> [count]: a sum in a fixed order, unlike `index_add` of floats on a GPU."""
        return torch.segment_reduce(values * self._mask, "sum", lengths=self._lengths, unsafe=True)


def default(logprob: Tensor, old: Tensor, advantage: Tensor, config: DefaultLoss) -> PolicyTerm:
    """DPPO's binary mask on the change of probability, plus a squared-log-ratio regulariser (PRIME-RL's default loss).

    The mask: Qi et al. 2026, arXiv:2602.04879 ("Binary-TV").

        d = exp(logprob) - exp(old)
        dropped = d > mask_high where the advantage is positive, d < -mask_low elsewhere
        loss = -(1 - dropped) · adv_tau · advantage · r  +  kl_tau · (log r)²

    The ratio is neither clipped nor detached: the gradient flows through it. The regulariser covers dropped tokens too.
    """
    with torch.no_grad():
        change = logprob.exp() - old.exp()
        dropped = torch.where(advantage > 0, change > config.mask_high, change < -config.mask_low)
    return masked_ratio(logprob - old, advantage, dropped, config.adv_tau, config.kl_tau), dropped


def ipo(logprob: Tensor, old: Tensor, advantage: Tensor, config: IPOLoss) -> PolicyTerm:
    """The default loss with a symmetric mask: dropped where |exp(logprob) - exp(old)| > threshold (PRIME-RL, 2026)."""
    with torch.no_grad():
        dropped = (logprob.exp() - old.exp()).abs() > config.threshold
    return masked_ratio(logprob - old, advantage, dropped, config.adv_tau, config.kl_tau), dropped


def masked_ratio(log_ratio: Tensor, advantage: Tensor, dropped: Tensor, adv_tau: float, kl_tau: float) -> Tensor:
    ratio = torch.where(dropped | (advantage == 0), 0.0, log_ratio).exp()
    return kl_tau * log_ratio.square() - torch.where(dropped, 0.0, adv_tau * advantage) * ratio


def grpo(logprob: Tensor, old: Tensor, advantage: Tensor, config: GRPOLoss) -> PolicyTerm:
    """PPO's clipped objective on tokens, as in GRPO:  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Schulman et al. 2017, arXiv:1707.06347; Shao et al. 2024, arXiv:2402.03300. clip_high > clip_low is DAPO (Yu et al.
    2025, arXiv:2503.14476). Normalization: fixed is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), sequence the paper of
    GRPO, group DAPO's formula, token (the default) common practice.
    """
    return _clipped(logprob - old, advantage, config.clip_low, config.clip_high)


def ppo_clip(logprob: Tensor, old: Tensor, advantage: Tensor, config: PPOClipLoss) -> PolicyTerm:
    """The clipped objective, bounded where A < 0 as well:  -max(min(r A, clip(r) A), dual_clip · A).
    Ye et al. 2020, arXiv:1912.09729 (dual-clip PPO), which recommends 3."""
    log_ratio = logprob - old
    with torch.no_grad():
        bounded = (advantage < 0) & (log_ratio.exp() > config.dual_clip)
    loss, clipped = _clipped(torch.where(bounded, 0.0, log_ratio), advantage, config.clip_low, config.clip_high)
    return torch.where(bounded, -config.dual_clip * advantage, loss), clipped | bounded


def gspo(logprob: Tensor, old: Tensor, advantage: Tensor, config: GSPOLoss, sequences: Sequences) -> PolicyTerm:
    """The clipped objective of whole sequences:  s = exp(mean of log r over the sequence),  -min(s A, clip(s) A).
    Zheng et al. 2025, arXiv:2507.18071, with its clips and mean over sequences. All tokens get a gradient through s."""
    return _clipped(sequences.mean(logprob - old), advantage, config.clip_low, config.clip_high)


def _clipped(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> PolicyTerm:
    with torch.no_grad():
        ratio = log_ratio.exp()
        held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
        clipped = ratio * advantage > held
    free = torch.where(clipped | (advantage == 0), 0.0, log_ratio).exp() * advantage
    return -torch.where(clipped, held, free), clipped


def cispo(logprob: Tensor, old: Tensor, advantage: Tensor, config: CISPOLoss) -> PolicyTerm:
    """Clipped importance weights, detached:  -clip(r, 1 - clip_low, 1 + clip_high) · A · logprob.

    MiniMax-M1, 2025, arXiv:2506.13585, with an upper bound that it does not state; ScaleRL (arXiv:2510.13786) saw no
    difference in a range with 5 in it. No token is dropped. Both normalize by group ("prompt average"); we by token.
    """
    with torch.no_grad():
        weight = (logprob - old).exp().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * advantage * logprob, torch.zeros_like(weight, dtype=torch.bool)


def reinforce(
    logprob: Tensor, old: Tensor, advantage: Tensor, config: ReinforceLoss, sequences: Sequences | None = None
) -> PolicyTerm:
    """Williams' policy gradient with a detached importance weight:  -w(ratio) · A · logprob.

    none: w = 1.  truncate (TIS, Yao et al. 2025, a blog post): w = min(ratio, high).  mask (MIS): w = ratio within
    low … high, else 0 (dropped); by token IcePop (Ling team 2025, arXiv:2510.18855), by sequence "When Speed Kills
    Stability" (Liu et al. 2025, a blog post). `level`: the ratio of a token, or a sequence's product or geometric mean.
    """
    with torch.no_grad():
        log_ratio = logprob - old
        if config.level != "token":
            assert sequences is not None
            log_ratio = (sequences.sum if config.level == "sequence" else sequences.mean)(log_ratio)
        ratio = log_ratio.exp()
        dropped = torch.zeros_like(ratio, dtype=torch.bool)
        if config.importance == "mask":
            dropped = (ratio < config.least) | (ratio > config.most)
            weight = torch.where(dropped, 0.0, ratio)
        else:
            weight = ratio.clamp(max=config.most) if config.importance == "truncate" else torch.ones_like(ratio)
    return -weight * advantage * logprob, dropped
