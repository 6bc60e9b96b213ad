"""Settings of what is left out of training, and of which tasks are drawn more often."""

from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.base import Problem, Section
from prime_rl.config.shared import Fraction


class EpisodeFilter(Section):
    """What filters of single episodes have in common."""

    from_baseline: bool = Field(
        default=False, description="Leave such an episode out of what others of its group are compared with, too."
    )


class TruncatedFilter(EpisodeFilter):
    """Leaves out episodes that were cut off."""


class OverlongFilter(EpisodeFilter):
    """Leaves out episodes with many sampled tokens."""

    max_tokens: PositiveInt = Field(description="Most sampled tokens of an episode that is trained on.")


class RepetitionFilter(EpisodeFilter):
    """Leaves out episodes that repeat themselves."""

    ngram: PositiveInt = Field(default=16, description="Tokens of what is looked for again.")
    max_share: Fraction = Field(
        default=0.5, description="Largest share of such sequences that occurred before in the same reply."
    )
    min_tokens: PositiveInt = Field(default=64, description="Shorter replies are not looked at.")


class GibberishFilter(EpisodeFilter):
    """Leaves out episodes with rare tokens that the sampler itself found most improbable."""

    min_token_id: NonNegativeInt = Field(
        default=100_000, description="Ids from here on are rare, as tokenizers number them."
    )
    max_logprob: float = Field(default=-14.0, lt=0, description="Log-probability below which a token is improbable.")
    max_tokens: NonNegativeInt = Field(default=0, description="Such tokens that are let pass.")


class OffPolicyFilter(EpisodeFilter):
    """Leaves out episodes that are too old by the step that would train on them."""

    max_steps: NonNegativeInt = Field(
        description="Most steps between the oldest token and the step; max_off_policy_steps bounds all."
    )


class DifficultyFilter(Section):
    """Turns groups away that are too hard or too easy; others take their place."""

    low: float = Field(default=0.0, description="Groups are kept whose mean reward is above.")
    high: float = Field(default=1.0, description="And below.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low < self.high:
            return self
        raise Problem(f"low {self.low} is not below high {self.high}: every group would be turned away", "low", "high")


class CustomFilter(EpisodeFilter):
    """A filter of your own."""

    path: str = Field(description="Function: module:name or file.py:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")


class FilterConfig(Section):
    """What is left out of training, whatever its reward."""

    dynamic_sampling: bool = Field(
        default=False, description="Turn groups away whose advantages are all zero; others take their place."
    )
    difficulty: DifficultyFilter | None = Field(default=None, description="By the mean reward of a group.")
    truncated: TruncatedFilter | None = Field(default=None, description="Episodes that were cut off.")
    overlong: OverlongFilter | None = Field(default=None, description="Episodes with many sampled tokens.")
    repetition: RepetitionFilter | None = Field(default=None, description="Episodes that repeat themselves.")
    gibberish: GibberishFilter | None = Field(default=None, description="Episodes with improbable rare tokens.")
    off_policy: OffPolicyFilter | None = Field(default=None, description="Episodes that are too old.")
    custom: CustomFilter | None = Field(default=None, description="A filter of your own.")


class CurriculumConfig(Section):
    """Difficulty pools: tasks are drawn more or less often by the mean reward of their last group."""

    easy: float = Field(default=0.8, description="Mean reward from which on a task is easy.")
    hard: float = Field(default=0.2, description="Mean reward up to which a task is hard.")
    easy_weight: PositiveFloat = Field(default=0.1, description="How often an easy task is drawn, next to a new one.")
    normal_weight: PositiveFloat = Field(default=1.0, description="How often any other one is.")
    hard_weight: PositiveFloat = Field(default=0.5, description="How often a hard one is.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.hard < self.easy:
            return self
        raise Problem(f"hard {self.hard} is not below easy {self.easy}: a task would be both", "hard", "easy")
