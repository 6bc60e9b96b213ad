"""What the server tells its plugin: in an environment variable, since vLLM makes the plugin itself, without arguments."""

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

PLUGIN = "prime_rl"  # the entry point's name in pyproject.toml
_ENV = "PRIMERL_SERVER"


@dataclass(frozen=True)
class Settings:
    """`loopback`: only this machine reaches the server, so that a request may name any local directory."""

    output_dir: Path
    weights_root: Path | None
    loopback: bool
    stage_weights: bool = True

    def export(self) -> None:
        os.environ[_ENV] = TypeAdapter(Settings).dump_json(self).decode()


def exported_settings() -> Settings:
    """What the server that started this process exported."""
    return TypeAdapter(Settings).validate_json(os.environ[_ENV])
