"""livecodebench: problems in the dataset's schema, tests as it packs them, and programs judged by them."""

import base64
import datetime
import json
import os
import pickle
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet
import pytest
import verifiers.v1 as vf

from benchmark_tasks.rows import DataError
from livecodebench import code_of
from livecodebench.tests import read_tests, same_lines, same_value

pytestmark = pytest.mark.usefixtures("isolation")


def packed(value: Any) -> str:
    """As the dataset packs hidden tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


def row(id: str, shown: list[dict[str, str]], hidden: str, **more: Any) -> dict[str, Any]:
    return {
        "question_title": "t", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": id,
        "contest_id": "c", "contest_date": "2024-09-01T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps(shown), "private_test_cases": hidden, "metadata": "{}", **more,
    }  # fmt: skip


STARTER = "class Solution:\n    def add(self, values: List[int]) -> int:\n        "
ROWS = [
    row("add", [case("1 2\n", "3\n")], packed(json.dumps([case("10 20\n", "30"), case("0.5 0.25\n", "0.75\n")]))),
    row(
        "sum", [case("[1, 2]", "3", "functional")], json.dumps([case("[]", "0", "functional")]), starter_code=STARTER,
        metadata=json.dumps({"func_name": "add"}), difficulty="hard", contest_date="2025-01-04T00:00:00",
    ),
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in ROWS))
    return str(path)


def load(**args: Any) -> list[Any]:
    return list(vf.load_environment(vf.resolve_env_config({"taskset": {"id": "livecodebench", **args}})).taskset)


async def score(task: Any, program: str) -> float:
    return float(await task.correct(SimpleNamespace(last_reply=f"Thus:\n```python\n{program}\n```\n")))


READING = [
    ("a, b = map(float, input().split())\nprint(a + b)", 1.0),
    ("a, b = map(int, input().split())\nprint(a + b)", 0.0),  # passes the shown test, and one of the hidden ones
    ("a, b = map(float, input().split())\nprint(a + b)\nraise SystemExit(1)", 0.0),
    ("syntax error", 0.0),
    ("", 0.0),
]
CALLED = [
    (STARTER + "print('noise')\n        return sum(values)", 1.0),
    ("def add(values):\n    return sum(values)", 1.0),
    (STARTER + "return 3", 0.0),
    (STARTER + "return None", 0.0),
    ("class Solution:\n    def other(self, values):\n        return sum(values)", 0.0),
]


async def test_programs(data: str) -> None:
    """Contract: right for all tests, shown and hidden, or wrong; programs that read, and those whose function (or
    method of Solution) is called with each test's arguments, with typing's names there."""
    for task, programs in zip(load(data=data), (READING, CALLED), strict=True):
        for program, reward in programs:
            assert await score(task, program) == reward, program


async def test_time_is_bounded(data: str) -> None:
    """Contract: of each test, and of all of them."""
    slow = "import time\na, b = map(float, input().split())\ntime.sleep(0.7)\nprint(a + b)"
    assert await score(load(data=data, task={"seconds": 0.1})[0], slow) == 0.0
    assert await score(load(data=data, task={"all_seconds": 1.0})[0], slow) == 0.0
    assert await score(load(data=data)[0], slow) == 1.0


async def test_hidden_tests_stay_in_the_file(data: str, tmp_path: Path) -> None:
    """Contract: a release's gigabytes are not held in memory; other kinds of files give the same tasks."""
    tasks = load(data=data)
    assert all(not task.data.private and not task.data.public for task in tasks)
    path = tmp_path / "test.parquet"
    dated = [{**one, "contest_date": datetime.datetime.fromisoformat(one["contest_date"])} for one in ROWS]
    pyarrow.parquet.write_table(pa.Table.from_pylist(dated), path)
    others = load(data=str(path))
    assert [task.key for task in others] == [task.key for task in tasks] == ["livecodebench/add", "livecodebench/sum"]
    assert [task.key for task in load(data=str(path), since="2025-01-01")] == ["livecodebench/sum"]
    assert await score(others[1], STARTER + "return sum(values)") == 1.0


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nand\n```py\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b\n"),
        ("<think>```python\na\n```", None),
        ("```python\na", None),
    ],
)
def test_the_code_of_a_reply(reply: str, code: str | None) -> None:
    """Contract: the last complete block after the thinking."""
    assert code_of(reply) == code


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/pickles-are-programs",)


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (packed(Evil()), "the pickle wants posix.system; only a string is accepted"),
        (packed([case("1", "2")]), "unpacks to a list, not a string"),
        (packed("{"), "private_test_cases is not JSON"),
        (packed(json.dumps([{"input": "1"}])), "has not input, output and testtype"),
        (packed(json.dumps([case("1", "2", "telepathy")])), "testtype 'telepathy'; known are stdin and functional"),
        ("not base64!", "neither JSON nor base64 of zlib of a pickle"),
        (base64.b64encode(zlib.compress(b"")).decode(), "neither JSON nor base64 of zlib of a pickle"),
        ("", "p: no tests"),
        (packed("x" * 5000), "larger than"),
    ],
)
def test_hidden_tests_that_are_not(private: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a pickle that would run code never runs; foreign data and strings that fill memory are refused."""
    monkeypatch.setattr("livecodebench.tests.LARGEST", 1000)
    with pytest.raises(DataError) as caught:
        read_tests("[]", private, "p")
    assert message in str(caught.value)
    assert not Path("/tmp/pickles-are-programs").exists()


def test_outputs_compared() -> None:
    """Contract: trailing space and spelling of numbers do not matter, all else does; no output is an error."""
    same = [("1 2 \n3\n\n", "1 2\n3"), ("0.50 2", "0.5 2.0")]
    others = [("1\n2", "1 2"), ("a b", "ab"), ("1", "1\n1"), ("sNaN", "1"), ("1 sNaN", "1 2")]
    assert [same_lines(*pair) for pair in [*same, *others]] == [True] * len(same) + [False] * len(others)
    assert same_value("[1, [2]]", "[1,[2]]")
    for pair in (("[1]", "[2]"), ("", "1"), ("[" * 200_000, "1")):
        assert not same_value(*pair)


def test_bad_input(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: one line that says what is wrong."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"question_id": "x"}) + "\n")
    with pytest.raises(DataError, match="bad.jsonl, line 2, row 0: no column 'question_content'"):
        load(data=str(bad))
    bad.write_text((json.dumps(ROWS[0]) + "\n") * 2)
    with pytest.raises(DataError, match="rows 0 and 1 have the same question_id 'add'"):
        load(data=str(bad))
    with pytest.raises(DataError, match="subset 'release_v7': give one of release_v1 to release_v6, or v1 to v6"):
        load(subset="release_v7")
    with pytest.raises(DataError, match="there is no such file"):
        load(data="./none.jsonl")

    nothing = mock.Mock(side_effect=OSError("We couldn't connect to the hub"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing)
    with pytest.raises(DataError, match="could not be had from the hub: .* give a local copy"):
        load()


def test_releases(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a release is all files up to its own, or that one alone."""

    def download(name: str, file: str, repo_type: str) -> str:
        assert (name, repo_type) == ("livecodebench/code_generation_lite", "dataset")
        path = tmp_path / file
        path.write_text(json.dumps({**ROWS[0], "question_id": file}) + "\n")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for subset, files in (("release_v3", ("test.jsonl", "test2.jsonl", "test3.jsonl")), ("v6", ("test6.jsonl",))):
        assert [task.key for task in load(subset=subset)] == [f"livecodebench/{file}" for file in files]
