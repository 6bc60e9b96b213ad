"""The packages of benchmarks: rows in each dataset's schema become tasks with durable ids, and replies are judged."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet
import pytest
import verifiers.v1 as vf
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetNotFoundError

from benchmark_tasks.rows import DataError

MATH500 = [
    {"problem": "1+1?", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"},
    {"problem": "1/2?", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 5, "unique_id": "test/algebra/2.json"},
    {"problem": "2+2?", "answer": "4", "subject": "Geometry", "level": 5, "unique_id": "test/geometry/1.json"},
]  # fmt: skip
AIME24 = [{"id": 60, "problem": "p", "solution": "s", "answer": "033", "url": "u", "year": "2024"}]
AIME25 = [{"problem": "p", "answer": "70", "id": "0"}, {"problem": "q", "answer": "588", "id": "1"}]
GSM8K = [{"question": "How many?", "answer": "First <<1+1=2>>2.\nThen more.\n#### 1,234"}]
MATH = [
    {"problem": "x?", "level": "Level 5", "type": "Algebra", "solution": r"\boxed{1}? No, $\boxed{\frac{3}{4}}$."},
    {"problem": "y?", "level": "Level 1", "type": "Geometry", "solution": r"\boxed 7"},
    {"problem": "z?", "level": "Level ?", "type": "Geometry", "solution": r"\fbox{8}"},
]  # fmt: skip
GENESYS = [
    {
        "problem_id": f"math_{n}", "task_type": kind, "prompt": f"problem {n}", "verification_info": info,
        "metadata": "{}",
        "solve_rate_qwen_r1_distill_7b": n / 4,
    }
    for n, (kind, info) in enumerate(
        [
            ("verifiable_math", json.dumps({"ground_truth": "5"})),
            ("verifiable_math", json.dumps({"ground_truth": 6})),
            ("verifiable_code", json.dumps({"language": "python", "test_cases": []})),
            ("verifiable_math", json.dumps({"ground_truth": r"\sqrt{2}"})),
        ]
    )
]  # fmt: skip
DEEPSCALER = [
    {"problem": "p", "answer": "1", "solution": "s"},
    {"problem": "p", "answer": "1", "solution": "another"},
    {"problem": "p", "answer": "2", "solution": ""},
]
GPQA = [
    {
        "Record ID": f"rec{n}", "Question": f" What {n}? ", "Correct Answer": " right\n",
        "Incorrect Answer 1": "wrong one",
        "Incorrect Answer 2": "wrong two", "Incorrect Answer 3": "wrong three", "High-level domain": domain,
    }
    for n, domain in enumerate(["Physics", "Biology", "Physics", "Chemistry"] * 5)
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(id: str, **args: Any) -> list[Any]:
    """As verifiers itself loads it."""
    return list(vf.load_environment(vf.resolve_env_config({"taskset": {"id": id, **args}})).taskset)


async def score(task: Any, reply: str) -> float:
    return float(await task.correct(SimpleNamespace(last_reply=reply)))


CASES: list[tuple[str, str, list[dict[str, Any]], list[str], list[str]]] = [
    ("math500", "a.jsonl", MATH500, [f"math500/{row['unique_id']}" for row in MATH500], ["2", r"\frac{1}{2}", "4"]),
    ("aime2024", "a.parquet", AIME24, ["aime2024/60"], ["33"]),
    ("aime25", "a.csv", AIME25, ["aime2025/0", "aime2025/1"], ["70", "588"]),
    ("gsm8k", "a.parquet", GSM8K, ["gsm8k/313ffee464e564ae"], ["1234"]),
    ("hendrycks-math", "a.jsonl", MATH, ["hendrycks-math/" + one for one in ("", "", "")], [r"\frac{3}{4}", "7", "8"]),
    ("hendrycks-math", "a.jsonl", GENESYS, [f"hendrycks-math/math_{n}" for n in (0, 1, 3)], ["5", "6", r"\sqrt{2}"]),
    ("intellect-math", "a.parquet", GENESYS, [f"intellect-math/math_{n}" for n in (0, 1, 3)], ["5", "6", r"\sqrt{2}"]),
    ("deepscaler", "a.jsonl", DEEPSCALER, ["deepscaler/", "deepscaler/"], ["1", "2"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("id", "file", "rows", "keys", "answers"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_rows_become_tasks(id, file, rows, keys, answers, tmp_path):
    """Contract: in the dataset's schema and from any kind of file, questions, answers and ids are the dataset's."""
    tasks = load(id, data=write(tmp_path / file, rows))
    assert [task.data.answer for task in tasks] == answers
    assert len({task.key for task in tasks}) == len(tasks)
    for task, key in zip(tasks, keys, strict=True):
        assert task.key.startswith(key)
        assert task.data.prompt in {row.get("problem", row.get("question", row.get("prompt"))) for row in rows}
        assert r"\boxed{}" in task.data.system_prompt


def test_ids_do_not_depend_on_the_rows_around(tmp_path):
    """Contract: a row keeps its id in another order and among others; order and number are of the seed alone."""
    whole = load("hendrycks-math", data=write(tmp_path / "a.jsonl", MATH))
    part = load("hendrycks-math", data=write(tmp_path / "b.jsonl", MATH[:0:-1]))
    assert [task.key for task in part] == [task.key for task in whole[:0:-1]]
    data = write(tmp_path / "c.jsonl", GPQA)
    shuffled = [task.key for task in load("gpqa", data=data, seed=3)]
    assert sorted(shuffled) == sorted(task.key for task in load("gpqa", data=data))
    assert [task.key for task in load("gpqa", data=data, seed=3, num_tasks=4)] == shuffled[:4]
    assert [task.key for task in load("gpqa", data=data, seed=4)] != shuffled


def test_tasks_are_chosen(tmp_path):
    """Contract: by how hard the dataset says they are; a saved dataset by its usual split where none is asked for."""
    data, genesys = write(tmp_path / "a.jsonl", MATH), write(tmp_path / "b.jsonl", GENESYS)
    assert [task.data.answer for task in load("hendrycks-math", data=data, levels=[5])] == [r"\frac{3}{4}"]
    assert [task.data.answer for task in load("hendrycks-math", data=data, types=["Geometry"])] == ["7", "8"]
    chosen = load("intellect-math", data=genesys, min_solve_rate=0.25, max_solve_rate=0.5)
    assert [task.data.answer for task in chosen] == ["6"]
    saved = tmp_path / "saved"
    DatasetDict(train=Dataset.from_list(AIME25[:1]), test=Dataset.from_list(AIME25[1:])).save_to_disk(str(saved))
    assert [task.data.answer for task in load("aime2025", data=str(saved))] == ["588"]
    with pytest.raises(DataError, match="has no split 'dev'; it has train, test"):
        load("aime2025", data=str(saved), split="dev")


async def test_gpqa(tmp_path):
    """Contract: the right option's place is the question's own, evenly spread; its letter, dressed, or text counts."""
    tasks = load("gpqa", data=write(tmp_path / "a.csv", GPQA))
    assert {task.data.answer for task in tasks} == set("ABCD")
    assert len(load("gpqa", data=str(tmp_path / "a.csv"), domains=["Physics"])) == 10
    task = tasks[0]
    right = task.data.answer
    wrong = next(letter for letter in "ABCD" if letter != right)
    assert f"\n{right}) right" in task.data.prompt
    for dress in (r"\boxed{(%s)}", r"\boxed{\text{%s}}", r"\boxed{%s) as said}", "The answer is **%s**."):
        assert await score(task, dress % right) == 1.0, dress
        assert await score(task, dress % wrong) == 0.0, dress
    assert await score(task, r"\boxed{right}") == 1.0
    assert await score(task, r"\boxed{wrong one}") == 0.0
    assert await score(task, right) == 0.0
    # Pinned: an order that changed would make old results and new ones of different questions.
    assert "".join(task.data.answer for task in tasks[:8]) == "AADAADDA"


@pytest.mark.parametrize(
    ("id", "rows", "args", "message"),
    [
        ("math500", [MATH500[0], {**MATH500[1], "answer": None}], {}, "row 1: nothing in column 'answer'"),
        ("math500", [MATH500[0], MATH500[0]], {}, "rows 0 and 1 have the same unique_id 'test/algebra/1.json'"),
        ("math500", MATH500, {"levels": [2]}, "nothing is left after what its settings leave out"),
        ("math500", MATH500, {"split": "test"}, "has no splits"),
        ("aime2024", [{"id": 1, "problem": "p", "answer": "1000"}], {}, "'1000' is no whole number from 0 to 999"),
        ("gsm8k", [{"question": "q", "answer": "42"}], {}, "row 0: no answer after #### in column 'answer'"),
        ("hendrycks-math", [{**MATH[0], "solution": "x = 3"}], {}, r"no answer in a \boxed{} of column 'solution'"),
        ("intellect-math", GENESYS[2:3], {}, "no row has task_type 'verifiable_math'; there is verifiable_code"),
        ("intellect-math", [{**GENESYS[0], "verification_info": "{"}], {}, "math_0: verification_info is not JSON"),
        ("intellect-math", [{**GENESYS[0], "verification_info": "{}"}], {}, "verification_info has no ground_truth"),
        ("gpqa", [{"Question": "q"}], {}, "no column 'Record ID'"),
    ],
)  # fmt: skip
def test_bad_data(id, rows, args, message, tmp_path):
    """Contract: one line that names the file, the row and what is there."""
    data = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load(id, data=data, **args)
    assert message in str(caught.value)
    assert "bad.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_data_that_is_not_there(tmp_path, monkeypatch):
    """Contract: a missing path is named; an unreachable hub names the local remedy, and for gated data the token."""
    with pytest.raises(DataError, match=r"there is no such file or directory"):
        load("math500", data=str(tmp_path / "none.jsonl"))

    unreachable = mock.Mock(side_effect=ConnectionError("Couldn't reach the Hub\n(no route)"))
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(DataError) as caught:
        load("math500")
    assert str(caught.value).startswith(
        "dataset 'HuggingFaceH4/MATH-500' could not be had from the hub: Couldn't reach the Hub (no route)."
    )
    assert "give a local copy: data = " in str(caught.value)

    gated = mock.Mock(side_effect=DatasetNotFoundError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub."))
    monkeypatch.setattr("datasets.load_dataset", gated)
    with pytest.raises(DataError, match="put a token into HF_TOKEN, which the environment's `secrets` has to name"):
        load("gpqa")


async def test_simple_math():
    """Contract: made here, splits that share nothing, a longer list begins with the shorter; the answers are right."""
    train, held = load("simple-math", num_tasks=300), load("simple-math", split="eval", num_tasks=300, seed=5)
    assert not {task.key for task in train} & {task.key for task in held}
    assert [task.key for task in load("simple-math", num_tasks=20)] == [task.key for task in train[:20]]
    for task in load("simple-math", num_tasks=200, terms=4, largest=12):
        assert eval(task.key.removeprefix("simple-math/")) == int(task.data.answer)
    assert await score(train[0], rf"\boxed{{{train[0].data.answer}}}") == 1.0
    with pytest.raises(ValueError, match="num_tasks 50, and only .* train problems were found: raise largest or terms"):
        load("simple-math", num_tasks=50, largest=2, operations=["add"])
