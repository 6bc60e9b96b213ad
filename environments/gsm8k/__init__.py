"""gsm8k: grade-school word problems, as a verifiers (v1) environment package.

openai/gsm8k, subset `main`, splits `train` (7473) and `test` (1319): `question, answer`, the answer being a worked
solution whose last line is `#### 42`, after the dataset's card (Cobbe et al., 2021).
"""

from collections.abc import Iterator

import verifiers.v1 as vf

from benchmark_tasks.local import LocalEnv
from benchmark_tasks.rows import DataError
from benchmark_tasks.taskset import BenchmarkConfig, MathTask, MathTaskConfig, Problem, math_tasks

__all__ = ["Gsm8kTaskset", "LocalEnv"]

MARK = "####"


class Gsm8kConfig(BenchmarkConfig):
    task: MathTaskConfig = MathTaskConfig()
    data: str = "openai/gsm8k"


class Gsm8kTaskset(vf.Taskset[MathTask, Gsm8kConfig]):
    def load(self) -> Iterator[MathTask]:
        yield from math_tasks(self.config, "gsm8k", _problems(self.config))


def _problems(config: Gsm8kConfig) -> Iterator[Problem]:
    rows = config.rows("test", ("main",)).require("question", "answer")
    for number, (id, row) in enumerate(zip(rows.ids(None, "question", "answer"), rows.rows, strict=True)):
        _, mark, answer = row["answer"].rpartition(MARK)
        if not mark or not answer.strip():
            raise DataError(f"{rows.where}, row {number}: no answer after {MARK} in column 'answer'")
        yield Problem(id, row["question"], answer.strip().replace(",", ""))
