"""Single assignments, where each came from, and how a key is spelled there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from prime_rl.config.base import ConfigError, Section
from prime_rl.config.schema import Keys, list_index

PREFIX = "PRIME_"
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
MAX_DEPTH = 32


@dataclass(frozen=True)
class Origin:
    """`text` names the option, the file (and line) or the variable."""

    kind: Literal["option", "file", "variable"]
    text: str

    @property
    def source(self) -> str:
        """The file, or all options, or all variables."""
        return self.text.partition(", line ")[0] if self.kind == "file" else self.kind

    def spell(self, keys: Keys) -> str:
        """`keys` as one would write them in this place."""
        return spell(keys, self.kind)


def spell(keys: Keys, kind: Literal["option", "file", "variable"]) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    if kind == "variable":
        return PREFIX + "__".join(keys).upper()
    return ".".join(keys)


@dataclass(frozen=True)
class Assignment:
    """One key gets a value. A value that is a table is empty: what it holds has assignments of its own.

    A `mark` sets nothing: it tells where something inside a list stands, as lists are assigned whole.

    Raises ConfigError, with the origin, where keys or value could not be written to a resolved configuration: nothing
    behind this point meets such a value.
    """

    keys: Keys
    value: Any
    origin: Origin
    mark: bool = False

    def __post_init__(self) -> None:
        fault = "an empty key" if "" in self.keys else _fault([self.value, *self.keys], MAX_DEPTH - len(self.keys))
        if fault is not None:
            raise ConfigError([f"{self.origin.text}: {fault}"])


def _fault(value: Any, room: int) -> str | None:
    """What is wrong with a value or with something in it; tables and lists may be nested `room` deep in it."""
    if room < 0:
        return f"more than {MAX_DEPTH} tables and lists, one within the other"
    if isinstance(value, str) and "\0" in value:
        return "text with a NUL character"
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "not UTF-8 text"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of more than 64 bits"
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((fault for part in parts if (fault := _fault(part, room - 1)) is not None), None)


Layer = list[Assignment]


def flatten(keys: Keys, value: Any, origin: Origin) -> Iterator[Assignment]:
    """`value` as assignments of single keys; a table is first switched on, then filled."""
    if not isinstance(value, dict):
        yield Assignment(keys, value, origin)
        return
    yield Assignment(keys, {}, origin)
    for key, item in value.items():
        yield from flatten((*keys, str(key)), item, origin)


def of_one_type(layers: list[Layer], hints: list[str]) -> list[Layer]:
    """`layers`, from the lowest to the highest, without what an earlier source sets in a section that a later one makes another `type`.

    It was meant for the earlier type, and would else go over silently where the later one has a setting of the same name. A hint tells of it.
    """
    kept: list[list[Assignment | None]] = [list(layer) for layer in layers]
    types: dict[Keys, Assignment] = {}
    for number, layer in enumerate(layers):
        for place, now in enumerate(layer):
            if now.mark or now.keys[-1] != "type" or not isinstance(now.value, str):
                continue
            section, before = now.keys[:-1], types.get(now.keys)
            types[now.keys] = now
            if before is None or before.value == now.value:
                continue
            gone = []
            for earlier in kept[: number + 1]:
                end = place if earlier is kept[number] else len(earlier)
                for i, one in enumerate(earlier[:end]):
                    inside = one is not None and len(one.keys) > len(section) and one.keys[: len(section)] == section
                    if one is not None and inside and one.origin.source != now.origin.source:
                        earlier[i] = None
                        gone += [".".join(one.keys)] if one.keys != now.keys and one.value != {} else []
            if gone:
                hints.append(
                    f"{', '.join(dict.fromkeys(gone))} set by {before.origin.source} for type '{before.value}' is left out: "
                    f"{now.origin.text} makes it '{now.value}'"
                )
    return [[one for one in layer if one is not None] for layer in kept]


def build(assignments: Iterable[Assignment], section: type[Section]) -> tuple[dict[str, Any], list[str]]:
    """The table that the assignments make when carried out one after the other, and a line for each that cannot be.

    Tables merge key by key, everything else is replaced.
    """
    tree: dict[str, Any] = {}
    problems = []
    for one in assignments:
        if one.mark:
            continue
        try:
            put(tree, one.keys, nulls(one.value), None if one.origin.kind == "file" else list_index(section, one.keys))
        except IndexError as error:
            problems.append(f"{one.origin.text}: {error}")
    return tree, problems


def put(tree: dict[str, Any], keys: Keys, value: Any, index: int | None = None) -> None:
    """Set one key, making tables on the way, also in place of other values. An empty table leaves a table as it is.

    `keys[index]` is the number of an item of a list. Raises IndexError beyond the end.
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


def nulls(value: Any) -> Any:
    """A copy of `value` with null for every string "None" in it, as TOML has no null."""
    if isinstance(value, dict):
        return {key: nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nulls(item) for item in value]
    return None if value == "None" else value


def is_shared_copy(keys: Keys) -> bool:
    """Whether `keys` lie in a section of `rl` into which settings of the same name are filled from the top."""
    return len(keys) > 1 and keys[0] in SECTIONS_OF_RL


class Origins:
    """Which origin set a key last."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        """`layers` from the weakest to the strongest; what one of them assigns is equally strong."""
        self._by_keys: dict[Keys, tuple[Origin, int]] = {}
        self._tables: set[Keys] = set()
        for strength, layer in enumerate(layers):
            for assignment in layer:
                if assignment.value != {} and not assignment.mark:
                    self.forget(assignment.keys)
                self._by_keys[assignment.keys] = assignment.origin, strength
                self._tables.update(assignment.keys[:length] for length in range(1, len(assignment.keys)))

    def exact(self, keys: Keys) -> Origin | None:
        """Origin of the very setting, or of the shared setting of `rl` that it was filled from."""
        entry = self._by_keys.get(keys) or (self._by_keys.get(keys[1:]) if is_shared_copy(keys) else None)
        return entry[0] if entry is not None else None

    def given(self, keys: Keys) -> bool:
        return keys in self._by_keys

    def strength(self, keys: Keys) -> int:
        """The layer of the strongest source of `keys` or of something within it; -1 where nobody gave it."""
        return max((layer for given, (_, layer) in self._by_keys.items() if given[: len(keys)] == keys), default=-1)

    def of(self, keys: Keys) -> Origin | None:
        """Origin of `keys`, else of something within it, else of the table around it; None where nobody gave it."""
        origin = self.exact(keys)
        origin = origin or next((one for given, (one, _) in self._by_keys.items() if given[: len(keys)] == keys), None)
        for length in range(len(keys) - 1, 0, -1):
            origin = origin or self.exact(keys[:length])
        return origin

    def forget(self, keys: Keys) -> None:
        """Drop `keys` and everything within: another value stands there now."""
        self._by_keys.pop(keys, None)
        if keys in self._tables:
            for given in [given for given in self._by_keys if given[: len(keys)] == keys]:
                del self._by_keys[given]
