"""Rows of a fine-tuning dataset, from wherever they are stored."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from prime_rl.config.sft import SFTData
from prime_rl.errors import UserError

ACCEPTED = "a column `messages`, or two columns `prompt` and `completion` (optionally `tools`)"
Row = Mapping[str, Any]


class Rows(Protocol):
    """What is trained on, by index. A list of dicts is one, a `datasets.Dataset` another."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def load_rows(config: SFTData) -> Rows:
    """The rows of `config.name`: a .jsonl, .json or .parquet file, a directory of them, a saved dataset, or a dataset of the hub.

    `split` and `subset` choose within saved and hub datasets; a plain file has neither.

    Raises:
        UserError: it is not there, cannot be read, is empty, has other columns than the accepted ones, or has not the split or subset
            that is asked for.
    """
    path = Path(config.name).expanduser()
    if path.exists():
        if config.subset is not None:
            raise UserError(
                f"data.subset {config.subset!r} chooses within a dataset of the hub, and {path} is a local one"
            )
        rows = _load_local(path, config.split)
    elif _looks_local(config.name):
        raise UserError(f"dataset {config.name} does not exist")
    else:
        rows = _load_hub(config)
    if len(rows) == 0:
        raise UserError(f"dataset {config.name} is empty")
    check_columns(rows[0], config.name)
    return rows


def check_columns(row: Row, name: str) -> None:
    """Raise UserError, naming the columns found, unless the row has the form of a conversation or of a prompt with its completion."""
    if "messages" not in row and not {"prompt", "completion"} <= row.keys():
        raise UserError(f"dataset {name} has the columns {', '.join(row) or '(none)'}; fine-tuning needs {ACCEPTED}")


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".json", ".jsonl", ".parquet"))


def _load_local(path: Path, split: str) -> Rows:
    if path.is_file():
        _refuse_split(path, split)
        return _load_files([path])
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _load_saved(path, split)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".json", ".parquet"))
    if not files:
        raise UserError(f"dataset directory {path} is no saved dataset and holds no .jsonl, .json or .parquet files")
    _refuse_split(path, split)
    return _load_files(files)


def _refuse_split(path: Path, split: str) -> None:
    """Raise UserError where a split is asked for (`train` is the default) of what has none: all of it would be trained on."""
    if split != SFTData.model_fields["split"].default:
        raise UserError(f"data.split {split!r}: {path} has no splits, give the files of that split")


def _load_files(files: list[Path]) -> Rows:
    if len({file.suffix for file in files}) > 1:
        raise UserError(f"dataset files of several kinds in {files[0].parent}: keep one kind")
    if files[0].suffix == ".parquet":
        return _load_parquet(files)
    if files[0].suffix not in (".jsonl", ".json"):
        raise UserError(f"dataset file {files[0]}: the ending must be .jsonl, .json or .parquet")
    return [row for file in files for row in _load_json(file)]


def _load_json(path: Path) -> list[Row]:
    """JSON lines, or one JSON list. Read here and not by `datasets`, which would give all rows' tool arguments each other's keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"dataset {path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}") from error
    else:
        rows = [_parse_line(line, path, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{path}: row {number} is a {type(row).__name__}, not an object")
    return rows


def _parse_line(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} line {number} is not JSON: {error}") from error


def _load_parquet(files: list[Path]) -> Rows:
    import pyarrow
    from datasets import Dataset, concatenate_datasets
    from datasets.exceptions import DatasetGenerationError

    try:
        return concatenate_datasets([Dataset.from_parquet(str(file)) for file in files])
    except (pyarrow.ArrowException, DatasetGenerationError, OSError, ValueError) as error:
        raise UserError(f"dataset {files[0]} cannot be read: {_one_line(error)}") from error


def _load_saved(path: Path, split: str) -> Rows:
    import pyarrow
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise UserError(f"saved dataset {path} cannot be read: {_one_line(error)}") from error
    if not isinstance(saved, DatasetDict):
        _refuse_split(path, split)
        return saved
    if split not in saved:
        raise UserError(f"saved dataset {path} has no split {split!r}; it has {', '.join(saved)}")
    return saved[split]


def _load_hub(config: SFTData) -> Rows:
    import httpx
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(config.name, config.subset, split=config.split)
    except (DatasetsError, OSError, ValueError, httpx.HTTPError) as error:
        raise UserError(
            f"dataset {config.name} is no local path, and the hub did not give it: {_one_line(error)}"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
