"""What can be known to fail before anything is started. Cheap: imports no torch, no vLLM, no environment."""

import difflib
import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.config import OrchestratorConfig
from prime_rl.config.shared import ClientConfig, EnvConfig
from prime_rl.envs import ids, venv
from prime_rl.envs.adapter import CLASSIC
from prime_rl.errors import UserError
from prime_rl.importing import find_module, look_here
from prime_rl.inference import checks
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import read_header

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_model(name: str, *, weights: bool = True) -> None:
    """Raises UserError for a local directory that is missing or is no model. Hub names are looked up by the processes.

    Without `weights` (fake data, which takes random ones) the directory need not hold any, nor a tokenizer.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if _is_path(name):
            raise UserError(f"model directory {name} does not exist")
        return
    if not path.is_dir():
        raise UserError(f"model {name} is a file: give the directory that holds config.json")
    if not (path / "config.json").is_file():
        raise UserError(f"model directory {name} has no config.json")
    if "model_type" not in _json(path / "config.json"):
        raise UserError(f"{path / 'config.json'} describes no model: it has no model_type")
    if not weights:
        return
    if not any(path.glob("*.safetensors")):
        raise UserError(f"model directory {name} has no *.safetensors")
    for file in path.glob("*.safetensors"):
        try:
            read_header(file)
        except CommitError as error:
            raise UserError(str(error)) from error
    if not any((path / tokenizer).is_file() for tokenizer in _TOKENIZERS):
        raise UserError(f"model directory {name} has no tokenizer")
    for tokenizer in ("tokenizer.json", "tokenizer_config.json"):
        if (path / tokenizer).is_file():
            _json(path / tokenizer)


def check_chat_template(name: str) -> None:
    """Raises UserError for a local model whose tokenizer has no chat template."""
    path = Path(name).expanduser()
    if path.is_dir() and not checks.has_chat_template(path):
        raise UserError(f"the tokenizer in {name} has no chat template: add a chat_template.jinja")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def check_dataset(name: str) -> None:
    """Raises UserError for a local path that does not exist. Hub names are looked up when the data is loaded."""
    if not Path(name).expanduser().exists() and (_is_path(name) or name.endswith(_DATA_SUFFIXES)):
        raise UserError(f"data.name: {name} does not exist")


def check_environment(environment: EnvConfig) -> None:
    """Raises UserError when an environment is not installed, in the version that its id names, or what it is to run in is not there."""
    if environment.python is not None:  # installed elsewhere: its worker will tell
        if shutil.which(environment.python) is None:
            raise UserError(f"environment {environment.name}: no Python interpreter at {environment.python}")
        return
    if environment.requirements:
        venv.check(environment)
        return
    look_here()
    module = ids.module_name(environment.id)
    if ids.find(environment.id) is None and not _is_builtin_taskset(module):
        raise UserError(
            f"environment {environment.id} is not installed (no module {module}, nor a {module}.py here): "
            f"`uv run prime env install {environment.id}`, `uv add` its package, or name it in `requirements`{_near(environment.id)}"
        )
    kind = ids.kind_of(environment.id) if environment.adapter == "auto" else environment.adapter
    if kind == "classic":
        raise UserError(f"environment {environment.id} {CLASSIC}")
    try:
        ids.check_version(environment.id)
    except ids.WrongVersion as error:
        raise UserError(str(error)) from error


def _near(environment_id: str) -> str:
    """An installed environment that may have been meant."""
    near = difflib.get_close_matches(environment_id, ids.installed(), 1)
    return f"; did you mean {near[0]}?" if near else ""


def check_own_functions(config: OrchestratorConfig, key: str = "") -> None:
    """Raises UserError when the module of a function of the user's own, which a setting names, is not there. `key`: what its keys begin with."""
    for algorithm, name in config.algorithms():
        if algorithm.type == "custom":
            find_module(algorithm.path, f"{key}{name}.path")
    for filters, name in config.all_filters():
        if filters.custom is not None:
            find_module(filters.custom.path, f"{key}{name}.custom.path")


def check_key(client: ClientConfig) -> None:
    """A key that was asked for is there.

    Raises:
        UserError: the variable that was named is not set.
    """
    default = ClientConfig.model_fields["api_key_var"].default
    if client.api_key_var != default and not os.environ.get(client.api_key_var):
        raise UserError(f"client.api_key_var: the variable {client.api_key_var} is not set")


def check_port(host: str, port: int) -> None:
    """Raises UserError when the port is taken, or is another loading server's, before a server loads a model for a minute only to find out."""
    checks.check_port(host, port, "--inference.server.port")


def public_key(arguments: Sequence[str]) -> str | None:
    """A warning for a server's key that was given on the command line; None where there is none."""
    if any(argument.partition("=")[0].replace("_", "-") == "--inference.api-key" for argument in arguments):
        return (
            "warning: the key is on the command line, which every user of this machine can read: "
            "set PRIME_INFERENCE__API_KEY or VLLM_API_KEY instead"
        )
    return None


def _is_path(name: str) -> bool:
    parts = Path(name).parts
    return name.startswith(("/", ".", "~")) or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def _is_builtin_taskset(module: str) -> bool:
    """verifiers brings some of its own; looked for on disk, because importing verifiers takes seconds."""
    package = importlib.util.find_spec("verifiers")
    roots = [] if package is None else package.submodule_search_locations or []
    paths = [Path(root) / "v1" / "tasksets" / module for root in roots]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in paths)
