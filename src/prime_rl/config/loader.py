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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from prime_rl.config.base import BaseConfig, Problem, Problems, Section, has_mark
from prime_rl.config.migration import OLDER, OLDER_FOLDERS
from prime_rl.redact import without_password

Config = TypeVar("Config", bound=BaseConfig)
Keys = tuple[str, ...]
Kind = Literal["option", "file", "variable"]

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
RESERVED_VARIABLE = "PRIME_API_KEY"  # the key of the user's account, although `inference` has an api_key
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
ABSENT: Any = object()
BOOLS = {"true": True, "false": False, "1": True, "0": False, "none": None}
# What is said of kinds of errors in place of pydantic's words.
MESSAGES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table"),
    "list_type": "must be a list",
    "path_type": "must be a path",
    "missing": "required, but not given",
    "union_tag_not_found": "needs a `type`",
}


class ConfigError(Exception):
    """One or more mistakes in a configuration, each a readable line in `problems`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def parse(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """Return the configuration that `argv` and `env` describe; read the files they name, print nothing.

    Settings that the sections of a run have in common reach each of them, as they do not in a class made directly.

    Raises:
        ConfigError: with every mistake.
    """
    return resolve(cls, argv, env)[0]


def resolve(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> tuple[Config, list[str]]:
    """As `parse`, with hints at today's spelling of what was given in an older one, and at what is left out."""
    table = _read(cls, argv, env)
    # Once as given, for what is unknown or of a wrong type, and once with the settings that sections share.
    for shared in (False, True):
        try:
            if shared:
                cls.share(table)
            config = cls.model_validate(table.tree())
        except Problems as error:
            table.problems += [_problem_line(problem, (), table) for problem in error.problems]
        except ValidationError as error:
            table.problems += _validation_lines(error, cls, table, shared)
        if table.problems:
            raise ConfigError(*table.problems)
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


# What can be given: every path below a configuration class


class Setting(NamedTuple):
    """A path that can be given: a field of the section `owner`, or an item of a list, whose number is "N" in `keys`.

    `kinds` are its types (`Any` within a dict); `tag` is the `type` of the innermost union around it.
    """

    keys: Keys
    field: FieldInfo
    owner: type[Section]
    tag: str
    kinds: tuple[Any, ...]

    @property
    def sections(self) -> tuple[type[Section], ...]:
        """Those of its types that are sections, several in a union."""
        return tuple(kind for kind in self.kinds if isinstance(kind, type) and issubclass(kind, Section))

    def takes(self, *kinds: Any) -> bool:
        """Whether one of its types is one of these, or a list or dict of anything."""
        return any(kind in (declared, get_origin(declared)) for declared in self.kinds for kind in kinds)


@cache
def settings(root: type[Section]) -> tuple[Setting, ...]:
    """Every path below `root` in the order of declaration; one that several members of a union have comes from each."""
    paths = _paths((), FieldInfo(), root, "", root)
    return tuple({(one.keys, one.owner, one.tag): one for one in paths if one.keys}.values())


def _paths(keys: Keys, field: FieldInfo, owner: type[Section], tag: str, annotation: Any) -> Iterator[Setting]:
    """Yield the setting, what is in it, and the items of a list of sections."""
    yield (setting := Setting(keys, field, owner, tag, tuple(_alternatives(annotation))))
    for section in setting.sections:
        own_tag = str(section.model_fields["type"].default) if len(setting.sections) > 1 else tag
        for name, inner in sorted(section.model_fields.items(), key=lambda item: item[0] != "type"):
            yield from _paths((*keys, name), inner, section, own_tag, inner.annotation)
    for item in [get_args(kind)[0] for kind in setting.kinds if get_origin(kind) is list]:
        if isinstance(item, type) and issubclass(item, Section):
            yield from _paths((*keys, "N"), field, owner, tag, item)


def _alternatives(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, Union, UnionType):
        inner = get_args(annotation)
        for kind in inner[:1] if get_origin(annotation) is Annotated else inner:
            yield from _alternatives(kind)
    else:
        yield annotation


def find(root: type[Section], keys: Keys) -> Setting | None:
    """What `keys` name, None where there is no such setting. In a union any member may have it."""
    path, around = generic(keys), None
    for setting in settings(root):
        if setting.keys == path:
            return setting
        if setting.takes(dict) and setting.keys == path[: len(setting.keys)]:
            around = around or setting._replace(kinds=(Any,))
    return around


def nearest(root: type[Section], keys: Keys) -> Keys | None:
    """The setting that `keys` probably meant: the same elsewhere, one so described, an abbreviated or a similar one."""
    start = next(length for length in range(len(keys)) if find(root, keys[: length + 1]) is None)
    rest, parent = (keys[start].removeprefix("no_"), *keys[start + 1 :]), generic(keys[:start])
    word, single = "_".join(rest), [setting for setting in settings(root) if "N" not in setting.keys]
    described = f"{word.replace('_', ' ').capitalize()}."
    same = [setting.keys for setting in single if setting.keys[-len(rest) :] == rest]
    if same := same or [setting.keys for setting in single if setting.field.description == described]:
        return min(same, key=lambda path: (-len({*path} & {*keys}), len(path)))
    below = [setting.keys[start:] for setting in settings(root) if setting.keys[:start] == parent]
    names = {"_".join(path): path for path in below if "N" not in path}
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in names}
    longer = [name for name in names if name.startswith(word) or initials[name].startswith(word)] if word[1:] else []
    close = sorted(longer, key=len) or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return (*keys[:start], *names[close[0]]) if close else None


def is_index(key: str) -> bool:
    """Whether a key is the number of an item of a list."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None


def generic(keys: Keys) -> Keys:
    """`keys` with "N" for the number of an item."""
    return tuple("N" if is_index(key) else key for key in keys)


def in_section(keys: Keys) -> Keys:
    """`keys` of `rl` as the process has them that they are meant for."""
    return keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


# What was given, with the origin of each value


class Entry(NamedTuple):
    """The value of a key, {} of a table and [] of a list: what is in them has entries of its own.

    It was given, as `keys`, by the option, the variable, or the file of these `lines` that is called `name`; by none
    where it follows from other settings. The highest precedence wins.
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
        """The name; of a file also the line that names the last of the keys, below those that name its parents.

        tomllib does not report lines. A key inside a string could be mistaken for one, which only misplaces a message.
        """
        number, before = -1, ""
        for key in self.keys[self.above :]:
            pattern = rf"[^#]*(?<![\w-]){re.escape(key)}[\"']?\s*[=.\]]"
            if is_index(key):
                pattern = rf"\s*\[\[.*\b{re.escape(before)}[\"']?\s*\]"
            matches = [line for line in range(max(number, 0), len(self.lines)) if re.match(pattern, self.lines[line])]
            number, before = next(iter(matches[int(key) if is_index(key) else 0 :]), number), key
        return self.name if number < 0 else f"{self.name}, line {number + 1}"


class Table:
    """Settings by path, of each the strongest: sources are added from the weakest to the strongest.

    `unions` are the sections that have several types: the settings of one mean nothing in another.
    """

    def __init__(self, unions: frozenset[Keys] = frozenset()) -> None:
        self.entries: dict[Keys, Entry] = {(): Entry({})}  # what is around an entry comes before it
        self.hints: list[str] = []
        self.problems: list[str] = []
        self._unions = unions

    def entry(self, keys: Keys | str) -> Entry:
        """The entry; its value is ABSENT where there is none. A dotted text names keys without dots."""
        return self.entries.get(tuple(keys.split(".")) if isinstance(keys, str) else keys, Entry())

    def items(self, keys: Keys) -> list[Any]:
        """The values directly in a table or a list."""
        return [entry.value for path, entry in self.entries.items() if path and path[:-1] == keys]

    def nearest(self, keys: Keys) -> Entry:
        """The entry of `keys`, else of its nearest parent, that a source gave; an empty one where none did."""
        with_parents = [self.entry(keys[:length]) for length in range(len(keys), 0, -1)]
        return next((entry for entry in with_parents if entry.name), Entry())

    def tree(self) -> Any:
        """All settings, nested."""
        values: dict[Keys, Any] = {}
        for keys, (value, *_) in self.entries.items():
            values[keys] = type(value)() if isinstance(value, dict | list) else value
            if keys:
                around = values[keys[:-1]]
                around.append(values[keys]) if isinstance(around, list) else around.update({keys[-1]: values[keys]})
        return values[()]

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
        source, before = source._replace(keys=keys), value
        if (older := OLDER.get(in_section(keys))) is not None:
            keys, value = (*keys[:-1], older[0]), older[1](value)
            if (keys, value) != (source.keys, before):
                today = ",".join(map(str, value)) if isinstance(value, list) else value
                hint = f"{before} is an older spelling of {spell(keys, source.kind)} {today}"
                self.hints.append(f"{source.place} {hint}")
        same, union = self.entry(keys).value, keys[:-1]
        if keys[-1:] == ("type",) and generic(union) in self._unions and same not in (ABSENT, value):
            if len(self.items(union)) > 1:
                what = f"{'.'.join(union)} of type '{same}' is left out"
                self.hints.append(f"{what}: {source.place} makes it '{value}'")
            self.set(union, source._replace(value={}, keys=union))
        if isinstance(value, dict) and isinstance(same, dict):
            self.entries[keys] = source._replace(value={})
        else:
            leaf = type(value)() if isinstance(value, dict | list) else None if value == "None" else value
            self.set(keys, source._replace(value=leaf))
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in sorted(items, key=lambda item: item[0] != "type"):
            self.add((*keys, str(key)), item, source)

    def fill(self, dotted: str, entry: Entry) -> None:
        """Set what was missing, or came from a weaker source, and follows from another setting."""
        keys = tuple(dotted.split("."))
        for parent in [keys[:length] for length in range(len(keys))]:
            if not isinstance(self.entry(parent).value, dict):
                self.set(parent, Entry({}))
        self.set(keys, entry)

    def set(self, keys: Keys, entry: Entry) -> None:
        """Put an entry in place of the one before and of what was in that."""
        for path in [path for path in self.entries if path[: len(keys)] == keys != path]:
            del self.entries[path]
        self.entries[keys] = entry


Assignment = tuple[Keys, Any, Entry]  # the last is the source, as an entry without a value


def _read(cls: type[Section], argv: Sequence[str], env: Mapping[str, str]) -> Table:
    """Return what all sources give, the weakest first.

    argparse can neither tell an optional section from a setting nor let `@` stand anywhere.
    """
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
            for one in _take(cls, words):
                (options if one[2].kind == "option" else files).append(one)
        except ConfigError as error:
            table.problems += error.problems
    for keys, value, source in sorted(files, key=lambda one: one[0] != ()):
        precedence += not keys  # a section's file has the precedence of the last whole-config file
        table.add(keys, value, source._replace(precedence=precedence))
    for keys, value, source in sorted(options, key=lambda one: (any(map(is_index, one[0])), one[0][-1] != "type")):
        table.add(keys, value, source._replace(precedence=precedence + 1))
    return table


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
    if words[0].startswith("@"):
        return _take_file(words, ())
    word = words.popleft()
    name, equals, inline_value = word.partition("=")
    if not name.startswith("--") or name == "--":
        if word.endswith(".toml") or os.path.isfile(word):
            raise ConfigError(f"to read the file {word}, write: @ {word}")
        hint = ": options start with --" if word.startswith("-") else ""
        raise ConfigError(f"unexpected argument '{without_password(word)}'{hint}")
    keys = tuple(name[2:].replace("-", "_").split("."))
    setting, source = find(cls, keys), Entry(kind="option", name=name)
    if setting is None:  # `--no-flag` or, for what may be null, `--no-ckpt`; also `--trainer.no-ckpt`
        for position, key in enumerate(keys):
            positive = (*keys[:position], key.removeprefix("no_"), *keys[position + 1 :])
            setting = find(cls, positive) if key.startswith("no_") else None
            if setting is not None and (setting.takes(bool) or setting.takes(NoneType)):
                if equals:
                    raise ConfigError(f"{name} takes no value")
                return [(positive, False if setting.takes(bool) else None, source)]
        return [(keys, inline_value if equals else " ".join(_following(words)), source)]
    first = inline_value if equals else words[0] if words else ""
    is_table = bool(setting.sections) or setting.takes(dict)
    if is_table and first.startswith("@"):
        words.extendleft([first] if equals else [])
        return _take_file(words, keys, f"{name} ")
    most = None if setting.takes(list) else 0 if setting.takes(bool) and first.lower() not in BOOLS else 1
    texts = [inline_value] if equals else _following(words, most)
    if not texts and not is_table and not setting.takes(bool, Any):
        raise ConfigError(f"{name} needs a value")
    value = _from_text(texts, setting)
    if is_table and not isinstance(value, dict) and value not in (None, "None"):
        table = f"a table such as \"{{'key': 1}}\", {name} @ file.toml, or one of its settings ({name}.…)"
        raise ConfigError(f"{name} is a section: expected {table}{_got(''.join(texts))}")
    return [(keys, value, source)]


def _following(words: deque[str], most: int | None = None) -> list[str]:
    """Take the values that follow an option, at most so many; none of several is a file without its @."""
    values: list[str] = []
    while words and len(values) != most and not words[0].startswith(("--", "@")):
        if most is None and words[0].endswith(".toml"):
            break
        values.append(words.popleft())
    return values


def _take_file(words: deque[str], prefix: Keys, after: str = "") -> list[Assignment]:
    """Read the file of the `@` that comes next, in the same word or the next."""
    path = words.popleft()[1:]
    if not path and (not words or words[0].startswith(("--", "@"))):
        raise ConfigError(f"{after}@ must be followed by a file")
    return _read_file(Path(path or words.popleft()), prefix)


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
    if setting.takes(str, Path, Literal):
        return text
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
    tags = [setting.tag for setting in settings(cls) if setting.keys == generic(keys) and setting.tag]
    leaves = (path for path, entry in table.entries.items() if path[: len(keys)] == keys and entry.value != {})
    keys = next(leaves, keys)
    entry = table.nearest(keys)
    unknown = f"{entry.place} names no setting"
    if entry.kind == "file":
        unknown = f"unknown key {'.'.join(keys)}{_where(entry.place)}"
    if keys[0] in SECTIONS_OF_RL and find(cls, keys[:1]) is None:
        its = spell(keys[1:], entry.kind)
        return f"{unknown}: only `rl` has a section `{keys[0]}`; give {its} to the command `{keys[0]}`"
    if tags:
        types = ", ".join(f"'{tag}'" for tag in dict.fromkeys(tags))
        return f"{unknown} of this type; it belongs to type {types}"
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
