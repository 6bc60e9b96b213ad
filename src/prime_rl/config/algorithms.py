"""Settings of the algorithms: what an episode is worth, and which component of the loss its tokens feed."""

from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.base import Problem, Section
from prime_rl.config.shared import Fraction


class LinearPenalty(Section):
    """The reward loses a share of the group's mean reward that grows with length, relative to the group's longest."""

    type: Literal["linear"] = Field(default="linear", description="Kind of length penalty.")
    output: NonNegativeFloat = Field(default=0.25, description="Weight of the sampled tokens.")
    input: NonNegativeFloat = Field(default=0.1, description="Weight of all other tokens.")
    turns: NonNegativeFloat = Field(default=0.1, description="Weight of the turns.")


class OverlongPenalty(Section):
    """DAPO's soft overlong punishment: the reward falls towards the end of the room for a reply, and by `scale` beyond it."""

    type: Literal["overlong"] = Field(default="overlong", description="Kind of length penalty.")
    max_tokens: PositiveInt = Field(description="Sampled tokens from which on the whole penalty is taken off.")
    cache: PositiveInt = Field(description="Tokens before that over which it grows.")
    scale: PositiveFloat = Field(default=1.0, description="The whole penalty.")

    @model_validator(mode="after")
    def _in_order(self) -> "OverlongPenalty":
        if self.cache <= self.max_tokens:
            return self
        raise Problem(f"cache {self.cache} is more than max_tokens {self.max_tokens}", "cache", "max_tokens")


class Algorithm(Section):
    """What all algorithms are asked."""

    group_relative: ClassVar[bool] = False  # compares attempts at one task, so that it needs several
    by_reward: ClassVar[bool] = True  # else samples are trained whatever their reward is


class ByReward(Algorithm):
    """Algorithms that weigh tokens by an advantage."""

    length_penalty: LinearPenalty | OverlongPenalty | None = Field(
        default=None, discriminator="type", description="Taken off the reward before advantages are computed."
    )


class GRPO(ByReward):
    """Advantage: the reward minus the mean of its group."""

    group_relative: ClassVar[bool] = True

    type: Literal["grpo"] = Field(default="grpo", description="Kind of algorithm.")
    std_normalize: bool = Field(default=False, description="Divide by the standard deviation of the group.")


class RLOO(ByReward):
    """Advantage: the reward minus the mean of the other rewards of its group."""

    group_relative: ClassVar[bool] = True

    type: Literal["rloo"] = Field(default="rloo", description="Kind of algorithm.")


class OPO(ByReward):
    """Advantage: the reward minus the mean of its group weighted by length, the baseline of least variance."""

    group_relative: ClassVar[bool] = True

    type: Literal["opo"] = Field(default="opo", description="Kind of algorithm.")


class MaxRL(ByReward):
    """Advantage: the reward minus the mean of its group, divided by that mean: rare successes weigh more."""

    group_relative: ClassVar[bool] = True

    type: Literal["max_rl"] = Field(default="max_rl", description="Kind of algorithm.")


class ReinforcePP(ByReward):
    """REINFORCE++. Advantage: the reward, normalized over the environment's episodes in the batch."""

    type: Literal["reinforce_pp"] = Field(default="reinforce_pp", description="Kind of algorithm.")
    group_baseline: bool = Field(
        default=False, description="Take the mean of the group off first (REINFORCE++-baseline)."
    )


class RAE(ByReward):
    """Role-conditioned advantage estimation. Advantage: the reward minus a moving average of the agent's earlier ones."""

    type: Literal["rae"] = Field(default="rae", description="Kind of algorithm.")
    decay: Fraction = Field(default=0.95, description="Share of the old average that stays with each reward.")


class GDPO(ByReward):
    """Every reward function is normalized within its group by itself; the weighted sum is normalized over the batch."""

    group_relative: ClassVar[bool] = True

    type: Literal["gdpo"] = Field(default="gdpo", description="Kind of algorithm.")
    weights: dict[str, float] = Field(
        default_factory=dict, description="Weight of each reward function (empty: all that are there, equally)."
    )
    batch_normalize: bool = Field(
        default=True, description="Normalize the sum over the environment's episodes in the batch."
    )


class CustomAlgorithm(ByReward):
    """Advantages of your own."""

    type: Literal["custom"] = Field(default="custom", description="Kind of algorithm.")
    path: str = Field(description="Function: module:name or file.py:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")


AlgorithmConfig = GRPO | RLOO | OPO | MaxRL | ReinforcePP | RAE | GDPO | CustomAlgorithm
