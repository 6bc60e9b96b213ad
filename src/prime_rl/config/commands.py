"""Settings of the small commands: `rl init`, `rl view` and `prime-merge`."""

from pathlib import Path

from pydantic import Field, NonNegativeInt

from prime_rl.config.base import BaseConfig, option
from prime_rl.config.inference import Port
from prime_rl.config.shared import Device, ModelConfig
from prime_rl.config.trainer import ExportConfig


class StarterConfig(BaseConfig):
    """Write a commented configuration file for `rl`. Asks for what is not given, where there is a terminal"""

    environment: str | None = option(None, "Id of the environment (None: ask, else reverse-text).")
    model: str | None = option(None, "Hub name or directory of the model (None: ask, else a small one).")
    gpus: NonNegativeInt | None = option(None, "GPUs to use (None: ask, else those of this host).")
    file: Path = option(Path("rl.toml"), "The file to write.")


class ViewConfig(BaseConfig):
    """Show runs on a web page, running or finished, from their files: `rl view RUN [RUN…]` (default: `output_dir`)"""

    runs: list[Path] = option(list, "Run directories; a deployment's tenants are shown, too (also without --runs).")
    host: str = option("127.0.0.1", "Address to listen on. Any but loopback asks for a token, which is printed.")
    port: Port | None = option(None, "Port to listen on (None: a free one from 8800 on).")
    export: Path | None = option(None, "Write the page into this file, with its data, and end.")


class MergeConfig(BaseConfig):
    """Merge an adapter into its model: a directory with full weights, whose log-probabilities are checked"""

    model: ModelConfig = option(ModelConfig, "The base model.")
    adapter: Path = Field(description="Directory of the adapter, in PEFT's format.")
    device: Device = option("cpu", "Where to add up and check (auto: CUDA where there is a GPU).")
    weights: ExportConfig = option(ExportConfig, "The merged weights.")
