"""Resolved configurations as TOML that, fed back with `@`, gives an equal configuration."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from prime_rl.config.base import BaseConfig
from prime_rl.config.schema import has_mark
from prime_rl.errors import UserError


def to_toml(config: BaseConfig) -> str:
    """Every setting of `config`; null is the string "None".

    Secrets are written as "None": they travel by environment variable. What is meant for one start alone (dry_run,
    clean) is left out: a configuration fed back is to run.
    """
    return tomli_w.dumps(config.as_given(_table(config)))


def write_toml(config: BaseConfig, path: Path) -> None:
    """Write `to_toml(config)` to `path`, whole or not at all, and make its directory.

    Raises:
        UserError: the place cannot be written to.
    """
    staged = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(to_toml(config), encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _table(section: BaseModel) -> dict[str, Any]:
    fields = type(section).model_fields
    written = {name: value for name, value in section if not has_mark(fields[name], "one_time")}
    return {name: "None" if has_mark(fields[name], "secret") else _plain(value) for name, value in written.items()}


def _plain(value: Any) -> Any:
    if value is None:
        return "None"
    if isinstance(value, BaseModel):
        return _table(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
