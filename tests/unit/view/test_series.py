"""Curves from metrics files that grow, are torn, or begin again."""

import json
from pathlib import Path

import numpy as np
import pytest

from prime_rl.view.series import MetricColumns
from support.viewing import metric_lines

EVERYTHING = (-1e18, 1e18)


def values(columns: MetricColumns, key: str = "a", points: int = 100) -> dict[int, float]:
    columns.read()
    curve = columns.curve(key, points, *EVERYTHING)
    return dict(zip(curve["step"], curve["value"], strict=True))


def test_a_file_that_is_being_written(tmp_path: Path) -> None:
    """Contract: half a line waits for its end, added lines are taken in, damaged ones are left out."""
    path = tmp_path / "trainer.jsonl"
    columns = MetricColumns(path)
    assert values(columns) == {}
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a": 2')
    assert values(columns) == {0: 1.0}
    with path.open("a") as file:
        file.write(
            '.5}\nhalf of a {"step": 7, "a": 1}\n[]\n{"step": 2, "a": "text", "b": 1}\n{"step": 3, "a": 4.0, "b": 1}\n'
        )
    assert values(columns) == {0: 1.0, 1: 2.5, 3: 4.0}
    assert values(columns, "b") == {3: 1.0}


def test_steps_that_were_made_again(tmp_path: Path) -> None:
    """Contract: after a restart the later value of a step counts; a file that begins again is read anew."""
    path = tmp_path / "trainer.jsonl"
    path.write_text(metric_lines(range(6), a=1.0) + metric_lines(range(3, 5), a=2.0))
    columns = MetricColumns(path)
    assert values(columns) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 1.0}
    path.write_text(metric_lines(range(1), a=5.0))
    assert values(columns) == {0: 5.0}


def test_a_million_rows(tmp_path: Path) -> None:
    """Contract: no more points than asked for, and the one spike among a million rows is still seen."""
    path, number = tmp_path / "trainer.jsonl", 1_000_000
    rows = [b'{"step": %d, "a": 1.0, "b": 2.0}\n' % step for step in range(number)]
    rows[654_321] = b'{"step": 654321, "a": 99.0}\n'
    path.write_bytes(b"".join(rows))
    columns = MetricColumns(path)
    columns.read()
    curve = columns.curve("a", 500, *EVERYTHING)
    assert {len(column) for column in curve.values()} == {500}
    assert max(curve["max"]) == 99.0
    assert sum(curve["count"]) == number
    assert np.dot(curve["value"], curve["count"]) == pytest.approx(number + 98, rel=1e-5)
    near = columns.curve("a", 500, 654_300, 654_340)
    assert (near["step"][0], near["step"][-1], max(near["value"])) == (654_300, 654_340, 99.0)


def test_sparse_metrics_share_buckets(tmp_path: Path) -> None:
    """Contract: buckets of a column that few steps have are those of the others, so that both can be added up."""
    path = tmp_path / "trainer.jsonl"
    path.write_text(
        "".join(json.dumps({"step": n, "a": 1.0, **({"b": 3.0} if n % 100 == 0 else {})}) + "\n" for n in range(1000))
    )
    columns = MetricColumns(path)
    columns.read()
    every, few = (columns.curve(key, 10, *EVERYTHING) for key in ("a", "b"))
    assert every["bucket"] == few["bucket"] == list(range(10))
    assert (few["step"], few["count"]) == ([n * 100 for n in range(10)], [1] * 10)
