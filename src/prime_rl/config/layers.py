"""What the sources of a configuration give, as layers from the weakest to the strongest, and the table they make."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Keys = tuple[str, ...]
Kind = Literal["option", "file", "variable"]

PREFIX = "PRIME_"  # of environment variables: PRIME_MODEL__NAME is model.name
SECTIONS_OF_RL = ("trainer", "orchestrator", "inference")
ABSENT: Any = object()


def _port_of(address: Any) -> Any:
    """Return the port of an address like http://localhost:8001; anything else as it is, also one with a host to lose."""
    local = re.fullmatch(r"https?://(?:localhost|127\.0\.0\.1):(\d{1,5})/*", str(address))
    return int(local[1]) if local else address


# Older spellings: the key of today in the same table, and how its value is written there. The same in a section of `rl`.
OLDER: dict[Keys, tuple[str, Callable[[Any], Any]]] = {
    ("exp_id",): ("output_dir", lambda name: f"outputs/{name}"),
    ("ckpt", "path"): ("output_dir", lambda path: path),
    ("client", "port"): ("base_url", lambda port: f"http://localhost:{port}/v1"),
    ("benchmarks",): ("environment_ids", lambda names: str(names).replace(",", " ").split()),
    ("server", "port"): ("port", _port_of),
}


class ConfigError(Exception):
    """One or more mistakes in a configuration, each a readable line in `problems`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Origin(NamedTuple):
    """Where a value came from; `text` is the option, the variable, or the file with its line."""

    kind: Kind
    text: str


class Items(dict[str, Any]):
    """An item of a list, by its number: what `--environments.0.id` gives."""


@dataclass
class Layer:
    """What an option, a variable or a file gives. A stronger source has a higher rank.

    `lines` are those of a file that is read into the section at `prefix`.
    """

    kind: Kind
    source: str
    rank: int
    tree: dict[str, Any]
    prefix: Keys = ()
    lines: tuple[str, ...] = ()

    def origin(self, keys: Keys) -> Origin:
        """In a file the line that names the last of `keys`, below those that name the tables around it.

        tomllib does not tell. A key inside a string could be mistaken for one, which only misplaces a message.
        """
        number, before = -1, ""
        for key in keys[len(self.prefix) :]:
            place = rf"[^#]*(?<![\w-]){re.escape(key)}[\"']?\s*[=.\]]"
            if is_index(key):
                place = rf"\s*\[\[.*\b{re.escape(before)}[\"']?\s*\]"
            matches = [line for line in range(max(number, 0), len(self.lines)) if re.match(place, self.lines[line])]
            number, before = next(iter(matches[int(key) if is_index(key) else 0 :]), number), key
        return Origin(self.kind, self.source if number < 0 else f"{self.source}, line {number + 1}")


def is_index(key: str) -> bool:
    """Whether a key is the number of an item of a list."""
    return re.fullmatch("0|[1-9][0-9]{0,8}", key) is not None


def spell(keys: Keys, kind: Kind) -> str:
    """`keys` as an option, as a dotted TOML key, or as an environment variable."""
    if kind == "option":
        return "--" + ".".join(keys).replace("_", "-")
    return PREFIX + "__".join(keys).upper() if kind == "variable" else ".".join(keys)


def nested(keys: Keys, value: Any) -> Any:
    """The tables and items around `value` that `keys` name."""
    for key in reversed(keys):
        value = Items({key: value}) if is_index(key) else {key: value}
    return value


def lookup(tree: Any, keys: Keys) -> Any:
    """The value at `keys`, or ABSENT."""
    for key in keys:
        if isinstance(tree, dict):
            tree = tree.get(key, ABSENT)
        else:
            is_item = isinstance(tree, list) and is_index(key) and int(key) < len(tree)
            tree = tree[int(key)] if is_item else ABSENT
    return tree


class LayeredTable:
    """The table that layers make: of each key the value of the strongest source."""

    def __init__(self, tree: dict[str, Any] | None = None) -> None:
        self.tree: dict[str, Any] = copy.deepcopy(tree or {})
        self.hints: list[str] = []
        self.problems: list[str] = []
        self._sources: dict[Keys, Layer] = {}  # the strongest that gives a key, or something within it

    def add(self, layer: Layer) -> None:
        """Put `layer` over those before: tables are merged, anything else is replaced; the text "None" is null."""
        hints, problems = _at_today(layer)
        self.hints += hints
        self.problems += problems
        self.tree = self._merged(self.tree, layer.tree, (), layer)

    def _merged(self, before: Any, value: Any, keys: Keys, layer: Layer) -> Any:
        self._sources[keys] = layer
        if isinstance(value, Items) and not isinstance(before, dict):
            ((key, item),) = value.items()
            number, items = int(key), list(before) if isinstance(before, list) else []
            if number > len(items):
                self.problems.append(f"{layer.source}: there are {len(items)} of {'.'.join(keys)}")
                return before
            items[number : number + 1] = [self._merged(lookup(items, (key,)), item, (*keys, key), layer)]
            return items
        if isinstance(value, list):
            return [self._merged(ABSENT, item, (*keys, str(number)), layer) for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return None if value == "None" else value
        merged = dict(before) if isinstance(before, dict) else {}
        if merged.get("type", value.get("type")) != value.get("type", merged.get("type")):
            merged = self._without_other_type(merged, value, keys, layer)
        return merged | {
            key: self._merged(merged.get(key, ABSENT), item, (*keys, key), layer) for key, item in value.items()
        }

    def _without_other_type(self, before: dict[str, Any], value: Any, keys: Keys, layer: Layer) -> dict[str, Any]:
        """Drop what weaker sources set for another `type`: a setting of the same name means another thing there."""
        kinds = {key: one.kind for key in before if (one := self._sources.get((*keys, key)))}
        kept = {key: item for key, item in before.items() if kinds.get(key) == layer.kind != "file"}
        gone = sorted(".".join((*keys, key)) for key in before if key not in kept and key != "type")
        if gone and (setter := self.origin((*keys, "type"))) is not None:
            of = f"set by {setter.text.partition(', line ')[0]} for type '{before['type']}'"
            now = layer.origin((*keys, "type")).text
            self.hints.append(f"{', '.join(gone)} {of} is left out: {now} makes it '{value['type']}'")
        return kept

    def get(self, keys: Keys) -> Any:
        """The value, or ABSENT."""
        return lookup(self.tree, keys)

    def fill(self, keys: Keys, value: Any) -> None:
        """Set what follows from another setting; its origin is that one's."""
        around = self.tree
        for key in keys[:-1]:
            if not isinstance(around.get(key), dict):
                around[key] = {}
            around = around[key]
        around[keys[-1]] = value
        self._sources.pop(keys, None)

    def remove(self, keys: Keys) -> None:
        """Forget `keys` and everything within."""
        if self.get(keys) is not ABSENT:
            del lookup(self.tree, keys[:-1])[keys[-1]]

    def _layer(self, keys: Keys) -> Layer | None:
        """The strongest that gives `keys` or something within; None where nobody gave it or it was filled."""
        return None if self.get(keys) is ABSENT else self._sources.get(keys)

    def rank(self, keys: Keys) -> int:
        """Rank of the strongest source of `keys` or of something within it; -1 where nobody gave it."""
        layer = self._layer(keys)
        return -1 if layer is None else layer.rank

    def exact(self, keys: Keys) -> Origin | None:
        """Origin of the very setting, or of the shared setting of `rl` that it was filled from."""
        shared = keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys
        return next((layer.origin(one) for one in (keys, shared) if one and (layer := self._layer(one))), None)

    def origin(self, keys: Keys) -> Origin | None:
        """Origin of `keys`, else of the table around it; None where nobody gave it."""
        around = [self.exact(keys[:length]) for length in range(len(keys), 0, -1)]
        return next((origin for origin in around if origin is not None), None)


def _at_today(layer: Layer) -> tuple[list[str], list[str]]:
    """Rename what a layer gives in an older spelling; return a hint at each, and what it gives in both as mistakes."""
    hints, problems = [], []
    for section in ((), *((name,) for name in SECTIONS_OF_RL)):
        for older, (name, convert) in OLDER.items():
            keys = (*section, *older)
            table = lookup(layer.tree, keys[:-1])
            if not isinstance(table, dict) or older[-1] not in table:
                continue
            source, before = layer.origin(keys).text, table.pop(older[-1])
            today = spell((*keys[:-1], name), layer.kind)
            if name in table:
                problems.append(f"{'.'.join(keys)} and {today} are the same setting, give it once ({source})")
                continue
            value = table[name] = convert(before)
            if (name, value) == (older[-1], before):
                continue
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            hints.append(f"{source} {before} is an older spelling of {today} {shown}")
    return hints, problems
