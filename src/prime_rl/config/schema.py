"""What the configuration classes declare, as one flat table: each path that can be given, with the field it names."""

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from prime_rl.config.base import Section
from prime_rl.config.layers import Keys, is_index


@dataclass(frozen=True)
class Setting:
    """A path that can be given: a field of the section `owner`, or an item of a list, whose number is "N" in `keys`.

    `kinds` are its types without None; `Any` is that of a key within a dict. `tag` is the `type` of the innermost union around it.
    """

    keys: Keys
    field: FieldInfo
    owner: type[Section]
    tag: str
    kinds: tuple[Any, ...]
    nullable: bool

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """Those of the types that are sections: several for a union."""
        return tuple(kind for kind in self.kinds if isinstance(kind, type) and issubclass(kind, Section))

    @property
    def is_table(self) -> bool:
        return bool(self.sections) or self.takes(dict)

    def takes(self, kind: type) -> bool:
        """Whether one of its types is this one, or a list or dict of anything."""
        return any(kind in (one, get_origin(one)) for one in self.kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal allows."""
        return tuple(word for kind in self.kinds if get_origin(kind) is Literal for word in get_args(kind))


def has_mark(field: FieldInfo, mark: str) -> bool:
    """Whether the field is declared with this `mark`."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def type_tag(section: type[Section]) -> str:
    """The value of `type` that chooses `section` in a union."""
    return str(section.model_fields["type"].default)


@cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Every path below `root` in the order of declaration; one that several members of a union have comes from each."""
    return tuple(_fields(root, (), ""))


def _fields(section: type[Section], path: Keys, tag: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        yield from _paths((*path, name), field, section, tag, field.annotation)


def _paths(keys: Keys, field: FieldInfo, owner: type[Section], tag: str, annotation: Any) -> Iterator[Setting]:
    """Yield the setting, the items of a list of sections, and what is within."""
    alternatives = list(_alternatives(annotation))
    kinds = tuple(kind for kind in alternatives if kind is not type(None))
    setting = Setting(keys, field, owner, tag, kinds, nullable=len(kinds) < len(alternatives))
    yield setting
    for section in setting.sections:
        yield from _fields(section, keys, type_tag(section) if len(setting.sections) > 1 else tag)
    for item in [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]:
        if isinstance(item, type) and issubclass(item, Section):
            yield from _paths((*keys, "N"), field, owner, tag, item)


def _alternatives(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for kind in get_args(annotation):
            yield from _alternatives(kind)
    else:
        yield annotation


@cache
def _by_path(root: type[Section]) -> dict[Keys, list[Setting]]:
    table: dict[Keys, list[Setting]] = {}
    for setting in settings(root):
        table.setdefault(setting.keys, []).append(setting)
    return table


def _path(keys: Keys) -> Keys:
    return tuple("N" if is_index(key) else key for key in keys)


def find(root: type[Section], keys: Keys) -> Setting | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    table, path = _by_path(root), _path(keys)
    if path in table:
        return table[path][0]
    around = [setting for length in range(len(path)) for setting in table.get(path[:length], ()) if setting.takes(dict)]
    return replace(around[0], kinds=(Any,), nullable=False) if around else None


def types_with(root: type[Section], keys: Keys) -> list[str]:
    """The `type`s of a union that have the setting."""
    return list(dict.fromkeys(setting.tag for setting in _by_path(root).get(_path(keys), ()) if setting.tag))


def nearest(root: type[Section], keys: Keys) -> Keys | None:
    """The setting that `keys` probably meant: the same elsewhere, one that they abbreviate, or one of similar name."""
    start = next((length for length in range(len(keys)) if find(root, keys[: length + 1]) is None), None)
    if start is None:
        return None
    rest = (keys[start].removeprefix("no_"), *keys[start + 1 :])
    same = [path for path in _by_path(root) if path[-len(rest) :] == rest and "N" not in path]
    if same:
        return min(same, key=lambda path: (-len(set(path) & set(keys)), len(path)))
    inner = [path[start:] for path in _by_path(root) if path[:start] == _path(keys[:start]) and "N" not in path[start:]]
    neighbours = [path for path in inner if path[:-1] == rest[:-1] and path]
    for path in sorted(neighbours, key=lambda path: len(path[-1])):
        initials = "".join(part[:1] for part in path[-1].split("_"))
        if len(rest[-1]) > 1 and (initials.startswith(rest[-1]) or path[-1].startswith(rest[-1])):
            return (*keys[:start], *path)
    names = {"_".join(path): path for path in inner}
    close = difflib.get_close_matches("_".join(rest), names, n=1, cutoff=0.7)
    return (*keys[:start], *names[close[0]]) if close else None
