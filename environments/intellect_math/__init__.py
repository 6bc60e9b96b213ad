"""intellect-math: the mathematical problems that INTELLECT-2 was trained on, as a verifiers (v1) environment package.

PrimeIntellect/INTELLECT-2-only-math, split `train`, in genesys' format (see `benchmark_tasks.genesys`), with models'
solve rates, such as
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from benchmark_tasks.genesys import math_problems
from benchmark_tasks.local import LocalEnv
from benchmark_tasks.rows import DataError, Rows
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, math_tasks

__all__ = ["IntellectMathTaskset", "LocalEnv"]


class IntellectMathConfig(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "PrimeIntellect/INTELLECT-2-only-math"
    solve_rate_field: str = Field(default="solve_rate_qwen_r1_distill_7b", description="Column to choose problems by.")
    min_solve_rate: float | None = Field(default=None, ge=0, le=1, description="Least solve rate (None: any).")
    max_solve_rate: float | None = Field(default=None, ge=0, le=1, description="Greatest solve rate (None: any).")


class IntellectMathTaskset(vf.Taskset[MathTask, IntellectMathConfig]):
    def load(self) -> Iterator[MathTask]:
        yield from math_tasks(self.config, "intellect-math", math_problems(_chosen(self.config)))


def _chosen(config: IntellectMathConfig) -> Rows:
    rows = config.rows("train")
    if config.min_solve_rate is None and config.max_solve_rate is None:
        return rows
    low = 0.0 if config.min_solve_rate is None else config.min_solve_rate
    high = 1.0 if config.max_solve_rate is None else config.max_solve_rate
    name = config.solve_rate_field
    if name not in rows.columns:
        rows.require(name)
    kept = [row for row in rows.rows if row.get(name) is not None and low <= row[name] <= high]  # some were never tried
    if not kept:
        raise DataError(f"{rows.where}: no row has a {config.solve_rate_field} from {low} to {high}")
    return Rows(rows.where, kept)
