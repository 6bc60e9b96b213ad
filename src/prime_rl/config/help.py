"""What `--help`, `--version` and `--completion` print, made from the configuration classes alone."""

import shutil
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from prime_rl.config.base import Section, default_type
from prime_rl.config.layers import ConfigError, Keys, spell
from prime_rl.config.schema import Setting, find, settings

LEFT = 46  # columns of an option and its type
SHELLS = ("bash", "zsh", "fish")
OVERVIEW = """\
usage: {prog} [@ FILE.toml]... [--section @ FILE.toml]... [--option VALUE]...

{summary}

The command line wins over files, a later file over an earlier one, files over variables (PRIME_MODEL__NAME for
model.name), and these over defaults. In TOML keys have _ for -, null is "None", and include = "other.toml" reads
another file first.

  {prog} --help SECTION       the options of a section
  {prog} --help all           every option
  {prog} --help=WORD          options with WORD in name or description
  {prog} --version
  {prog} --completion SHELL   a script for bash, zsh or fish
"""


def answer(cls: type[Section], prog: str, arguments: Sequence[str]) -> str:
    """Return what to print for --help, --version or --completion. Raises ConfigError where it names nothing."""
    for token, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, word = token.partition("=")
        topic = word if equals else "" if following.startswith(("-", "@")) else following
        if name == "--version":
            return f"{prog} (prime-rl {version('prime-rl')})"
        if name == "--completion":
            return completion(cls, prog, topic)
        if name in ("-h", "--help"):
            return search(cls, word) if equals else help_text(cls, prog, topic)
    raise AssertionError


def help_text(cls: type[Section], prog: str, topic: str = "") -> str:
    """Return the overview: top-level options and sections. Of a topic (`trainer.optim`, `all`, a word) what it names."""
    if not topic:
        summary = "\n".join(textwrap.wrap(_summary(cls), _width()))
        return "\n".join([OVERVIEW.format(prog=prog, summary=summary), *_inside(cls, ())])
    by_path = {".".join(setting.keys): setting for setting in settings(cls)}
    if topic == "all":
        sections = [line for one in by_path.values() if one.sections for line in ("", *_topic(cls, one))]
        return "\n".join([*_inside(cls, ()), *sections])
    wanted = topic.strip("-").replace("-", "_")
    wanted = f"{wanted}.N" if f"{wanted}.N" in by_path else wanted
    return "\n".join(_topic(cls, by_path[wanted])) if wanted in by_path else search(cls, topic)


def search(cls: type[Section], word: str) -> str:
    """Return the options with `word` in their name or description."""
    entries: dict[str, None] = {}
    for setting in settings(cls):
        text = f"{'.'.join(setting.keys)} {spell(setting.keys, 'option')} {setting.field.description}".lower()
        if word.lower() not in text:
            continue
        if not setting.sections:
            entries["\n".join(_lines(setting))] = None
        elif setting.nullable:
            switch = f"  {_option(setting)} | {_option(setting, 'no-')}"
            entries[f"{switch:<{LEFT - 1}} {setting.field.description}"] = None
    if not entries:
        raise ConfigError([f"no option has '{word}' in its name or description"])
    return "\n".join(entries)


def completion(cls: type[Section], prog: str, shell: str) -> str:
    """Return a script that completes the names of options: `source <(rl --completion bash)`."""
    options = sorted({spell(setting.keys, "option") for setting in settings(cls)})
    function, names = f"_complete_{prog.replace('-', '_')}", " ".join(options)
    if shell == "bash":
        body = f'COMPREPLY=($(compgen -W "{names}" -- "${{COMP_WORDS[COMP_CWORD]}}"))'
        return f"{function}() {{ {body}; }}\ncomplete -o default -F {function} {prog}"
    if shell == "zsh":
        return f"#compdef {prog}\n{function}() {{ compadd -- {names}; _files; }}\ncompdef {function} {prog}"
    if shell == "fish":
        return "\n".join(f"complete -c {prog} -l {name[2:]}" for name in options)
    raise ConfigError([f"--completion needs one of {', '.join(SHELLS)}"])


def _topic(cls: type[Section], setting: Setting) -> list[str]:
    if not setting.sections:
        return _lines(setting)
    switch = f" (off unless given; {_option(setting)} switches it on, {_option(setting, 'no-')} off)"
    title = f"[{'.'.join(setting.keys)}] {(setting.field.description or '').rstrip('.')}"
    return [f"{title}{switch if setting.nullable else ''}:", *_inside(cls, setting.keys)]


def _inside(cls: type[Section], path: Keys) -> list[str]:
    """Return the lines of the options, then of the sections, of the section at `path`, for each of its types."""
    lines = []
    around = find(cls, path) if path else None
    inside = {(one.keys, one.owner): one for one in settings(cls) if one.keys[:-1] == path}
    for tag, alike in groupby(inside.values(), key=lambda one: one.tag):
        of_type = sorted(alike, key=lambda one: bool(one.sections))
        if around is not None and len(around.sections) > 1:
            chosen = ", the default" if tag == default_type(around.field) else ""
            option = spell((*path, "type"), "option")
            lines += ["", f"  with {option} {tag}{chosen}: {_summary(of_type[0].owner)}"]
        shown = [one for one in of_type if one.keys[-1] != "type" or len(one.choices) > 1]
        lines += [line for one in shown for line in _lines(one)]
    return lines


def _option(setting: Setting, prefix: str = "") -> str:
    return spell((*setting.keys[:-1], f"{prefix}{setting.keys[-1]}"), "option")


def _lines(setting: Setting) -> list[str]:
    """Return an option with type, description and default, or a section with its description."""
    kind = f"| {_option(setting, 'no-')}" if setting.takes(bool) and not setting.nullable else type_text(setting)
    left, text = f"  {_option(setting)} {kind}", f"{setting.field.description} [{default_text(setting)}]"
    if setting.sections:
        left, text = f"  [{'.'.join(setting.keys)}]", setting.field.description or ""
    indented = textwrap.wrap(text, _width(), initial_indent=" " * LEFT, subsequent_indent=" " * LEFT)
    if len(left) > LEFT - 2:
        return [left, *indented]
    return [f"{left:<{LEFT}}{indented[0].lstrip()}", *indented[1:]]


def _width() -> int:
    return max(80, min(shutil.get_terminal_size((140, 40)).columns, 160))


def type_text(setting: Setting) -> str:
    """Return the type of a setting for people: `int|None`."""
    return "|".join([*map(_kind_text, setting.kinds), *(["None"] if setting.nullable else [])])


def _kind_text(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "|".join(str(word) for word in get_args(kind))
    named = {list: "list", dict: "table", Path: "path"}
    return named.get(origin or kind) or ("table" if issubclass(kind, Section) else str(kind.__name__))


def default_text(setting: Setting) -> str:
    """Return the default of a setting for people: `default: 1`, or `required`."""
    default: Any = setting.field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if default in ("", [], {}):
        return "default: empty"
    return f"default: {str(default).lower() if isinstance(default, bool) else default}"


def _summary(section: type[Section]) -> str:
    return f"{' '.join((section.__doc__ or '').split()).rstrip('.')}."
