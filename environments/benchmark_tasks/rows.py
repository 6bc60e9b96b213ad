"""Rows of a benchmark, from the hub or from a local copy, and what must be true of them.

Local files are read here, so that an error names the file and the line. `datasets` is imported only for the hub and for
saved datasets.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
T = TypeVar("T")

ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
# Some hidden tests and long solutions are far longer than the 128 KiB that csv accepts by itself.
csv.field_size_limit(2**31 - 1)


class DataError(ValueError):
    """A benchmark's data is not there or not what it should be; the message is one line that says what to do."""


@dataclass(frozen=True)
class Rows:
    """Rows, and where they are from, for messages."""

    where: str
    rows: list[Row]

    @property
    def columns(self) -> list[str]:
        """Of the first row."""
        return list(self.rows[0])

    def require(self, *columns: str) -> "Rows":
        """Itself.

        Raises:
            DataError: a row lacks one of the columns, or has nothing in it.
        """
        for number, row in enumerate(self.rows):
            for column in columns:
                if row.get(column) is None:
                    what = "nothing in column" if column in row else "no column"
                    raise DataError(
                        f"{self.where}, row {number}: {what} {column!r}; there is {', '.join(row) or 'nothing'}"
                    )
        return self

    def ids(self, column: str | None, *contents: str) -> list[str]:
        """One durable id a row: what `column` holds, or, without one, a hash of the columns `contents`.

        Raises:
            DataError: two rows have the same id.
        """
        if column is None:
            return [_content_hash(row, contents) for row in self.rows]
        found: dict[str, int] = {}
        for number, row in enumerate(self.rows):
            before = found.setdefault(str(row[column]), number)
            if before != number:
                raise DataError(
                    f"{self.where}: rows {before} and {number} have the same {column} {str(row[column])!r}; leave one "
                    "of them out"
                )
        return list(found)


def _content_hash(row: Row, columns: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(str(row[column]) for column in columns).encode()).hexdigest()[:16]


def read(data: str, split: str | None, subsets: Sequence[str | None], default_split: str) -> Rows:
    """Return the rows of a .jsonl, .json, .parquet or .csv file, a directory of them, or a saved or hub's dataset.

    Args:
        data: A path, or the hub's name of a dataset.
        split: That is asked for (None: `default_split`, where there are splits).
        subsets: Of a dataset of the hub, read one after the other (None: it has no subsets).

    Raises:
        DataError: it is not there, cannot be read or is empty, or it is a plain file and a split is asked for.
    """
    path = Path(data).expanduser()
    if path.exists():
        rows = _read_local(path, split, default_split)
    elif looks_local(data):
        raise DataError(f"data {data!r}: there is no such file or directory (looked in {Path.cwd()})")
    else:
        rows = [row for subset in subsets for row in _read_hub(data, subset, split or default_split)]
    if not rows:
        raise DataError(f"data {data!r} has no rows")
    return Rows(data, rows)


def looks_local(data: str) -> bool:
    """Whether it was meant as a path: the hub's names are `name` or `owner/name`."""
    return data.startswith((".", "/", "~")) or data.count("/") > 1 or data.endswith(ENDINGS)


def _read_local(path: Path, split: str | None, default_split: str) -> list[Row]:
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _read_saved(path, split, default_split)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in ENDINGS)
    if not files:
        raise DataError(f"data {str(path)!r} is no saved dataset and holds no files that end in {', '.join(ENDINGS)}")
    if split is not None:
        raise DataError(
            f"split {split!r}: {path} has no splits; name the file of that split as data and leave split out"
        )
    return [row for file in files for row in _read_file(file)]


def _read_file(path: Path) -> list[Row]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
        if path.suffix not in ENDINGS:
            raise DataError(f"data {str(path)!r}: the ending must be one of {', '.join(ENDINGS)}")
        return list(_json_rows(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data {str(path)!r} cannot be read: {one_line(error)}") from error
    except ValueError as error:  # pyarrow's errors are ValueErrors
        raise error if isinstance(error, DataError) else DataError(f"data {str(path)!r}: {one_line(error)}") from error


def _json_rows(path: Path) -> Iterator[Row]:
    """Of JSON lines, or of one JSON list."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        numbered: Iterable[tuple[int, Any]] = enumerate(json.loads(text), 1)
    else:
        lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        numbered = ((number, json_line(line, path, number)) for number, line in lines)
    for number, row in numbered:
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: a {type(row).__name__} and no object")
        yield row


def json_line(line: str | bytes, path: Path, number: int) -> Any:
    """The value in one line of a file, or a DataError that names it."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON: {error}") from error


def _read_saved(path: Path, split: str | None, default_split: str) -> list[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"saved dataset {str(path)!r} cannot be read: {one_line(error)}") from error
    if isinstance(saved, DatasetDict):
        wanted = split or default_split
        if wanted not in saved:
            raise DataError(f"saved dataset {str(path)!r} has no split {wanted!r}; it has {', '.join(saved)}")
        saved = saved[wanted]
    elif split is not None:
        raise DataError(f"split {split!r}: the saved dataset {str(path)!r} has no splits; leave split out")
    return saved.to_list()


def _read_hub(name: str, subset: str | None, split: str) -> list[Row]:
    from datasets import load_dataset

    return ask_hub(name, lambda: load_dataset(name, subset, split=split).to_list())


def ask_hub(name: str, get: Callable[[], T]) -> T:
    """What `get` gets from the hub's dataset `name`, or a DataError that says what can be done without the hub."""
    import httpx
    from datasets.exceptions import DatasetsError

    try:
        return get()
    except (DatasetsError, OSError, ValueError, httpx.HTTPError) as error:
        why = one_line(error)
        gated = "gated" in why.lower() or "401" in why or "403" in why
        token = (
            " Its owners ask for consent: accept the terms on its page and put a token into HF_TOKEN, which the "
            "environment's `secrets` has to name."
            if gated
            else ""
        )
        raise DataError(
            f"dataset {name!r} could not be had from the hub: {why}.{token} Or give a local copy: "
            'data = "path/to/file.jsonl" (or .parquet, .csv, a saved dataset)'
        ) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def unique(rows: Iterable[T], id_of: Callable[[T], str]) -> list[T]:
    """Without the repetitions of what has the same id."""
    return list({id_of(row): row for row in reversed(list(rows))}.values())[::-1]


def choose(items: list[T], id_of: Callable[[T], str], seed: int | None, most: int | None) -> list[T]:
    """The first `most` of them, in the order given or, with a seed, in one that depends on seed and ids alone.

    Hashes, because the `random` module does not promise the same order in every Python version.
    """
    if seed is not None:
        items = sorted(items, key=lambda item: hashlib.sha256(f"{seed}/{id_of(item)}".encode()).digest())
    return items[:most]
