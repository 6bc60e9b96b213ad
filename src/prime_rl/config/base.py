"""Base classes of all configuration: sections, settings common to all entrypoints, and contradictions of settings."""

import difflib
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, cast, get_args, get_origin

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from prime_rl.errors import user_errors

Keys = tuple[str, ...]
_KEY = r"<([a-z][\w.]*)>"


class Problem:
    """A contradiction between settings: "<low> 3 is above <high> 2". `keys` and names in angle brackets are dotted,
    relative to the section that raises it. The parser adds where each of them was set."""

    def __init__(self, message: str, *keys: str) -> None:
        self.message = re.sub(_KEY, r"\1", message)
        self.keys = tuple(dict.fromkeys([*re.findall(_KEY, message), *keys]))


class Problems(ValueError):
    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def check(*results: Problem | None) -> None:
    if problems := [problem for problem in results if problem is not None]:
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
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


Checks = Iterator[Problem | None]


def conflict(contradicts: object, message: str, *keys: str) -> Problem | None:
    return Problem(message, *keys) if contradicts else None


class Section(BaseModel):
    """A table of settings. Unknown keys are errors; a union without `type` is of the type of its default."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    def checks(self) -> Checks:
        """Complete the section's settings, and yield what contradicts among them. Called once for each class that the
        section derives from, bases first: no call of `super()`."""
        yield None

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these settings, by dotted key. They are not checked."""
        copy = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            inner = getattr(copy, name).with_values({rest: value}) if rest else value
            copy = copy.model_copy(update={name: inner})
        return copy

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


# Settings: every path below a configuration class


class Setting(NamedTuple):
    """A path that can be set: a field of the section `owner`, or an item of a list, whose number is "N" in `keys`.
    `kinds` are its types (`Any` within a dict); `tag` is the `type` of the innermost union around it."""

    keys: Keys
    field: FieldInfo
    owner: type[Section]
    tag: str
    kinds: tuple[Any, ...]

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """Those of its types that are sections, several in a union."""
        return tuple(kind for kind in self.kinds if isinstance(kind, type) and issubclass(kind, Section))

    def takes(self, *kinds: Any) -> bool:
        """Whether one of its types is one of these, or a list or dict of anything."""
        return any(kind in (declared, get_origin(declared)) for declared in self.kinds for kind in kinds)


@cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Every path below `root` in the order of declaration; one that several members of a union have comes from each."""
    paths = _paths((), FieldInfo(), root, "", root)
    return tuple({(one.keys, one.owner, one.tag): one for one in paths if one.keys}.values())


def _paths(keys: Keys, field: FieldInfo, owner: type[Section], tag: str, annotation: Any) -> Iterator[Setting]:
    """Yield the setting, what is in it, and the items of a list of sections."""
    yield (setting := Setting(keys, field, owner, tag, tuple(_alternatives(annotation))))
    for section in setting.sections:
        own_tag = str(section.model_fields["type"].default) if len(setting.sections) > 1 else tag
        for name, inner in sorted(section.model_fields.items(), key=lambda item: item[0] != "type"):
            yield from _paths((*keys, name), inner, section, own_tag, inner.annotation)
    for item in [get_args(kind)[0] for kind in setting.kinds if get_origin(kind) is list]:
        if isinstance(item, type) and issubclass(item, Section):
            yield from _paths((*keys, "N"), field, owner, tag, item)


def _alternatives(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) not in (Annotated, Union, UnionType):
        yield annotation
        return
    inner = get_args(annotation)
    for kind in inner[:1] if get_origin(annotation) is Annotated else inner:
        yield from _alternatives(kind)


def find(root: type[Section], keys: Keys) -> Setting | None:
    """The setting of these keys, None where there is none. In a union any member may have it."""
    path, around = generic(keys), None
    for setting in settings(root):
        if setting.keys == path:
            return setting
        if setting.takes(dict) and setting.keys == path[: len(setting.keys)]:
            around = around or setting._replace(kinds=(Any,))
    return around


def nearest(root: type[Section], keys: Keys) -> Keys | None:
    """The setting that `keys` probably meant: the same elsewhere, one so described, an abbreviated or a similar one."""
    start = next(length for length in range(len(keys)) if find(root, keys[: length + 1]) is None)
    single = [setting for setting in settings(root) if "N" not in setting.keys]
    rest = (keys[start].removeprefix("no_"), *keys[start + 1 :])
    word, described = "_".join(rest), f"{' '.join(rest).replace('_', ' ').capitalize()}."
    same = [setting.keys for setting in single if setting.keys[-len(rest) :] == rest]
    if same := same or [setting.keys for setting in single if setting.field.description == described]:
        return min(same, key=lambda path: (-len({*path} & {*keys}), len(path)))
    below = [one.keys[start:] for one in settings(root) if one.keys[:start] == generic(keys[:start])]
    names = {"_".join(path): path for path in below if "N" not in path}
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in names}
    longer = [name for name in names if name.startswith(word) or initials[name].startswith(word)] if word[1:] else []
    close = sorted(longer, key=len) or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return (*keys[:start], *names[close[0]]) if close else None


def is_index(key: str) -> bool:
    """Whether a key is the number of an item of a list."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None


def generic(keys: Keys) -> Keys:
    """`keys` with "N" for the number of an item."""
    return tuple("N" if is_index(key) else key for key in keys)


# Resolved configurations as TOML that, fed back with `@`, gives an equal configuration


def to_toml(config: BaseConfig) -> str:
    """Return every setting of `config`; null is the string "None".

    Secrets are written as "None": they travel by environment variable. What is meant for one start alone (dry_run,
    clean) is left out: a configuration fed back is to run.
    """
    return tomli_w.dumps(_plain(config))


def write_toml(config: BaseConfig, path: Path) -> None:
    """Write `to_toml(config)` to `path`, whole or not at all, and make its directory. Raises UserError."""
    staged = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")  # hosts may share the directory
    with user_errors(f"cannot write {path}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.write_text(to_toml(config), encoding="utf-8")
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)


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
