"""Rows in the format of genesys, PrimeIntellect's library of reasoning data.

Columns: `problem_id, task_type, prompt, verification_info, metadata`. `verification_info` is JSON in a string (a map in
some copies), with the answer as `ground_truth` in a `verifiable_math` row. Datasets of one kind only, such as
PrimeIntellect/INTELLECT-2-only-math, may leave `task_type` out.
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmark_tasks.rows import DataError, Row, Rows
from benchmark_tasks.taskset import Problem

MATH = "verifiable_math"


def is_genesys(rows: Rows) -> bool:
    """Whether the first row has this format."""
    return {"prompt", "verification_info"} <= set(rows.columns)


def math_problems(rows: Rows) -> Iterator[Problem]:
    """The mathematical ones of the rows.

    Raises:
        DataError: a column is missing, an answer is not there, or two rows have the same id.
    """
    rows.require("prompt", "verification_info")
    kept = Rows(rows.where, [row for row in rows.rows if row.get("task_type", MATH) == MATH])
    if not kept.rows:
        kinds = sorted({str(row.get("task_type")) for row in rows.rows})
        raise DataError(f"{rows.where}: no row has task_type {MATH!r}; there is {', '.join(kinds)}")
    column = "problem_id" if "problem_id" in kept.columns else None
    if column:
        kept.require(column)
    for id, row in zip(kept.ids(column, "prompt", "verification_info"), kept.rows, strict=True):
        yield Problem(id, row["prompt"], _truth(row, f"{rows.where}, problem {id}"))


def _truth(row: Row, where: str) -> str:
    info: Any = row["verification_info"]
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError as error:
            raise DataError(f"{where}: verification_info is not JSON: {error}") from error
    truth = info.get("ground_truth") if isinstance(info, dict) else None
    if truth is None:
        raise DataError(f"{where}: verification_info has no ground_truth; there is {str(info)[:100]}")
    return str(truth)
