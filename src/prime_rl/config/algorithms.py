"""Settings of the algorithms: what an episode is worth, and which component of the loss its tokens feed."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.base import Problem, Section
from prime_rl.config.shared import Fraction
from prime_rl.redact import has_password


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
    def _in_order(self) -> Self:
        if self.cache <= self.max_tokens:
            return self
        raise Problem(f"cache {self.cache} is more than max_tokens {self.max_tokens}", "cache", "max_tokens")


class TeacherServer(Section):
    """Another model's server, which samples."""

    base_url: str = Field(description="Address of the server, with or without /v1.")
    model: str = Field(default="", description="Name of the model there (empty: the first one it lists).")
    api_key_var: str = Field(default="TEACHER_API_KEY", description="Environment variable that holds the API key.")
    max_concurrent: PositiveInt = Field(default=32, description="Most episodes at a time.")

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        if not self.base_url.startswith(("http://", "https://")):
            raise Problem("base_url does not start with http:// or https://", "base_url")
        if has_password(self.base_url):
            raise Problem("base_url holds a password, which would be written and shown: see api_key_var", "base_url")
        return self


class TeacherConfig(TeacherServer):
    """Another model's server, any that tells the log-probabilities of a prompt: vLLM, or OpenAI's completions with `echo`."""

    max_concurrent: PositiveInt = Field(default=32, description="Most requests at a time.")
    timeout: PositiveFloat = Field(default=120.0, description="Seconds that one request may take.")
    max_attempts: PositiveInt = Field(default=4, description="Tries of a request that fails on the server's side.")


Component = Literal["rl", "ce", "ref_kl"]


class Algorithm(Section):
    """What all algorithms are asked."""

    compares: ClassVar[bool] = False  # attempts at one task, so that it needs several
    component: ClassVar[Component] = "rl"  # of the loss, which sampled tokens feed; only `rl` knows advantages

    @property
    def group_relative(self) -> bool:
        """Whether it compares attempts at one task, so that several are needed and equal rewards tell nothing."""
        return self.compares


class ByReward(Algorithm):
    """Algorithms that weigh tokens by an advantage."""

    length_penalty: LinearPenalty | OverlongPenalty | None = Field(
        default=None, discriminator="type", description="Taken off the reward before advantages are computed."
    )


class GRPO(ByReward):
    """Advantage: the reward minus the mean of its group."""

    compares: ClassVar[bool] = True

    type: Literal["grpo"] = Field(default="grpo", description="Kind of algorithm.")
    std_normalize: bool = Field(default=False, description="Divide by the standard deviation of the group.")


class RLOO(ByReward):
    """Advantage: the reward minus the mean of the other rewards of its group."""

    compares: ClassVar[bool] = True

    type: Literal["rloo"] = Field(default="rloo", description="Kind of algorithm.")


class OPO(ByReward):
    """Advantage: the reward minus the mean of its group weighted by length, the baseline of least variance."""

    compares: ClassVar[bool] = True

    type: Literal["opo"] = Field(default="opo", description="Kind of algorithm.")


class MaxRL(ByReward):
    """Advantage: the reward minus the mean of its group, divided by that mean: rare successes weigh more."""

    compares: ClassVar[bool] = True

    type: Literal["max_rl"] = Field(default="max_rl", description="Kind of algorithm.")


class ReinforcePP(ByReward):
    """REINFORCE++. Advantage: the reward, normalized over the environment's episodes in the batch."""

    type: Literal["reinforce_pp"] = Field(default="reinforce_pp", description="Kind of algorithm.")
    group_baseline: bool = Field(
        default=False, description="Take the mean of the group off first (REINFORCE++-baseline)."
    )
    per_token: bool = Field(
        default=False, description="Normalize over the batch's sampled tokens, so that long episodes weigh more."
    )

    @property
    def group_relative(self) -> bool:
        """With the group's mean taken off it does."""
        return self.group_baseline


class RAE(ByReward):
    """Role-conditioned advantage estimation. Advantage: the reward minus a moving average of the agent's earlier ones."""

    type: Literal["rae"] = Field(default="rae", description="Kind of algorithm.")
    decay: Fraction = Field(default=0.95, description="Share of the old average that stays with each reward.")


class GDPO(ByReward):
    """Every reward function is normalized within its group by itself; the weighted sum is normalized over the batch."""

    compares: ClassVar[bool] = True

    type: Literal["gdpo"] = Field(default="gdpo", description="Kind of algorithm.")
    weights: dict[str, float] = Field(
        default_factory=dict, description="Weight of each reward function (empty: all that are there, equally)."
    )
    batch_normalize: bool = Field(
        default=True, description="Normalize the sum over the environment's episodes in the batch."
    )

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.weights and not any(self.weights.values()):
            raise Problem("weights are all zero, and so would be every advantage", "weights")
        if self.length_penalty is None:
            return self
        raise Problem("length_penalty has no effect: gdpo reads the rewards of single functions", "length_penalty")


class CustomAlgorithm(ByReward):
    """Advantages of your own."""

    type: Literal["custom"] = Field(default="custom", description="Kind of algorithm.")
    path: str = Field(description="Function: module:name or file.py:name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")


class Distillation(Algorithm):
    """Algorithms that learn from a teacher, whatever the reward is."""

    teacher: TeacherServer | None = Field(default=None, description="The model to learn from.")

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if self.teacher is None:
            raise Problem(f"{type(self).__name__.lower()} needs a teacher: give teacher.base_url", "teacher")
        return self


class OPD(Distillation):
    """On-policy distillation: the teacher scores what the policy samples, which moves towards it (reverse KL)."""

    component: ClassVar[Component] = "ref_kl"

    type: Literal["opd"] = Field(default="opd", description="Kind of algorithm.")
    teacher: TeacherConfig | None = Field(default=None, description="The model to learn from.")


class SFT(Distillation):
    """Distillation off policy: the teacher samples, the policy learns its tokens by cross-entropy."""

    component: ClassVar[Component] = "ce"

    type: Literal["sft"] = Field(default="sft", description="Kind of algorithm.")


class OPSD(Algorithm):
    """On-policy self-distillation: the policy itself, shown a demonstration of the task, scores what it samples without."""

    component: ClassVar[Component] = "ref_kl"

    type: Literal["opsd"] = Field(default="opsd", description="Kind of algorithm.")
    demonstration: str = Field(default="answer", min_length=1, description="Field of a task that demonstrates it.")
    template: str = Field(
        default="A correct answer to what follows is:\n{demonstration}\nAnswer in your own words.",
        description="System message that shows it, {demonstration} in it.",
    )

    @model_validator(mode="after")
    def _shows_it(self) -> Self:
        if "{demonstration}" not in self.template:
            raise Problem("template has no {demonstration} in it", "template")
        return self


class Echo(ByReward):
    """GRPO, and cross-entropy on what the environment says after the policy's first reply: it learns to foresee it."""

    compares: ClassVar[bool] = True

    type: Literal["echo"] = Field(default="echo", description="Kind of algorithm.")
    std_normalize: bool = Field(default=False, description="Divide by the standard deviation of the group.")
    weights: dict[str, float] = Field(
        default_factory=lambda: {"tool": 0.1}, description="Weight of tokens by the role of their message."
    )

    @model_validator(mode="after")
    def _roles_are_known(self) -> Self:
        known = ("system", "user", "assistant", "tool")
        if unknown := sorted(self.weights.keys() - set(known)):
            raise Problem(f"weights: no message has the role {unknown[0]!r} (roles: {', '.join(known)})", "weights")
        if negative := [role for role, weight in self.weights.items() if weight < 0]:
            raise Problem(f"weights: {negative[0]} is below zero", "weights")
        return self


RewardAlgorithm = GRPO | Echo | RLOO | OPO | MaxRL | ReinforcePP | RAE | GDPO | CustomAlgorithm
AlgorithmConfig = RewardAlgorithm | OPD | OPSD | SFT
