"""What a command prints of its configuration: mistakes and hints, or what --help, --version and --completion ask for."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from prime_rl.config.base import Section, default_type
from prime_rl.config.loader import Config, ConfigError, Setting, find, resolve, say, settings, spell

LEFT = 46  # columns of an option and its type
OVERVIEW = """\
usage: {prog} [@ FILE.toml]... [--section @ FILE.toml]... [--option VALUE]...

{summary}

The command line wins over files, a later file over an earlier one, files over variables (PRIME_MODEL__NAME for
model.name), and these over defaults. In TOML keys have _ for -, null is "None", and include = "other.toml" reads
another file first.

  {prog} --help SECTION       its options and sections
  {prog} --help=WORD          options with WORD in name or description; `all` for every option
  {prog} --version
  {prog} --completion SHELL   a script for bash, zsh or fish
"""
SHELLS = {
    "bash": 'complete -o default -W "{options}" {prog}',
    "zsh": 'autoload -U compinit bashcompinit && compinit && bashcompinit; complete -o default -W "{options}" {prog}',
    "fish": "for option in {options}; complete -c {prog} -l (string sub -s 3 -- $option); end",
}


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Return the configuration of this process, from `argv` (None: the command line) and the environment.

    Print help, version or completion and exit with status 0 where asked to; print every mistake and exit with status 1
    where there is one.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = prog or os.path.basename(sys.argv[0])
    try:
        if (text := answer(cls, name, arguments)) is not None:
            say(text)
            raise SystemExit(0)
        config, hints = resolve(cls, arguments, os.environ)
    except ConfigError as error:
        usual = "" if arguments else f" Settings usually go in a file: {name} @ config.toml."
        end = f"Nothing was started.{usual} All settings: {name} --help=all; those that are gone: docs/migration.md"
        print(*(f"error: {problem}" for problem in error.problems), end, sep="\n", file=sys.stderr)
        raise SystemExit(1) from None
    for hint in hints:
        print(f"hint: {hint}", file=sys.stderr)
    return config


def answer(cls: type[Section], prog: str, arguments: Sequence[str]) -> str | None:
    """Return what to print for --help, --version or --completion, None where none of them is asked for.

    Raises:
        ConfigError: the word after it names nothing.
    """
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, inline_value = word.partition("=")
        topic = inline_value if equals else "" if following.startswith(("-", "@")) else following
        if name == "--version":
            return f"{prog} (prime-rl {version('prime-rl')})"
        if name == "--completion":
            if topic not in SHELLS:
                raise ConfigError(f"--completion needs one of {', '.join(SHELLS)}")
            options = sorted({spell(setting.keys, "option") for setting in settings(cls)})
            return SHELLS[topic].format(prog=prog, options=" ".join(options))
        if name in ("-h", "--help"):
            return help_text(cls, prog, topic, within=not equals)
    return None


def help_text(cls: type[Section], prog: str, topic: str = "", within: bool = True) -> str:
    """Return the overview: top-level options and sections.

    Of a topic that is a section: its own options and sections, if `within`. Of any other: the options with it in name or
    description.
    """
    every = settings(cls)
    if not topic:
        top = sorted((one for one in every if len(one.keys) == 1), key=lambda one: bool(one.sections))
        overview = OVERVIEW.format(prog=prog, summary=textwrap.fill(_summary(cls), _width()))
        return "\n".join([overview, *(_line(cls, one) for one in top)])
    section = tuple(topic.replace("-", "_").split("."))
    numbered = (*section, "N")  # of a list of sections, each of its items
    own = [one for one in every if {one.keys, one.keys[:-1]} & {section, numbered}]
    if within and len(own) > 1:
        return "\n".join(_line(cls, one) for one in own)
    texts = [(f"{spell(one.keys, 'file')} {spell(one.keys, 'option')} {one.field.description}", one) for one in every]
    lines = [_line(cls, one) for text, one in texts if topic == "all" or topic.lower() in text.lower()]
    if not lines:
        raise ConfigError(f"no option has '{topic}' in its name or description")
    return "\n".join(lines)


def _line(cls: type[Section], setting: Setting) -> str:
    """Return an option with type, description and default, a section, or the heading of one type of a section."""
    option, name = spell(setting.keys, "option"), setting.keys[-1]
    switch = spell((*setting.keys[:-1], f"no_{name}"), "option")
    kind = f"| {switch}" if setting.takes(bool) and not setting.takes(NoneType) else type_text(setting)
    left, text = f"  {option} {kind}", f"{setting.field.description} [{default_text(setting)}]"
    if setting.sections:
        left, text = f"  [{'.'.join(setting.keys)}]", setting.field.description or ""
        text += f" [default: off; {option}, {switch}]" if setting.takes(NoneType) else ""
    elif name == "type" and setting.tag:
        around = find(cls, setting.keys[:-1])
        default = ", the default" if around is not None and setting.tag == default_type(around.field) else ""
        return f"\n  with {option} {setting.tag}{default}: {_summary(setting.owner)}"
    right = textwrap.indent(textwrap.fill(text, _width() - LEFT), " " * LEFT)
    return f"{left}\n{right}" if len(left) > LEFT - 2 else left + right[len(left) :]


def _width() -> int:
    return max(80, min(shutil.get_terminal_size((140, 40)).columns, 160))


def type_text(setting: Setting) -> str:
    """Return the type of a setting for people: `int|None`."""
    names: dict[Any, str] = {list: "list", dict: "table", Path: "path", NoneType: "None"}
    words: list[str] = []
    for kind in setting.kinds:
        name = "table" if kind in setting.sections else names.get(get_origin(kind) or kind)
        words += get_args(kind) if get_origin(kind) is Literal else [name or kind.__name__]
    return "|".join(words)


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
