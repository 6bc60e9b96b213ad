"""What every configuration class is made of: sections, the settings common to all entrypoints, and how they contradict."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from prime_rl.errors import UserError

_KEY = r"<([a-z][\w.]*)>"


class Problem:
    """A contradiction between settings: "<low> 3 is above <high> 2".

    What is in angle brackets, and `keys`, are dotted names, relative to the section that raises it. The parser adds where
    each of them came from.
    """

    def __init__(self, message: str, *keys: str) -> None:
        self.message = re.sub(_KEY, r"\1", message)
        self.keys = tuple(dict.fromkeys([*re.findall(_KEY, message), *keys]))


class Problems(ValueError):
    """Contradictions found by one validator."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def check(*results: Problem | None) -> None:
    """Raise the problems among `results`, all of them together."""
    problems = [problem for problem in results if problem is not None]
    if problems:
        raise Problems(problems)


def option(default: Any, description: str, mark: str = "", **constraints: Any) -> Any:
    """Declare a setting of a section.

    `default` may be what makes it (a class, `list`); `constraints` are those of pydantic's Field. `mark` "secret" is
    neither shown nor written; "one_time" is meant for one start alone and left out of written configurations.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    extra: Any = {mark: True} if mark else None
    return Field(**made, description=description, json_schema_extra=extra, repr=mark != "secret", **constraints)


def has_mark(field: FieldInfo, mark: str) -> bool:
    """Whether the field is declared with this `mark`."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


Checks = Iterator[Problem | None]


def conflict(contradicts: object, message: str, *keys: str) -> Problem | None:
    """A problem if `contradicts`, for `check`."""
    return Problem(message, *keys) if contradicts else None


class Section(BaseModel):
    """A table of settings. Unknown keys are errors; a union without `type` is of the type of its default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    def checks(self) -> Checks:
        """Complete the section's settings, and yield what contradicts among them.

        Called once for each class that the section derives from, bases first: no call of `super()`.
        """
        yield None

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = [kind for kind in reversed(type(self).__mro__) if "checks" in vars(kind)]
        check(*(problem for kind in kinds for problem in cast(type[Section], kind).checks(self)))
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_types(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        for name, field in cls.model_fields.items():
            value = filled.get(name)
            if isinstance(value, dict) and "type" not in value and (tag := default_type(field)) is not None:
                filled[name] = {"type": tag, **value}
        return filled


def default_type(field: FieldInfo) -> str | None:
    """The `type` that a union of sections has when none is given, None where the field is no such union."""
    if field.discriminator != "type" or field.default_factory is None:
        return None
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    return str(default.type)


class LogConfig(Section):
    """Console and log file."""

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lambda word: str(word).lower())] = (
        option("info", "Least severe messages shown.")
    )


class BaseConfig(Section):
    """Settings of every entrypoint."""

    output_dir: Path = option(Path("outputs"), "Directory of the run; everything durable is written below it.")
    seed: int = option(0, "Seed of everything random but the servers' sampling (sampling.seeded).", ge=0, lt=2**63)
    dry_run: bool = option(False, "Validate, print the plan, write resolved configs, start nothing.", mark="one_time")
    log: LogConfig = option(LogConfig, "Console and log file.")

    @staticmethod
    def share(table: Any) -> None:
        """Fill settings that several sections have in common into each of them. Raises Problems."""


# Resolved configurations as TOML that, fed back with `@`, gives an equal configuration


def to_toml(config: BaseConfig) -> str:
    """Return every setting of `config`; null is the string "None".

    Secrets are written as "None": they travel by environment variable. What is meant for one start alone (dry_run,
    clean) is left out: a configuration fed back is to run.
    """
    return tomli_w.dumps(_plain(config))


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


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        written = {name: item for name, item in value if not has_mark(fields[name], "one_time")}
        return {name: "None" if has_mark(fields[name], "secret") else _plain(item) for name, item in written.items()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "None" if value is None else str(value) if isinstance(value, Path) else value
