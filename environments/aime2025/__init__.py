"""aime2025: the 30 problems of AIME I and II of 2025, as a verifiers (v1) environment package. Also named `aime25`.

math-ai/aime25, split `test`: `problem, answer, id`, after the dataset's card.
"""

from collections.abc import Iterator

import verifiers.v1 as vf

from benchmark_tasks.aime import aime_problems
from benchmark_tasks.local import LocalEnv
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, math_tasks

__all__ = ["Aime2025Taskset", "LocalEnv"]


class Aime2025Config(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "math-ai/aime25"


class Aime2025Taskset(vf.Taskset[MathTask, Aime2025Config]):
    def load(self) -> Iterator[MathTask]:
        yield from math_tasks(self.config, "aime2025", aime_problems(self.config, "test"))
