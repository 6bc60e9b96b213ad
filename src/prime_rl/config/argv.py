"""The command line: options, and files given with `@`.

Options are split here rather than by argparse, which can neither tell an optional section from a setting nor let `@` stand anywhere.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.config import files, text
from prime_rl.config.base import ConfigError, Section
from prime_rl.config.origin import Layer, Origin, flatten
from prime_rl.config.schema import Found, Keys, find


@dataclass
class CommandLine:
    """Layers of the command line, and the mistakes found in splitting it."""

    options: Layer = field(default_factory=list)
    section_files: Layer = field(default_factory=list)
    root_files: Layer = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(argv: Sequence[str], section: type[Section]) -> CommandLine:
    """Split `argv` into layers of assignments to `section`; reads the files it names. Mistakes are collected."""
    line = CommandLine()
    tokens = _Tokens(argv)
    while tokens.left():
        token = tokens.take()
        try:
            if token.startswith("@"):
                line.root_files += files.read(_file(token, tokens, "@"))
            elif token.startswith("--") and len(token) > 2:
                _option(token, tokens, section, line)
            else:
                raise ConfigError([_stray(token)])
        except ConfigError as error:
            line.problems += error.problems
    return line


class _Tokens:
    """The arguments, taken one by one."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._next = 0

    def left(self) -> bool:
        return self._next < len(self._argv)

    def take(self) -> str:
        self._next += 1
        return self._argv[self._next - 1]

    def peek(self) -> str | None:
        """The next token if it can be a value: neither an option nor `@`."""
        if not self.left():
            return None
        token = self._argv[self._next]
        return None if token.startswith(("--", "@")) else token

    def at_file(self) -> bool:
        return self.left() and self._argv[self._next].startswith("@")

    def take_values(self) -> list[str]:
        values = []
        while self.peek() is not None:
            values.append(self.take())
        return values


def _file(token: str, tokens: _Tokens, after: str) -> Path:
    """The file of an `@`, glued to it or the next token."""
    if len(token) > 1:
        return Path(token[1:])
    if tokens.peek() is None:
        raise ConfigError([f"{after} must be followed by a file"])
    return Path(tokens.take())


def _stray(token: str, option: str = "") -> str:
    if token.endswith(".toml") or os.path.isfile(token):
        return f"to read the file {token}, write: {option}{' ' if option else ''}@ {token}"
    if token.startswith("-"):
        return f"unexpected argument '{token}': options start with --"
    return f"unexpected argument '{token}'"


def _option(token: str, tokens: _Tokens, section: type[Section], line: CommandLine) -> None:
    name, equals, glued = token.partition("=")
    origin = Origin("option", name)
    keys = tuple(name[2:].replace("-", "_").split("."))
    found = find(section, keys)
    positive = _switched_off(keys, section) if found is None else None
    if positive is not None:
        if equals:
            raise ConfigError([f"{name} takes no value"])
        line.options += flatten(*positive, origin)
    elif _takes_file(found) and (glued.startswith("@") if equals else tokens.at_file()):
        file = _file(glued if equals else tokens.take(), tokens, f"{name} @")
        line.section_files += files.read(file, keys)
    else:
        value = _value(name, glued if equals else None, tokens, found)
        line.options += flatten(keys, value, origin)


def _takes_file(found: Found | None) -> bool:
    return found is not None and not found.rest and bool(found.setting.sections or found.setting.is_dict)


def _switched_off(keys: Keys, section: type[Section]) -> tuple[Keys, bool | None] | None:
    """Keys and value of `--no-flag` (False) or, for what may be null, `--no-ckpt`; also written `--trainer.no-ckpt`."""
    for position, key in enumerate(keys):
        if not key.startswith("no_"):
            continue
        positive = (*keys[:position], key.removeprefix("no_"), *keys[position + 1 :])
        found = find(section, positive)
        if found is not None and not found.rest and (found.setting.is_bool or found.setting.nullable):
            return positive, False if found.setting.is_bool else None
    return None


def _value(name: str, glued: str | None, tokens: _Tokens, found: Found | None) -> Any:
    """The value of an option: what `=` glues to it, or the tokens after it, as many as its type takes."""
    if found is None:
        # An unknown option: reported later, with a suggestion. Its values must not be taken for stray arguments.
        return glued if glued is not None else " ".join(tokens.take_values())
    setting = found.setting
    if setting.item is not None and not found.rest:
        values = [glued] if glued is not None else tokens.take_values()
        if not values:
            raise ConfigError([f"{name} needs one or more values"])
        if given_files := [value for value in values if value.endswith(".toml")]:
            raise ConfigError([_stray(file) for file in given_files])
        return text.items(values, setting)
    following = tokens.peek() if glued is None else glued
    if setting.is_bool and glued is None and not _is_truth(following, setting.nullable):
        return True
    if following is None:
        return _nothing(name, found)
    if glued is None:
        tokens.take()
    return _single(name, following, found)


def _is_truth(token: str | None, nullable: bool) -> bool:
    return token is not None and (token.lower() in text.WORDS or (nullable and token == "None"))


def _nothing(name: str, found: Found) -> Any:
    """The value of an option that is given without one."""
    if found.setting.sections and found.setting.nullable:
        return {}
    if found.setting.is_dict and found.rest:
        return True
    if found.setting.sections:
        raise ConfigError([f"{name} is a section: write {name} @ file.toml, or one of its settings ({name}.…)"])
    raise ConfigError([f"{name} needs a value"])


def _single(name: str, given: str, found: Found) -> Any:
    value = text.value(given, found)
    if not _takes_file(found) or isinstance(value, dict) or value is None:
        return value
    if given.endswith(".toml") or os.path.isfile(given):
        raise ConfigError([_stray(given, name)])
    raise ConfigError([f"{name} is a section: expected a table such as \"{{'key': 1}}\" or @ file.toml, got '{given}'"])
