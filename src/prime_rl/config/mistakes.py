"""Every mistake as a readable line: the key, what is wrong with it, where it came from, the nearest setting."""

import difflib
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.base import Problem, Problems, Section, has_mark
from prime_rl.config.migration import ANY, REMOVED
from prime_rl.config.schema import find, nearest, types_with
from prime_rl.config.table import SECTIONS_OF_RL, Keys, Table, in_section, spell
from prime_rl.redact import without_password

# What is said of kinds of errors in place of pydantic's words.
_MESSAGES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table"),
    "list_type": "must be a list",
    "path_type": "must be a path",
    "missing": "required, but not given",
    "union_tag_not_found": "needs a `type`",
}


def validation_lines(error: ValidationError, cls: type[Section], table: Table, shared: bool) -> list[str]:
    """Return a line for each mistake that pydantic found; one that was copied into several sections counts once.

    `shared`: whether sections have what they share, so that contradictions and what is missing can be told.
    """
    reported, lines = set[Keys](), dict[tuple[Keys, str], str]()
    located = [(_keys_of_error(details, table), details) for details in error.errors(include_url=False)]
    for keys, details in sorted(located, key=lambda one: table.entry(one[0]).keys != one[0]):
        cause, kind = details.get("ctx", {}).get("error"), details["type"]
        if not shared and (kind == "missing" or isinstance(cause, Problems)):
            continue
        if isinstance(cause, Problems):
            for problem in cause.problems:
                lines.setdefault((in_section(keys), problem.message), problem_line(problem, keys, table))
        elif any(keys[:length] in reported for length in range(len(keys) + 1)):
            continue  # one line, whatever number of types was tried
        elif kind == "extra_forbidden":
            if not _left_out(table, keys):
                lines[keys, ""] = _unknown(cls, table, keys)
        else:
            message, entry, setting = _message(details), table.nearest(keys), find(cls, keys)
            shown = entry.origin and not (setting and has_mark(setting.field, "secret"))
            shown = shown and kind not in ("missing", "union_tag_invalid", "literal_error")
            line = f"{'.'.join(keys)}: {message}{got(details['input']) if shown else ''}{_where(entry.place)}"
            lines.setdefault((in_section(keys), message), line)
        reported.add(keys)
    return list(lines.values())


def problem_line(problem: Problem, prefix: Keys, table: Table) -> str:
    """Return the message of a contradiction, with where each of its keys came from."""
    entries = {key: table.entry((*prefix, *key.split("."))) for key in problem.keys}
    origins = {key: entry.place for key, entry in entries.items() if entry.origin is not None}
    in_its_section = not origins or any(entries[key].keys == (*prefix, *key.split(".")) for key in origins)
    within = f"{'.'.join(prefix)}: " if prefix and in_its_section else ""
    return f"{within}{problem.message}{_where(', '.join(f'{key}: {place}' for key, place in origins.items()))}"


def _keys_of_error(details: Any, table: Table) -> Keys:
    """Return a location of pydantic as keys: without the names of types that pydantic puts into it."""
    keys: Keys = ()
    for part in details["loc"]:
        keys = (*keys, str(part)) if (*keys, str(part)) in table.entries else keys
    if details["type"] == "missing":
        return (*keys, str(details["loc"][-1]))
    return (*keys, "type") if details["type"] == "union_tag_invalid" else keys


def _left_out(table: Table, keys: Keys) -> bool:
    """Take out, with a hint, a setting that an earlier release wrote into the configs/ of a run, which is to be resumed."""
    entry, (instead, as_today) = table.nearest(keys), _removed(keys)
    if not instead or entry.origin is None or entry.origin.kind != "file" or as_today not in (ANY, table.get(keys)):
        return False
    folder = Path(entry.origin.name).parent
    if folder.name != "configs" or not (folder.parent / "status").is_dir():
        return False
    table.hints.append(f"{'.'.join(keys)} of an earlier release is left out: {instead}{_where(entry.place)}")
    table.remove(keys)
    return True


def _removed(keys: Keys) -> tuple[str, Any]:
    """Return what `REMOVED` says of a setting of earlier releases; "" of any other."""
    return next((said for name, said in REMOVED.items() if f".{'.'.join(keys)}".endswith(f".{name}")), ("", ANY))


def _unknown(cls: type[Section], table: Table, keys: Keys) -> str:
    """Return a line about `keys`, the last of which names nothing in its section."""
    instead, _ = _removed(keys)
    types = [f"'{tag}'" for tag in types_with(cls, keys)]
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


def got(value: Any) -> str:
    """Return what was given, but not where a table or a list was meant, which may hold a secret."""
    if str(value).lstrip().startswith(("{", "[") if isinstance(value, str) else "[{"):
        return ", and what was given is malformed"
    items = [
        without_password(one) if isinstance(one, str) else one
        for one in (value if isinstance(value, list) else [value])
    ]
    text = repr(items if isinstance(value, list) else items[0])
    return f", got {text if len(text) <= 60 else f'{text[:57]}...'}"


def _message(details: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in ("union_tag_invalid", "literal_error"):
        expected, wrong = context.get("expected_tags") or context["expected"], context.get("tag", details["input"])
        near = difflib.get_close_matches(str(wrong), re.findall(r"'(.*?)'", expected), n=1, cutoff=0.7)
        return f"must be {expected}{got(str(wrong))}" + (f"; did you mean '{near[0]}'?" if near else "")
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _MESSAGES.get(kind) or message.split(", unable to parse")[0]


def _where(place: str) -> str:
    return f" ({place})" if place else ""
