"""What asynchronous RL decides, without a clock, a network or a file.

The orchestrator keeps the engines busy while the trainer works on an older batch. Three questions are answered here:

* *What may start now?* An episode for step n starts only on a policy version >= max(0, n - async_level). With async_level 0 nothing starts
  before the trainer has caught up (synchronous, on-policy); with k the engines work up to k steps ahead.
* *What is a batch?* The first `batch_size / group_size` groups that are complete, in the order in which they were opened.
* *What is too old?* A sample is trained at most `max_off_policy_steps` after the oldest version that sampled one of its tokens; what could
  only be trained later than that is cancelled or dropped, and counted.

The shell (`orchestrator.py`) feeds events in (`finish`, `fail`, `serve`) and does what comes out (`next_start`, `ready_batch`). Simulators
and property tests drive this very class.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from prime_rl.transport.protocol import may_start, planned_step, too_old

Result = TypeVar("Result")


class Drop(StrEnum):
    """Why an episode was not trained."""

    ERRORED = "errored"  # the environment failed, or no attempt was left
    TIMEOUT = "timeout"  # it passed its deadline
    STALE = "stale"  # it could only be trained beyond the off-policy bound
    UNPROVEN = "unproven"  # what sampled it was given up, or could not be proven
    FILTERED = "filtered"  # it carries no learning signal
    CANCELLED = "cancelled"  # the run ended while it was in flight


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
    max_attempts: int = 3

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

    episode: int
    group: int
    number: int
    attempt: int
    task: Task
    version: int


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """A finished episode: the versions that may have sampled its tokens are `first` … `last`."""

    start: Start
    first: int
    last: int
    result: Result


@dataclass
class Group(Generic[Result]):
    """Attempts at one task, scored together."""

    number: int
    task: Task
    waiting: list[tuple[int, int]]  # (number in the group, attempt) still to start
    flying: set[int] = field(default_factory=set)
    finished: list[Finished[Result]] = field(default_factory=list)
    lost: int = 0  # episodes that ended without a result

    @property
    def complete(self) -> bool:
        return not self.waiting and not self.flying


@dataclass(frozen=True)
class Batch(Generic[Result]):
    """Complete groups, ready to be trained at `step`, in the order in which they were opened."""

    step: int
    groups: list[Group[Result]]


class Core(Generic[Result]):
    """The scheduler's state.

    Args:
        limits: The numbers.
        tasks: Endless iterator over tasks, in the order in which groups are opened.
        step: The first step to collect (0 in a fresh run).
        version: The policy version the engines serve.
        groups_opened: Groups opened before, in a resumed run.
    """

    def __init__(
        self, limits: Limits, tasks: Iterator[Task], step: int = 0, version: int = 0, groups_opened: int = 0
    ) -> None:
        self.limits = limits
        self.step = step
        self.version = version
        self.announced = version
        self.groups_opened = groups_opened
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[Drop] = Counter()
        self._tasks = tasks
        self._groups: dict[int, Group[Result]] = {}  # open or complete, not yet in a batch; in the order of opening
        self._flying: dict[int, Start] = {}

    # -- what may start ------------------------------------------------------------------------------------------------------

    def next_start(self) -> Start | None:
        """The next episode that may start now, or None. Opened groups are continued before a new one is opened."""
        if len(self._flying) >= self.limits.max_concurrent:
            return None
        group = next((group for group in self._groups.values() if group.waiting), None)
        if group is None:
            if not self.may_open():
                return None
            group = self._open()
        number, attempt = group.waiting.pop(0)
        start = Start(self.issued, group.number, number, attempt, group.task, self.version)
        self.issued += 1
        group.flying.add(start.episode)
        self._flying[start.episode] = start
        return start

    def may_open(self) -> bool:
        """Whether a group opened now would be for a step that the served version allows."""
        step = planned_step(self.step, len(self._groups), self.limits.groups_per_batch)
        if self.limits.max_steps is not None and step >= self.limits.max_steps:
            return False
        return may_start(step, self.version, self.limits.async_level)

    def _open(self) -> Group[Result]:
        group: Group[Result] = Group(
            self.groups_opened, next(self._tasks), [(number, 0) for number in range(self.limits.group_size)]
        )
        self._groups[group.number] = group
        self.groups_opened += 1
        return group

    # -- what happened -------------------------------------------------------------------------------------------------------

    def finish(self, episode: int, result: Result) -> None:
        """An episode ended with a result that can be trained."""
        start, group = self._land(episode)
        group.finished.append(Finished(start, start.version, self.announced, result))
        self._settle(group)

    def fail(self, episode: int, reason: Drop, retry: bool = False) -> bool:
        """An episode ended without a result. With `retry` it is issued again, up to `max_attempts` times. Returns whether it will be."""
        start, group = self._land(episode)
        again = retry and start.attempt + 1 < self.limits.max_attempts
        self.dropped[reason] += 1
        if again:
            group.waiting.insert(0, (start.number, start.attempt + 1))
        else:
            group.lost += 1
        self._settle(group)
        return again

    def announce(self, version: int) -> None:
        """An update to `version` begins: tokens sampled from now on may be of it, though `serve` has not been called yet."""
        if version < self.version:
            raise ValueError(f"version {version} is older than the served {self.version}")
        self.announced = max(self.announced, version)

    def serve(self, version: int) -> None:
        """The engines serve `version` from now on."""
        self.announce(version)
        self.version = version

    def stale(self) -> list[Start]:
        """Episodes in flight that could only be trained beyond the off-policy bound; the shell cancels them and reports `fail(STALE)`."""
        return [start for start in self._flying.values() if self._too_old(start.version)]

    def restart_from(self, version: int) -> list[Start]:
        """What was sampled and is not in a batch yet is worth nothing: its weights were given up, or never proven. Go on from `version`.

        Returns:
            What is in flight; the shell cancels it and reports `fail(UNPROVEN)`.
        """
        for group in list(self._groups.values()):
            group.waiting.clear()
            self.dropped[Drop.UNPROVEN] += len(group.finished)
            group.finished.clear()
            self._settle(group)
        self.version = self.announced = version
        return list(self._flying.values())

    def abandon(self) -> list[Start]:
        """The run ends: nothing starts any more; returns what is in flight."""
        for group in self._groups.values():
            group.waiting.clear()
        return list(self._flying.values())

    # -- what is a batch -----------------------------------------------------------------------------------------------------

    def ready_batch(self) -> Batch[Result] | None:
        """The batch of the current step if enough groups are complete. Nothing changes until `advance` or `discard`."""
        self._drop_stale()
        complete = [group for group in self._groups.values() if group.complete]
        if len(complete) < self.limits.groups_per_batch:
            return None
        return Batch(self.step, complete[: self.limits.groups_per_batch])

    def advance(self, batch: Batch[Result], trained: int) -> None:
        """The batch is committed: go on to the next step. `trained` of its finished episodes are in it; the others were filtered."""
        self._remove(batch)
        self.trained += trained
        self.dropped[Drop.FILTERED] += sum(len(group.finished) for group in batch.groups) - trained
        self.step += 1

    def discard(self, batch: Batch[Result]) -> None:
        """The batch carries no learning signal at all: collect another one for the same step."""
        self._remove(batch)
        self.dropped[Drop.FILTERED] += sum(len(group.finished) for group in batch.groups)

    @property
    def done(self) -> bool:
        """Whether every batch up to `max_steps` has been committed."""
        return self.limits.max_steps is not None and self.step >= self.limits.max_steps

    @property
    def in_flight(self) -> int:
        """Episodes that run now."""
        return len(self._flying)

    @property
    def waiting_for_batch(self) -> int:
        """Finished episodes that are not in a batch yet."""
        return sum(len(group.finished) for group in self._groups.values())

    def check_conservation(self) -> None:
        """Every issued episode is trained, dropped, finished or in flight; raises `AssertionError` with the difference."""
        known = self.trained + self.dropped.total() + self.waiting_for_batch + self.in_flight
        if known != self.issued:
            raise AssertionError(
                f"{self.issued} episodes were issued, {known} are accounted for: {self.trained} trained, {dict(self.dropped)} dropped, "
                f"{self.waiting_for_batch} finished, {self.in_flight} in flight"
            )

    # -- private -------------------------------------------------------------------------------------------------------------

    def _land(self, episode: int) -> tuple[Start, Group[Result]]:
        start = self._flying.pop(episode)
        group = self._groups[start.group]
        group.flying.remove(episode)
        return start, group

    def _settle(self, group: Group[Result]) -> None:
        """A complete group without a single result is no group: it leaves, and another one takes its place."""
        if group.complete and not group.finished:
            del self._groups[group.number]

    def _too_old(self, version: int) -> bool:
        return too_old(self.step, version, self.limits.max_off_policy_steps)

    def _drop_stale(self) -> None:
        for group in list(self._groups.values()):
            fresh = [episode for episode in group.finished if not self._too_old(episode.first)]
            self.dropped[Drop.STALE] += len(group.finished) - len(fresh)
            group.lost += len(group.finished) - len(fresh)
            group.finished = fresh
            self._settle(group)

    def _remove(self, batch: Batch[Result]) -> None:
        for group in batch.groups:
            del self._groups[group.number]
