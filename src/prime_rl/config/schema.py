"""What the configuration classes declare, in the terms that parser and help need."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from prime_rl.config.base import Section, default_type

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """One field of a section. `members` are its types without None; `sections` those of them that are tables."""

    name: str
    field: FieldInfo
    members: tuple[Any, ...]
    nullable: bool

    @property
    def sections(self) -> tuple[type[Section], ...]:
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
    def secret(self) -> bool:
        return has_mark(self.field, "secret")

    def section_for(self, value: Any) -> type[Section] | None:
        """The table that `value` fills: of a union the one its `type` names, or the default's where it names none."""
        if len(self.sections) <= 1:
            return self.sections[0] if self.sections else None
        tag = value.get("type", default_type(self.field)) if isinstance(value, dict) else default_type(self.field)
        tagged = {type_tag(section): section for section in self.sections}
        return tagged.get(tag) if isinstance(tag, str) else None


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
    return {name: _setting(name, field) for name, field in section.model_fields.items()}


def _setting(name: str, field: FieldInfo) -> Setting:
    members = tuple(_members(field.annotation))
    return Setting(name, field, tuple(m for m in members if m is not type(None)), type(None) in members)


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
    """The setting that keys lead to. `rest` is what lies below the setting: keys within a dict, or the number of an item of a list of sections."""

    setting: Setting
    rest: Keys = ()


def find(section: type[Section], keys: Keys) -> Found | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    setting = settings(section).get(keys[0])
    if setting is None:
        return None
    if len(keys) == 1:
        return Found(setting)
    if setting.is_dict:
        return Found(setting, keys[1:])
    if setting.item_section is not None:
        return _find_in_item(setting, setting.item_section, keys)
    for member in setting.sections:
        if (found := find(member, keys[1:])) is not None:
            return found
    return None


def _find_in_item(setting: Setting, item: type[Section], keys: Keys) -> Found | None:
    if not (keys[1].isdecimal() and len(keys[1]) < 10):
        return None
    if len(keys) == 2:
        return Found(setting, keys[1:])
    return find(item, keys[2:])


def list_index(section: type[Section], keys: Keys) -> int | None:
    """Position among `keys` of the number of an item of a list of sections, None where they choose none; keys below it may name no setting."""
    for position in range(1, len(keys)):
        found = find(section, keys[: position + 1])
        if found is None:
            return None
        if found.setting.item_section is not None and found.rest:
            return position
    return None


def all_paths(section: type[Section], prefix: Keys = ()) -> Iterator[Keys]:
    """Every path that can be given, sections included; items of lists left out."""
    seen = set()
    for name, setting in settings(section).items():
        for path in ((*prefix, name), *(p for member in setting.sections for p in all_paths(member, (*prefix, name)))):
            if path not in seen:
                seen.add(path)
                yield path


def type_text(setting: Setting) -> str:
    """The type of a setting as help shows it."""
    words = [_member_text(member) for member in setting.members]
    return "|".join([*words, "None"] if setting.nullable else words)


def _member_text(member: Any) -> str:
    if get_origin(member) is Literal:
        return "|".join(str(word) for word in get_args(member))
    if get_origin(member) is list:
        return f"list of {_member_text(next(_members(get_args(member)[0])))}"
    if get_origin(member) is dict or issubclass(member, Section):
        return "table"
    return "path" if member is Path else str(member.__name__)
