"""aime2024: the 30 problems of AIME I and II of 2024, as a verifiers (v1) environment package. Also named `aime24`.

HuggingFaceH4/aime_2024, split `train`: `id, problem, solution, answer, url, year`, after the dataset's card.
"""

from collections.abc import Iterator

import verifiers.v1 as vf

from benchmark_tasks.aime import aime_problems
from benchmark_tasks.local import LocalEnv
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, math_tasks

__all__ = ["Aime2024Taskset", "LocalEnv"]


class Aime2024Config(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "HuggingFaceH4/aime_2024"


class Aime2024Taskset(vf.Taskset[MathTask, Aime2024Config]):
    def load(self) -> Iterator[MathTask]:
        yield from math_tasks(self.config, "aime2024", aime_problems(self.config, "train"))
