r"""hendrycks-math: the MATH dataset (Hendrycks et al., 2021), as a verifiers (v1) environment package.

EleutherAI/hendrycks_math, seven subsets (`algebra`, …), splits `train` (7500) and `test` (5000): `problem, level` (such
as "Level 5"), `type, solution`, with the answer in the last `\boxed{}` of the solution, after the dataset's card. Data
in genesys' format is read too, such as justus27/math-hendrycks-genesys-format, which the package of this name on
PRIME's hub reads; it has no levels and types to choose by.
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from benchmark_tasks.answers import last_boxed
from benchmark_tasks.genesys import is_genesys, math_problems
from benchmark_tasks.local import LocalEnv
from benchmark_tasks.rows import DataError, Rows
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, Problem, matches, math_tasks

__all__ = ["HendrycksMathTaskset", "LocalEnv"]

SUBSETS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class HendrycksMathConfig(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "EleutherAI/hendrycks_math"
    levels: list[int] = Field(default=[], description="Difficulties, of 1 to 5 (empty: all).")
    types: list[str] = Field(default=[], description='Such as "Number Theory" (empty: all).')


class HendrycksMathTaskset(vf.Taskset[MathTask, HendrycksMathConfig]):
    def load(self) -> Iterator[MathTask]:
        rows = self.config.rows("train", SUBSETS)
        chosen = self.config.levels or self.config.types
        problems = _problems(self.config, rows) if chosen or not is_genesys(rows) else math_problems(rows)
        yield from math_tasks(self.config, "hendrycks-math", problems)


def _problems(config: HendrycksMathConfig, rows: Rows) -> Iterator[Problem]:
    filtered = [name for name, wanted in (("level", config.levels), ("type", config.types)) if wanted]
    rows.require("problem", "solution", *filtered)
    levels = [f"Level {level}" for level in config.levels]
    for number, (id, row) in enumerate(zip(rows.ids(None, "problem", "solution"), rows.rows, strict=True)):
        if not matches(row, "level", levels) or not matches(row, "type", config.types):
            continue
        answer = last_boxed(row["solution"])
        if not answer:
            raise DataError(f"{rows.where}, row {number}: no answer in a \\boxed{{}} of column 'solution'")
        yield Problem(id, row["problem"], answer)
