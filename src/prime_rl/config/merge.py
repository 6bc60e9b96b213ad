"""Settings of `prime-merge`."""

from pathlib import Path

from pydantic import Field

from prime_rl.config.base import BaseConfig, option
from prime_rl.config.shared import Device, ModelConfig
from prime_rl.config.trainer import ExportConfig


class MergeConfig(BaseConfig):
    """Merge an adapter into its model: a directory with full weights, whose log-probabilities are checked"""

    model: ModelConfig = option(ModelConfig, "The base model.")
    adapter: Path = Field(description="Directory of the adapter, in PEFT's format.")
    device: Device = option("cpu", "Where to add up and check (auto: CUDA where there is a GPU).")
    weights: ExportConfig = option(ExportConfig, "The merged weights.")
