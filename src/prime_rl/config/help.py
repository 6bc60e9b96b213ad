"""What `--help`, `--version` and `--completion` print, made from the configuration classes alone."""

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from prime_rl.config.assignments import ConfigError, Keys, spell
from prime_rl.config.base import Section, default_type
from prime_rl.config.schema import Setting, every_setting, settings, type_tag

LEFT = 46  # columns of an option and its type
SHELLS = ("bash", "zsh", "fish")


def answer(cls: type[Section], prog: str, arguments: Sequence[str]) -> str:
    """What to print for --help, --version or --completion among `arguments`. Raises ConfigError where it names nothing."""
    for token, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, word = token.partition("=")
        if name == "--version":
            return f"{prog} (prime-rl {version('prime-rl')})"
        topic = word if equals else "" if following.startswith(("-", "@")) else following
        if name == "--completion":
            return completion(cls, prog, topic)
        if name in ("-h", "--help"):
            return search(cls, word) if equals else help_text(cls, prog, topic)
    raise AssertionError


def help_text(cls: type[Section], prog: str, topic: str = "") -> str:
    """The overview: top-level options and sections. Of a topic (`trainer.optim`, `all`) that section, or everything."""
    if topic == "all":
        sections = [
            (".".join(keys), setting)
            for keys, setting in every_setting(cls)
            if setting.sections or setting.item_section
        ]
        return "\n".join([*_options(cls, ()), *(line for keys, one in sections for line in ("", *_topic(keys, one)))])
    if topic:
        topics = {".".join(keys): setting for keys, setting in every_setting(cls)}
        wanted = topic.strip("-").replace("-", "_")
        if wanted not in topics:
            near = difflib.get_close_matches(wanted, topics, n=1)
            meant = f"did you mean {prog} --help {near[0]}?" if near else f"{prog} --help={topic} searches for it"
            raise ConfigError([f"there is no section {topic}; {meant}"])
        return "\n".join(_topic(wanted, topics[wanted]))
    lines = [
        f"usage: {prog} [@ FILE.toml]... [--section @ FILE.toml]... [--option VALUE]...",
        "",
        *textwrap.wrap(f"{_summary(cls)}.", _width()),
        "",
        "The command line wins over files, a later file over an earlier one, files over variables (PRIME_MODEL__NAME for",
        'model.name), and these over defaults. In TOML keys have _ for -, null is "None", and include = "other.toml" reads',
        "another file first.",
        "",
        "Options:",
        *_options(cls, ()),
        "",
        f"Sections ({prog} --help SECTION shows one):",
        *_sections(cls, ()),
        "",
        f"  {prog} --help all           every option",
        f"  {prog} --help=WORD          options with WORD in name or description",
        f"  {prog} --version",
        f"  {prog} --completion SHELL   a script for {', '.join(SHELLS)}",
    ]
    return "\n".join(lines)


def search(cls: type[Section], word: str) -> str:
    """Options with `word` in their name or description."""
    wanted = word.lower().replace("-", "_")
    rows: dict[str, None] = {}
    for keys, setting in every_setting(cls):
        said = (setting.field.description or "").lower()
        if not setting.sections and (wanted in ".".join(keys) or word.lower() in said):
            rows["\n".join(_row(keys, setting))] = None
    if not rows:
        raise ConfigError([f"no option has '{word}' in its name or description"])
    return "\n".join(rows)


def completion(cls: type[Section], prog: str, shell: str) -> str:
    """A script that completes the names of options: `source <(rl --completion bash)`."""
    described = {spell(keys, "option"): setting.field.description or "" for keys, setting in every_setting(cls)}
    names = " ".join(sorted(described))
    function = f"_complete_{prog.replace('-', '_')}"
    if shell == "bash":
        body = f'COMPREPLY=($(compgen -W "{names}" -- "${{COMP_WORDS[COMP_CWORD]}}"))'
        return f"{function}() {{ {body}; }}\ncomplete -o default -F {function} {prog}"
    if shell == "zsh":
        return f"#compdef {prog}\n{function}() {{ compadd -- {names}; _files; }}\ncompdef {function} {prog}"
    if shell == "fish":
        quoted = {name: text.replace("\\", "\\\\").replace("'", "\\'") for name, text in described.items()}
        return "\n".join(f"complete -c {prog} -l {name[2:]} -d '{text}'" for name, text in quoted.items())
    raise ConfigError([f"--completion needs one of {', '.join(SHELLS)}"])


def _topic(keys: str, setting: Setting) -> Iterator[str]:
    path = tuple(keys.split("."))
    members = setting.sections
    if setting.item_section is not None:
        path, members = (*path, "N"), (setting.item_section,)
    if not members:
        yield from _row(path, setting)
        return
    name = f"[[{keys}]]" if setting.item_section else f"[{keys}]"
    title = f"{name} {(setting.field.description or '').rstrip('.')}"
    if setting.nullable:
        off = spell((*path[:-1], f"no-{path[-1]}"), "option")
        title += f" (off unless given; {spell(path, 'option')} switches it on, {off} off)"
    yield f"{title}:"
    for member in members:
        if len(members) > 1:
            tag = type_tag(member)
            chosen = ", the default" if tag == default_type(setting.field) else ""
            yield from ["", f"  with {spell((*path, 'type'), 'option')} {tag}{chosen}: {_summary(member)}."]
        yield from _options(member, path)
        yield from _sections(member, path)


def _options(section: type[Section], prefix: Keys) -> Iterator[str]:
    for name, setting in settings(section).items():
        if (not setting.sections and not setting.item_section and name != "type") or (
            name == "type" and setting.field.description and len(setting.choices) > 1
        ):
            yield from _row((*prefix, name), setting)


def _sections(section: type[Section], prefix: Keys) -> Iterator[str]:
    for name, setting in settings(section).items():
        inner = [*setting.sections, *([setting.item_section] if setting.item_section else [])]
        if inner:
            paths = {keys for member in inner for keys, one in every_setting(member) if not one.sections}
            left = f"  {'.'.join((*prefix, name))} ({len(paths)} option{'s' if len(paths) > 1 else ''})"
            yield from _columns(left, setting.field.description or "")


def _row(keys: Keys, setting: Setting) -> Iterator[str]:
    flag = setting.is_bool and not setting.nullable
    off = " | " + spell((*keys[:-1], f"no-{keys[-1]}"), "option") if flag else f" {_type_text(setting)}"
    yield from _columns(f"  {spell(keys, 'option')}{off}", f"{setting.field.description} [{_default(setting)}]")


def _columns(left: str, text: str) -> Iterator[str]:
    if len(left) > LEFT - 2:
        yield left
        left = ""
    first, *others = textwrap.wrap(text, _width() - LEFT) or [""]
    yield f"{left:<{LEFT}}{first}"
    yield from (f"{'':<{LEFT}}{line}" for line in others)


def _width() -> int:
    return max(80, min(shutil.get_terminal_size((140, 40)).columns, 160))


def _type_text(setting: Setting) -> str:
    words = [_member_text(member) for member in setting.members]
    return "|".join([*words, "None"] if setting.nullable else words)


def _member_text(member: Any) -> str:
    if get_origin(member) is Literal:
        return "|".join(str(word) for word in get_args(member))
    if get_origin(member) is list:
        return "list"
    if get_origin(member) is dict or issubclass(member, Section):
        return "table"
    return "path" if member is Path else str(member.__name__)


def _default(setting: Setting) -> str:
    default: Any = setting.field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default in ("", [], {}):
        return "default: empty"
    return f"default: {str(default).lower() if isinstance(default, bool) else default}"


def _summary(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split()).rstrip(".")
