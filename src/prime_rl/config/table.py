"""The flat table that all sources of a configuration write into: of each key the value, and where it came from."""

import re
from typing import Any, Literal, NamedTuple

from prime_rl.config.migration import OLDER

Keys = tuple[str, ...]
Kind = Literal["option", "file", "variable"]

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
ABSENT: Any = object()


class ConfigError(Exception):
    """One or more mistakes in a configuration, each a readable line in `problems`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def is_index(key: str) -> bool:
    """Whether a key is the number of an item of a list."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


def generic(keys: Keys) -> Keys:
    """`keys` with "N" for the number of an item."""
    return tuple("N" if is_index(key) else key for key in keys)


def in_section(keys: Keys) -> Keys:
    """`keys` of `rl` as the process has them that they are meant for."""
    return keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys


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

        tomllib does not tell. A key inside a string could be mistaken for one, which only misplaces a message.
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
    """The value of a key: {} of a table, [] of a list, whose settings and items have entries of their own.

    `keys`: the key path as the user spelled it in `origin` (None: given in Python, or it follows from others).
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


NOTHING = Entry(ABSENT)


class Table:
    """Entries by key, of each the strongest. Sources are added from the weakest to the strongest.

    `unions` are the sections that have several types: the settings of one mean nothing in another.
    """

    def __init__(self, tree: dict[str, Any] | None = None, unions: frozenset[Keys] = frozenset()) -> None:
        self.entries: dict[Keys, Entry] = {}
        self.hints: list[str] = []
        self.problems: list[str] = []
        self._unions = unions
        self._write((), tree or {}, None)

    def add(self, keys: Keys, value: Any, origin: Origin) -> None:
        """Put a value over those before: tables are merged, anything else is replaced; the text "None" is null."""
        for length, key in enumerate(keys):
            parent = keys[:length]
            table = self.entry(parent).value
            if not isinstance(table, dict | list if is_index(key) else dict):
                self.remove(parent)
                table = [] if is_index(key) else {}
            count = sum(other[:-1] == parent != other for other in self.entries)
            if isinstance(table, list) and int(key) > count:
                has = f"{'.'.join(parent)} has {count} item{'' if count == 1 else 's'}"
                self.problems.append(f"{origin.name}: index {key} is out of range: {has}")
                return
            self.entries[parent] = Entry(table, origin, parent)
        self._write(keys, value, origin)

    def _write(self, keys: Keys, value: Any, origin: Origin | None) -> None:
        """Set `keys`, under its name of today, and all that is in it."""
        written_as, before = keys, value
        if origin is not None and (older := OLDER.get(in_section(keys))) is not None:
            keys, value = (*keys[:-1], older[0]), older[1](value)
            if (keys, value) != (written_as, before):
                today = ",".join(map(str, value)) if isinstance(value, list) else value
                hint = f"{before} is an older spelling of {spell(keys, origin.kind)} {today}"
                self.hints.append(f"{origin.place(written_as)} {hint}")
        same = self.entry(keys)
        if origin is not None and same.origin is origin and same.keys != written_as:
            both = f"{'.'.join(same.keys)} and {'.'.join(written_as)} are the same setting, give it once"
            self.problems.append(f"{both} ({same.place})")
        if origin is not None and keys[-1:] == ("type",):
            self._leave_out_other_types(keys, value, origin)
        if not (isinstance(value, dict) and isinstance(same.value, dict)):
            self.remove(keys)
        named = isinstance(value, list) or (isinstance(value, dict) and all(isinstance(key, str) for key in value))
        if origin is None and not named:
            self.entries[keys] = Entry(value)  # of a configuration made in Python: as it is
            return
        leaf = type(value)() if isinstance(value, dict | list) else None if value == "None" else value
        self.entries[keys] = Entry(leaf, origin, written_as)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in sorted(items, key=lambda item: item[0] != "type"):
            self._write((*keys, str(key)), item, origin)

    def _leave_out_other_types(self, keys: Keys, value: Any, origin: Origin) -> None:
        """Drop what weaker sources set for another `type`, which is set at `keys`; options may come in any order."""
        before, union = self.entry(keys), keys[:-1]
        if before.value in (ABSENT, value) or generic(union) not in self._unions:
            return
        others = {key: entry.origin for key, entry in self.entries.items() if key[:-1] == union and key != keys}
        in_any_order = origin.kind != "file"  # other options (or variables) are meant for this type, too
        gone = [key for key, by in others.items() if by is None or by.kind != origin.kind or not in_any_order]
        for key in gone:
            self.remove(key)
        if gone and before.origin is not None:
            what = f"{', '.join(sorted('.'.join(key) for key in gone))} set by {before.origin.name}"
            now = f"{origin.place(keys)} makes it '{value}'"
            self.hints.append(f"{what} for type '{before.value}' is left out: {now}")

    def entry(self, keys: Keys | str) -> Entry:
        """The entry, or NOTHING. A dotted text names keys without dots."""
        return self.entries.get(tuple(keys.split(".")) if isinstance(keys, str) else keys, NOTHING)

    def get(self, keys: Keys) -> Any:
        """The value with all that is in it, or ABSENT."""
        children: dict[Keys, list[Keys]] = {}
        for other in self.entries:
            if other:
                children.setdefault(other[:-1], []).append(other)

        def value_of(keys: Keys) -> Any:
            value, inside = self.entry(keys).value, children.get(keys, [])
            if isinstance(value, list) and inside:
                return [value_of(key) for key in sorted(inside, key=lambda key: int(key[-1]))]
            return {key[-1]: value_of(key) for key in inside} if isinstance(value, dict) and inside else value

        return value_of(keys)

    def fill(self, dotted: str, entry: Entry) -> None:
        """Set what was missing, or came from a weaker source, and follows from another setting."""
        keys = tuple(dotted.split("."))
        for parent in [keys[:length] for length in range(len(keys))]:
            if not isinstance(self.entry(parent).value, dict):
                self.entries[parent] = Entry({})
        self.remove(keys)
        self.entries[keys] = entry

    def remove(self, keys: Keys) -> None:
        """Forget `keys` and everything within."""
        if isinstance(self.entry(keys).value, dict | list):
            for other in [other for other in self.entries if other[: len(keys)] == keys != other]:
                del self.entries[other]
        self.entries.pop(keys, None)

    def nearest(self, keys: Keys) -> Entry:
        """The entry of `keys`, else of its nearest parent, that a source gave; NOTHING where none did."""
        with_parents = [self.entry(keys[:length]) for length in range(len(keys), 0, -1)]
        return next((entry for entry in with_parents if entry.origin is not None), NOTHING)
