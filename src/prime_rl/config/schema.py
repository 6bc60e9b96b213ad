"""What the configuration classes declare, in the terms that the loader and the help need."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from prime_rl.config.base import Section, default_type

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One field of a section. `members` are its types without None."""

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

    def section_for(self, value: Any) -> type[Section] | None:
        """The table that `value` fills: of a union the one its `type` names, or the default's where it names none."""
        if len(self.sections) <= 1:
            return self.sections[0] if self.sections else None
        tag = value.get("type", default_type(self.field)) if isinstance(value, dict) else default_type(self.field)
        return next((section for section in self.sections if type_tag(section) == tag), None)


def has_mark(field: FieldInfo, mark: str) -> bool:
    """Whether the field is declared with `json_schema_extra={mark: True}`."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))


def type_tag(section: type[Section]) -> str:
    """The value of `type` that chooses `section` in a union."""
    return str(section.model_fields["type"].default)


@cache
def settings(section: type[Section]) -> dict[str, Setting]:
    """The settings of `section` by name, in the order of declaration."""
    found = {}
    for name, field in section.model_fields.items():
        members = tuple(_members(field.annotation))
        kinds = tuple(member for member in members if member is not type(None))
        found[name] = Setting(name, field, kinds, nullable=type(None) in members)
    return found


def _members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


@dataclass(frozen=True)
class Found:
    """The setting that keys lead to. `rest` lies below it: keys within a dict, or the number of an item of a list."""

    setting: Setting
    rest: Keys = ()

    @property
    def is_table(self) -> bool:
        return not self.rest and bool(self.setting.sections or self.setting.is_dict)

    @property
    def is_list(self) -> bool:
        return not self.rest and self.setting.item is not None


def find(section: type[Section], keys: Keys) -> Found | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    setting, rest = settings(section).get(keys[0]), keys[1:]
    if setting is None:
        return None
    if not rest or setting.is_dict:
        return Found(setting, rest)
    if setting.item_section is not None:
        if not (rest[0].isdecimal() and len(rest[0]) < 10):
            return None
        return find(setting.item_section, rest[1:]) if rest[1:] else Found(setting, rest)
    return next((found for member in setting.sections if (found := find(member, rest)) is not None), None)


def list_index(section: type[Section], keys: Keys) -> int | None:
    """Position among `keys` of the number of an item of a list of sections, None where they choose none."""
    for position in range(1, len(keys)):
        found = find(section, keys[: position + 1])
        if found is None:
            return None
        if found.setting.item_section is not None and found.rest:
            return position
    return None


def every_setting(section: type[Section], prefix: Keys = ()) -> Iterator[tuple[Keys, Setting]]:
    """Every path that can be given, sections included; a name that several members of a union share comes from each."""
    for name, setting in settings(section).items():
        yield (*prefix, name), setting
        for member in setting.sections:
            yield from every_setting(member, (*prefix, name))
        if setting.item_section is not None:
            yield from every_setting(setting.item_section, (*prefix, name, "N"))
