"""Small JSON files that others wrote: what is damaged, or foreign, counts as absent, whatever it is. Standard library only."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

_Record = TypeVar("_Record")
_MOST = 2**63  # no time, pid or count is beyond it


def read_table(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, nothing whole (a power cut), something else, or no reading it."""
    try:
        return as_table(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def as_table(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def build(kind: type[_Record], table: dict[str, Any] | None) -> _Record | None:
    """A dataclass from the table's fields, those of its own dataclass type from tables within.

    Fields that it does not know are passed over, those with a default may be missing; None where anything else does not fit.
    """
    if table is None:
        return None
    hints, given = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in table:
            fits, value = _value(hints[field.name], table[field.name])
            if not fits:
                return None
            given[field.name] = value
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            return None
    return kind(**given)


def _value(hint: Any, value: object) -> tuple[bool, object]:
    """Whether a JSON value is one of the type, and that value."""
    if isinstance(hint, types.UnionType):
        found = [result for each in typing.get_args(hint) if (result := _value(each, value))[0]]
        return found[0] if found else (False, None)
    if dataclasses.is_dataclass(hint):
        record = build(typing.cast(type, hint), as_table(value))
        return record is not None, record
    if hint is types.NoneType:
        return value is None, None
    if isinstance(value, bool):
        return hint is bool, value
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and abs(value) < _MOST, value  # false for NaN
    return isinstance(value, hint), value
