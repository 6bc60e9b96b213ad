"""JSON schemas of the configs, with which editors complete and check TOML files (`#:schema` in a file's first line)."""

import json
from pathlib import Path
from typing import Any

from prime_rl.config.base import BaseConfig
from prime_rl.config.eval import EvalConfig
from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.rl import DeploymentConfig, RLConfig
from prime_rl.config.sft import SFTConfig
from prime_rl.config.trainer import TrainerConfig

CONFIGS: dict[str, type[BaseConfig]] = {
    "rl": RLConfig,
    "tenants": DeploymentConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceCommandConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
}
_INCLUDE = {"description": "Files that are read before this one, by paths relative to it.", "type": ["string", "array"]}


def write_schemas(directory: Path) -> list[Path]:
    """Write a schema for each command, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{command}.json" for command in CONFIGS]
    for path, cls in zip(paths, CONFIGS.values(), strict=True):
        path.write_text(json.dumps(schema(cls), indent=1) + "\n")
    return paths


def schema(cls: type[BaseConfig]) -> dict[str, Any]:
    """Return the schema of what a file may say. Nothing is required: other files and options may supply it."""
    tree = _plain(cls.model_json_schema())
    tree["properties"]["include"] = _INCLUDE
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree}


def _plain(node: Any) -> Any:
    """Leave out titles and what is required, and let several variants fit: a file may leave the `type` of one out."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            plain[key] = {name: _plain(each) for name, each in value.items()}
        elif key not in ("required", "title", "discriminator"):
            plain["anyOf" if key == "oneOf" else key] = _plain(value)
    return plain
