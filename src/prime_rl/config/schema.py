"""What the configuration classes declare, as one flat table: each path that can be given, with the field it names."""

import difflib
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from prime_rl.config.base import Section
from prime_rl.config.table import Keys, generic


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

    @property
    def is_table(self) -> bool:
        return bool(self.sections) or self.takes(dict)


def type_tag(section: type[Section]) -> str:
    """The value of `type` that chooses `section` in a union."""
    return str(section.model_fields["type"].default)


@cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Every path below `root` in the order of declaration; one that several members of a union have comes from each."""
    return tuple(_fields(root, (), ""))


def _fields(section: type[Section], path: Keys, tag: str) -> Iterator[Setting]:
    for name, field in sorted(section.model_fields.items(), key=lambda field: field[0] != "type"):
        yield from _paths((*path, name), field, section, tag, field.annotation)


def _paths(keys: Keys, field: FieldInfo, owner: type[Section], tag: str, annotation: Any) -> Iterator[Setting]:
    """Yield the setting, what is in it, and the items of a list of sections."""
    types_and_none = list(_alternatives(annotation))
    kinds = tuple(kind for kind in types_and_none if kind is not type(None))
    sections = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    choices = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    setting = Setting(keys, field, owner, tag, kinds, sections, choices, nullable=type(None) in types_and_none)
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


def find(root: type[Section], keys: Keys) -> Setting | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    table, path = _by_path(root), generic(keys)
    if path in table:
        return table[path][0]
    parents = [
        setting for length in range(len(path)) for setting in table.get(path[:length], ()) if setting.takes(dict)
    ]
    return parents[0]._replace(kinds=(Any,), nullable=False) if parents else None


def types_with(root: type[Section], keys: Keys) -> list[str]:
    """The `type`s of a union that have the setting."""
    return list(dict.fromkeys(setting.tag for setting in _by_path(root).get(generic(keys), ()) if setting.tag))


def nearest(root: type[Section], keys: Keys) -> Keys | None:
    """The setting that `keys` probably meant: the same elsewhere, one that they abbreviate, or one of similar name."""
    start = next((length for length in range(len(keys)) if find(root, keys[: length + 1]) is None), None)
    if start is None:
        return None
    rest = (keys[start].removeprefix("no_"), *keys[start + 1 :])
    same = [path for path in _by_path(root) if path[-len(rest) :] == rest and "N" not in path]
    if same:
        return min(same, key=lambda path: (-len({*path} & {*keys}), len(path)))
    word, parent = "_".join(rest), generic(keys[:start])
    names = {"_".join(path[start:]): path[start:] for path in _by_path(root) if path[:start] == parent}
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in names}
    longer = [name for name in names if len(word) > 1 and (name.startswith(word) or initials[name].startswith(word))]
    close = sorted(longer, key=len) or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return (*keys[:start], *names[close[0]]) if close and "N" not in names[close[0]] else None
