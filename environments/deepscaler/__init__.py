"""deepscaler: competition problems (AIME, AMC, Omni-MATH, STILL), as a verifiers (v1) environment package.

agentica-org/DeepScaleR-Preview-Dataset, split `train` (some 40,000): `problem, answer, solution`, after the dataset's
card. Problems are in it more than once; those with the same answer, too, are one task.
"""

from collections.abc import Iterator

import verifiers.v1 as vf

from benchmark_tasks.local import LocalEnv
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, Problem, math_tasks

__all__ = ["DeepscalerTaskset", "LocalEnv"]


class DeepscalerConfig(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "agentica-org/DeepScaleR-Preview-Dataset"


class DeepscalerTaskset(vf.Taskset[MathTask, DeepscalerConfig]):
    def load(self) -> Iterator[MathTask]:
        yield from math_tasks(self.config, "deepscaler", _problems(self.config))


def _problems(config: DeepscalerConfig) -> Iterator[Problem]:
    rows = config.rows("train").require("problem", "answer")
    for id, row in zip(rows.ids(None, "problem", "answer"), rows.rows, strict=True):
        yield Problem(id, row["problem"], str(row["answer"]))
