"""Where rows may be stored, and what is refused."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from prime_rl.config.sft import SFTData
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import load_rows

ROWS = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(3)]


def store(kind: str, directory: Path) -> Path:
    """The path of `ROWS`, stored in some form."""
    directory.mkdir(exist_ok=True)
    path, dataset = directory / f"a.{kind}", Dataset.from_list(ROWS)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "parquet":
        dataset.to_parquet(str(path))
    elif kind == "saved":
        dataset.save_to_disk(str(path))
    else:
        DatasetDict({"train": dataset, "test": Dataset.from_list(ROWS[:1])}).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "splits"])
def test_stores(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every local form gives the same rows in the same order."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = load_rows(SFTData(name=str(store(kind, tmp_path))))
    assert [dict(rows[i]) for i in range(len(rows))] == ROWS


def test_splits(tmp_path: Path) -> None:
    """A saved dataset with splits gives the one asked for, and names those it has. Of what has none it is refused: all
    rows would be trained on. So is a subset of anything local."""
    path = str(store("splits", tmp_path))
    assert len(load_rows(SFTData(name=path, split="test"))) == 1
    assert "of splits only train, test: see" in refused(path, split="validation")
    for kind in ("jsonl", "saved"):
        path = str(store(kind, tmp_path / kind))
        for more in ({"split": "test"}, {"subset": "en"}):
            assert "has no subsets, and of splits only train" in refused(path, **more)


def test_tool_arguments_stay_apart(tmp_path: Path) -> None:
    """Rows of a JSON file do not get the keys of each other's tool arguments."""
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {key: 1}}}]}]}
        for key in ("a", "b")
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert list(load_rows(SFTData(name=str(path)))) == rows


def refused(name: str, **more: str) -> str:
    with pytest.raises(UserError) as caught:
        load_rows(SFTData(name=name, **more))
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\n", "is empty"),
        ('{"prompt": "a", "completion": "b"}\n{', "line 2 is not JSON"),
        ('{"prompt": "a", "completion": "b"}\n7', "line 2 is a int, not an object"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path) -> None:
    """A bad file is one clear line with its name."""
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    assert message in refused(str(path))
    assert str(path) in refused(str(path))


def test_other_local_mistakes(tmp_path: Path) -> None:
    """A directory or file of another kind, or damaged, is named. A missing path is not asked of the hub."""
    for name in ("./none", "/none/at/all", "~/none", "none.jsonl", "a/b/c"):
        assert refused(name) == f"dataset {name} does not exist"
    assert "cannot be read" in refused(str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    assert "is neither a saved dataset nor a file .jsonl or .parquet" in refused(str(tmp_path / "a.txt"))
    (tmp_path / "b.parquet").write_text("no parquet")
    assert "cannot be read" in refused(str(tmp_path / "b.parquet"))
