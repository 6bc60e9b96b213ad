"""One configuration system for every entrypoint. Imports neither torch nor any other heavy package."""

from prime_rl.config.base import BaseConfig, to_toml, write_toml
from prime_rl.config.eval import EvalConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.loader import ConfigError, child_env, load, parse
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.rl import RLConfig
from prime_rl.config.sft import SFTConfig
from prime_rl.config.trainer import TrainerConfig

__all__ = [
    "BaseConfig",
    "ConfigError",
    "EvalConfig",
    "InferenceConfig",
    "OrchestratorConfig",
    "RLConfig",
    "SFTConfig",
    "TrainerConfig",
    "child_env",
    "load",
    "parse",
    "to_toml",
    "write_toml",
]
