"""math500: 500 problems of the MATH test set, as a verifiers (v1) environment package.

HuggingFaceH4/MATH-500, split `test`: `problem, solution, answer, subject, level` (1 to 5) and `unique_id` (such as
test/algebra/1.json), after the dataset's card. Chosen in "Let's Verify Step by Step" (Lightman et al., 2023).
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from benchmark_tasks.local import LocalEnv
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, Problem, matches, math_tasks

__all__ = ["LocalEnv", "Math500Taskset"]


class Math500Config(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "HuggingFaceH4/MATH-500"
    levels: list[int] = Field(default=[], description="Difficulties, of 1 to 5 (empty: all).")
    subjects: list[str] = Field(default=[], description="Such as Algebra (empty: all).")


class Math500Taskset(vf.Taskset[MathTask, Math500Config]):
    def load(self) -> Iterator[MathTask]:
        yield from math_tasks(self.config, "math500", _problems(self.config))


def _problems(config: Math500Config) -> Iterator[Problem]:
    filtered = [name for name, wanted in (("level", config.levels), ("subject", config.subjects)) if wanted]
    rows = config.rows("test").require("problem", "answer", "unique_id", *filtered)
    for id, row in zip(rows.ids("unique_id"), rows.rows, strict=True):
        if matches(row, "level", config.levels) and matches(row, "subject", config.subjects):
            yield Problem(id, row["problem"], str(row["answer"]))
