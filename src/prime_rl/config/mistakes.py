"""Where each key of a configuration came from, and every mistake as a readable line that says so."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from prime_rl.config.base import LOADED, Problem, Problems, Section
from prime_rl.config.schema import Keys, every_setting, find, has_mark, settings, type_tag
from prime_rl.redact import without_password

Kind = Literal["option", "file", "variable"]

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
MOST_LINES = 50  # mistakes shown at a time


class Origin(NamedTuple):
    """`text` names the option, the file (and line) or the variable."""

    kind: Kind
    text: str

    @property
    def source(self) -> str:
        """The file, or all options, or all variables."""
        return self.text.partition(", line ")[0] if self.kind == "file" else self.kind


class Assignment(NamedTuple):
    """One key gets a value. A table is assigned empty, then key by key.

    `sets` is false for what only tells where something inside a list stands: lists are assigned whole.
    """

    keys: Keys
    value: Any
    origin: Origin
    rank: int = 0
    sets: bool = True


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


class Origins:
    """Which origin set a key last."""

    def __init__(self, assignments: Iterable[Assignment] = ()) -> None:
        self._by_keys: dict[Keys, tuple[Origin, int]] = {}
        for one in assignments:
            if one.value != {} and one.sets:
                self.forget(one.keys)
            self._by_keys[one.keys] = one.origin, one.rank

    def _within(self, keys: Keys) -> list[Keys]:
        return [given for given in self._by_keys if given[: len(keys)] == keys]

    def given(self, keys: Keys) -> bool:
        return keys in self._by_keys

    def exact(self, keys: Keys) -> Origin | None:
        """Origin of the very setting, or of the shared setting of `rl` that it was filled from."""
        shared = keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys
        entry = self._by_keys.get(keys) or self._by_keys.get(shared)
        return entry[0] if entry is not None else None

    def of(self, keys: Keys) -> Origin | None:
        """Origin of `keys`, else of something within it, else of the table around it; None where nobody gave it."""
        inner = next((self._by_keys[given][0] for given in self._within(keys)), None)
        around = (self.exact(keys[:length]) for length in range(len(keys) - 1, 0, -1))
        return self.exact(keys) or inner or next((origin for origin in around if origin is not None), None)

    def rank(self, keys: Keys) -> int:
        """Of the strongest source of `keys` or of something within it; -1 where nobody gave it."""
        return max((self._by_keys[given][1] for given in self._within(keys)), default=-1)

    def forget(self, keys: Keys) -> None:
        """Drop `keys` and everything within: another value stands there now."""
        for given in self._within(keys):
            del self._by_keys[given]


_SHAPES = {"model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "list_type": "a list", "path_type": "a path"}  # fmt: skip
# Kinds of errors whose message says all there is to say about the value.
_SELF_EVIDENT = ("missing", "union_tag_invalid", "literal_error")


def misfits(root: type[Section], tree: dict[str, Any], origins: Origins, incomplete: bool) -> list[str]:
    """A line about each unknown key, wrong type and missing setting of what was given, before settings are shared.

    `incomplete`: part of the input could not be read, so missing settings are not reported.
    """
    try:
        root.model_validate(tree, context=LOADED)
    except ValidationError as error:
        found: dict[Keys, str] = {}
        for details in error.errors(include_url=False):
            keys = _keys_of_error(details, tree)
            told = any(keys[: len(other)] == other for other in found)  # one line, whatever number of types was tried
            contradiction = isinstance(details.get("ctx", {}).get("error"), Problem | Problems)
            if told or contradiction or (incomplete and details["type"] == "missing"):
                continue
            unknown = details["type"] == "extra_forbidden"
            search = len(found) < MOST_LINES
            found[keys] = (
                _unknown(root, tree, keys, origins, search) if unknown else _line(details, root, keys, origins)
            )
        return list(found.values())
    return []


def contradictions(error: ValidationError, root: type[Section], tree: dict[str, Any], origins: Origins) -> list[str]:
    """A line for each. One that was copied into several sections is reported once, where it was given."""
    found: list[tuple[bool, str, str]] = []
    for details in error.errors(include_url=False):
        keys, cause = _keys_of_error(details, tree), details.get("ctx", {}).get("error")
        if isinstance(cause, Problem | Problems):
            for problem in cause.problems if isinstance(cause, Problems) else [cause]:
                found.append((origins.given(keys), str(problem), problem_line(problem, keys, origins)))
        else:
            found.append((origins.given(keys), _message(details), _line(details, root, keys, origins)))
    told = {fault for given, fault, _ in found if given}
    lines = []
    for given, fault, line in found:
        if given or fault not in told:
            lines.append(line)
        told.add(fault)
    return lines


def _keys_of_error(details: Any, tree: Any) -> Keys:
    """A location of pydantic as keys: without the names of types that pydantic puts into it."""
    here, keys = tree, []
    for part in details["loc"]:
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = here[part]
            keys.append(str(part))
    missing = details["type"] == "missing"
    tag = details["type"] == "union_tag_invalid"
    return (*keys, *([str(details["loc"][-1])] if missing else []), *(["type"] if tag else []))


def _unknown(root: type[Section], tree: Any, keys: Keys, origins: Origins, search: bool) -> str:
    """A line about `keys`, the last of which names nothing in its section."""
    section: type[Section] = root
    rivals: tuple[type[Section], ...] = ()
    value: Any = tree
    for key in keys[:-1]:
        value = value[int(key)] if isinstance(value, list) else value[key]
        setting = settings(section).get(key)  # None: the number of an item of a list
        if setting is not None:
            section = setting.section_for(value) or setting.item_section or section
            rivals = setting.sections if len(setting.sections) > 1 else ()
    owners = [type_tag(rival) for rival in rivals if keys[-1] in settings(rival)]
    removed = next((one.removed[keys[-1]] for one in (section, *rivals) if keys[-1] in one.removed), None)
    value, position = value[keys[-1]], len(keys) - 1
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        keys = (*keys, key)
    origin = origins.of(keys)
    kind = origin.kind if origin is not None else "file"
    within = f" of type '{type_tag(section)}'" if rivals else ""
    if origin is not None and kind != "file":
        said = f"{origin.text} names no setting{within}"
    else:
        said = f"unknown key {'.'.join(keys)}{within}{_where(origin)}"
    if removed is not None:
        return f"{said} any more: {removed}"
    if keys[0] in SECTIONS_OF_RL and keys[0] not in settings(root):
        its = spell(keys[1:], kind)
        return f"{said}: only `rl` has a section `{keys[0]}`; give {its} to the command `{keys[0]}`"
    if owners:
        *but_last, last = [f"'{owner}'" for owner in owners]
        return f"{said}; it belongs to type {', '.join(but_last)}{' or ' if but_last else ''}{last}"
    near = nearest(root, keys, section, position) if search else None
    return said if near is None else f"{said}; did you mean {spell(near, kind)}?"


def nearest(root: type[Section], keys: Keys, section: type[Section], position: int) -> Keys | None:
    """The setting that `keys` probably meant; `keys[position]` is the one that `section` does not have.

    In this order: the same name with other dots (--model-name), a neighbour of similar name, the same name elsewhere, a
    similar name with other dots. None where none is likely.
    """
    paths = [path for path, _ in every_setting(root) if "N" not in path]
    unknown = "_".join(keys[position:])
    names = {"_".join(path[position:]): path for path in paths if path[:position] == keys[:position]}
    if unknown in names:
        return names[unknown]
    initials = {name: "".join(part[0] for part in name.split("_")) for name in settings(section)}
    word = keys[position]
    abbreviated = [name for name, letters in initials.items() if len(word) > 1 and letters.startswith(word)]
    for name in [*difflib.get_close_matches(word, initials), *sorted(abbreviated, key=len)]:
        mended = (*keys[:position], name, *keys[position + 1 :])
        if find(root, mended) is not None:
            return mended
    if same := [path for path in paths if path[-1] == keys[-1] and set(keys[position:]) <= set(path)]:
        return min(same, key=lambda path: (-len(set(path) & set(keys)), len(path)))
    close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.8)
    return names[close[0]] if close else None


def _line(details: Any, root: type[Section], keys: Keys, origins: Origins) -> str:
    origin, found = origins.of(keys), find(root, keys) if keys else None
    secret = found is not None and has_mark(found.setting.field, "secret")
    got = "" if origin is None or secret or details["type"] in _SELF_EVIDENT else f", got {_short(details['input'])}"
    return f"{'.'.join(keys)}: {_message(details)}{got}{_where(origin)}"


def problem_line(problem: Problem, prefix: Keys, origins: Origins) -> str:
    full = {key: (*prefix, *key.split(".")) for key in problem.keys}
    sources = {key: origin.text for key in problem.keys if (origin := origins.exact(full[key])) is not None}
    own = not sources or any(origins.given(full[key]) for key in sources)
    within = f"{'.'.join(prefix)}: " if prefix and own else ""
    named = ", ".join(f"{key}: {text}" for key, text in sources.items())
    return f"{within}{problem}{f' ({named})' if named else ''}"


def _message(details: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return "required, but not given"
    if kind == "union_tag_not_found":
        return "needs a `type`"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = context.get("expected_tags") or context["expected"]
        wrong = str(context.get("tag", details["input"]))
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


def _where(origin: Origin | None) -> str:
    return f" ({origin.text})" if origin is not None else ""
