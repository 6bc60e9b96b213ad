"""Settings of the orchestrator."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.algorithms import GRPO, AlgorithmConfig, TeacherConfig
from prime_rl.config.base import BaseConfig, Problem, check
from prime_rl.config.filters import CurriculumConfig, FilterConfig
from prime_rl.config.shared import (
    CkptConfig,
    ClientConfig,
    EnvConfig,
    Environments,
    Examples,
    Fraction,
    ModelConfig,
    MonitorConfig,
    SamplingConfig,
    SamplingOverride,
    nothing_to_clean,
)
from prime_rl.config.trainer import resume_within


class TrainingEnv(EnvConfig):
    """An environment that is trained on."""

    algorithm: AlgorithmConfig | None = Field(
        default=None, discriminator="type", description="Algorithm of this environment alone (None: the one of all)."
    )
    filters: FilterConfig | None = Field(default=None, description="Filters of this environment alone.")
    curriculum: CurriculumConfig | None = Field(default=None, description="Difficulty pools of this environment alone.")


class EvalSection(Environments[EnvConfig]):
    """Evaluation during the run. Without environments of its own: the training ones with their argument `split` set to "eval"."""

    num_examples: Examples = Field(default=-1, description="Tasks per environment (-1: all).")
    rollouts_per_example: PositiveInt = Field(default=1, description="Attempts at one task.")
    interval: PositiveInt | None = Field(
        default=None, description="Steps between two evaluations (None: none in between)."
    )
    at_start: bool = Field(default=True, description="Evaluate the base model first.")
    at_end: bool = Field(default=True, description="Evaluate the final weights.")
    sampling: SamplingOverride = Field(
        default_factory=SamplingOverride, description="Sampling settings that differ from those of training."
    )


class OrchestratorConfig(BaseConfig, Environments[TrainingEnv]):
    """The orchestrator: makes rollouts, scores them, cuts batches."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    client: ClientConfig = Field(default_factory=ClientConfig, description="The inference server to talk to.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How tokens are sampled.")
    batch_size: PositiveInt = Field(default=128, description="Rollouts per step.")
    rollouts_per_example: PositiveInt = Field(default=16, description="Attempts at one task; divides batch_size.")
    seq_len: PositiveInt = Field(default=2048, description="Most tokens of one sample.")
    max_steps: PositiveInt | None = Field(default=None, description="Steps to run (None: until stopped).")
    async_level: NonNegativeInt = Field(default=1, description="Steps that sampling may run ahead of training.")
    max_off_policy_steps: NonNegativeInt = Field(
        default=8, description="Most steps between the oldest token of a sample and the step that trains on it."
    )
    max_concurrent: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="Most episodes in flight (None: batch_size x (async_level + 1); auto: up to that, as the servers take them).",
    )
    renderer: str = Field(default="auto", description="Renderer of chats: auto, default, a name, or an import path.")
    algorithm: AlgorithmConfig = Field(
        default_factory=GRPO, discriminator="type", description="What an episode is worth, compared with others."
    )
    reference: TeacherConfig | None = Field(
        default=None, description="A reference model that scores what is trained by reward, for trainer.loss.kl_coef."
    )
    filter_zero_advantage: bool = Field(default=True, description="Leave out samples whose advantage is exactly zero.")
    filters: FilterConfig = Field(default_factory=FilterConfig, description="What else is left out of training.")
    curriculum: CurriculumConfig | None = Field(
        default=None, description="Draw tasks by how hard they are (None: all alike, one epoch after the other)."
    )
    max_error_rate: Fraction = Field(default=0.5, description="Share of failed episodes beyond which the run stops.")
    rollout_timeout: PositiveFloat = Field(default=300.0, description="Seconds that one episode may take.")
    weights_timeout: PositiveFloat = Field(default=3600.0, description="Seconds to wait for a version of the weights.")
    trainer: bool = Field(
        default=True,
        description="A trainer takes part (false: all batches come from the servers' base model; `rl` starts one anyway).",
    )
    canary: bool = Field(
        default=True,
        description="Check after every load that a server computes what the trainer computed (see also weights.canary).",
    )
    recover: bool = Field(
        default=False,
        json_schema_extra={"one_time": True},
        description="Go on from what is committed in output_dir: batches, finished episodes, the trainer's present life.",
    )
    clean: bool = Field(
        default=False,
        json_schema_extra={"one_time": True},
        description="Remove what an earlier run left in output_dir first, unless another process of this run is up already.",
    )
    eval: EvalSection | None = Field(default=None, description="Evaluation during the run.")
    ckpt: CkptConfig | None = Field(default=None, description="Checkpoints of the full training state.")
    monitor: MonitorConfig = Field(
        default_factory=MonitorConfig, description="Where metrics go, beside metrics/*.jsonl."
    )
    bench: bool = Field(
        default=False,
        description="Make rollouts for a few steps without a trainer and print throughput. Writes to output_dir/bench.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check(
            None if self.environments else Problem("no environment: give [environment] with an `id`", "environment"),
            self._whole_groups(),
            *(self._can_compare(algorithm, key) for algorithm, key in self.algorithms()),
            self._off_policy_bound(),
            self._reply_fits(),
            *(self._can_be_trained(sampling, key) for sampling, key in self._training_sampling()),
            *(self._can_be_scored(env) for env in self.environments),
            *(self._filters_have_an_effect(filters, key) for filters, key in self.all_filters()),
            resume_within(self.max_steps, self.ckpt),
            nothing_to_clean(self.clean, self.recover, self.ckpt),
        )
        return self

    def _whole_groups(self) -> Problem | None:
        if self.batch_size % self.rollouts_per_example == 0:
            return None
        message = f"rollouts_per_example {self.rollouts_per_example} does not divide batch_size {self.batch_size}"
        return Problem(message, "rollouts_per_example", "batch_size")

    def algorithm_of(self, env: str) -> AlgorithmConfig:
        """The algorithm of the environment of that name."""
        return self._named(env).algorithm or self.algorithm

    def algorithm_key(self, env: str) -> str:
        """The setting that `algorithm_of` gives."""
        return f"environments.{env}.algorithm" if self._named(env).algorithm else "algorithm"

    def filters_of(self, env: str) -> FilterConfig:
        """The filters of the environment of that name."""
        return self._named(env).filters or self.filters

    def curriculum_of(self, env: str) -> CurriculumConfig | None:
        """The difficulty pools of the environment of that name."""
        return self._named(env).curriculum or self.curriculum

    def _named(self, name: str) -> TrainingEnv:
        return next(env for env in self.environments if env.name == name)

    def all_filters(self) -> list[tuple[FilterConfig, str]]:
        """Those in use, each with its key."""
        own = [(env.filters, f"environments.{env.name}.filters") for env in self.environments if env.filters]
        return [*([(self.filters, "filters")] if len(own) < len(self.environments) else []), *own]

    def algorithms(self) -> list[tuple[AlgorithmConfig, str]]:
        """Those in use, each with its key."""
        own = [(env.algorithm, self.algorithm_key(env.name)) for env in self.environments if env.algorithm]
        used = [(self.algorithm, "algorithm")] if len(own) < len(self.environments) else []
        return [*used, *own]

    def _can_compare(self, algorithm: AlgorithmConfig, key: str) -> Problem | None:
        if algorithm.type == "reinforce_pp" and self.batch_size == 1:
            message = "reinforce_pp compares the episodes of a batch: with batch_size 1 every advantage would be zero"
            return Problem(message, f"{key}.type", "batch_size")
        if self.rollouts_per_example > 1 or not algorithm.group_relative:
            return None
        message = (
            f"{algorithm.type} compares attempts at one task: with rollouts_per_example 1 every advantage would be zero"
        )
        return Problem(message, f"{key}.type", "rollouts_per_example")

    def _off_policy_bound(self) -> Problem | None:
        if self.max_off_policy_steps >= self.async_level:
            return None
        message = f"max_off_policy_steps {self.max_off_policy_steps} is below async_level {self.async_level}"
        return Problem(message, "max_off_policy_steps", "async_level")

    def _training_sampling(self) -> list[tuple[SamplingConfig, str]]:
        own = [
            (env.sampling.over(self.sampling), f"environments.{env.name}.sampling")
            for env in self.environments
            if env.sampling
        ]
        return [(self.sampling, "sampling"), *own]

    def _can_be_trained(self, sampling: SamplingConfig, key: str) -> Problem | None:
        if sampling.temperature > 0:
            return None
        message = "temperature 0 samples greedily: there is no distribution to train on (evaluations may use it)"
        return Problem(message, f"{key}.temperature")

    def _filters_have_an_effect(self, filters: FilterConfig, key: str) -> Problem | None:
        its = [self.algorithm_of(env.name) for env in self.environments if self.filters_of(env.name) is filters]
        if filters.dynamic_sampling and not any(one.group_relative or one.type == "custom" for one in its):
            kinds = ", ".join(sorted({one.type for one in its}))
            message = (
                f"dynamic_sampling has no effect: {kinds} compares no attempts, so that no group is without signal"
            )
            return Problem(message, f"{key}.dynamic_sampling")
        rule = filters.off_policy
        if rule is not None and rule.max_steps < self.async_level:
            message = (
                f"off_policy.max_steps {rule.max_steps} is below async_level {self.async_level}: nothing would be left"
            )
            return Problem(message, f"{key}.off_policy.max_steps", "async_level")
        if rule is not None and rule.max_steps >= self.max_off_policy_steps:
            message = f"off_policy has no effect: max_off_policy_steps {self.max_off_policy_steps} drops the same"
            return Problem(message, f"{key}.off_policy.max_steps", "max_off_policy_steps")
        return None

    def _can_be_scored(self, env: TrainingEnv) -> Problem | None:
        algorithm = self.algorithm_of(env.name)
        scored = algorithm.component == "ref_kl" or (algorithm.component == "rl" and self.reference is not None)
        sampling = env.sampling.over(self.sampling) if env.sampling else self.sampling
        if not scored or sampling.temperature == 1.0:
            return None
        who = "a teacher" if algorithm.component == "ref_kl" else "the reference"
        key = "sampling" if env.sampling is None else f"environments.{env.name}.sampling"
        message = f"{who} tells log-probabilities of temperature 1, and {env.name} is sampled at {sampling.temperature}"
        return Problem(message, f"{key}.temperature")

    def _reply_fits(self) -> Problem | None:
        longest = self.sampling.max_tokens
        if longest is None or longest < self.seq_len:
            return None
        message = f"sampling.max_tokens {longest} leaves no room for a prompt within seq_len {self.seq_len}"
        return Problem(message, "sampling.max_tokens", "seq_len")
