"""From variables, `@` files and options to one validated configuration, or to every mistake as a readable line."""

import ast
import difflib
import json
import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import ValidationError

from prime_rl.config.base import (
    BaseConfig,
    Keys,
    Problem,
    Problems,
    Section,
    Setting,
    default_type,
    find,
    generic,
    has_mark,
    is_index,
    nearest,
    settings,
)
from prime_rl.config.migration import OLDER, current_file
from prime_rl.errors import UserError, say
from prime_rl.redact import without_password

Config = TypeVar("Config", bound=BaseConfig)
Kind = Literal["option", "file", "variable"]
Assignment = tuple[Keys, Any, "Entry"]  # the last is the source, as an entry without a value

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
RESERVED_VARIABLE = "PRIME_API_KEY"  # the key of the user's account, although `inference` has an api_key
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
ABSENT: Any = object()
_LOADER = "loader"  # context of a validation whose sections have what they share
BOOLS = {"true": True, "false": False, "1": True, "0": False, "none": None}
# What is said of kinds of errors in place of pydantic's words.
MESSAGES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table"),
    "list_type": "must be a list",
    "path_type": "must be a path",
    "missing": "required, but not given",
    "union_tag_not_found": "needs a `type`",
}
LEFT = 46  # columns of help for an option and its type
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


class ConfigError(UserError):
    """One or more mistakes in a configuration, each a readable line in `problems`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Return the configuration of this process, from `argv` (None: the command line) and the environment. Exit with
    status 0 after --help, --version or --completion, with status 1 after printing every mistake."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = prog or os.path.basename(sys.argv[0])
    try:
        if (text := _answer(cls, name, arguments)) is not None:
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


def parse(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """Return the configuration that `argv` and `env` describe; read the files they name, print nothing.

    Raises ConfigError with every mistake.
    """
    return resolve(cls, argv, env)[0]


def from_files(cls: type[Config], *paths: str | Path, **values: Any) -> Config:
    """Return the configuration of TOML files and of `values`, which win. Raises as `parse`."""
    return resolve(cls, [word for path in paths for word in ("@", str(path))], {}, values)[0]


def resolve(
    cls: type[Config], argv: Sequence[str], env: Mapping[str, str], values: Mapping[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """As `parse`, with `values` by dotted key over both, and with hints at today's spelling of an older setting, and at
    settings that are left out."""
    table = _read(cls, argv, env)
    for name, value in (values or {}).items():
        source = Entry(name=f"argument {name}", precedence=len(argv) + 2)  # above all of argv
        table.add(tuple(name.split(".")), value, source)
    # Once without shared settings, for what is unknown or of a wrong type, and once with them.
    for shared in (False, True):
        try:
            if shared:
                cls.share(table)
            config = cls.model_validate(table.tree(), context=_LOADER)
        except Problems as error:
            table.problems += [_problem_line(problem, (), table) for problem in error.problems]
        except ValidationError as error:
            table.problems += _validation_lines(error, cls, table, shared)
        if table.problems:
            raise ConfigError(*table.problems)
    return config, table.hints


def in_section(keys: Keys) -> Keys:
    """`keys` of `rl` as the process has them that they are meant for."""
    return keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


# The table: values by path, each with its origin


class Entry(NamedTuple):
    """The value of a key, {} of a table and [] of a list: what is in them has entries of its own.

    Its origin is the option, the variable, or the file of these `lines` that is called `name`, which had it as `keys`;
    there is none where it follows from other settings. The highest precedence wins.
    """

    value: Any = ABSENT
    kind: Kind = "file"
    name: str = ""
    precedence: int = -1
    keys: Keys = ()
    lines: tuple[str, ...] = ()
    above: int = 0  # how many of the keys are not in the file: those of the section that it was given to

    @property
    def place(self) -> str:
        """The name; of a file also the line that names the last of the keys, below those that name its parents. tomllib
        does not report lines. A key inside a string could be mistaken for one, which only misplaces a message."""
        number, before = -1, ""
        for key in self.keys[self.above :]:
            pattern = rf"[^#]*(?<![\w-]){re.escape(key)}[\"']?\s*[=.\]]"
            if is_index(key):
                pattern = rf"\s*\[\[.*\b{re.escape(before)}[\"']?\s*\]"
            matches = [line for line in range(max(number, 0), len(self.lines)) if re.match(pattern, self.lines[line])]
            number, before = next(iter(matches[int(key) if is_index(key) else 0 :]), number), key
        return self.name if number < 0 else f"{self.name}, line {number + 1}"


class Table:
    """Settings by path, of each the strongest: sources are added from the weakest to the strongest. `unions` are the
    sections that have several types: the settings of one mean nothing in another."""

    def __init__(self, unions: frozenset[Keys] = frozenset()) -> None:
        self.entries: dict[Keys, Entry] = {(): Entry({})}  # what is around an entry comes before it
        self.hints: list[str] = []
        self.problems: list[str] = []
        self._unions = unions

    def entry(self, keys: Keys | str) -> Entry:
        """The entry; its value is ABSENT where there is none. A dotted text names keys without dots."""
        return self.entries.get(tuple(keys.split(".")) if isinstance(keys, str) else keys, Entry())

    def items(self, keys: Keys) -> list[Any]:
        """The values directly in a table or a list, nested."""
        return [self.tree(path) for path in list(self.entries) if path and path[:-1] == keys]

    def tree(self, keys: Keys = ()) -> Any:
        """The value with all that is in it, nested."""
        value = self.entries[keys].value
        if isinstance(value, dict):
            return {path[-1]: self.tree(path) for path in self.entries if path and path[:-1] == keys}
        return self.items(keys) if isinstance(value, list) else value

    def origin(self, keys: Keys) -> Entry:
        """The entry of `keys`, else of its nearest parent, that a source has; an empty one where none has."""
        with_parents = [self.entry(keys[:length]) for length in range(len(keys), 0, -1)]
        return next((entry for entry in with_parents if entry.name), Entry())

    def set(self, keys: Keys | str, entry: Entry) -> None:
        """Put an entry, and the tables around it, in place of the one before and of what was in that."""
        keys = tuple(keys.split(".")) if isinstance(keys, str) else keys
        kinds = (dict, list) if keys and is_index(keys[-1]) else (dict,)
        if keys and not isinstance(self.entry(keys[:-1]).value, kinds):
            self.set(keys[:-1], Entry(kinds[-1]()))
        self.entries = {path: one for path, one in self.entries.items() if path == keys or path[: len(keys)] != keys}
        self.entries[keys] = entry

    def add(self, keys: Keys, value: Any, source: Entry) -> None:
        """Put a value over those before: tables are merged, anything else is replaced; the text "None" is null."""
        for length, key in enumerate(keys):
            parent, around = keys[:length], self.entry(keys[:length])
            if not isinstance(around.value, dict | list if is_index(key) else dict):
                self.set(parent, around := Entry([] if is_index(key) else {}))
            if isinstance(around.value, list) and int(key) > (size := len(self.items(parent))):
                has = f"{'.'.join(parent)} has {size} item{'' if size == 1 else 's'}"
                self.problems.append(f"{source.name}: index {key} is out of range: {has}")
                return
            if around.name != source.name:
                self.entries[parent] = source._replace(value=around.value, keys=parent)
        source, before = source._replace(keys=keys), (keys, value)
        if (older := OLDER.get(in_section(keys))) is not None:
            keys, value = (*keys[:-1], older[0]), older[1](value)
        if (keys, value) != before:
            today = ",".join(map(str, value)) if isinstance(value, list) else value
            self.hints.append(f"{source.place} {before[1]} is an older spelling of {spell(keys, source.kind)} {today}")
        same, union = self.entry(keys).value, keys[:-1]
        if keys[-1:] == ("type",) and generic(union) in self._unions and same not in (ABSENT, value):
            if len(self.items(union)) > 1:
                self.hints.append(f"{'.'.join(union)} of type '{same}' is left out: {source.place} makes it '{value}'")
            self.set(union, source._replace(value={}, keys=union))
        if isinstance(value, dict) and isinstance(same, dict):
            self.entries[keys] = source._replace(value={})
        else:
            leaf = type(value)() if isinstance(value, dict | list) else None if value == "None" else value
            self.set(keys, source._replace(value=leaf))
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in sorted(items, key=lambda item: item[0] != "type"):
            self.add((*keys, str(key)), item, source)


# Sources: variables, the words of the command line, and files


def _read(cls: type[Section], argv: Sequence[str], env: Mapping[str, str]) -> Table:
    """Return what all sources give, the weakest first. argparse can neither tell an optional section from a setting nor
    let `@` stand anywhere."""
    table = Table(unions=frozenset(setting.keys for setting in settings(cls) if len(setting.sections) > 1))
    # A type comes before the settings that it has, items of a list by their number, after the list.
    for name in sorted(env, key=lambda name: (not name.endswith("__TYPE"), len(name), name)):
        if keys := _keys_of_variable(name, cls):
            setting = find(cls, keys)
            value = env[name] if setting is None else _from_text([env[name]], setting)
            table.add(keys, value, Entry(kind="variable", name=name, precedence=0))
    words, files, options, precedence = deque(argv), list[Assignment](), list[Assignment](), 1
    while words:
        try:
            taken = _take_file(words, ()) if words[0].startswith("@") else _take_option(cls, words)
            (options if taken[0][2].kind == "option" else files).extend(taken)
        except ConfigError as error:
            table.problems += error.problems
    for keys, value, source in sorted(files, key=lambda one: one[0] != ()):
        precedence += not keys  # a section's file has the precedence of the last whole-config file
        table.add(keys, value, source._replace(precedence=precedence))
    for keys, value, source in sorted(options, key=lambda one: (any(map(is_index, one[0])), one[0][-1] != "type")):
        table.add(keys, value, source._replace(precedence=precedence + 1))
    return table


def child_env(env: Mapping[str, str], cls: type[Section]) -> dict[str, str]:
    """Return `env` without the variables that a process configured by `cls` would read as settings. For one that gets
    its complete configuration as a file: what was meant for `rl` may be a mistake there."""
    return {name: value for name, value in env.items() if not _keys_of_variable(name, cls)}


def _keys_of_variable(name: str, cls: type[Section]) -> Keys:
    """Return the setting that a variable names, () of any other program's: one without `__` has to be a setting."""
    if not name.startswith(PREFIX) or name == RESERVED_VARIABLE:
        return ()
    keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
    keys = ("log", "level") if keys == ("log_level",) else keys
    return keys if len(keys) > 1 or find(cls, OLDER.get(keys, keys)[:1]) else ()


def _take_option(cls: type[Section], words: deque[str]) -> list[Assignment]:
    """Take an option with the values that follow it, as many as its type takes, or with the file of its section."""
    word = words.popleft()
    name, equals, inline_value = word.partition("=")
    if not name.startswith("--") or name == "--":
        if word.endswith(".toml") or os.path.isfile(word):
            raise ConfigError(f"to read the file {word}, write: @ {word}")
        hint = ": options start with --" if word.startswith("-") else ""
        raise ConfigError(f"unexpected argument '{without_password(word)}'{hint}")
    keys = tuple(name[2:].replace("-", "_").split("."))
    setting, source = find(cls, keys), Entry(kind="option", name=name)
    positive = tuple(key.removeprefix("no_") for key in keys)  # of `--no-flag` or, for what may be null, `--no-ckpt`
    off = find(cls, positive) if setting is None and positive != keys else None
    if off is not None and off.takes(bool, NoneType):
        if equals:
            raise ConfigError(f"{name} takes no value")
        return [(positive, False if off.takes(bool) else None, source)]
    first = inline_value if equals else words[0] if words else ""
    is_table = setting is not None and (bool(setting.sections) or setting.takes(dict))
    if is_table and first.startswith("@"):
        words.extendleft([first] if equals else [])
        return _take_file(words, keys, f"{name} ")
    takes_many = setting is None or setting.takes(list)
    most = None if setting is None or takes_many else 0 if setting.takes(bool) and first.lower() not in BOOLS else 1
    texts = [inline_value] if equals else []
    while words and not equals and len(texts) != most and not words[0].startswith(("--", "@")):
        if takes_many and words[0].endswith(".toml"):  # a file without its @
            break
        texts.append(words.popleft())
    if setting is None:
        return [(keys, " ".join(texts), source)]
    if not texts and not is_table and not setting.takes(bool, Any):
        raise ConfigError(f"{name} needs a value")
    value = _from_text(texts, setting)
    if is_table and not isinstance(value, dict) and value not in (None, "None"):
        table = f"a table such as \"{{'key': 1}}\", {name} @ file.toml, or one of its settings ({name}.…)"
        raise ConfigError(f"{name} is a section: expected {table}{_got(''.join(texts))}")
    return [(keys, value, source)]


def _from_text(texts: list[str], setting: Setting) -> Any:
    """Convert the text of an option or a variable to the setting's type (a list takes any number; no text means true).
    Text that does not convert is returned unchanged."""
    text = " ".join(texts) if texts else "true"
    if text == "None" or (setting.takes(str, Path, Literal) and not setting.takes(list)):
        return text
    if setting.takes(list):
        if text.lstrip().startswith("{"):  # tables, each of them a word
            return [_literal(item) for item in texts]
        parts = [part.strip() for item in texts for part in item.split(",")]
        return _literal(text) if text.lstrip().startswith("[") else [part for part in parts if part]
    if setting.takes(bool):
        return BOOLS.get(text.lower(), text)
    value = _literal(text)
    if value in (True, False) and setting.sections and setting.takes(NoneType):
        return {} if value else None
    return text if isinstance(value, bool) and setting.takes(int, float) else value  # pydantic would take true for 1


def _literal(text: str) -> Any:
    """Return the value of JSON, else of a Python literal that JSON has a form of, else the text itself."""
    with suppress(ValueError):
        return json.loads(text)
    with suppress(ValueError, TypeError, SyntaxError):
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    return text


def _take_file(words: deque[str], prefix: Keys, after: str = "") -> list[Assignment]:
    """Read the file of the `@` that comes next, in the same word or the next."""
    path = words.popleft()[1:]
    if not path and (not words or words[0].startswith(("--", "@"))):
        raise ConfigError(f"{after}@ must be followed by a file")
    return _read_file(Path(path or words.popleft()), prefix)


def _read_file(path: Path, prefix: Keys, including: tuple[Path, ...] = ()) -> list[Assignment]:
    """Return the assignments of the files that a file includes, by relative paths, then its own below `prefix`."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [entry.stem for entry in path.parent.glob("*.toml")], n=1)
        hint = f"did you mean {path.parent / near[0]}.toml?" if near else ""
        hint = hint if path.parent.is_dir() else f"nor is there a directory {path.parent}"
        hint = f"today it is {today}" if (today := current_file(path)) else hint
        raise ConfigError(f"no such file: {path}{_where(hint)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of tomllib, or of an encoding
        raise ConfigError(f"{path}: malformed TOML: {str(error).partition(';')[0]}") from None
    names = tree.pop("include", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: include must be a file name or a list of file names")
    assignments: list[Assignment] = []
    for target in [path.parent / name for name in names]:
        if os.path.abspath(target) in map(os.path.abspath, (*including, path)):
            raise ConfigError(f"{path}: include of {target} is a cycle")
        assignments += _read_file(target, prefix, (*including, path))
    return [*assignments, (prefix, tree, Entry(name=str(path), lines=tuple(text.splitlines()), above=len(prefix)))]


# Mistakes as lines: the key, what is wrong with it, where it came from, the nearest setting


def _validation_lines(error: ValidationError, cls: type[Section], table: Table, shared: bool) -> list[str]:
    """Return a line for each mistake that pydantic found; one that was copied into several sections counts once.
    `shared`: whether sections have what they share, so that contradictions and missing settings can be reported."""
    reported, lines = set[Keys](), dict[tuple[Keys, str], str]()
    located = [(_keys_of_error(details, table), details) for details in error.errors(include_url=False)]
    for keys, details in sorted(located, key=lambda one: table.entry(one[0]).keys != one[0]):
        cause, kind = details.get("ctx", {}).get("error"), details["type"]
        if not shared and (kind == "missing" or isinstance(cause, Problems)):
            continue
        if isinstance(cause, Problems):
            for problem in cause.problems:
                lines.setdefault((in_section(keys), problem.message), _problem_line(problem, keys, table))
        elif any(keys[:length] in reported for length in range(len(keys) + 1)):
            continue  # one line, whatever number of types was tried
        elif kind == "extra_forbidden":
            lines[keys, ""] = _unknown(cls, table, keys)
        else:
            message, entry, setting = _message(details), table.origin(keys), find(cls, keys)
            shown = entry.name and not (setting and has_mark(setting.field, "secret"))
            shown = shown and kind not in ("missing", "union_tag_invalid", "literal_error")
            line = f"{'.'.join(keys)}: {message}{_got(details['input']) if shown else ''}{_where(entry.place)}"
            lines.setdefault((in_section(keys), message), line)
        reported.add(keys)
    return list(lines.values())


def _keys_of_error(details: Any, table: Table) -> Keys:
    """Return a location of pydantic as keys: without the names of types that pydantic puts into it."""
    keys: Keys = ()
    for part in details["loc"]:
        keys = (*keys, str(part)) if (*keys, str(part)) in table.entries else keys
    if details["type"] == "missing":
        return (*keys, str(details["loc"][-1]))
    return (*keys, "type") if details["type"] == "union_tag_invalid" else keys


def _problem_line(problem: Problem, prefix: Keys, table: Table) -> str:
    """Return the message of a contradiction, with where each of its keys came from."""
    entries = {key: table.entry((*prefix, *key.split("."))) for key in problem.keys}
    origins = {key: entry.place for key, entry in entries.items() if entry.name}
    in_its_section = not origins or any(entries[key].keys == (*prefix, *key.split(".")) for key in origins)
    within = f"{'.'.join(prefix)}: " if prefix and in_its_section else ""
    return f"{within}{problem.message}{_where(', '.join(f'{key}: {place}' for key, place in origins.items()))}"


def _unknown(cls: type[Section], table: Table, keys: Keys) -> str:
    """Return a line about `keys`, the last of which names nothing in its section."""
    tags = dict.fromkeys(f"'{one.tag}'" for one in settings(cls) if one.keys == generic(keys) and one.tag)
    leaves = (path for path, entry in table.entries.items() if path[: len(keys)] == keys and entry.value != {})
    keys = next(leaves, keys)
    entry = table.origin(keys)
    unknown = f"{entry.place} names no setting"
    if entry.kind == "file":
        unknown = f"unknown key {'.'.join(keys)}{_where(entry.place)}"
    if keys[0] in SECTIONS_OF_RL and find(cls, keys[:1]) is None:
        its = spell(keys[1:], entry.kind)
        return f"{unknown}: only `rl` has a section `{keys[0]}`; give {its} to the command `{keys[0]}`"
    if tags:
        return f"{unknown} of this type; it belongs to type {', '.join(tags)}"
    near = nearest(cls, keys)
    return unknown if near is None else f"{unknown}; did you mean {spell(near, entry.kind)}?"


def _message(details: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("union_tag_invalid", "literal_error"):
        expected, wrong = context.get("expected_tags") or context["expected"], context.get("tag", details["input"])
        near = difflib.get_close_matches(str(wrong), re.findall(r"'(.*?)'", expected), n=1, cutoff=0.7)
        return f"must be {expected}{_got(str(wrong))}" + (f"; did you mean '{near[0]}'?" if near else "")
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return MESSAGES.get(kind) or message.split(", unable to parse")[0]


def _got(value: Any) -> str:
    """Return what was given, but not where a table or a list was meant, which may hold a secret."""
    if str(value).lstrip().startswith(("{", "[") if isinstance(value, str) else "[{"):
        return ", and what was given is malformed"
    items = value if isinstance(value, list) else [value]
    shown = [without_password(item) if isinstance(item, str) else item for item in items]
    text = repr(shown if isinstance(value, list) else shown[0])
    return f", got {text if len(text) <= 60 else f'{text[:57]}...'}"


def _where(place: str) -> str:
    return f" ({place})" if place else ""


# Help


def _answer(cls: type[Section], prog: str, arguments: Sequence[str]) -> str | None:
    """Return what to print for --help, --version or --completion, None where none of them is asked for."""
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
    """Return the overview: top-level options and sections. Of a topic that is a section: its own options and sections,
    if `within`. Of any other: the options with the topic in their name or description."""
    every, section = settings(cls), tuple(topic.replace("-", "_").split("."))
    around = {section, (*section, "N")} if topic else {()}  # of a list of sections, each of its items
    shown = [one for one in every if {one.keys, one.keys[:-1]} & around]
    overview, width = list[str](), max(80, min(shutil.get_terminal_size((140, 40)).columns, 160))
    if not topic:
        overview = [OVERVIEW.format(prog=prog, summary=textwrap.fill(_summary(cls), width))]
        shown.sort(key=lambda one: bool(one.sections))
    elif not within or len(shown) < 2:
        texts = [f"{spell(one.keys, 'file')} {spell(one.keys, 'option')} {one.field.description}" for one in every]
        matches = zip(every, texts, strict=True)
        shown = [one for one, text in matches if topic == "all" or topic.lower() in text.lower()]
    if not shown:
        raise ConfigError(f"no option has '{topic}' in its name or description")
    return "\n".join([*overview, *(_line(cls, one, width) for one in shown)])


def _line(cls: type[Section], setting: Setting, width: int) -> str:
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
    right = textwrap.indent(textwrap.fill(text, width - LEFT), " " * LEFT)
    return f"{left}\n{right}" if len(left) > LEFT - 2 else left + right[len(left) :]


def _summary(section: type[Section]) -> str:
    return f"{' '.join((section.__doc__ or '').split()).rstrip('.')}."


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
    if setting.field.is_required():
        return "required"
    default: Any = setting.field.get_default(call_default_factory=True, validated_data={})
    if default in ("", [], {}):
        return "default: empty"
    return f"default: {str(default).lower() if isinstance(default, bool) else default}"
