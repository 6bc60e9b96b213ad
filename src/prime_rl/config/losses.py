"""Settings of the trainer's losses: what a policy loss is made of, and by what it is divided."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.base import Problem, Section
from prime_rl.config.shared import Fraction

Level = Literal["token", "sequence", "geometric"]
Estimator = Literal["k1", "k2", "k3"]
Normalization = Literal["token", "sequence", "group", "fixed"]
_WEIGHS_THE_SAME = (
    "What weighs the same: tokens, sequences, or groups; or a token weighs 1 / fixed_length of its sequence."
)


class PolicyLoss(Section):
    """What all losses have beside their policy gradient."""

    normalization: Normalization = Field(default="token", description=_WEIGHS_THE_SAME)
    fixed_length: PositiveInt | None = Field(
        default=None, description="Tokens that every sequence is divided by (normalization fixed)."
    )
    kl_coef: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of the divergence from a reference model: see orchestrator.reference.",
    )
    kl_estimator: Estimator | None = Field(default=None, description="How that divergence is estimated (None: k3).")
    entropy_coef: float = Field(default=0.0, description="Weight of the entropy bonus.")

    @property
    def estimator(self) -> Estimator:
        """`kl_estimator`, or its default: GRPO's."""
        return self.kl_estimator or "k3"

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if (self.normalization == "fixed") == (self.fixed_length is not None):
            return self
        message = (
            "normalization fixed needs fixed_length, the tokens that every sequence is divided by"
            if self.fixed_length is None
            else f"fixed_length has no effect: normalization is {self.normalization}"
        )
        raise Problem(message, "normalization", "fixed_length")

    @model_validator(mode="after")
    def _estimates_something(self) -> Self:
        if self.kl_estimator is None or self.kl_coef > 0:
            return self
        raise Problem(f"kl_estimator {self.kl_estimator} has no effect: kl_coef is 0", "kl_estimator", "kl_coef")


class DefaultLoss(PolicyLoss):
    """Importance-weighted policy gradient: tokens whose probability moved too far are masked."""

    type: Literal["default"] = Field(default="default", description="Kind of loss.")
    mask_low: NonNegativeFloat = Field(
        default=0.2, description="Largest fall in probability of a token that is trained."
    )
    mask_high: NonNegativeFloat = Field(
        default=0.2, description="Largest rise in probability of a token that is trained."
    )
    adv_tau: NonNegativeFloat = Field(default=1.0, description="Weight of the advantage.")
    kl_tau: NonNegativeFloat = Field(
        default=1e-3, description="Weight of the penalty for moving away from the sampler."
    )


class IPOLoss(PolicyLoss):
    """As the default loss, with one bound on the change of probability whatever the advantage."""

    type: Literal["ipo"] = Field(default="ipo", description="Kind of loss.")
    threshold: NonNegativeFloat = Field(
        default=0.1, description="Largest change in probability of a token that is trained."
    )
    adv_tau: NonNegativeFloat = Field(default=1.0, description="Weight of the advantage.")
    kl_tau: NonNegativeFloat = Field(
        default=1e-3, description="Weight of the penalty for moving away from the sampler."
    )


class GRPOLoss(PolicyLoss):
    """Clipped ratio as in PPO and GRPO; a larger clip_high is DAPO's."""

    type: Literal["grpo"] = Field(default="grpo", description="Kind of loss.")
    clip_low: Fraction = Field(default=0.2, description="The ratio is clipped below 1 - clip_low.")
    clip_high: NonNegativeFloat = Field(default=0.2, description="The ratio is clipped above 1 + clip_high.")


class PPOClipLoss(PolicyLoss):
    """Clipped ratio with a second clip, which bounds what a token of negative advantage can do."""

    type: Literal["ppo_clip"] = Field(default="ppo_clip", description="Kind of loss.")
    clip_low: Fraction = Field(default=0.2, description="The ratio is clipped below 1 - clip_low.")
    clip_high: NonNegativeFloat = Field(default=0.2, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float = Field(default=3.0, gt=1, description="Ratio that a negative advantage is clipped at.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.dual_clip > 1 + self.clip_high:
            return self
        message = f"dual_clip {self.dual_clip} is not above 1 + clip_high {self.clip_high}"
        raise Problem(message, "dual_clip", "clip_high")


class GSPOLoss(PolicyLoss):
    """Clipped ratio of whole sequences: the geometric mean of their tokens' ratios."""

    type: Literal["gspo"] = Field(default="gspo", description="Kind of loss.")
    normalization: Normalization = Field(default="sequence", description=_WEIGHS_THE_SAME)
    clip_low: Fraction = Field(default=3e-4, description="The ratio is clipped below 1 - clip_low.")
    clip_high: NonNegativeFloat = Field(default=4e-4, description="The ratio is clipped above 1 + clip_high.")


class CISPOLoss(PolicyLoss):
    """Policy gradient weighted by the clipped ratio: every token keeps its gradient."""

    type: Literal["cispo"] = Field(default="cispo", description="Kind of loss.")
    clip_low: Fraction = Field(default=1.0, description="The weight is at least 1 - clip_low (1: no bound).")
    clip_high: NonNegativeFloat = Field(default=4.0, description="The weight is at most 1 + clip_high.")


# The least ratio and the largest, by level: over a thousand tokens the product is rarely near 1, and the geometric mean rarely far from it.
# Tokens: IcePop's (Ling team 2025, arXiv:2510.18855). Sequences: bounded from above alone, as Liu et al. 2025 mask them ("When Speed Kills Stability",
# a blog post): a lower bound would drop most long ones, which weigh next to nothing anyway. Geometric means: one per cent, which is our own choice.
_MASK_BOUNDS: dict[Level, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.0, 2.0),
    "geometric": (0.99, 1.01),
}
# Tokens and sequences: TIS's (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", a blog post). No geometric
# mean comes near 2, which would cut nothing off: it has the bound that masking has.
_TRUNCATE_BOUNDS: dict[Level, float] = {"token": 2.0, "sequence": 2.0, "geometric": 1.01}


class ReinforceLoss(PolicyLoss):
    """Policy gradient with an importance weight against what sampling with other weights, or by another engine, does."""

    type: Literal["reinforce"] = Field(default="reinforce", description="Kind of loss.")
    importance: Literal["none", "truncate", "mask"] = Field(
        default="truncate",
        description="Weight: 1, the ratio cut off at `high` (TIS), or 0 outside of low … high (MIS, IcePop).",
    )
    level: Level = Field(
        default="token", description="The ratio of a token, of its sequence (product), or that one's geometric mean."
    )
    low: NonNegativeFloat | None = Field(
        default=None, description="Least ratio that counts: mask (None: 0.5; of sequences 0, geometric 0.99)."
    )
    high: PositiveFloat | None = Field(
        default=None, description="Largest ratio (None: 2; mask by token 5; geometric 1.01)."
    )

    @property
    def least(self) -> float:
        """`low`, or the default of the level."""
        return self.low if self.low is not None else _MASK_BOUNDS[self.level][0]

    @property
    def most(self) -> float:
        """`high`, or the default of the level."""
        if self.high is not None:
            return self.high
        return _MASK_BOUNDS[self.level][1] if self.importance == "mask" else _TRUNCATE_BOUNDS[self.level]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.importance != "mask" or self.least < self.most:
            return self
        raise Problem(f"low {self.least} is not below high {self.most}", "low", "high")

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.low is not None and self.importance != "mask":
            raise Problem(f"low has no effect: importance is {self.importance}", "low", "importance")
        if self.high is not None and self.importance == "none":
            raise Problem("high has no effect: importance is none", "high", "importance")
        if self.level != "token" and self.importance == "none":
            raise Problem(f"level {self.level} has no effect: importance is none", "level", "importance")
        return self


class CustomLoss(PolicyLoss):
    """A policy loss of your own."""

    type: Literal["custom"] = Field(default="custom", description="Kind of loss.")
    path: str = Field(description="Function: module:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")


LossConfig = DefaultLoss | IPOLoss | GRPOLoss | PPOClipLoss | GSPOLoss | CISPOLoss | ReinforceLoss | CustomLoss
