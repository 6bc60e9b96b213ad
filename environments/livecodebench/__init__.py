"""livecodebench: problems of programming contests, as a verifiers (v1) environment package.

livecodebench/code_generation_lite, files `test.jsonl` to `test6.jsonl`, one a release: `question_title,
question_content, platform, question_id, contest_id, contest_date, starter_code, difficulty` (easy, medium, hard),
`public_test_cases, private_test_cases, metadata` (with `func_name` where a function is asked for), after the dataset's
card and loader (Jain et al., 2024). What a model writes runs in `benchmark_tasks.sandbox`.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from benchmark_tasks.answers import after_thinking
from benchmark_tasks.local import LocalEnv
from benchmark_tasks.sandbox import Limits, check
from benchmark_tasks.taskset import BenchmarkConfig, pick
from livecodebench.data import CodeProblem, Where, read_problems
from livecodebench.tests import passes

__all__ = ["LiveCodeBenchTaskset", "LocalEnv"]

INSTRUCTIONS = (
    "You are an expert Python programmer. Solve the problem with a correct and fast Python program. Reason first, then "
    "give the whole program in one code block that begins with ```python and ends with ```; the last block of your "
    "reply counts."
)
READS = "The program reads its input from standard input and writes its answer to standard output."
COMPLETES = "Complete this code, and keep its names:\n\n```python\n{starter}\n```"
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class CodeTaskConfig(vf.TaskConfig):
    seconds: PositiveFloat = Field(default=6.0, description="Processor time of a program for one test, in seconds.")
    all_seconds: PositiveFloat = Field(default=300.0, description="Seconds for all tests of a problem.")
    memory_mib: PositiveInt = Field(default=2048, description="Memory of a program, in MiB.")
    unsafe: bool = Field(default=False, description="See the argument unsafe.")


class LiveCodeBenchConfig(BenchmarkConfig):
    task: CodeTaskConfig = CodeTaskConfig()
    data: str = "livecodebench/code_generation_lite"
    subset: str | None = Field(
        default=None, description="release_v1 to release_v6: up to that one; v1 to v6: that alone (None: release_v6)."
    )
    difficulties: list[str] = Field(default=[], description="Of easy, medium, hard (empty: all).")
    since: str = Field(default="", description="First day of contests, such as 2024-08-01 (empty: any).")
    until: str = Field(default="", description="Last day of contests (empty: any).")
    instructions: str = Field(default=INSTRUCTIONS, description='System prompt ("": none).')
    unsafe: bool = Field(
        default=False,
        description="Run what models write without isolation: with the network, and all this user may read and write.",
    )

    @model_validator(mode="after")
    def _unsafe_tasks(self) -> Self:
        if self.unsafe:
            self.task = self.task.model_copy(update={"unsafe": True})
        return self


class CodeData(vf.TaskData):
    function: str
    public: str
    private: str
    file: str
    offset: int


class CodeTask(vf.Task[CodeData, vf.State, CodeTaskConfig]):
    @property
    def key(self) -> str:
        return str(self.data.id)  # the default would change with the number of the row

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the program in the reply passes all tests."""
        program = code_of(trace.last_reply)
        if program is None:
            return 0.0
        return float(await asyncio.get_running_loop().run_in_executor(_pool(), self._passes_all, program))

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        return float(code_of(trace.last_reply) is not None)

    def _passes_all(self, program: str) -> bool:
        data, config = self.data, self.config
        where = Where(data.public, data.private, data.file, data.offset)
        limits = Limits(seconds=config.seconds, memory_mib=config.memory_mib)
        deadline = time.monotonic() + config.all_seconds
        return all(
            time.monotonic() < deadline and passes(program, test, data.function, limits, config.unsafe)
            for test in where.tests(self.key)
        )


class LiveCodeBenchTaskset(vf.Taskset[CodeTask, LiveCodeBenchConfig]):
    def load(self) -> Iterator[CodeTask]:
        config = self.config
        if not config.task.unsafe:
            check()
        kept = [
            problem for problem in read_problems(config.data, config.subset, config.split) if _wanted(config, problem)
        ]
        for problem in pick(config, kept, lambda one: one.id):
            where = problem.where
            data = CodeData(
                id=f"livecodebench/{problem.id}", prompt=prompt(problem), system_prompt=config.instructions or None,
                function=problem.function, public=where.public, private=where.private,
                file=where.file, offset=where.offset,
            )  # fmt: skip
            yield CodeTask(data, config.task)


def _wanted(config: LiveCodeBenchConfig, problem: CodeProblem) -> bool:
    day = problem.date[:10]
    return (
        (not config.difficulties or problem.difficulty in config.difficulties)
        and (not config.since or day >= config.since)
        and (not config.until or day <= config.until)
    )


def prompt(problem: CodeProblem) -> str:
    task = COMPLETES.format(starter=problem.starter.rstrip()) if problem.starter.strip() else READS
    return f"{problem.question.strip()}\n\n{task}"


def code_of(reply: str) -> str | None:
    """The last complete code block after the thinking; None without one."""
    blocks = _BLOCK.findall(after_thinking(reply))
    return blocks[-1] if blocks else None


@cache
def _pool() -> ThreadPoolExecutor:
    """Programs at a time: as many as there are processors, less one for the worker's loop."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="sandbox")
