"""Settings of evaluations against a running server."""

from typing import ClassVar, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from prime_rl.config.base import BaseConfig, Older, Problem
from prime_rl.config.shared import (
    ClientConfig,
    EnvConfig,
    Environments,
    ModelConfig,
    MonitorConfig,
    SamplingConfig,
    unique_names,
)


class EvalConfig(BaseConfig, Environments[EnvConfig]):
    """Evaluation of a model that a server holds."""

    older: ClassVar[dict[str, Older]] = {
        **BaseConfig.older,
        "benchmarks": Older("environment_ids", lambda names: str(names).replace(",", " ").split()),
    }

    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    client: ClientConfig = Field(default_factory=ClientConfig, description="The inference server to talk to.")
    environment_ids: list[str] = Field(
        default_factory=list, description="Environments to evaluate, in short: ids only."
    )
    num_examples: int = Field(default=-1, ge=-1, description="Tasks per environment (-1: all).")
    rollouts_per_example: PositiveInt = Field(default=1, description="Attempts at one task.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How tokens are sampled.")
    seq_len: PositiveInt = Field(default=2048, description="Most tokens of prompt and reply.")
    max_concurrent: PositiveInt = Field(default=64, description="Most episodes in flight.")
    rollout_timeout: PositiveFloat = Field(default=300.0, description="Seconds that one episode may take.")
    renderer: str = Field(default="auto", description="Renderer of chats: auto, default, a name, or an import path.")
    monitor: MonitorConfig = Field(
        default_factory=MonitorConfig, description="Where metrics go, beside metrics/*.jsonl."
    )

    @model_validator(mode="after")
    def _add_ids(self) -> Self:
        self.environments = [*self.environments, *(EnvConfig(id=name) for name in self.environment_ids)]
        self.environment_ids = []
        if not self.environments:
            raise Problem("no environment: give --environment-ids or [[environments]]", "environment_ids")
        unique_names(self.environments)
        return self
