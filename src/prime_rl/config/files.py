"""TOML files: what they say and on which line."""

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from prime_rl.config.base import ConfigError
from prime_rl.config.origin import Assignment, Layer, Origin
from prime_rl.config.schema import Keys

INCLUDE = "include"
MAX_BYTES = 16 << 20
# configs/trainer/NAME.toml, or configs/trainer/NAME/1b.toml, of older releases is configs/NAME/train.toml.
_OLDER_FOLDERS = {
    "trainer": "train.toml",
    "training": "train.toml",
    "orchestrator": "orch.toml",
    "inference": "infer.toml",
}

_HEADER = re.compile(r"^\s*\[(\[)?\s*(?P<keys>[^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*(?P<keys>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def read(path: Path, prefix: Keys = (), including: tuple[Path, ...] = ()) -> Layer:
    """What the file at `path` assigns below `prefix`, after what the files in its `include` assign. Raises ConfigError.

    `include = "other.toml"` (or a list) names files relative to this one; this one wins over them.
    """
    tree, text = _load(path)
    included: Layer = []
    for name in _included(tree.pop(INCLUDE, []), path):
        target = path.parent / name
        chain = (*including, path)
        if any(os.path.abspath(target) == os.path.abspath(other) for other in chain):
            raise ConfigError([f"{path}: include of {target} is a cycle"])
        included += read(target, prefix, chain)
    lines = key_lines(text)
    return included + _assignments(tree, (), prefix, path, lines)


def _load(path: Path) -> tuple[dict[str, Any], str]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
        if len(text) > MAX_BYTES:
            raise ConfigError([f"{path}: not a TOML file (more than {MAX_BYTES >> 20} MiB)"])
        return tomllib.loads(text), text
    except FileNotFoundError:
        raise ConfigError([f"no such file: {path}{_nearest_file(path)}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: not a TOML file (not UTF-8 text)"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: malformed TOML: nested too deeply"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_malformed(path, str(error))]) from None
    except ValueError as error:  # a number too long to be read, or a NUL in the path of an include
        raise ConfigError([f"{path}: cannot be read: {str(error).partition(';')[0]}"]) from None


def _malformed(path: Path, message: str) -> str:
    place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    if place is None:
        return f"{path}: malformed TOML: {message}"
    where = f"line {place[1]}, column {place[2]}" if place[1] else "end of file"
    return f"{path}, {where}: malformed TOML: {message[: place.start()]}"


def _nearest_file(path: Path) -> str:
    for folder, name in _OLDER_FOLDERS.items():
        if folder in path.parts[:-1]:
            position = path.parts.index(folder)
            today = Path(*path.parts[:position], path.with_suffix("").parts[position + 1], name)
            if os.path.isfile(today):
                return f" (today it is {today})"
    if not os.path.isdir(path.parent):
        return f" (nor is there a directory {path.parent})"
    near = difflib.get_close_matches(path.stem, [entry.stem for entry in path.parent.glob("*.toml")], n=1)
    return f" (did you mean {path.parent / near[0]}.toml?)" if near else ""


def _included(value: Any, path: Path) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{path}: {INCLUDE} must be a file name or a list of file names"])
    return names


def _assignments(tree: dict[str, Any], keys: Keys, prefix: Keys, path: Path, lines: dict[Keys, int]) -> Layer:
    layer = [Assignment((*prefix, *keys), {}, _origin(path, lines, keys))] if (*prefix, *keys) else []
    for key, value in tree.items():
        inner = (*keys, key)
        if isinstance(value, dict):
            layer += _assignments(value, inner, prefix, path, lines)
            continue
        layer.append(Assignment((*prefix, *inner), value, _origin(path, lines, inner)))
        within = (
            [given for given in lines if given[: len(inner)] == inner and given != inner]
            if isinstance(value, list)
            else []
        )
        layer += [Assignment((*prefix, *given), None, _origin(path, lines, given), mark=True) for given in within]
    return layer


def _origin(path: Path, lines: dict[Keys, int], keys: Keys) -> Origin:
    for length in range(len(keys), 0, -1):
        if line := lines.get(keys[:length]):
            return Origin("file", f"{path}, line {line}")
    return Origin("file", str(path))


def key_lines(text: str) -> dict[Keys, int]:
    """Line (from 1) on which each key, table header and array item stands. tomllib does not say.

    Reads line by line: a key inside a multi-line string could be mistaken for one, which only misplaces a message.
    """
    lines: dict[Keys, int] = {}
    table: Keys = ()
    counts: dict[Keys, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _indexed(_split(header["keys"]), counts)
            if header[1]:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split(key["keys"])), number)
    return lines


def _split(keys: str) -> Keys:
    return tuple(part.strip("\"'") for part in _PART.findall(keys))


def _indexed(keys: Keys, counts: dict[Keys, int]) -> Keys:
    """`keys` with the index of the newest item after every array of tables but the last key."""
    full: Keys = ()
    for position, key in enumerate(keys):
        full = (*full, key)
        if full in counts and position < len(keys) - 1:
            full = (*full, str(counts[full]))
    return full
