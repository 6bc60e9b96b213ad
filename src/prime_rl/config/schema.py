"""The paths of settings that the configuration classes declare, each with the field it names, and how a path is spelled."""

import difflib
import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from prime_rl.config.base import Section

Keys = tuple[str, ...]
Kind = Literal["option", "file", "variable"]

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")


class ConfigError(Exception):
    """One or more mistakes in a configuration, each a readable line in `problems`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def is_index(key: str) -> bool:
    """Whether a key is the number of an item of a list."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


def generic(keys: Keys) -> Keys:
    """`keys` with "N" for the number of an item."""
    return tuple("N" if is_index(key) else key for key in keys)


def in_section(keys: Keys) -> Keys:
    """`keys` of `rl` as the process has them that they are meant for."""
    return keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys


class Setting(NamedTuple):
    """A path that can be given: a field of the section `owner`, or an item of a list, whose number is "N" in `keys`.

    `kinds` are its types without None (`Any` within a dict); `sections` are those of them that are sections, several in
    a union, and `choices` the words of a Literal. `tag` is the `type` of the innermost union around it.
    """

    keys: Keys
    field: FieldInfo
    owner: type[Section]
    tag: str
    kinds: tuple[Any, ...]
    sections: tuple[type[Section], ...]
    choices: tuple[str, ...]
    nullable: bool

    def takes(self, *kinds: type) -> bool:
        """Whether one of its types is one of these, or a list or dict of anything."""
        return any(kind in (declared, get_origin(declared)) for declared in self.kinds for kind in kinds)


def type_tag(section: type[Section]) -> str:
    """The value of `type` that chooses `section` in a union."""
    return str(section.model_fields["type"].default)


@cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Every path below `root` in the order of declaration; one that several members of a union have comes from each."""
    return tuple(_fields(root, (), ""))


@cache
def by_path(root: type[Section]) -> dict[Keys, list[Setting]]:
    """`settings(root)`, by path."""
    table: dict[Keys, list[Setting]] = {}
    for setting in settings(root):
        table.setdefault(setting.keys, []).append(setting)
    return table


def _fields(section: type[Section], path: Keys, tag: str) -> Iterator[Setting]:
    for name, field in sorted(section.model_fields.items(), key=lambda field: field[0] != "type"):
        yield from _paths((*path, name), field, section, tag, field.annotation)


def _paths(keys: Keys, field: FieldInfo, owner: type[Section], tag: str, annotation: Any) -> Iterator[Setting]:
    """Yield the setting, what is in it, and the items of a list of sections."""
    types_and_none = list(_alternatives(annotation))
    kinds = tuple(kind for kind in types_and_none if kind is not type(None))
    sections = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    choices = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    yield Setting(keys, field, owner, tag, kinds, sections, choices, nullable=type(None) in types_and_none)
    for section in sections:
        yield from _fields(section, keys, type_tag(section) if len(sections) > 1 else tag)
    for item in [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]:
        if isinstance(item, type) and issubclass(item, Section):
            yield from _paths((*keys, "N"), field, owner, tag, item)


def _alternatives(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        inner = get_args(annotation)
        for kind in inner[:1] if get_origin(annotation) is Annotated else inner:
            yield from _alternatives(kind)
    else:
        yield annotation


def find(root: type[Section], keys: Keys) -> Setting | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    table, path = by_path(root), generic(keys)
    if path in table:
        return table[path][0]
    around = [setting for length in range(len(path)) for setting in table.get(path[:length], ()) if setting.takes(dict)]
    return around[0]._replace(kinds=(Any,), nullable=False) if around else None


def nearest(root: type[Section], keys: Keys) -> Keys | None:
    """The setting that `keys` probably meant: the same elsewhere, an abbreviated or described one, or one of similar name."""
    start = next(length for length in range(len(keys)) if find(root, keys[: length + 1]) is None)
    rest = (keys[start].removeprefix("no_"), *keys[start + 1 :])
    same = [path for path in by_path(root) if path[-len(rest) :] == rest and "N" not in path]
    word, parent = "_".join(rest), generic(keys[:start])
    described = f"{word.replace('_', ' ').capitalize()}."
    same = same or [path for path, (setting, *_) in by_path(root).items() if setting.field.description == described]
    if same:
        return min(same, key=lambda path: (-len({*path} & {*keys}), len(path)))
    names = {
        "_".join(path[start:]): path for path in by_path(root) if path[:start] == parent and "N" not in path[start:]
    }
    longer = [
        name
        for name in names
        if len(word) > 1 and (name.startswith(word) or "".join(part[:1] for part in name.split("_")).startswith(word))
    ]
    close = sorted(longer, key=len) or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return (*keys[:start], *names[close[0]][start:]) if close else None
