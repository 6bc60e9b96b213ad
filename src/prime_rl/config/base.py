"""What every configuration class is made of: sections, the settings common to all entrypoints, and how they contradict."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from prime_rl.config.layers import LayeredTable

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


def _lower_case(word: Any) -> Any:
    return word.lower() if isinstance(word, str) else word


LOADED = {"loaded": True}
"""Context of a validation of what the loader read: it shares settings between sections itself."""


class LogConfig(Section):
    """Console and log file."""

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower_case)] = option(
        "info", "Least severe messages shown."
    )


class BaseConfig(Section):
    """Settings of every entrypoint."""

    output_dir: Path = option(Path("outputs"), "Directory of the run; everything durable is written below it.")
    seed: int = option(0, "Seed of everything random in the run.", ge=0, lt=2**63)
    dry_run: bool = option(False, "Validate, print the plan, write resolved configs, start nothing.", mark="one_time")
    log: LogConfig = option(LogConfig, "Console and log file.")

    @staticmethod
    def share(table: LayeredTable) -> None:
        """Fill settings that several sections have in common into each of them. Raises Problems."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or info.context == LOADED or cls.share is BaseConfig.share:
            return data
        table = LayeredTable(
            {  # a section made in Python counts with what was set in it
                name: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
                for name, value in data.items()
            }
        )
        cls.share(table)
        return table.tree
