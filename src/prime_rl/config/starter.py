"""Settings of `rl init`."""

from pathlib import Path

from pydantic import NonNegativeInt

from prime_rl.config.base import BaseConfig, option


class StarterConfig(BaseConfig):
    """Write a commented configuration file for `rl`. Asks for what is not given, where there is a terminal"""

    environment: str | None = option(None, "Id of the environment (None: ask, else reverse-text).")
    model: str | None = option(None, "Hub name or directory of the model (None: ask, else a small one).")
    gpus: NonNegativeInt | None = option(None, "GPUs to use (None: ask, else those of this host).")
    file: Path = option(Path("rl.toml"), "The file to write.")
