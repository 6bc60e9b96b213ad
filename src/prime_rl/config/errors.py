"""Mistakes as readable lines: the key, what is wrong, where it came from, and what was probably meant."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from prime_rl.config.base import TYPES_ONLY, Problem, Problems, Section
from prime_rl.config.origin import SECTIONS_OF_RL, Origin, Origins, spell
from prime_rl.config.schema import Keys, all_paths, find, settings, type_tag
from prime_rl.redact import without_password

MOST_LINES = 50
"""Mistakes that are shown at a time."""


def unknown_keys(section: type[Section], tree: dict[str, Any], origins: Origins) -> tuple[dict[str, Any], list[str]]:
    """`tree` without the keys that no section has, and a line about each of them."""
    problems: list[str] = []
    return _known(section, tree, (), _Report(section, origins, problems)), problems


class _Report:
    """Collects lines about unknown keys."""

    def __init__(self, root: type[Section], origins: Origins, problems: list[str]) -> None:
        self._root, self._origins, self._problems = root, origins, problems

    def unknown(self, keys: Keys, value: Any, section: type[Section], rivals: tuple[type[Section], ...]) -> None:
        """`keys` name nothing in `section`, which was chosen among `rivals` by `type`."""
        owners = [type_tag(rival) for rival in rivals if keys[-1] in settings(rival)]
        position = len(keys) - 1
        keys = (*keys, *_first_path(value))
        origin = self._origins.of(keys)
        within = f" of type '{type_tag(section)}'" if len(rivals) > 1 else ""
        if origin is not None and origin.kind != "file":
            said = f"{origin.text} names no setting{within}"
        else:
            said = f"unknown key {'.'.join(keys)}{within}{_where(origin)}"
        near = nearest(self._root, keys, section, position) if len(self._problems) < MOST_LINES else None
        if keys[0] in SECTIONS_OF_RL and keys[0] not in settings(self._root):
            said += f": only `rl` has a section `{keys[0]}`; give {self._spell(keys[1:], origin)} to the command `{keys[0]}`"
        elif owners:
            *but_last, last = [f"'{owner}'" for owner in owners]
            said += f"; it belongs to type {', '.join(but_last)}{' or ' if but_last else ''}{last}"
        elif near is not None:
            said += f"; did you mean {self._spell(near, origin)}?"
        self._problems.append(said)

    @staticmethod
    def _spell(keys: Keys, origin: Origin | None) -> str:
        return spell(keys, origin.kind if origin is not None else "file")


def _first_path(value: Any) -> Keys:
    """The keys down to the first thing that a table holds."""
    if not isinstance(value, dict) or not value:
        return ()
    key, inner = next(iter(value.items()))
    return (key, *_first_path(inner))


def _known(
    section: type[Section], tree: dict[str, Any], prefix: Keys, report: _Report, rivals: tuple[type[Section], ...] = ()
) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, value in tree.items():
        setting = settings(section).get(key)
        if setting is None:
            report.unknown((*prefix, key), value, section, rivals)
            continue
        known[key] = value
        inner, item = setting.section_for(value), setting.item_section
        if inner is not None and isinstance(value, dict):
            known[key] = _known(inner, value, (*prefix, key), report, setting.sections)
        elif item is not None and isinstance(value, list):
            known[key] = [
                _known(item, entry, (*prefix, key, str(number)), report) if isinstance(entry, dict) else entry
                for number, entry in enumerate(value)
            ]
    return known


def nearest(root: type[Section], keys: Keys, section: type[Section], position: int) -> Keys | None:
    """The setting that `keys` probably meant, None where none is likely. `keys[position]` is the unknown one: `section` does not have it.

    In this order: the same name with other dots (--model-name), a neighbour of similar name, the same name elsewhere, a
    similar name with other dots.
    """
    paths = list(all_paths(root))
    unknown = "_".join(keys[position:])
    names = {"_".join(path[position:]): path for path in paths if path[:position] == keys[:position]}
    if unknown in names:
        return names[unknown]
    for name in _close(keys[position], settings(section)):
        mended = (*keys[:position], name, *keys[position + 1 :])
        if find(root, mended) is not None:
            return mended
    same = [path for path in paths if path[-1] == keys[-1] and set(keys[position:]) <= set(path)]
    if same:
        return min(same, key=lambda path: (-len(set(path) & set(keys)), len(path)))
    close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.8)
    return names[close[0]] if close else None


def _close(word: str, names: Iterable[str]) -> list[str]:
    """Names similar to `word`, and those that it abbreviates (`dp` for `data_parallel_size`), best first."""
    initials = {name: "".join(part[0] for part in name.split("_")) for name in names}
    abbreviated = [name for name, letters in initials.items() if len(word) > 1 and letters.startswith(word)]
    return [*difflib.get_close_matches(word, initials), *sorted(abbreviated, key=len)]


_SHAPES = {
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
    "list_type": "a list",
    "path_type": "a path",
}
# Kinds of errors whose message says all there is to say about the value.
_SELF_EVIDENT = ("missing", "union_tag_invalid", "literal_error")


def misfits(root: type[Section], tree: dict[str, Any], origins: Origins) -> list[str]:
    """Remove the values of wrong types from `tree`; a line about each.

    Found before settings are shared: what fills and compares sections meets values of the declared types alone.
    """
    try:
        root.model_validate(tree, context=TYPES_ONLY)
    except ValidationError as error:
        wrong: dict[Keys, Any] = {}
        for details in filter(_is_misfit, error.errors()):
            wrong.setdefault(plain_keys(root, details["loc"]), details)
        for keys in wrong:
            _remove(tree, keys)
        return [_line(details, root, keys, origins) for keys, details in wrong.items()]
    return []


def _is_misfit(details: Any) -> bool:
    return details["type"] != "missing" and not isinstance(details.get("ctx", {}).get("error"), Problem | Problems)


def _remove(tree: dict[str, Any], keys: Keys) -> None:
    """Remove what is at `keys`, which may be the whole list around an item that is no table."""
    here: Any = tree
    table, name = tree, keys[0]
    for key in keys:
        if isinstance(here, dict):
            table, name = here, key
            here = here.get(key)
        elif isinstance(here, list):
            here = here[int(key)]
    table.pop(name, None)


def describe(error: ValidationError, root: type[Section], origins: Origins, incomplete: bool = False) -> list[str]:
    """A line for each thing that validation found. A fault that was copied into several sections is reported once, where it was given.

    `incomplete`: part of the input could not be read, so missing settings are not reported.
    """
    found = []
    for details in error.errors(include_url=False):
        if incomplete and details["type"] == "missing":
            continue
        keys = plain_keys(root, details["loc"])
        found += [(origins.given(keys), *line) for line in _lines(details, root, keys, origins, incomplete)]
    told = {fault for given, fault, _ in found if given}
    lines = []
    for given, fault, line in found:
        if given or fault not in told:
            lines.append(line)
        told.add(fault)
    return lines


def _lines(
    details: Any, root: type[Section], keys: Keys, origins: Origins, incomplete: bool
) -> Iterator[tuple[tuple[str, str], str]]:
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, Problem | Problems):
        for problem in cause.problems if isinstance(cause, Problems) else [cause]:
            given = any(origins.exact((*keys, *key.split("."))) is not None for key in problem.keys)
            if given or not incomplete:
                yield (str(problem), ""), _problem_line(problem, keys, origins)
        return
    yield (_message(details), repr(details["input"])), _line(details, root, keys, origins)


def _line(details: Any, root: type[Section], keys: Keys, origins: Origins) -> str:
    keys += ("type",) if details["type"] == "union_tag_invalid" else ()
    origin = origins.of(keys)
    setting = find(root, keys) if keys else None
    secret = setting is not None and setting.setting.secret
    got = "" if origin is None or secret or details["type"] in _SELF_EVIDENT else f", got {_short(details['input'])}"
    return f"{'.'.join(keys)}: {_message(details)}{got}{_where(origin)}"


def _problem_line(problem: Problem, prefix: Keys, origins: Origins) -> str:
    full = {key: (*prefix, *key.split(".")) for key in problem.keys}
    sources = {key: origin.text for key in problem.keys if (origin := origins.exact(full[key])) is not None}
    own = not sources or any(origins.given(full[key]) for key in sources)
    within = f"{'.'.join(prefix)}: " if prefix and own else ""
    return f"{within}{problem}" + (
        f" ({', '.join(f'{key}: {text}' for key, text in sources.items())})" if sources else ""
    )


def _message(details: Any) -> str:
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == "missing":
        return "required, but not given"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "union_tag_not_found":
        return "needs a `type`"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = context.get("expected_tags") or context["expected"]
        wrong = str(context.get("tag", value))
        words = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(wrong, words, n=1, cutoff=0.7)
        return f"must be {expected}, got {_short(wrong)}" + (f"; did you mean '{near[0]}'?" if near else "")
    if kind in _SHAPES:
        return f"must be {_SHAPES[kind]}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message.split(", unable to parse")[0]


def _short(value: Any) -> str:
    text = without_password(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _where(origin: Any) -> str:
    return f" ({origin.text})" if origin is not None else ""


def plain_keys(root: type[Section], location: tuple[int | str, ...]) -> Keys:
    """A location of pydantic as keys: without the names of union members that pydantic puts into it."""
    keys: list[str] = []
    section: type[Section] | None = root
    rest = list(location)
    while rest:
        key = str(rest.pop(0))
        keys.append(key)
        setting = settings(section).get(key) if section is not None else None
        section = None
        if setting is None:
            continue
        if setting.item_section is not None:
            if rest:
                keys.append(str(rest.pop(0)))
            section = setting.item_section
        elif len(setting.sections) > 1 and rest:
            tag = rest.pop(0)
            section = next((member for member in setting.sections if type_tag(member) == tag), None)
        elif setting.sections:
            section = setting.sections[0]
        elif len(setting.members) > 1:
            break
    return tuple(keys)
