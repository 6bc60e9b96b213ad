"""The American Invitational Mathematics Examination: 30 problems a year, answers from 0 to 999."""

from collections.abc import Iterator

from benchmark_tasks.rows import DataError
from benchmark_tasks.taskset import BenchmarkConfig, Problem


def aime_problems(config: BenchmarkConfig, split: str) -> Iterator[Problem]:
    """Problems of `problem, answer` and, where there is one, `id`.

    Raises:
        DataError: a column is missing, or an answer is no whole number from 0 to 999.
    """
    rows = config.rows(split).require("problem", "answer")
    column = "id" if "id" in rows.columns else None
    if column:
        rows.require(column)
    for id, row in zip(rows.ids(column, "problem"), rows.rows, strict=True):
        text = str(row["answer"]).strip().removesuffix(".0")
        if not (text.isascii() and text.isdigit() and int(text) <= 999):
            raise DataError(f"{rows.where}, problem {id}: the answer {text!r} is no whole number from 0 to 999")
        yield Problem(id, row["problem"], str(int(text)))
