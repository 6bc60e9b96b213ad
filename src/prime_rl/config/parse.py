"""From command line, files and environment variables to a validated configuration."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from prime_rl.config.base import BaseConfig, ConfigError

Config = TypeVar("Config", bound=BaseConfig)


def parse(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """The configuration that `argv` and `env` describe. Raises ConfigError."""
    tree: dict[str, Any] = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token == "@":
            tree.update(tomllib.loads(Path(tokens.pop(0)).read_text()))
    try:
        return cls.model_validate(_nulls(tree))
    except ValidationError as error:
        raise ConfigError([str(error)]) from error


def _nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if value == "None" else value


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """The configuration of this process; prints help (status 0) or errors (status 2) and exits where there is none."""
    import os

    try:
        return parse(cls, sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
