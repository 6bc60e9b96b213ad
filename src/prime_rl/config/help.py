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
    """Return the overview: top-level options and sections. Of a topic (`trainer.optim`, `all`) that section, or everything."""
    if not topic:
        summary = "\n".join(textwrap.wrap(_summary(cls), _width()))
        return "\n".join([OVERVIEW.format(prog=prog, summary=summary), *_options(cls, ())])
    if topic == "all":
        sections = [line for keys, one in every_setting(cls) if one.within for line in ("", *_topic(keys, one))]
        return "\n".join([*_options(cls, ()), *sections])
    topics = {".".join(keys): (keys, setting) for keys, setting in every_setting(cls)}
    wanted = topic.strip("-").replace("-", "_")
    if wanted not in topics:
        near = difflib.get_close_matches(wanted, topics, n=1)
        meant = f"did you mean {prog} --help {near[0]}?" if near else f"{prog} --help={topic} searches for it"
        raise ConfigError([f"there is no section {topic}; {meant}"])
    return "\n".join(_topic(*topics[wanted]))


def search(cls: type[Section], word: str) -> str:
    """Return the options with `word` in their name or description."""
    rows: dict[str, None] = {}
    for keys, setting in every_setting(cls):
        text = f"{'.'.join(keys)} {spell(keys, 'option')} {setting.field.description}".lower()
        if not setting.sections and word.lower() in text:
            rows["\n".join(_row(keys, setting))] = None
    if not rows:
        raise ConfigError([f"no option has '{word}' in its name or description"])
    return "\n".join(rows)


def completion(cls: type[Section], prog: str, shell: str) -> str:
    """Return a script that completes the names of options: `source <(rl --completion bash)`."""
    options = sorted({spell(keys, "option") for keys, _ in every_setting(cls)})
    function, names = f"_complete_{prog.replace('-', '_')}", " ".join(options)
    if shell == "bash":
        body = f'COMPREPLY=($(compgen -W "{names}" -- "${{COMP_WORDS[COMP_CWORD]}}"))'
        return f"{function}() {{ {body}; }}\ncomplete -o default -F {function} {prog}"
    if shell == "zsh":
        return f"#compdef {prog}\n{function}() {{ compadd -- {names}; _files; }}\ncompdef {function} {prog}"
    if shell == "fish":
        return "\n".join(f"complete -c {prog} -l {name[2:]}" for name in options)
    raise ConfigError([f"--completion needs one of {', '.join(SHELLS)}"])


def _topic(keys: Keys, setting: Setting) -> Iterator[str]:
    if not setting.within:
        yield from _row(keys, setting)
        return
    name = f"[[{'.'.join(keys)}]]" if setting.item_section else f"[{'.'.join(keys)}]"
    off = spell((*keys[:-1], f"no-{keys[-1]}"), "option")
    switch = f" (off unless given; {spell(keys, 'option')} switches it on, {off} off)" if setting.nullable else ""
    yield f"{name} {(setting.field.description or '').rstrip('.')}{switch}:"
    path = (*keys, "N") if setting.item_section else keys
    for member in setting.within:
        if len(setting.within) > 1:
            tag = type_tag(member)
            chosen = ", the default" if tag == default_type(setting.field) else ""
            yield from ["", f"  with {spell((*path, 'type'), 'option')} {tag}{chosen}: {_summary(member)}"]
        yield from _options(member, path)


def _options(section: type[Section], prefix: Keys) -> Iterator[str]:
    """Yield a line for each option, then one for each section, of `section`. The `type` of a union is not an option of its members."""
    for name, setting in settings(section).items():
        if not setting.within and (name != "type" or len(setting.choices) > 1):
            yield from _row((*prefix, name), setting)
    for name, setting in settings(section).items():
        if setting.within:
            yield from _columns(f"  [{'.'.join((*prefix, name))}]", setting.field.description or "")


def _row(keys: Keys, setting: Setting) -> Iterator[str]:
    flag = setting.is_bool and not setting.nullable
    kind = f"| {spell((*keys[:-1], f'no-{keys[-1]}'), 'option')}" if flag else type_text(setting)
    yield from _columns(f"  {spell(keys, 'option')} {kind}", f"{setting.field.description} [{default_text(setting)}]")


def _columns(left: str, text: str) -> Iterator[str]:
    if len(left) > LEFT - 2:
        yield left
        left = ""
    lines = textwrap.wrap(text, _width() - LEFT)
    yield from (f"{start:<{LEFT}}{line}" for start, line in zip([left, *[""] * len(lines)], lines, strict=False))


def _width() -> int:
    return max(80, min(shutil.get_terminal_size((140, 40)).columns, 160))


def type_text(setting: Setting) -> str:
    """Return the type of a setting for people: `int|None`."""
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
