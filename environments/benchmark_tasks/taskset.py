r"""What the tasksets of benchmarks are made of: their settings, mathematical tasks, and how rows become them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import verifiers.v1 as vf
from pydantic import Field, PositiveFloat, PositiveInt

from benchmark_tasks import judge
from benchmark_tasks.answers import boxed_answer
from benchmark_tasks.rows import DataError, Row, Rows, T, choose, read, unique

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."


class BenchmarkConfig(vf.TasksetConfig):
    """Tasks of a benchmark and their instructions. verifiers' own `system_prompt` (a file) replaces `instructions`."""

    data: str = Field(
        description="The hub's name of the dataset, or a path: .jsonl, .json, .parquet, .csv, a directory."
    )
    split: str | None = Field(
        default=None, description="Split of a dataset of the hub or a saved one (None: as usual)."
    )
    subset: str | None = Field(default=None, description="Subset of a dataset of the hub (None: as usual).")
    num_tasks: PositiveInt | None = Field(default=None, description="Most tasks (None: all).")
    seed: int | None = Field(default=None, description="Of the order of the tasks (None: the dataset's).")
    instructions: str = Field(default=BOXED, description='System prompt ("": none).')

    def rows(self, split: str, subsets: Sequence[str | None] = (None,)) -> Rows:
        """What the settings name.

        Args:
            split: Where none is asked for.
            subsets: Of the dataset that is the default, where none is asked for.

        Raises:
            DataError: see `read`.
        """
        usual = type(self).model_fields["data"].default == self.data
        return read(self.data, self.split, subsets if usual and self.subset is None else (self.subset,), split)


class MathTaskConfig(vf.TaskConfig):
    judge_seconds: PositiveFloat = Field(
        default=judge.SECONDS, description="Processor time to compare an answer with the truth."
    )


class MathData(vf.TaskData):
    answer: str


class MathTask(vf.Task[MathData, vf.State, MathTaskConfig]):
    """A problem whose answer is a mathematical expression in a box."""

    @property
    def key(self) -> str:
        return str(self.data.id)  # the default would change with the number of the row

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the reply's last box holds what equals the answer."""
        answer = boxed_answer(trace.last_reply)
        if answer is None:
            return 0.0
        return float(await judge.equal(self.data.answer, answer, self.config.judge_seconds))

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        return float(boxed_answer(trace.last_reply) is not None)


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    answer: str


def math_tasks(config: BenchmarkConfig, name: str, problems: Iterable[Problem]) -> Iterator[MathTask]:
    """Tasks of benchmark `name`, in the order and number that `config` asks for.

    Raises:
        DataError: there are none.
    """
    for one in pick(config, problems, lambda problem: problem.id):
        data = MathData(
            id=f"{name}/{one.id}", prompt=one.question, system_prompt=config.instructions or None, answer=one.answer
        )
        assert isinstance(config.task, MathTaskConfig)
        yield MathTask(data, config.task)


def pick(config: BenchmarkConfig, items: Iterable[T], id_of: Callable[[T], str]) -> list[T]:
    """The items that `config` asks for, in its order, repetitions left out.

    Raises:
        DataError: there are none.
    """
    found = choose(unique(items, id_of), id_of, config.seed, config.num_tasks)
    if not found:
        raise DataError(f"{config.data}: nothing is left after what its settings leave out")
    return found


def matches(row: Row, column: str, wanted: Sequence[object]) -> bool:
    """Whether a row's value is among those wanted; any is, where none is wanted in particular."""
    return not wanted or row[column] in wanted
