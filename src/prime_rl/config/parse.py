"""From command line, files and environment variables to a validated configuration."""

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from prime_rl.config import argv as command_line
from prime_rl.config import environ
from prime_rl.config.base import BaseConfig, ConfigError, Section
from prime_rl.config.errors import MOST_LINES, describe, misfits, unknown_keys
from prime_rl.config.help import help_text
from prime_rl.config.origin import Assignment, Origins, build, of_one_type, spell
from prime_rl.config.schema import Keys, list_index, settings
from prime_rl.redact import without_password

Config = TypeVar("Config", bound=BaseConfig)
LONGEST_LINE = 2000


def say(text: str) -> None:
    """Print a text whose reader may close the pipe early (`--help | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nor may the interpreter report the broken pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """The configuration of this process, from `argv` (None: the command line) and the environment.

    Prints help and exits with status 0 where asked to, prints every mistake and exits with status 2 where there is one.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = prog or os.path.basename(sys.argv[0])
    if "-h" in arguments or "--help" in arguments:
        say(help_text(cls, name))
        raise SystemExit(0)
    try:
        config, hints = resolve(cls, arguments, os.environ)
    except ConfigError as error:
        _report("error", error.problems)
        example = "" if arguments else f" Most are given in a file: {name} @ config.toml."
        print(f"Nothing was started.{example} For all settings: {name} --help", file=sys.stderr)
        raise SystemExit(2) from None
    _report("hint", hints)
    return config


def _report(kind: str, lines: list[str]) -> None:
    """Print the first lines, each as one line of bounded length, whatever the input held that they quote."""
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    for line in lines[:MOST_LINES] + more:
        short = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 200]} … {line[-200:]}"
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
        print(f"{kind}: {shown}", file=sys.stderr)


def parse(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """The configuration that `argv` and `env` describe; reads the files they name, prints nothing. Raises ConfigError."""
    return resolve(cls, argv, env).config


class Resolved(NamedTuple):
    """A configuration, and hints at today's spelling of what was given in an older one."""

    config: Any
    hints: list[str]


def resolve(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Resolved:
    """As `parse`, with the hints."""
    line = command_line.read(argv, cls)
    hints: list[str] = []
    # From the weakest to the strongest. Files for sections stand beside the last one for the whole, and beside one another.
    *earlier, last = [list(file) for _, file in groupby(line.root_files, lambda one: one.origin.source)] or [[]]
    # Items of lists after the lists, whatever their order on the line: neither is lost.
    options = sorted(line.options, key=lambda one: list_index(cls, one.keys) is not None)
    given = [environ.read(env, cls), *earlier, [*last, *line.section_files], options]
    layers = [[_todays(assignment, cls, hints) for assignment in layer] for layer in given]
    layers = of_one_type(layers, hints)
    origins = Origins(layers)
    tree, beyond = build(chain.from_iterable(layers), cls)
    tree, unknown = unknown_keys(cls, tree, origins)
    wrong = misfits(cls, tree, origins)
    problems = line.problems + beyond + unknown + wrong
    try:
        config = cls.model_validate(tree, context={"origins": origins, "hints": hints})
    except ValidationError as error:
        incomplete = bool(line.problems or wrong)
        raise ConfigError(problems + describe(error, cls, origins, incomplete)) from None
    if problems:
        raise ConfigError(problems)
    return Resolved(config, hints)


def _todays(assignment: Assignment, cls: type[Section], hints: list[str]) -> Assignment:
    """`assignment` in today's spelling, with a hint where it was given in an older one."""
    keys = assignment.keys
    for section in _sections_of(cls, keys[:-1]):
        older = section.older.get(keys[-1])
        if older is None:
            continue
        new, origin = (*keys[:-1], older.key), assignment.origin
        value = older.convert(assignment.value)
        if (new, value) == (keys, assignment.value):
            continue
        shown = ",".join(map(str, value)) if isinstance(value, list) else value
        hints.append(
            f"{origin.text} {without_password(str(assignment.value))} is an older spelling of {spell(new, origin.kind)} {shown}"
        )
        return Assignment(new, value, origin)
    return assignment


def _sections_of(cls: type[Section], keys: Keys) -> list[type[Section]]:
    """The sections that `keys` may lead to: several where they cross a union."""
    if not keys:
        return [cls]
    setting = settings(cls).get(keys[0])
    return [inner for member in setting.sections for inner in _sections_of(member, keys[1:])] if setting else []
