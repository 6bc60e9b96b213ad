"""What the configuration classes declare, in the terms that the loader and the help need."""

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from prime_rl.config.assignments import Keys
from prime_rl.config.base import Section, default_type


@dataclass(frozen=True)
class Setting:
    """One field of a section. `members` are its types without None; `Any` is that of a key within a dict."""

    name: str
    field: FieldInfo
    members: tuple[Any, ...]
    nullable: bool

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """Those of the types that are tables: several for a union."""
        return tuple(member for member in self.members if isinstance(member, type) and issubclass(member, Section))

    @property
    def item(self) -> Any:
        """Type of the items of a list, None for anything else."""
        lists = [member for member in self.members if get_origin(member) is list]
        return next(_members(get_args(lists[0])[0])) if lists else None

    @property
    def item_section(self) -> type[Section] | None:
        item = self.item
        return item if isinstance(item, type) and issubclass(item, Section) else None

    @property
    def is_dict(self) -> bool:
        return any(get_origin(member) is dict for member in self.members)

    @property
    def is_bool(self) -> bool:
        return bool in self.members

    @property
    def is_number(self) -> bool:
        return int in self.members or float in self.members

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal allows."""
        return tuple(word for member in self.members if get_origin(member) is Literal for word in get_args(member))

    @property
    def within(self) -> tuple[type[Section], ...]:
        """The tables that its value, or an item of it, may be."""
        return (self.item_section,) if self.item_section is not None else self.sections


def has_mark(field: FieldInfo, mark: str) -> bool:
    """Whether the field is declared with this `mark`."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def type_tag(section: type[Section]) -> str:
    """The value of `type` that chooses `section` in a union."""
    return str(section.model_fields["type"].default)


def section_for(setting: Setting, value: Any) -> type[Section] | None:
    """The table that `value` fills: of a union the one its `type` names, or the default's where it names none."""
    if len(setting.within) <= 1:
        return next(iter(setting.within), None)
    tag = value.get("type", default_type(setting.field)) if isinstance(value, dict) else None
    return next((section for section in setting.within if type_tag(section) == tag), None)


@cache
def settings(section: type[Section]) -> dict[str, Setting]:
    """The settings of `section` by name, in the order of declaration."""
    declared = {}
    for name, field in section.model_fields.items():
        members = tuple(_members(field.annotation))
        kinds = tuple(member for member in members if member is not type(None))
        declared[name] = Setting(name, field, kinds, nullable=type(None) in members)
    return declared


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def find(section: type[Section], keys: Keys) -> Setting | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    setting, rest = settings(section).get(keys[0]), keys[1:]
    if setting is None or not rest:
        return setting
    if setting.is_dict:
        return replace(setting, members=(Any,), nullable=False)
    if setting.item_section is not None:
        if not re.fullmatch("[0-9]{1,9}", rest[0]):
            return None
        if not rest[1:]:
            return replace(setting, members=setting.within, nullable=False)
        rest = rest[1:]
    return next((inner for member in setting.within if (inner := find(member, rest)) is not None), None)


def every_setting(section: type[Section], prefix: Keys = ()) -> Iterator[tuple[Keys, Setting]]:
    """Every path that can be given, sections included; a name that several members of a union share comes from each."""
    for name, setting in settings(section).items():
        yield (*prefix, name), setting
        inner = (*prefix, name) if setting.item_section is None else (*prefix, name, "N")
        for member in setting.within:
            yield from every_setting(member, inner)
