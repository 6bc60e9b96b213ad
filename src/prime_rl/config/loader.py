"""From variables, `@` files and options to one validated configuration, or to every mistake as a readable line."""

import ast
import difflib
import errno
import json
import os
import re
import sys
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from prime_rl.config.base import LOADED, BaseConfig, Problem, Problems, Section, has_mark
from prime_rl.config.migration import OLDER, OLDER_FOLDERS, REMOVED
from prime_rl.config.schema import (
    PREFIX,
    SECTIONS_OF_RL,
    ConfigError,
    Keys,
    Kind,
    Setting,
    by_path,
    find,
    generic,
    in_section,
    is_index,
    nearest,
    settings,
    spell,
)
from prime_rl.redact import without_password

Config = TypeVar("Config", bound=BaseConfig)

ABSENT: Any = object()
RESERVED_VARIABLE = "PRIME_API_KEY"  # the key of the user's account, although `inference` has an api_key
INCLUDE = "include"
# What is said of kinds of errors in place of pydantic's words.
MESSAGES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table"),
    "list_type": "must be a list",
    "path_type": "must be a path",
    "missing": "required, but not given",
    "union_tag_not_found": "needs a `type`",
}
BOOLS = {"true": True, "false": False, "1": True, "0": False, "none": None}


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Return the configuration of this process, from `argv` (None: the command line) and the environment.

    Print help, version or completion and exit with status 0 where asked to; print every mistake and exit with status 1
    where there is one.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = prog or os.path.basename(sys.argv[0])
    try:
        if any(word.partition("=")[0] in ("-h", "--help", "--version", "--completion") for word in arguments):
            from prime_rl.config.help import answer

            say(answer(cls, name, arguments))
            raise SystemExit(0)
        config, hints = resolve(cls, arguments, os.environ)
    except ConfigError as error:
        usual = "" if arguments else f" Settings usually go in a file: {name} @ config.toml."
        end = f"Nothing was started.{usual} To list all settings: {name} --help"
        print(*(f"error: {problem}" for problem in error.problems), end, sep="\n", file=sys.stderr)
        raise SystemExit(1) from None
    for hint in hints:
        print(f"hint: {hint}", file=sys.stderr)
    return config


def parse(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """Return the configuration that `argv` and `env` describe; read the files they name, print nothing.

    Raises:
        ConfigError: with every mistake.
    """
    return resolve(cls, argv, env)[0]


def resolve(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> tuple[Any, list[str]]:
    """As `parse`, with hints at today's spelling of what was given in an older one, and at what is left out."""
    table = _read(cls, argv, env)
    problems = table.problems
    # Once as given, for what is unknown or of a wrong type, and once with the settings that sections share.
    for shared in (False, True):
        try:
            if shared:
                cls.share(table)
            config = cls.model_validate(table.tree, context=LOADED)
        except Problems as error:
            problems += [_problem_line(problem, (), table) for problem in error.problems]
        except ValidationError as error:
            problems += _validation_lines(error, cls, table, shared)
        if problems:
            raise ConfigError(*problems)
    return config, table.hints


def say(text: str) -> None:
    """Print. Once the terminal or pipe is closed (`rl … | head`) lines are dropped, and the run goes on."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        with open(os.devnull, "w") as nowhere:  # nor may the interpreter report the broken pipe at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


# The tree of settings that all sources write into, with the origin of each


class Origin(NamedTuple):
    """An option, a variable, or a file, of which `lines` are read into the section at `prefix`.

    The highest precedence wins.
    """

    kind: Kind
    name: str
    precedence: int = 0
    prefix: Keys = ()
    lines: tuple[str, ...] = ()

    def place(self, keys: Keys) -> str:
        """Return the name; of a file also the line that names the last of `keys`, below those that name its parents.

        tomllib does not report lines. A key inside a string could be mistaken for one, which only misplaces a message.
        """
        number, before = -1, ""
        for key in keys[len(self.prefix) :]:
            pattern = rf"[^#]*(?<![\w-]){re.escape(key)}[\"']?\s*[=.\]]"
            if is_index(key):
                pattern = rf"\s*\[\[.*\b{re.escape(before)}[\"']?\s*\]"
            matches = [line for line in range(max(number, 0), len(self.lines)) if re.match(pattern, self.lines[line])]
            number, before = next(iter(matches[int(key) if is_index(key) else 0 :]), number), key
        return self.name if number < 0 else f"{self.name}, line {number + 1}"


class Entry(NamedTuple):
    """The value of a key, {} of a table and [] of a list.

    `keys`: the path as the user spelled it in `origin` (None: given in Python, or it follows from other settings).
    """

    value: Any
    origin: Origin | None = None
    keys: Keys = ()

    @property
    def precedence(self) -> int:
        return -1 if self.origin is None else self.origin.precedence

    @property
    def place(self) -> str:
        return "" if self.origin is None else self.origin.place(self.keys)


class Table:
    """A tree of settings, of each the strongest. Sources are added from the weakest to the strongest.

    `unions` are the sections that have several types: the settings of one mean nothing in another.
    """

    def __init__(self, tree: dict[str, Any] | None = None, unions: frozenset[Keys] = frozenset()) -> None:
        self.tree: Any = tree or {}
        self.hints: list[str] = []
        self.problems: list[str] = []
        self._origins: dict[Keys, tuple[Origin, Keys]] = {}
        self._unions = unions

    def get(self, keys: Keys) -> Any:
        """The value with all that is in it, or ABSENT."""
        value = self.tree
        for key in keys:
            if isinstance(value, list):
                value = value[int(key)] if is_index(key) and int(key) < len(value) else ABSENT
            else:
                value = value.get(key, ABSENT) if isinstance(value, dict) else ABSENT
        return value

    def entry(self, keys: Keys | str) -> Entry:
        """The entry; its value is ABSENT where there is none. A dotted text names keys without dots."""
        path = tuple(keys.split(".")) if isinstance(keys, str) else keys
        value = self.get(path)
        return Entry(type(value)() if isinstance(value, dict | list) else value, *self._origins.get(path, ()))

    def nearest(self, keys: Keys) -> Entry:
        """The entry of `keys`, else of its nearest parent, that a source gave; an empty one where none did."""
        with_parents = [self.entry(keys[:length]) for length in range(len(keys), 0, -1)]
        return next((entry for entry in with_parents if entry.origin is not None), Entry(ABSENT))

    def add(self, keys: Keys, value: Any, origin: Origin) -> None:
        """Put a value over those before: tables are merged, anything else is replaced; the text "None" is null."""
        for length, key in enumerate(keys):
            parent = keys[:length]
            table = self.get(parent)
            if not isinstance(table, dict | list if is_index(key) else dict):
                table = [] if is_index(key) else {}
                self._set(parent, table)
            if isinstance(table, list) and int(key) > len(table):
                has = f"{'.'.join(parent)} has {len(table)} item{'' if len(table) == 1 else 's'}"
                self.problems.append(f"{origin.name}: index {key} is out of range: {has}")
                return
            self._origins[parent] = (origin, parent)
        self._write(keys, value, origin)

    def _write(self, keys: Keys, value: Any, origin: Origin) -> None:
        """Set `keys`, under its name of today, and all that is in it."""
        written_as, before = keys, value
        if (older := OLDER.get(in_section(keys))) is not None:
            keys, value = (*keys[:-1], older[0]), older[1](value)
            if (keys, value) != (written_as, before):
                today = ",".join(map(str, value)) if isinstance(value, list) else value
                hint = f"{before} is an older spelling of {spell(keys, origin.kind)} {today}"
                self.hints.append(f"{origin.place(written_as)} {hint}")
        same = self.entry(keys)
        if same.origin is origin and same.keys != written_as:
            both = f"{'.'.join(same.keys)} and {'.'.join(written_as)} are the same setting, give it once"
            self.problems.append(f"{both} ({same.place})")
        if keys[-1:] == ("type",) and generic(keys[:-1]) in self._unions and same.value not in (ABSENT, value):
            self._leave_out_other_types(keys, value, origin)
        if not (isinstance(value, dict) and isinstance(same.value, dict)):
            leaf = type(value)() if isinstance(value, dict | list) else None if value == "None" else value
            self._set(keys, leaf)
        self._origins[keys] = (origin, written_as)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in sorted(items, key=lambda item: item[0] != "type"):
            self._write((*keys, str(key)), item, origin)

    def _leave_out_other_types(self, keys: Keys, value: Any, origin: Origin) -> None:
        """Drop what weaker sources set for another `type`, which is set at `keys`; options may come in any order."""
        before, union = self.entry(keys), keys[:-1]
        others = {(*union, key): self.entry((*union, key)).origin for key in self.get(union) if key != "type"}
        gone = [key for key, by in others.items() if by is None or by.kind != origin.kind or origin.kind == "file"]
        for key in gone:
            self.remove(key)
        if gone and before.origin is not None:
            what = f"{', '.join(sorted('.'.join(key) for key in gone))} set by {before.origin.name}"
            now = f"{origin.place(keys)} makes it '{value}'"
            self.hints.append(f"{what} for type '{before.value}' is left out: {now}")

    def fill(self, dotted: str, entry: Entry) -> None:
        """Set what was missing, or came from a weaker source, and follows from another setting."""
        keys = tuple(dotted.split("."))
        for parent in [keys[:length] for length in range(len(keys))]:
            if not isinstance(self.get(parent), dict):
                self._set(parent, {})
        self._set(keys, entry.value)
        if entry.origin is not None:
            self._origins[keys] = (entry.origin, entry.keys)

    def remove(self, keys: Keys) -> None:
        """Forget `keys`, of a table, and everything within."""
        if isinstance(around := self.get(keys[:-1]), dict):
            around.pop(keys[-1], None)
        self._forget_origins(keys)

    def _set(self, keys: Keys, value: Any) -> None:
        """Put a value in place of the one before."""
        self._forget_origins(keys)
        around = self.get(keys[:-1])
        if not keys:
            self.tree = value
        elif isinstance(around, list):
            around[int(keys[-1]) : int(keys[-1]) + 1] = [value]
        else:
            around[keys[-1]] = value

    def _forget_origins(self, keys: Keys) -> None:
        self._origins = {other: by for other, by in self._origins.items() if other[: len(keys)] != keys}


Assignment = tuple[Keys, Any, Origin]


def _read(cls: type[Section], argv: Sequence[str], env: Mapping[str, str]) -> Table:
    """Return what all sources give, the weakest first.

    argparse can neither tell an optional section from a setting nor let `@` stand anywhere.
    """
    table = Table(unions=frozenset(setting.keys for setting in settings(cls) if len(setting.sections) > 1))
    for name in sorted(env, key=lambda name: (len(name), name)):  # items of a list by their number
        if keys := _keys_of_variable(name, cls):
            setting = find(cls, keys)
            value = env[name] if setting is None else _from_text([env[name]], setting)
            table.add(keys, value, Origin("variable", name))
    words, assignments, precedence = deque(argv), list[Assignment](), 1
    while words:
        try:
            assignments += _take(cls, words)
        except ConfigError as error:
            table.problems += error.problems
    for keys, value, origin in sorted(assignments, key=_strength):
        # A section's file has the precedence of the last whole-config file.
        precedence += origin.kind == "file" and not keys
        table.add(keys, value, origin._replace(precedence=precedence + (origin.kind == "option")))
    return table


def _strength(assignment: Assignment) -> tuple[bool, bool]:
    """Options after files, files for sections after others; items of lists after the lists, so that neither is lost."""
    keys, _, origin = assignment
    return (True, any(map(is_index, keys))) if origin.kind == "option" else (False, keys != ())


# Environment variables: PRIME_MODEL__NAME is model.name. One without `__` counts only if it names a setting.


def child_env(env: Mapping[str, str], cls: type[Section]) -> dict[str, str]:
    """Return `env` without the variables that a process configured by `cls` would read as settings.

    For one that gets its complete configuration as a file: what was meant for `rl` may be a mistake there.
    """
    return {name: value for name, value in env.items() if not _keys_of_variable(name, cls)}


def _keys_of_variable(name: str, cls: type[Section]) -> Keys:
    """Return the setting that a variable names, () of any other program's."""
    if not name.startswith(PREFIX) or name == RESERVED_VARIABLE:
        return ()
    keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
    keys = ("log", "level") if keys == ("log_level",) else keys
    today = (OLDER[keys][0],) if keys in OLDER else keys
    return keys if len(keys) > 1 or find(cls, today) else ()


# The words of the command line, and values as text


def _take(cls: type[Section], words: deque[str]) -> list[Assignment]:
    """Take a file with those that it includes, or an option with the values that follow it, as many as its type takes."""
    word = words.popleft()
    name, equals, inline_value = word.partition("=")
    if word.startswith("@"):
        return _read_file(_take_path("@", word, words), ())
    if not name.startswith("--") or name == "--":
        if word.endswith(".toml") or os.path.isfile(word):
            raise ConfigError(f"to read the file {word}, write: @ {word}")
        hint = ": options start with --" if word.startswith("-") else ""
        raise ConfigError(f"unexpected argument '{without_password(word)}'{hint}")
    keys = tuple(name[2:].replace("-", "_").split("."))
    setting, origin = find(cls, keys), Origin("option", name)
    if setting is None:  # `--no-flag` or, for what may be null, `--no-ckpt`; also `--trainer.no-ckpt`
        for position, key in enumerate(keys):
            positive = (*keys[:position], key.removeprefix("no_"), *keys[position + 1 :])
            setting = find(cls, positive) if key.startswith("no_") else None
            if setting is not None and (setting.takes(bool) or setting.nullable):
                if equals:
                    raise ConfigError(f"{name} takes no value")
                return [(positive, False if setting.takes(bool) else None, origin)]
        return [(keys, inline_value if equals else " ".join(_following(words)), origin)]
    first = inline_value if equals else words[0] if words else ""
    is_table = bool(setting.sections) or setting.takes(dict)
    if is_table and first.startswith("@"):
        return _read_file(_take_path(f"{name} @", first if equals else words.popleft(), words), keys)
    most = None if setting.takes(list) else 0 if setting.takes(bool) and first.lower() not in BOOLS else 1
    texts = [inline_value] if equals else _following(words, most)
    if not texts and not is_table and not setting.takes(bool, Any):
        raise ConfigError(f"{name} needs a value")
    value = _from_text(texts, setting)
    if is_table and not isinstance(value, dict) and value not in (None, "None"):
        table = f"a table such as \"{{'key': 1}}\", {name} @ file.toml, or one of its settings ({name}.…)"
        raise ConfigError(f"{name} is a section: expected {table}{_got(''.join(texts))}")
    return [(keys, value, origin)]


def _following(words: deque[str], most: int | None = None) -> list[str]:
    """Take the values that follow an option, at most so many; none of several is a file without its @."""
    values: list[str] = []
    while words and len(values) != most and not words[0].startswith(("--", "@")):
        if most is None and words[0].endswith(".toml"):
            break
        values.append(words.popleft())
    return values


def _take_path(after: str, word: str, words: deque[str]) -> Path:
    """Return the file of an `@`, in the same word or the next."""
    if word == "@" and (not words or words[0].startswith(("--", "@"))):
        raise ConfigError(f"{after} must be followed by a file")
    return Path(words.popleft() if word == "@" else word[1:])


def _from_text(texts: list[str], setting: Setting) -> Any:
    """Convert the text of an option or a variable to the setting's type (a list takes any number; no text means true).

    Text that does not convert is returned unchanged.
    """
    text = " ".join(texts) if texts else "true"
    if text == "None":
        return text
    if setting.takes(list):
        if text.lstrip().startswith("{"):  # tables, each of them a word
            return [_literal(item) for item in texts]
        parts = [part.strip() for item in texts for part in item.split(",")]
        return _literal(text) if text.lstrip().startswith("[") else [part for part in parts if part]
    if setting.takes(bool):
        return BOOLS.get(text.lower(), text)
    if setting.choices or setting.takes(str, Path):
        return text
    if setting.sections and setting.nullable and text.lower() in BOOLS:
        return {} if BOOLS[text.lower()] else None
    value = _literal(text)
    return text if isinstance(value, bool) and setting.takes(int, float) else value  # pydantic would take true for 1


def _literal(text: str) -> Any:
    """Return the value of JSON, else of a Python literal that JSON has a form of, else the text itself."""
    with suppress(ValueError):
        return json.loads(text)
    with suppress(ValueError, TypeError, SyntaxError):
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    return text


def _read_file(path: Path, prefix: Keys, including: tuple[Path, ...] = ()) -> list[Assignment]:
    """Return what each file that is included, relative to the one that does, then the file itself sets below `prefix`."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}{_nearest_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # of tomllib, or of an encoding
        raise ConfigError(f"{path}: malformed TOML: {str(error).partition(';')[0]}") from None
    names = tree.pop(INCLUDE, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: {INCLUDE} must be a file name or a list of file names")
    assignments: list[Assignment] = []
    for target in [path.parent / name for name in names]:
        if os.path.abspath(target) in map(os.path.abspath, (*including, path)):
            raise ConfigError(f"{path}: include of {target} is a cycle")
        assignments += _read_file(target, prefix, (*including, path))
    return [*assignments, (prefix, tree, Origin("file", str(path), prefix=prefix, lines=tuple(text.splitlines())))]


def _nearest_file(path: Path) -> str:
    for position, folder in enumerate(path.parts[:-1]):
        name = path.with_suffix("").parts[position + 1]
        today = Path(*path.parts[:position], name, f"{OLDER_FOLDERS.get(folder)}.toml")
        if os.path.isfile(today):
            return f" (today it is {today})"
    if not os.path.isdir(path.parent):
        return f" (nor is there a directory {path.parent})"
    near = difflib.get_close_matches(path.stem, [entry.stem for entry in path.parent.glob("*.toml")], n=1)
    return f" (did you mean {path.parent / near[0]}.toml?)" if near else ""


# Mistakes as lines: the key, what is wrong with it, where it came from, the nearest setting


def _validation_lines(error: ValidationError, cls: type[Section], table: Table, shared: bool) -> list[str]:
    """Return a line for each mistake that pydantic found; one that was copied into several sections counts once.

    `shared`: whether sections have what they share, so that contradictions and missing settings can be reported.
    """
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
            message, entry, setting = _message(details), table.nearest(keys), find(cls, keys)
            shown = entry.origin and not (setting and has_mark(setting.field, "secret"))
            shown = shown and kind not in ("missing", "union_tag_invalid", "literal_error")
            line = f"{'.'.join(keys)}: {message}{_got(details['input']) if shown else ''}{_where(entry.place)}"
            lines.setdefault((in_section(keys), message), line)
        reported.add(keys)
    return list(lines.values())


def _keys_of_error(details: Any, table: Table) -> Keys:
    """Return a location of pydantic as keys: without the names of types that pydantic puts into it."""
    keys: Keys = ()
    for part in details["loc"]:
        keys = keys if table.get((*keys, str(part))) is ABSENT else (*keys, str(part))
    if details["type"] == "missing":
        return (*keys, str(details["loc"][-1]))
    return (*keys, "type") if details["type"] == "union_tag_invalid" else keys


def _problem_line(problem: Problem, prefix: Keys, table: Table) -> str:
    """Return the message of a contradiction, with where each of its keys came from."""
    entries = {key: table.entry((*prefix, *key.split("."))) for key in problem.keys}
    origins = {key: entry.place for key, entry in entries.items() if entry.origin is not None}
    in_its_section = not origins or any(entries[key].keys == (*prefix, *key.split(".")) for key in origins)
    within = f"{'.'.join(prefix)}: " if prefix and in_its_section else ""
    return f"{within}{problem.message}{_where(', '.join(f'{key}: {place}' for key, place in origins.items()))}"


def _unknown(cls: type[Section], table: Table, keys: Keys) -> str:
    """Return a line about `keys`, the last of which names nothing in its section."""
    instead = next((said for name, said in REMOVED.items() if f".{'.'.join(keys)}".endswith(f".{name}")), "")
    types = dict.fromkeys(f"'{setting.tag}'" for setting in by_path(cls).get(generic(keys), ()) if setting.tag)
    value = table.get(keys)
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        keys = (*keys, key)
    entry = table.nearest(keys)
    kind = entry.origin.kind if entry.origin is not None else "file"
    unknown = f"{entry.place} names no setting"
    if kind == "file":
        unknown = f"unknown key {'.'.join(keys)}{_where(entry.place)}"
    if keys[0] in SECTIONS_OF_RL and find(cls, keys[:1]) is None:
        its = spell(keys[1:], kind)
        return f"{unknown}: only `rl` has a section `{keys[0]}`; give {its} to the command `{keys[0]}`"
    if types:
        return f"{unknown} of this type; it belongs to type {', '.join(types)}"
    if instead:
        return f"{unknown} any more: {instead}"
    near = nearest(cls, keys)
    return unknown if near is None else f"{unknown}; did you mean {spell(near, kind)}?"


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
