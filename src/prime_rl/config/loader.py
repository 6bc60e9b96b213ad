"""From variables, `@` files and options to one validated configuration, or to every mistake as a readable line.

Each source becomes assignments of single keys, each with its origin. Carried out from the weakest source to the
strongest they make a table, which pydantic validates. A mistake is named with the origin of the key.
"""

import ast
import difflib
import json
import os
import re
import sys
import tomllib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from prime_rl.config.base import LOADED, BaseConfig, ConfigError, Problems, Section
from prime_rl.config.mistakes import (
    MOST_LINES,
    PREFIX,
    Assignment,
    Origin,
    Origins,
    contradictions,
    misfits,
    problem_line,
    spell,
)
from prime_rl.config.schema import Found, Keys, Setting, find, has_mark, list_index, settings
from prime_rl.errors import UserError
from prime_rl.redact import without_password

Config = TypeVar("Config", bound=BaseConfig)

FOREIGN = "PRIME_API_KEY"  # the key of the user's account, although `inference` has an api_key
INCLUDE = "include"
BOOLS = {"true": True, "false": False, "1": True, "0": False}
MAX_DEPTH = 32
MAX_FILE_BYTES = 16 << 20
LONGEST_LINE = 2000
# configs/trainer/NAME.toml, or configs/trainer/NAME/1b.toml, of older releases is configs/NAME/train.toml.
OLDER_FOLDERS = {"trainer": "train", "training": "train", "orchestrator": "orch", "inference": "infer"}


class Resolved(NamedTuple):
    """A configuration, and hints at today's spelling of what was given in an older one."""

    config: Any
    hints: list[str]


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """The configuration of this process, from `argv` (None: the command line) and the environment.

    Prints help, version or completion and exits with status 0 where asked to; prints every mistake and exits with
    status 2 where there is one.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = prog or os.path.basename(sys.argv[0])
    try:
        if any(token.partition("=")[0] in ("-h", "--help", "--version", "--completion") for token in arguments):
            from prime_rl.config.help import answer

            say(answer(cls, name, arguments))
            raise SystemExit(0)
        config, hints = resolve(cls, arguments, os.environ)
    except ConfigError as error:
        _report("error", error.problems)
        example = "" if arguments else f" Most are given in a file: {name} @ config.toml."
        print(f"Nothing was started.{example} For all settings: {name} --help", file=sys.stderr)
        raise SystemExit(2) from None
    _report("hint", hints)
    return config


def parse(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """The configuration that `argv` and `env` describe; reads the files they name, prints nothing.

    Raises:
        ConfigError: with every mistake.
    """
    return resolve(cls, argv, env).config


def resolve(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> Resolved:
    """As `parse`, with hints."""
    hints: list[str] = []
    line = _CommandLine(argv, cls)
    # From the weakest to the strongest. Files for sections are as strong as the last one for the whole.
    *earlier, last = [list(layer) for _, layer in groupby(line.root_files, lambda one: one.origin.source)] or [[]]
    # Items of lists after the lists, whatever their order on the line: neither is lost.
    options = sorted(line.options, key=lambda one: list_index(cls, one.keys) is not None)
    layers = [_variables(env, cls), *earlier, [*last, *line.section_files], options]
    given = [_todays(one._replace(rank=rank), cls, hints) for rank, layer in enumerate(layers) for one in layer]
    assignments = _without_replaced_types(given, hints)
    origins = Origins(assignments)
    tree, problems = _build(assignments, cls)
    problems = [*line.problems, *problems]
    problems += misfits(cls, tree, origins, incomplete=bool(problems))
    if problems:
        raise ConfigError(problems)
    try:
        shared = cls.share(tree, origins, hints)
        return Resolved(cls.model_validate(shared, context=LOADED), hints)
    except Problems as error:
        raise ConfigError([problem_line(problem, (), origins) for problem in error.problems]) from None
    except ValidationError as error:
        raise ConfigError(contradictions(error, cls, shared, origins)) from None


def say(text: str) -> None:
    """Print a text whose reader may close the pipe early (`--help | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nor may the interpreter report the broken pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(kind: str, lines: list[str]) -> None:
    """Print the first lines, each as one line of bounded length, whatever the input held that they quote."""
    more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    for line in lines[:MOST_LINES] + more:
        short = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 200]} … {line[-200:]}"
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
        print(f"{kind}: {shown}", file=sys.stderr)


# Assignments and origins


def _assign(keys: Keys, value: Any, origin_of: Callable[[Keys], Origin]) -> Iterator[Assignment]:
    """`value` as assignments of single keys. Raises ConfigError where a resolved configuration could not hold it."""
    table = isinstance(value, dict)
    fault = "an empty key" if "" in keys else _fault([{} if table else value, *keys], MAX_DEPTH - len(keys))
    if fault is not None:
        raise ConfigError([f"{origin_of(keys).text}: {fault}"])
    if keys:
        yield Assignment(keys, {} if table else value, origin_of(keys))
    for key, item in value.items() if table else ():
        yield from _assign((*keys, str(key)), item, origin_of)


def _fault(value: Any, room: int) -> str | None:
    """What is wrong with a value or with something in it; tables and lists may be nested `room` deep in it."""
    if room < 0:
        return f"more than {MAX_DEPTH} tables and lists, one within the other"
    if isinstance(value, str) and "\0" in value:
        return "text with a NUL character"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "not UTF-8 text"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of more than 64 bits"
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((fault for part in parts if (fault := _fault(part, room - 1)) is not None), None)


def _todays(assignment: Assignment, cls: type[Section], hints: list[str]) -> Assignment:
    """`assignment` in today's spelling, with a hint where it was given in an older one."""
    *within, last = assignment.keys
    sections = [cls]
    for key in within:
        inner = [settings(section).get(key) for section in sections]
        sections = [member for setting in inner if setting is not None for member in setting.sections]
    older = next((section.older[last] for section in sections if last in section.older), None)
    if older is None:
        return assignment
    origin, given = assignment.origin, assignment.value
    new, value = (*within, older.key), older.convert(given)
    if (new, value) != (assignment.keys, given):
        shown = ",".join(map(str, value)) if isinstance(value, list) else value
        older_text = f"{origin.text} {without_password(str(given))}"
        hints.append(f"{older_text} is an older spelling of {spell(new, origin.kind)} {shown}")
    return assignment._replace(keys=new, value=value)


def _without_replaced_types(assignments: list[Assignment], hints: list[str]) -> list[Assignment]:
    """Drop what an earlier source sets in a section that a later one makes another `type`: it was meant for that type.

    It would else go over silently where the later type has a setting of the same name.
    """
    kept: list[Assignment] = []
    types: dict[Keys, Assignment] = {}
    for now in assignments:
        if now.sets and now.keys[-1] == "type" and isinstance(now.value, str):
            section, before = now.keys[:-1], types.get(now.keys)
            types[now.keys] = now
            if before is not None and before.value != now.value:

                def is_left(one: Assignment, now: Assignment = now, section: Keys = section) -> bool:
                    return one.keys[: len(section)] == section != one.keys and one.origin.source != now.origin.source

                gone = [".".join(one.keys) for one in kept if is_left(one) and one.keys != now.keys and one.value != {}]
                kept = [one for one in kept if not is_left(one)]
                if gone:
                    old = f"{', '.join(dict.fromkeys(gone))} set by {before.origin.source} for type '{before.value}'"
                    hints.append(f"{old} is left out: {now.origin.text} makes it '{now.value}'")
        kept.append(now)
    return kept


def _build(assignments: Iterable[Assignment], cls: type[Section]) -> tuple[dict[str, Any], list[str]]:
    """The table that the assignments make, one after the other, and a line for each that cannot be carried out."""
    tree: dict[str, Any] = {}
    problems = []
    for one in assignments:
        if one.sets:
            index = None if one.origin.kind == "file" else list_index(cls, one.keys)
            try:
                put(tree, one.keys, _nulls(one.value), index)
            except IndexError as error:
                problems.append(f"{one.origin.text}: {error}")
    return tree, problems


def put(tree: dict[str, Any], keys: Keys, value: Any, index: int | None = None) -> None:
    """Set one key, making tables on the way, also in place of other values. An empty table leaves a table as it is.

    `keys[index]` is the number of an item of a list. Raises IndexError beyond its end.
    """
    here = tree
    for key in keys[: -1 if index is None else index - 1]:
        if not isinstance(here.get(key), dict):
            here[key] = {}
        here = here[key]
    if index is None:
        if value != {} or not isinstance(here.get(keys[-1]), dict):
            here[keys[-1]] = value
        return
    name, number = keys[index - 1], int(keys[index])
    items = here[name] if isinstance(here.get(name), list) else []
    if number > len(items):
        raise IndexError(f"there are {len(items)} of {'.'.join(keys[:index])}")
    holder = {"item": items[number] if number < len(items) else {}}
    put(holder, ("item", *keys[index + 1 :]), value)
    here[name] = [*items[:number], holder["item"], *items[number + 1 :]]


def _nulls(value: Any) -> Any:
    """A copy of `value` with null for every string "None" in it, as TOML has no null."""
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if value == "None" else value


# Environment variables: PRIME_MODEL__NAME is model.name


def _variables(env: Mapping[str, str], cls: type[Section]) -> list[Assignment]:
    """What the PRIME_ variables assign. One without `__` counts only if it names a setting."""
    layer: list[Assignment] = []
    for name in sorted(env):
        if _is_setting(name, cls):
            keys, origin = _keys_of_variable(name), Origin("variable", name)
            found = find(cls, keys)
            value = env[name] if found is None else _from_text(env[name], found)
            layer += _assign(keys, value, lambda _, origin=origin: origin)  # type: ignore[misc]
    return layer


def child_env(env: Mapping[str, str], cls: type[Section]) -> dict[str, str]:
    """`env` without the variables that a process configured by `cls` would read as settings.

    For one that gets its complete configuration as a file: what was meant for `rl` may be a mistake there.
    """
    return {name: value for name, value in env.items() if not _is_setting(name, cls)}


def _keys_of_variable(name: str) -> Keys:
    keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
    return ("log", "level") if keys == ("log_level",) else keys


def _is_setting(name: str, cls: type[Section]) -> bool:
    if not name.startswith(PREFIX) or name == FOREIGN:
        return False
    keys = _keys_of_variable(name)
    return len(keys) > 1 or find(cls, keys) is not None


# The command line. argparse can neither tell an optional section from a setting nor let `@` stand anywhere.


class _CommandLine:
    """Options, files for a section (`--trainer @ file`), files for the whole, and mistakes in splitting them."""

    def __init__(self, argv: Sequence[str], cls: type[Section]) -> None:
        self.options: list[Assignment] = []
        self.section_files: list[Assignment] = []
        self.root_files: list[Assignment] = []
        self.problems: list[str] = []
        self._cls, self._tokens = cls, deque(argv)
        while self._tokens:
            try:
                self._take(self._tokens.popleft())
            except ConfigError as error:
                self.problems += error.problems

    def _take(self, token: str) -> None:
        if token.startswith("@"):
            self.root_files += _read_file(self._file(token, "@"))
        elif token.startswith("--") and len(token) > 2:
            self._option(token)
        else:
            raise ConfigError([_stray(token)])

    def _next_is_value(self) -> bool:
        return bool(self._tokens) and not self._tokens[0].startswith(("--", "@"))

    def _file(self, token: str, after: str) -> Path:
        """The file of an `@`, glued to it or the next token."""
        if token != "@":
            return Path(token[1:])
        if not self._next_is_value():
            raise ConfigError([f"{after} must be followed by a file"])
        return Path(self._tokens.popleft())

    def _option(self, token: str) -> None:
        name, equals, glued = token.partition("=")
        keys = tuple(name[2:].replace("-", "_").split("."))
        found = find(self._cls, keys)
        off = self._switched_off(keys) if found is None else None
        at = glued if equals else self._tokens[0] if self._tokens else ""
        if off is not None:
            if equals:
                raise ConfigError([f"{name} takes no value"])
            keys, value = off
        elif found is not None and found.is_table and at.startswith("@"):
            file = self._file(at if equals else self._tokens.popleft(), f"{name} @")
            self.section_files += _read_file(file, keys)
            return
        else:
            value = self._value(name, glued if equals else None, found)
        self.options += _assign(keys, value, lambda _: Origin("option", name))

    def _switched_off(self, keys: Keys) -> tuple[Keys, bool | None] | None:
        """Keys and value of `--no-flag` (False) or, for what may be null, `--no-ckpt`; also `--trainer.no-ckpt`."""
        for position, key in enumerate(keys):
            positive = (*keys[:position], key.removeprefix("no_"), *keys[position + 1 :])
            found = find(self._cls, positive) if key.startswith("no_") else None
            if found is not None and not found.rest and (found.setting.is_bool or found.setting.nullable):
                return positive, False if found.setting.is_bool else None
        return None

    def _value(self, name: str, glued: str | None, found: Found | None) -> Any:
        """The value of an option: what `=` glues to it, or the tokens after it, as many as its type takes."""
        texts = [] if glued is None else [glued]
        while glued is None and (found is None or found.is_list) and self._next_is_value():
            texts.append(self._tokens.popleft())
        if found is None:
            return " ".join(texts)  # reported later, with a suggestion: its values must not be taken for strays
        setting = found.setting
        if found.is_list:
            if not texts:
                raise ConfigError([f"{name} needs one or more values"])
            if files := [text for text in texts if text.endswith(".toml")]:
                raise ConfigError([_stray(file) for file in files])
            return _items(texts, setting)
        following = glued if glued is not None else self._tokens[0] if self._next_is_value() else None
        truths = {*BOOLS, "none"} if setting.nullable else {*BOOLS}
        if setting.is_bool and glued is None and (following is None or following.lower() not in truths):
            return True
        if following is None:
            return _without_value(name, found)
        if glued is None:
            self._tokens.popleft()
        value = _from_text(following, found)
        if not found.is_table or isinstance(value, dict) or value is None:
            return value
        if following.endswith(".toml") or os.path.isfile(following):
            raise ConfigError([_stray(following, name)])
        table = "expected a table such as \"{'key': 1}\" or @ file.toml"
        raise ConfigError([f"{name} is a section: {table}, got '{following}'"])


def _without_value(name: str, found: Found) -> Any:
    if found.setting.sections and found.setting.nullable:
        return {}
    if found.setting.is_dict and found.rest:
        return True
    if found.setting.sections:
        raise ConfigError([f"{name} is a section: write {name} @ file.toml, or one of its settings ({name}.…)"])
    raise ConfigError([f"{name} needs a value"])


def _stray(token: str, option: str = "") -> str:
    if token.endswith(".toml") or os.path.isfile(token):
        return f"to read the file {token}, write: {option}{' ' if option else ''}@ {token}"
    return f"unexpected argument '{token}'" + (": options start with --" if token.startswith("-") else "")


def _from_text(text: str, found: Found) -> Any:
    """`text` as the type of the setting has it. What does not fit stays text, which validation then refuses."""
    setting = found.setting
    if text == "None":
        return None
    if found.rest or setting.is_dict:
        return _literal(text)
    if setting.item is not None:
        return _items([text], setting)
    if setting.sections:
        if setting.nullable and text.lower() in BOOLS:
            return {} if BOOLS[text.lower()] else None
        return _literal(text)
    if setting.is_bool:
        return BOOLS.get(text.lower(), text)
    for kind in (int, float) if setting.is_number else ():
        with suppress(ValueError):
            return kind(text)
    return text


def _items(texts: list[str], setting: Setting) -> Any:
    """A list: separate texts, commas, or one JSON list."""
    if texts == ["None"]:
        return None
    if len(texts) == 1 and texts[0].lstrip().startswith("["):
        return _literal(texts[0])
    if setting.item_section is not None:
        return [_literal(text) for text in texts]
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _literal(text: str) -> Any:
    """JSON, else a Python literal, else the text itself."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        with warnings.catch_warnings(action="ignore"):  # of escapes that a string may have
            return _as_toml(ast.literal_eval(text.strip()))
    return text


def _as_toml(parsed: Any) -> Any:
    """As TOML would give it back: tuples are lists, keys are text. Raises ValueError for what TOML has no form of."""
    if isinstance(parsed, dict):
        return {str(key): _as_toml(item) for key, item in parsed.items()}
    if isinstance(parsed, list | tuple):
        return [_as_toml(item) for item in parsed]
    if parsed is not None and not isinstance(parsed, bool | int | float | str):
        raise ValueError
    return parsed


# TOML files

_HEADER = re.compile(r"^\s*\[(\[)?\s*(?P<keys>[^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_KEY = re.compile(rf"^\s*(?P<keys>(?:{_PART.pattern})(?:\s*\.\s*(?:{_PART.pattern}))*)\s*=")


def _read_file(path: Path, prefix: Keys = (), including: tuple[Path, ...] = ()) -> list[Assignment]:
    """What the file assigns below `prefix`, after what the files in its `include` assign, relative to it."""
    tree, text = _load_toml(path)
    names = tree.pop(INCLUDE, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{path}: {INCLUDE} must be a file name or a list of file names"])
    layer: list[Assignment] = []
    for target in [path.parent / name for name in names]:
        if any(os.path.abspath(target) == os.path.abspath(other) for other in (*including, path)):
            raise ConfigError([f"{path}: include of {target} is a cycle"])
        layer += _read_file(target, prefix, (*including, path))
    lines = {(*prefix, *keys): number for keys, number in _key_lines(text).items()}

    def origin(keys: Keys) -> Origin:
        number = next((lines[keys[:end]] for end in range(len(keys), len(prefix), -1) if keys[:end] in lines), None)
        return Origin("file", f"{path}, line {number}" if number else str(path))

    own = list(_assign(prefix, tree, origin))
    assigned = {one.keys for one in own}
    inside_lists = [Assignment(keys, None, origin(keys), sets=False) for keys in lines if keys not in assigned]
    return [*layer, *own, *inside_lists]


def _load_toml(path: Path) -> tuple[dict[str, Any], str]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode("utf-8")
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError([f"{path}: not a TOML file (more than {MAX_FILE_BYTES >> 20} MiB)"])
        return tomllib.loads(text), text
    except FileNotFoundError:
        problem = f"no such file: {path}{_nearest_file(path)}"
    except UnicodeDecodeError:
        problem = f"{path}: not a TOML file (not UTF-8 text)"
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
    except RecursionError:
        problem = f"{path}: malformed TOML: nested too deeply"
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at (?:(line \d+, column \d+)|end of document)\)$", str(error))
        where = f", {place[1] or 'end of file'}" if place else ""
        problem = f"{path}{where}: malformed TOML: {str(error)[: place.start() if place else None]}"
    except ValueError as error:  # a number too long to be read, or a NUL in the path of an include
        problem = f"{path}: cannot be read: {str(error).partition(';')[0]}"
    raise ConfigError([problem])


def _nearest_file(path: Path) -> str:
    for position, folder in enumerate(path.parts[:-1]):
        if folder in OLDER_FOLDERS:
            name = path.with_suffix("").parts[position + 1]
            today = Path(*path.parts[:position], name, f"{OLDER_FOLDERS[folder]}.toml")
            if os.path.isfile(today):
                return f" (today it is {today})"
    if not os.path.isdir(path.parent):
        return f" (nor is there a directory {path.parent})"
    near = difflib.get_close_matches(path.stem, [entry.stem for entry in path.parent.glob("*.toml")], n=1)
    return f" (did you mean {path.parent / near[0]}.toml?)" if near else ""


def _key_lines(text: str) -> dict[Keys, int]:
    """Line (from 1) on which each key, table header and array item stands. tomllib does not say.

    Reads line by line: a key inside a multi-line string could be mistaken for one, which only misplaces a message.
    """
    lines: dict[Keys, int] = {}
    counts: dict[Keys, int] = {}  # of items of arrays of tables
    table: Keys = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = ()
            *around, last = _split(header["keys"])
            for key in around:
                table = (*table, key)
                table = (*table, str(counts[table])) if table in counts else table
            table = (*table, last)
            if header[1]:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
            lines.setdefault(table, number)
        elif key_match := _KEY.match(line):
            lines.setdefault((*table, *_split(key_match["keys"])), number)
    return lines


def _split(keys: str) -> Keys:
    return tuple(part.strip("\"'") for part in _PART.findall(keys))


# Resolved configurations as TOML that, fed back with `@`, gives an equal configuration


def to_toml(config: BaseConfig) -> str:
    """Every setting of `config`; null is the string "None".

    Secrets are written as "None": they travel by environment variable. What is meant for one start alone (dry_run,
    clean) is left out: a configuration fed back is to run.
    """
    return tomli_w.dumps(config.as_given(_plain(config)))


def write_toml(config: BaseConfig, path: Path) -> None:
    """Write `to_toml(config)` to `path`, whole or not at all, and make its directory.

    Raises:
        UserError: the place cannot be written to.
    """
    staged = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(to_toml(config), encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _plain(value: Any) -> Any:
    if value is None:
        return "None"
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        written = {name: item for name, item in value if not has_mark(fields[name], "one_time")}
        return {name: "None" if has_mark(fields[name], "secret") else _plain(item) for name, item in written.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
