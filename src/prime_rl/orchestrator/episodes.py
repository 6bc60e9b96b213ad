"""The scheduler's vocabulary: task, group, episode, batch; why an episode is not trained; who is told what became of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")
Recorded = TypeVar("Recorded", contravariant=True)


class Drop(StrEnum):
    """Why an episode was not trained."""

    STALE = "stale"  # beyond the off-policy bound, or sampled by weights that were given up or never proven
    FILTERED = "filtered"  # it carries no learning signal, or a filter leaves it out
    ERRORED = "errored"  # the environment failed, or no attempt was left
    TRUNCATED = "truncated"  # none of its sampled tokens fits a sample
    CANCELLED = "cancelled"  # the run ended for good before it was trained
    TIMEOUT = "timeout"  # it passed its deadline


@dataclass(frozen=True)
class Task:
    """One row of an environment's dataset."""

    env: str
    index: int
    task_id: str


@dataclass(frozen=True)
class Limits:
    """The numbers the decisions depend on. Sizes are in episodes, levels in steps."""

    batch_size: int
    group_size: int
    async_level: int
    max_off_policy_steps: int
    max_concurrent: int
    max_steps: int | None = None
    # Each death of a server or worker costs all episodes there one, whoever was at fault: so many that a run with several deaths in a row loses
    # none, and so few that a task which kills its worker every time is given up.
    max_attempts: int = 5

    def __post_init__(self) -> None:
        if self.batch_size % self.group_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of the group size {self.group_size}")
        if self.max_off_policy_steps < self.async_level:
            raise ValueError(
                f"max_off_policy_steps {self.max_off_policy_steps} is below async_level {self.async_level}"
            )

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.group_size


@dataclass(frozen=True)
class Start:
    """An episode to start now. `number` is its place in its group; `version` is what the engines serve at this moment."""

    group: int
    number: int
    attempt: int
    task: Task
    version: int

    @property
    def episode(self) -> str:
        """Its name in the ledger, the logs and the batches' lineage."""
        return f"{self.group}.{self.number}.{self.attempt}"


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """A finished episode: the versions that may have sampled its tokens are `first` … `last`, as they stood in the trainer's incarnation `incarnation`."""

    start: Start
    first: int
    last: int
    result: Result
    incarnation: int = 0


@dataclass
class Group(Generic[Result]):
    """Attempts at one task, scored together."""

    number: int
    task: Task
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (number in the group, attempt), not issued yet
    again: list[tuple[int, int]] = field(default_factory=list)  # issued, in flight when the last incarnation ended
    flying: set[str] = field(default_factory=set)
    finished: list[Finished[Result]] = field(default_factory=list)
    lost: int = 0  # episodes that ended without a result
    admitted: bool = False  # complete, and not turned away

    @property
    def complete(self) -> bool:
        return not (self.waiting or self.again or self.flying)


@dataclass(frozen=True)
class Batch(Generic[Result]):
    """Complete groups, ready to be trained at `step`, in the order in which they were opened."""

    step: int
    groups: list[Group[Result]]

    @property
    def episodes(self) -> set[str]:
        """Its finished episodes."""
        return {finished.start.episode for group in self.groups for finished in group.finished}


class Record(Protocol[Recorded]):
    """Who is told what becomes of every episode, in the order of events: `ledger.Ledger`."""

    def opened(self, group: int, env: str, task_index: int, task_id: str) -> None: ...
    def issued(self, episode: str, version: int, incarnation: int) -> None: ...
    def finished(self, episode: str, first: int, last: int, incarnation: int, result: Recorded) -> None: ...
    def dropped(self, episode: str, reason: str, detail: str = "", retried: bool = False) -> None: ...
    def discarded(self, groups: Iterable[int], reason: str = "filtered", detail: str = "") -> None: ...
    def batched(
        self,
        step: int,
        trained: Sequence[str],
        filtered: Sequence[str],
        truncated: Sequence[str],
        groups: Sequence[int],
        details: Mapping[str, str] | None = None,
    ) -> None: ...


class Unrecorded:
    """Nobody is told: a benchmark, a simulation."""

    def opened(self, group: int, env: str, task_index: int, task_id: str) -> None:
        """See `Record`."""

    def issued(self, episode: str, version: int, incarnation: int) -> None:
        """See `Record`."""

    def finished(self, episode: str, first: int, last: int, incarnation: int, result: object) -> None:
        """See `Record`."""

    def dropped(self, episode: str, reason: str, detail: str = "", retried: bool = False) -> None:
        """See `Record`."""

    def discarded(self, groups: Iterable[int], reason: str = "filtered", detail: str = "") -> None:
        """See `Record`."""

    def batched(
        self,
        step: int,
        trained: Sequence[str],
        filtered: Sequence[str],
        truncated: Sequence[str],
        groups: Sequence[int],
        details: Mapping[str, str] | None = None,
    ) -> None:
        """See `Record`."""
