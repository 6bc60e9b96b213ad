"""From variables, `@` files and options to one validated configuration, or to every mistake as a readable line."""

import ast
import difflib
import errno
import json
import os
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from prime_rl.config.base import LOADED, BaseConfig, Problems, Section
from prime_rl.config.layers import OLDER, PREFIX, ConfigError, Keys, Layer, LayeredTable, is_index, nested
from prime_rl.config.mistakes import got, problem_line, validation_lines
from prime_rl.config.schema import Setting, find, has_mark
from prime_rl.errors import UserError
from prime_rl.redact import without_password

Config = TypeVar("Config", bound=BaseConfig)

FOREIGN = "PRIME_API_KEY"  # the key of the user's account, although `inference` has an api_key
INCLUDE = "include"
BOOLS = {"true": True, "false": False, "1": True, "0": False, "none": None}
# configs/trainer/NAME.toml, or configs/trainer/NAME/1b.toml, of older releases is configs/NAME/train.toml.
OLDER_FOLDERS = {"trainer": "train", "training": "train", "orchestrator": "orch", "inference": "infer"}


def load(cls: type[Config], argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Return the configuration of this process, from `argv` (None: the command line) and the environment.

    Print help, version or completion and exit with status 0 where asked to; print every mistake and exit with status 2
    where there is one.
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
    """Return the configuration that `argv` and `env` describe; read the files they name, print nothing.

    Raises:
        ConfigError: with every mistake.
    """
    return resolve(cls, argv, env)[0]


def resolve(cls: type[Config], argv: Sequence[str], env: Mapping[str, str]) -> tuple[Any, list[str]]:
    """As `parse`, with hints at today's spelling of what was given in an older one, and at what is left out."""
    sources = _Sources(cls)
    sources.read(argv, env)
    table = sources.table
    problems = sources.problems + table.problems
    # Once as given, for what is unknown or of a wrong type, and once with the settings that sections share.
    for shared in (False, True):
        try:
            if shared:
                cls.share(table)
            config = cls.model_validate(table.tree, context=LOADED)
        except Problems as error:
            problems += [problem_line(problem, (), table) for problem in error.problems]
        except ValidationError as error:
            problems += validation_lines(error, cls, table, shared)
        if problems:
            raise ConfigError(problems)
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


def _report(kind: str, lines: list[str]) -> None:
    for line in lines:
        print(f"{kind}: {line}", file=sys.stderr)


class _Sources:
    """Reads variables, files and options into one table, and collects mistakes in what they look like.

    argparse can neither tell an optional section from a setting nor let `@` stand anywhere.
    """

    def __init__(self, cls: type[Section]) -> None:
        self.table = LayeredTable()
        self.problems: list[str] = []
        self._cls, self._rank = cls, 0
        self._files: list[tuple[Path, Keys]] = []
        self._options: list[tuple[str, Keys, Any]] = []

    def read(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Add a layer for each source, from the weakest to the strongest."""
        for name in sorted(env, key=lambda name: [(len(part) * part.isdigit(), part) for part in name.split("__")]):
            if _is_setting(name, self._cls):
                keys = _keys_of_variable(name)
                value = from_text([env[name]], find(self._cls, keys))
                self.table.add(Layer("variable", name, 0, nested(keys, value)))
        tokens = deque(argv)
        while tokens:
            self._collect(self._take, tokens.popleft(), tokens)
        for path, prefix in sorted(self._files, key=lambda file: file[1] != ()):
            self._collect(self._read_file, path, prefix)
        # Items of lists after the lists, whatever their order on the line: neither is lost.
        for name, keys, value in sorted(self._options, key=lambda option: any(map(is_index, option[1]))):
            self.table.add(Layer("option", name, self._rank + 1, nested(keys, value)))

    def _collect(self, step: Callable[..., None], *arguments: Any) -> None:
        try:
            step(*arguments)
        except ConfigError as error:
            self.problems += error.problems

    def _take(self, token: str, following: deque[str]) -> None:
        """Read a file, or an option and the values that follow it, as many as its type takes."""
        if token.startswith("@"):
            self._files.append((_file(token, following, "@"), ()))
            return
        if not token.startswith("--") or token == "--":
            raise ConfigError([_stray(token)])
        name, equals, glued = token.partition("=")
        keys = tuple(name[2:].replace("-", "_").split("."))
        setting = find(self._cls, keys)
        peeked = glued if equals else following[0] if following else ""
        if setting is None and (off := self._switched_off(keys)) is not None:
            if equals:
                raise ConfigError([f"{name} takes no value"])
            self._options.append((name, *off))
        elif setting is not None and setting.is_table and peeked.startswith("@"):
            self._files.append((_file(peeked if equals else following.popleft(), following, f"{name} @"), keys))
        else:
            most = None if setting is None or setting.takes(list) else 1
            if setting is not None and setting.takes(bool) and peeked.lower() not in BOOLS:
                most = 0
            self._options.append((name, keys, _value(name, [glued] if equals else _values(following, most), setting)))

    def _switched_off(self, keys: Keys) -> tuple[Keys, bool | None] | None:
        """Return key and value of `--no-flag` (False) or, for what may be null, `--no-ckpt`; also `--trainer.no-ckpt`."""
        for position, key in enumerate(keys):
            positive = (*keys[:position], key.removeprefix("no_"), *keys[position + 1 :])
            setting = find(self._cls, positive) if key.startswith("no_") else None
            if setting is not None and (setting.takes(bool) or setting.nullable):
                return positive, False if setting.takes(bool) else None
        return None

    def _read_file(self, path: Path, prefix: Keys, including: tuple[Path, ...] = ()) -> None:
        """Write what the file gives below `prefix`, after what the files in its `include` give, relative to it."""
        tree, text = _load_toml(path)
        names = tree.pop(INCLUDE, [])
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError([f"{path}: {INCLUDE} must be a file name or a list of file names"])
        for target in [path.parent / name for name in names]:
            if any(os.path.abspath(target) == os.path.abspath(other) for other in (*including, path)):
                raise ConfigError([f"{path}: include of {target} is a cycle"])
            self._read_file(target, prefix, (*including, path))
        # A file for a section is as strong as the last of the whole.
        rank = self._rank = max(self._rank + (not prefix), 1)
        lines = tuple(text.splitlines())
        self.table.add(Layer("file", str(path), rank, nested(prefix, tree), prefix, lines))


# Environment variables: PRIME_MODEL__NAME is model.name. One without `__` counts only if it names a setting.


def child_env(env: Mapping[str, str], cls: type[Section]) -> dict[str, str]:
    """Return `env` without the variables that a process configured by `cls` would read as settings.

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
    today = (OLDER[keys][0],) if keys in OLDER else keys
    return len(keys) > 1 or find(cls, today) is not None


# The words of the command line, and values as text


def _values(following: deque[str], most: int | None = None) -> list[str]:
    """Take the values that follow an option, at most so many."""
    values: list[str] = []
    while following and not following[0].startswith(("--", "@")) and len(values) != most:
        values.append(following.popleft())
    return values


def _file(token: str, following: deque[str], after: str) -> Path:
    """Return the file of an `@`, glued to it or the next token."""
    names = [token[1:]] if token != "@" else _values(following, 1)
    if not names:
        raise ConfigError([f"{after} must be followed by a file"])
    return Path(names[0])


def _stray(token: str, option: str = "") -> str:
    if token.endswith(".toml") or os.path.isfile(token):
        return f"to read the file {token}, write: {option}@ {token}"
    hint = ": options start with --" if token.startswith("-") else ""
    return f"unexpected argument '{without_password(token)}'{hint}"


def _value(name: str, texts: list[str], setting: Setting | None) -> Any:
    """Return the value of an option that was given with `texts`; what names nothing is reported later, by validation."""
    if setting is None:
        return " ".join(texts)
    if files := [text for text in texts if text.endswith(".toml") and (setting.is_table or setting.takes(list))]:
        raise ConfigError([_stray(file, f"{name} " if setting.is_table else "") for file in files])
    if not texts and (setting.takes(bool) or Any in setting.kinds):
        return True
    if not texts and not setting.is_table:
        raise ConfigError([f"{name} needs a value"])
    value = from_text(texts, setting) if texts else {} if setting.nullable else ""
    if setting.is_table and not isinstance(value, dict) and value not in ("None", None):
        table = f"a table such as \"{{'key': 1}}\", {name} @ file.toml, or one of its settings ({name}.…)"
        raise ConfigError([f"{name} is a section: expected {table}{got(''.join(texts))}"])
    return value


def from_text(texts: list[str], setting: Setting | None) -> Any:
    """Return what `texts` (of a list any number) mean as the type of the setting; what does not fit stays text."""
    text = texts[0]
    if setting is None or text == "None":
        return text
    if setting.takes(list):
        if len(texts) == 1 and text.lstrip().startswith("["):
            return _literal(text)
        if text.lstrip().startswith("{"):
            return [_literal(item) for item in texts]
        return [part.strip() for item in texts for part in item.split(",") if part.strip()]
    if setting.takes(bool):
        return BOOLS.get(text.lower(), text)
    if setting.choices or str in setting.kinds or Path in setting.kinds:
        return text
    if setting.sections and setting.nullable and text.lower() in BOOLS:
        return {} if BOOLS[text.lower()] else None
    value = _literal(text)
    is_number = int in setting.kinds or float in setting.kinds
    return text if is_number and isinstance(value, bool) else value  # pydantic would take true for 1


def _literal(text: str) -> Any:
    """Return the value of JSON, else of a Python literal that JSON has a form of, else the text itself."""
    with suppress(ValueError):
        return json.loads(text)
    with suppress(ValueError, TypeError, SyntaxError):
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    return text


# TOML files


def _load_toml(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except FileNotFoundError:
        problem = f"no such file: {path}{_nearest_file(path)}"
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
    except ValueError as error:  # of tomllib, or of an encoding
        problem = f"{path}: malformed TOML: {str(error).partition(';')[0]}"
    raise ConfigError([problem])


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


# Resolved configurations as TOML that, fed back with `@`, gives an equal configuration


def to_toml(config: BaseConfig) -> str:
    """Return every setting of `config`; null is the string "None".

    Secrets are written as "None": they travel by environment variable. What is meant for one start alone (dry_run,
    clean) is left out: a configuration fed back is to run.
    """
    return tomli_w.dumps(_plain(config))


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
