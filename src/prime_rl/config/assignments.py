"""The table that every source of a configuration writes into, key by key, from the weakest to the strongest."""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Keys = tuple[str, ...]
Kind = Literal["option", "file", "variable"]

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
MAX_DEPTH = 32
ABSENT: Any = object()


def _port_of(address: Any) -> Any:
    """Return the port of an address like http://localhost:8001; anything else as it is, also one with a host to lose."""
    local = re.fullmatch(r"https?://(?:localhost|127\.0\.0\.1):(\d{1,5})/*", str(address))
    return int(local[1]) if local else address


# Older spellings: the key of today, and how its value is written there. The same in a section of `rl`.
OLDER: dict[Keys, tuple[Keys, Callable[[Any], Any]]] = {
    ("exp_id",): (("output_dir",), lambda name: f"outputs/{name}"),
    ("ckpt", "path"): (("ckpt", "output_dir"), lambda path: path),
    ("client", "port"): (("client", "base_url"), lambda port: f"http://localhost:{port}/v1"),
    ("benchmarks",): (("environment_ids",), lambda names: str(names).replace(",", " ").split()),
    ("canary",): (("logprob_check",), lambda on: on),
    ("server", "port"): (("server", "port"), _port_of),
}


class ConfigError(Exception):
    """One or more mistakes in a configuration, each a readable line in `problems`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Origin(NamedTuple):
    """The option, the variable or the file, of which also `keys` and `lines`. A stronger source has a higher rank."""

    kind: Kind
    source: str
    rank: int
    keys: Keys = ()
    lines: tuple[str, ...] = ()

    def is_with(self, other: "Origin") -> bool:
        """Whether both are of one file, or both options, or both variables."""
        return self.kind == other.kind and (self.kind != "file" or self.source == other.source)

    @property
    def text(self) -> str:
        """The source, of a file with the line that names the last of `keys`, below those that name the tables around it.

        tomllib does not tell. A key inside a string could be mistaken for one, which only misplaces a message.
        """
        number = -1
        for before, key in zip(("", *self.keys), self.keys, strict=False):
            place = rf"[^#]*(?<![\w-]){re.escape(key)}[\"']?\s*[=.\]]"
            if is_index(key):
                place = rf"\s*\[\[.*\b{re.escape(before)}[\"']?\s*\]"
            found = [line for line in range(max(number, 0), len(self.lines)) if re.match(place, self.lines[line])]
            number = next(iter(found[int(key) if is_index(key) else 0 :]), number)
        return self.source if number < 0 else f"{self.source}, line {number + 1}"


class Assignment(NamedTuple):
    """A value that is no table and no list, or an empty one, whose items are assignments of their own."""

    value: Any
    origin: Origin | None


def is_index(key: str) -> bool:
    """Whether a key is the number of an item of a list."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


class Assignments:
    """What was given: for each key the value of the strongest source, and where it came from."""

    def __init__(self) -> None:
        self.hints: list[str] = []
        self._entries: dict[Keys, Assignment] = {}  # a table or a list stands before what is in it

    def put(self, keys: Keys, value: Any, origin_of: Callable[[Keys], Origin | None] = lambda _: None) -> None:
        """Assign `value`: tables are merged, anything else is replaced. Make tables on the way, also in place of others.

        Raises:
            ConfigError: a resolved configuration could not hold the value, or an item is beyond the end of its list.
        """
        origin = origin_of(keys)
        section = keys[:1] if keys[:1] and keys[0] in SECTIONS_OF_RL else ()
        if origin is not None and keys[len(section) :] in OLDER:
            (today, convert), before = OLDER[keys[len(section) :]], (keys, value)
            keys, value = (*section, *today), convert(value)
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            if (keys, value) != before:
                hint = f"{origin.text} {before[1]} is an older spelling of {spell(keys, origin.kind)} {shown}"
                self.hints.append(hint)
        is_table, is_list = isinstance(value, dict), isinstance(value, list | tuple)
        items = value.items() if is_table else enumerate(value) if is_list else ()
        bare = {} if is_table else [] if is_list else value
        if origin is not None and (fault := _fault(keys, bare)):
            raise ConfigError([f"{origin.text}: {fault}"])
        for length in range(1, len(keys)):
            self._make_room(keys[: length + 1], origin)
        if is_table and self._is(keys, {}):
            if origin is not None:
                self._entries[keys] = Assignment({}, origin)
        elif keys:
            self._replace_type(keys, bare, origin)
            self.remove(keys, itself=False)
            self._entries[keys] = Assignment(None if bare == "None" and origin is not None else bare, origin)
        for key, item in items:
            self.put((*keys, str(key)), item, origin_of)

    def _is(self, keys: Keys, empty: Any) -> bool:
        return keys in self._entries and type(self._entries[keys].value) is type(empty)

    def _make_room(self, keys: Keys, origin: Origin | None) -> None:
        """Let a table, or for the number of an item a list, stand around `keys`, in place of whatever else stands there."""
        around, key = keys[:-1], keys[-1]
        if self._is(around, {}):
            return
        number = is_index(key)
        if not (number and self._is(around, [])):
            self.remove(around, itself=False)
            self._entries[around] = Assignment([] if number else {}, origin)
        length = sum(len(one) == len(keys) for one in self.within(around))
        if number and int(key) > length and origin is not None:
            raise ConfigError([f"{origin.text}: there are {length} of {'.'.join(around)}"])

    def _replace_type(self, keys: Keys, value: Any, origin: Origin | None) -> None:
        """Drop what weaker sources set for another `type` of a section: a setting of the same name means another thing."""
        before = self._entries.get(keys)
        if origin is None or before is None or before.origin is None or keys[-1] != "type" or before.value == value:
            return
        others = {one: self._entries[one] for one in self.within(keys[:-1]) if one not in (keys, keys[:-1])}
        weaker = [one for one, entry in others.items() if entry.origin and not origin.is_with(entry.origin)]
        if gone := [".".join(one) for one in weaker if others[one].value != {}]:
            of = f"set by {before.origin.source} for type '{before.value}'"
            self.hints.append(f"{', '.join(gone)} {of} is left out: {origin.text} makes it '{value}'")
        for one in weaker:
            if all(inner in weaker for inner in self.within(one)):  # a table stays around a stronger source's entry
                del self._entries[one]

    def remove(self, keys: Keys, itself: bool = True) -> None:
        """Forget `keys` and everything within; without `itself` only what is within."""
        for one in self.within(keys):
            if itself or one != keys:
                del self._entries[one]

    def within(self, keys: Keys) -> list[Keys]:
        """`keys`, where given, and everything given within."""
        return [one for one in self._entries if one[: len(keys)] == keys]

    def get(self, keys: Keys) -> Any:
        """The value, with what is within it, or ABSENT."""
        built: dict[Keys, Any] = {(): {}}
        for one in self.within(keys):
            value = self._entries[one].value
            built[one] = value if not isinstance(value, dict | list) else type(value)()
            around = built.get(one[:-1])
            if isinstance(around, list):
                around.append(built[one])
            elif around is not None:
                around[one[-1]] = built[one]
        return built.get(keys, ABSENT)

    def is_given(self, keys: Keys) -> bool:
        """Whether a source set it, or made it as a table on the way; not what follows from a shared setting."""
        return keys in self._entries and self._entries[keys].origin is not None

    def exact(self, keys: Keys) -> Origin | None:
        """Origin of the very setting, or of the shared setting of `rl` that it was filled from."""
        shared = keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys
        return next((self._entries[one].origin for one in (keys, shared) if self.is_given(one)), None)

    def origin(self, keys: Keys) -> Origin | None:
        """Origin of `keys`, else of something within it, else of the table around it; None where nobody gave it."""
        inner = [self._entries[one].origin for one in self.within(keys)]
        around = [self.exact(keys[:length]) for length in range(len(keys) - 1, 0, -1)]
        return next((origin for origin in (self.exact(keys), *inner, *around) if origin is not None), None)

    def rank(self, keys: Keys) -> int:
        """Rank of the strongest source of `keys` or of something within it; -1 where nobody gave it."""
        origins = [self._entries[one].origin for one in self.within(keys)]
        return max((origin.rank for origin in origins if origin is not None), default=-1)


def _fault(keys: Keys, value: Any) -> str | None:
    """Say what is wrong with a key or a value that no resolved configuration could hold."""
    if "" in keys:
        return "an empty key"
    if len(keys) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} tables and lists, one within the other"
    texts = [text for text in (*keys, value) if isinstance(text, str)]
    if any("\0" in text for text in texts):
        return "text with a NUL character"
    if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        return "not UTF-8 text"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of more than 64 bits"
    return None
