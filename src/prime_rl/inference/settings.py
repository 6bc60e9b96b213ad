"""What the server tells its plugin: in an environment variable, since vLLM makes the plugin itself, without arguments."""

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

PLUGIN = "prime_rl"  # the entry point's name in pyproject.toml
_ENV = "PRIMERL_SERVER"


@dataclass(frozen=True)
class Settings:
    """What the processes that answer have in common.

    Args:
        process: The server's name in the run.
        weights_root: Below it lie all weights that a request may name (None: any committed version that this host sees).
        server: Process id of the server, which the engine ends with.
        shared: Directory of the processes that answer where there are several, see `leader`; None for one.
        refuses_seeds: Whether a request with a seed would kill the engine, see `seeds`.
    """

    process: str
    output_dir: Path
    weights_root: Path | None
    weights_tmpfs: Path | None
    stage_weights: bool
    stage_on_device: bool
    servers_on_host: int
    server: int
    shared: Path | None
    refuses_seeds: bool

    def export(self) -> None:
        os.environ[_ENV] = TypeAdapter(Settings).dump_json(self).decode()


def shared_directory() -> Path | None:
    """Where the processes that answer meet; None where there is one, or no server at all."""
    return exported_settings().shared if _ENV in os.environ else None


def refuses_seeds() -> bool:
    """Whether requests with a seed are refused here."""
    return _ENV in os.environ and exported_settings().refuses_seeds


def exported_settings() -> Settings:
    """What the server that started this process exported."""
    return TypeAdapter(Settings).validate_json(os.environ[_ENV])
