"""The text of `--help`, made from the configuration classes alone."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from prime_rl.config.base import Section, default_type
from prime_rl.config.origin import spell
from prime_rl.config.schema import Keys, Setting, settings, type_tag, type_text

LEFT = 46


def help_text(cls: type[Section], prog: str) -> str:
    """Every setting of `cls` as an option, grouped by section, with type, default and what it means."""
    width = max(80, min(shutil.get_terminal_size((140, 40)).columns, 160))
    intro = [
        f"usage: {prog} [@ FILE.toml]... [--section @ FILE.toml]... [--option VALUE]...",
        "",
        textwrap.fill(_summary(cls), width) + ".",
        "",
        "The command line wins over files, a later file over an earlier one, files over variables (PRIME_MODEL__NAME for",
        'model.name), and these over defaults. In TOML keys have _ for -, null is "None", and include = "other.toml" reads',
        "another file first.",
    ]
    return "\n".join([*intro, *_section(cls, (), "General", width), "", "  -h, --help  Show this."])


def _section(section: type[Section], prefix: Keys, title: str, width: int) -> Iterator[str]:
    in_heading = "with --" in title  # A member of a union: its heading shows the option `type`.
    own = {n: s for n, s in settings(section).items() if not s.sections and not (in_heading and n == "type")}
    if own or prefix:
        yield from ["", f"{title}:"]
    for name, setting in own.items():
        yield from _row((*prefix, name), setting, width)
    for name, setting in settings(section).items():
        if setting.sections:
            yield from _inner(setting, (*prefix, name), width)
        if setting.item_section is not None:
            inner = (*prefix, name, "N")
            yield from _section(setting.item_section, inner, f"[[{'.'.join((*prefix, name))}]] Each of them", width)


def _inner(setting: Setting, keys: Keys, width: int) -> Iterator[str]:
    title = f"[{'.'.join(keys)}] {(setting.field.description or '').rstrip('.')}"
    if setting.nullable:
        off = spell((*keys[:-1], f"no-{keys[-1]}"), "option")
        title += f" (off unless given; {spell(keys, 'option')} switches it on, {off} off)"
    if len(setting.sections) == 1:
        yield from _section(setting.sections[0], keys, title, width)
        return
    for number, member in enumerate(setting.sections):
        tag = type_tag(member)
        chosen = ", the default" if tag == default_type(setting.field) else ""
        heading = f"{title}\n  with {spell((*keys, 'type'), 'option')} {tag}{chosen}: {_summary(member)}"
        yield from _section(member, keys, heading if number == 0 else heading.split("\n")[1], width)


def _row(keys: Keys, setting: Setting, width: int) -> Iterator[str]:
    option = spell(keys, "option")
    left = f"  {option}" if setting.is_bool and not setting.nullable else f"  {option} {type_text(setting)}"
    if setting.is_bool and not setting.nullable:
        left += " | " + spell((*keys[:-1], f"no-{keys[-1]}"), "option")
    text = f"{setting.field.description} [{_default(setting)}]"
    lines = textwrap.wrap(text, width - LEFT) or [""]
    if len(left) > LEFT - 2:
        yield left
        left = ""
    yield f"{left:<{LEFT}}{lines[0]}"
    yield from (f"{'':<{LEFT}}{line}" for line in lines[1:])


def _default(setting: Setting) -> str:
    default: Any = setting.field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default in ("", [], {}):
        return "default: empty"
    if isinstance(default, bool):
        return f"default: {str(default).lower()}"
    return f"default: {default}"


def _summary(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split()).rstrip(".")
