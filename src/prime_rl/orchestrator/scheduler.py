"""The scheduler of asynchronous RL: what may start, what is a batch, what is too old. No clock, no network, no file.

The orchestrator keeps the engines busy while the trainer works on an older batch. Three questions are answered here:

* *What may start now?* An episode for step n starts only on a policy version >= max(0, n - async_level). With async_level 0 nothing starts
  before the trainer has caught up (synchronous, on-policy); with k the engines work up to k steps ahead. Batches are *staggered*: episodes of one
  batch start at once, those beyond them at a pace, so that batches complete one after the other (`paced_until`).
* *What is a batch?* The first `batch_size / group_size` groups that are complete, in the order in which they were opened. A group that can teach
  nothing may be turned away at the gate: another one is opened in its place (dynamic sampling).
* *What is too old, or sampled by weights that do not count?* A sample is trained at most `max_off_policy_steps` after the oldest version that
  sampled one of its tokens; what could only be trained later than that is cancelled or dropped. What an incarnation of the trainer sampled that was
  given up, or a server that failed its verification, is dropped and made again: the group keeps its place.

The loop (`orchestrator.py`) reports what happened (`finish`, `fail`, `serve`) and does what comes out (`next_start`, `ready_batch`). Every change of
an episode is emitted as an `Event`; the ledger stores them and is the only count of episodes. Simulators and property tests drive this very class.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Generic, TypeVar

from prime_rl.transport.protocol import may_batch, may_start, planned_step, too_old

Result = TypeVar("Result")

NO_SIGNAL = "no signal in the whole batch"
BEYOND_BOUND = "beyond max_off_policy_steps"
PACE = 0.9  # fraction of the recent step time to leave between batch starts; below 1 so that steps can get shorter
_TURNS = 3  # of `async_level + 1` steps each, of which the shortest says how long a step takes


class State(StrEnum):
    """State of a slot of a group."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"  # with a result
    FAILED = "failed"  # without a result, and no attempt is left
    RETRY = "retry"  # was running when an earlier orchestrator ended: the same attempt starts again


_HELD = (State.RUNNING, State.FINISHED, State.RETRY)  # issued, neither dropped nor in a batch


class Drop(StrEnum):
    """Why an episode was not trained."""

    STALE = "stale"  # beyond the off-policy bound, or sampled by superseded or unverified weights
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
    # Each death of a server or worker costs all episodes there one, whoever was at fault.
    max_attempts: int = 5

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
    def key(self) -> tuple[int, int, int]:
        """`(group, number, attempt)`, the parts of `episode`."""
        return self.group, self.number, self.attempt

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


@dataclass(slots=True)
class GroupSlot:
    """One of the episodes that make a group. `attempt` counts up when it is tried again."""

    number: int
    attempt: int = 0
    state: State = State.PENDING


@dataclass
class Group(Generic[Result]):
    """Attempts at one task, scored together."""

    number: int
    task: Task
    slots: dict[int, GroupSlot] = field(default_factory=dict)  # by their number
    finished: list[Finished[Result]] = field(default_factory=list)  # in the order of their slots

    @property
    def complete(self) -> bool:
        return all(slot.state in (State.FINISHED, State.FAILED) for slot in self.slots.values())

    @property
    def next_slot(self) -> GroupSlot | None:
        """The slot to start next: one that an earlier orchestrator had started before one that is new."""
        startable = [slot for slot in self.slots.values() if slot.state in (State.RETRY, State.PENDING)]
        return min(startable, key=lambda slot: slot.state is State.PENDING, default=None)


@dataclass(frozen=True)
class Batch(Generic[Result]):
    """Complete groups, ready to be trained at `step`, in the order in which they were opened."""

    step: int
    groups: list[Group[Result]]

    @property
    def episodes(self) -> set[str]:
        """Its finished episodes."""
        return {finished.start.episode for group in self.groups for finished in group.finished}

    def committed(
        self,
        trained: Collection[str],
        filtered: Collection[str] = (),
        truncated: Collection[str] = (),
        details: Mapping[str, str] | None = None,
    ) -> "Batched":
        """Make the event of its commit. The arguments are `Batched`'s."""
        numbers = [group.number for group in self.groups]
        return Batched(self.step, numbers, list(trained), list(filtered), list(truncated), dict(details or {}))


# -- events: what the scheduler emits and the ledger stores. A result that was verified is emitted as `Finished`. ------------------


@dataclass(frozen=True)
class Opened:
    """A group was opened."""

    group: int
    task: Task


@dataclass(frozen=True)
class Issued:
    """An episode started, in incarnation `incarnation` of the trainer. The same one may be issued again by a later orchestrator."""

    start: Start
    incarnation: int


@dataclass(frozen=True)
class Dropped:
    """An issued or finished episode will not be trained. With `retried` its next attempt will be issued."""

    start: Start
    reason: Drop
    detail: str = ""
    retried: bool = False


@dataclass(frozen=True)
class Discarded:
    """A group left without a batch while `step` was collected: its finished episodes are dropped."""

    group: int
    step: int
    reason: Drop
    detail: str


@dataclass(frozen=True)
class Batched:
    """The batch of `step` was committed, with `groups`. Every finished episode of theirs is in one of the three lists.

    Args:
        trained: Episodes with samples in it.
        filtered: Those left out for want of a learning signal, or by a filter.
        truncated: Those left out because none of their sampled tokens fits a sample.
        details: Which filter left an episode out.
    """

    step: int
    groups: Sequence[int]
    trained: Sequence[str]
    filtered: Sequence[str]
    truncated: Sequence[str] = ()
    details: Mapping[str, str] = field(default_factory=dict)


Event = Opened | Issued | Finished[Any] | Dropped | Discarded | Batched


class Scheduler(Generic[Result]):
    """The scheduler's state.

    Args:
        limits: The numbers.
        tasks: Endless iterator over tasks, in the order in which groups are opened.
        step: The first step to collect (0 in a fresh run).
        version: The policy version the engines serve.
        incarnation: The trainer's present incarnation.
        emit: Called with every event, in order.
        gate: Returns why a complete group should not be trained, or None. A group that it turns away leaves room for another, so that batches stay full.
    """

    def __init__(
        self,
        limits: Limits,
        tasks: Iterator[Task],
        step: int = 0,
        version: int = 0,
        incarnation: int = 0,
        emit: Callable[[Event], None] = lambda event: None,
        gate: Callable[[Group[Result]], str | None] = lambda group: None,
    ) -> None:
        self.limits = limits
        self.step = step
        self.version = self.announced = version
        self.incarnation = incarnation
        # The served version was superseded by another incarnation: nothing starts until `go_back`.
        self.must_go_back = False
        # When a group may be opened that only the pace held back at the last `next_start`.
        self.opens_at: float | None = None
        self.groups_opened = 0
        self.ended = 0  # episodes that ran to their end, whatever it was: for rates
        self._tasks, self._emit, self._gate = tasks, emit, gate
        self._groups: dict[int, Group[Result]] = {}  # in no batch yet, in the order of opening
        # The scheduler is asked thousands of times a second about thousands of groups, so these are kept up to date by `_reindex`.
        self._startable: set[int] = set()  # groups with an episode to start
        self._complete: set[int] = set()  # complete groups that the gate has not checked
        self._admitted: set[int] = set()  # complete, and let through by the gate
        # When groups were opened: those of the last turns, and one more.
        self._opened: deque[float] = deque(maxlen=_TURNS * (limits.async_level + 1) * limits.groups_per_batch + 1)
        self._running: dict[str, Start] = {}
        self._unverified: dict[str, Finished[Result]] = {}  # finished since the servers were last verified

    def restore(self, groups: Iterable[Group[Result]]) -> None:
        """Go on with the open groups of an earlier orchestrator, in the order of opening. What is finished in them was verified.

        Call `begin_incarnation` afterwards: versions may have been superseded meanwhile.
        """
        for group in groups:
            self._add(group)
            self._settle(group)
        self._drop_stale()

    # -- what may start ------------------------------------------------------------------------------------------------------

    def next_start(self, now: float = 0.0) -> Start | None:
        """Start the next episode that may start now. Opened groups are continued before a new one is opened.

        Args:
            now: Seconds on the caller's clock. While it stands still there is no pace.
        """
        self.opens_at = None
        if self.must_go_back or len(self._running) >= self.limits.max_concurrent:
            return None
        if self._startable:
            group = self._groups[min(self._startable)]
            if not self._may_start(bisect_left(list(self._groups), group.number)):  # after going back
                return None
        else:
            if not self.may_open():
                return None
            if (paced := self.paced_until()) is not None and paced > now:
                self.opens_at = paced
                return None
            group = self._open(now)
        slot = group.next_slot
        assert slot is not None  # or the group could not be started
        slot.state = State.RUNNING
        start = Start(group.number, slot.number, slot.attempt, group.task, self.version)
        self._running[start.episode] = start
        self._reindex(group)
        self._emit(Issued(start, self.incarnation))
        return start

    def may_open(self) -> bool:
        """Whether a group opened now would be for a step that `max_steps` and the served version allow."""
        position, last = len(self._groups), self.limits.max_steps
        return (last is None or self._planned_step(position) < last) and self._may_start(position)

    def paced_until(self) -> float | None:
        """Earliest time at which the next group may be opened; None: at any time.

        With a full batch in flight, a group is opened no earlier than `PACE` x step time after the group one batch earlier. Batches that start together
        share the engines and finish together; engines and trainer would then be idle in turn. The step time is the shortest recent time in which
        `async_level + 1` batches were opened, divided by their number: the shortest, because anything else may have delayed the others.
        """
        batch, level, opened = self.limits.groups_per_batch, self.limits.async_level, self._opened
        turn = (level + 1) * batch
        if len(self._running) < self.limits.batch_size or len(opened) <= turn:
            return None
        turns = [opened[index] for index in range(-1, -len(opened) - 1, -turn)]
        seconds = min(later - earlier for later, earlier in pairwise(turns))
        return opened[-batch] + PACE * seconds / (level + 1)

    def allow(self, max_concurrent: int) -> None:
        """Set how many episodes may be in flight from now on; episodes already above the limit are not cancelled."""
        self.limits = replace(self.limits, max_concurrent=max_concurrent)

    # -- what happened -------------------------------------------------------------------------------------------------------

    def finish(self, episode: str, result: Result) -> None:
        """Take the result of an episode; it can be trained once the servers are verified (`verify`)."""
        start, group = self._end(episode)
        finished = Finished(start, start.version, self.announced, result, self.incarnation)
        group.slots[start.number].state = State.FINISHED
        insort(group.finished, finished, key=lambda one: one.start.number)
        self._unverified[episode] = finished
        self._reindex(group)
        if self._too_old(finished.first):
            self._drop_stale()

    def fail(self, episode: str, reason: Drop, detail: str = "", retry: bool = False) -> bool:
        """End an episode without a result. Returns whether it will be issued again: with `retry`, up to `max_attempts`."""
        start, group = self._end(episode)
        retried = retry and start.attempt + 1 < self.limits.max_attempts
        self._drop(group, start, reason, detail, retried)
        self._settle(group)
        return retried

    def announce(self, version: int) -> None:
        """Begin an update to `version`: tokens sampled from now on may be of it, though `serve` has not been called yet."""
        if version < self.version:
            raise ValueError(f"version {version} is older than the served {self.version}")
        self.announced = max(self.announced, version)

    def serve(self, version: int) -> list[Start]:
        """End the update: the engines serve `version` from now on. What could only be trained beyond the off-policy bound is dropped.

        Returns:
            What was in flight; the loop cancels it.
        """
        self.announce(version)
        self.version = version
        stale = [start for start in self._running.values() if self._too_old(start.version)]
        for start in stale:
            self.fail(start.episode, Drop.STALE, BEYOND_BOUND)
        return stale

    # -- what the servers served ---------------------------------------------------------------------------------------------

    def unverified(self) -> list[str]:
        """Episodes that finished since the last verification. Ask before the servers are asked, and `verify` these."""
        return list(self._unverified)

    def verify(self, episodes: Iterable[str]) -> None:
        """Count these: the servers were verified after they had finished."""
        for episode in episodes:
            if (finished := self._unverified.pop(episode, None)) is not None:
                self._emit(finished)

    def running_or_unverified(self) -> set[str]:
        """Episodes in flight, and those that finished since the last verification."""
        return {*self._running, *self._unverified}

    def invalidate(self, detail: str, episodes: Collection[str]) -> list[Start]:
        """Drop and retry what a server sampled since its last successful verification.

        Args:
            episodes: What it sampled; those that are neither in flight nor unverified are passed over.

        Returns:
            What was in flight; the loop cancels it.
        """
        unverified = [finished for name, finished in self._unverified.items() if name in episodes]
        return self._retry(unverified, [start for name, start in self._running.items() if name in episodes], detail)

    def retract(self) -> None:
        """Take back an announced update that failed, once no episode can hold tokens of that version."""
        self.announced = self.version

    def begin_incarnation(self, incarnation: int, incarnations: Mapping[int, int]) -> list[Start]:
        """Enter the trainer's incarnation `incarnation`: what superseded versions sampled is made again.

        Returns:
            What was in flight; the loop cancels it. If `must_go_back` is set afterwards, nothing starts before `go_back`.
        """
        finished = [one for group in self._groups.values() for one in group.finished]
        running = self._retry(
            [one for one in finished if not may_batch(one.first, one.last, one.incarnation, incarnations)],
            [
                one
                for one in self._running.values()
                if not may_batch(one.version, self.announced, self.incarnation, incarnations)
            ],
            f"version given up in incarnation {incarnation}",
        )
        self.must_go_back = self.must_go_back or not may_batch(
            self.version, self.announced, self.incarnation, incarnations
        )
        self.incarnation = incarnation
        return running

    def go_back(self, version: int) -> None:
        """Serve `version` of the present incarnation; it may be older than what was served before."""
        if self._running and version < self.announced:
            raise ValueError(f"{len(self._running)} episodes in flight were sampled by later versions than {version}")
        self.version = self.announced = version
        self.must_go_back = False

    # -- what is a batch -----------------------------------------------------------------------------------------------------

    def ready_batch(self) -> Batch[Result] | None:
        """The batch of the current step if enough groups are complete, independent of the order in which their episodes came back.

        Groups that the gate turns away are dropped; nothing else changes until `advance` or `discard`.
        """
        for group in [self._groups[number] for number in sorted(self._complete)]:
            if (reason := self._gate(group)) is None:
                self._complete.remove(group.number)
                self._admitted.add(group.number)
            else:
                # The ledger has what is dropped, too.
                self.verify([finished.start.episode for finished in group.finished])
                self._discard(group, Drop.FILTERED, reason)
        count = self.limits.groups_per_batch
        if len(self._admitted) < count:
            return None
        return Batch(self.step, [self._groups[number] for number in sorted(self._admitted)[:count]])

    def advance(self, batched: Batched) -> None:
        """Go on to the next step: the batch is committed. What is too old for that step is dropped.

        Raises:
            ValueError: these are not all finished episodes of the batch, or one of them is not verified.
        """
        batch = Batch(batched.step, [self._groups[number] for number in batched.groups])
        if {*batched.trained, *batched.filtered, *batched.truncated} != batch.episodes:
            raise ValueError(f"step {batch.step}: not every finished episode of the batch is trained or dropped")
        if unverified := batch.episodes & self._unverified.keys():
            raise ValueError(
                f"step {batch.step}: the server that sampled {', '.join(sorted(unverified))} is not verified"
            )
        for group in batch.groups:
            self._remove(group)
        self.step += 1
        self._emit(batched)
        self._drop_stale()

    def discard(self, batch: Batch[Result], truncated: Collection[str] = ()) -> None:
        """Collect another batch for the same step: this one, whose episodes are verified, carries no learning signal at all."""
        for group in batch.groups:
            for finished in group.finished:
                if finished.start.episode in truncated:
                    self._emit(Dropped(finished.start, Drop.TRUNCATED, NO_SIGNAL))
            self._discard(group, Drop.FILTERED, NO_SIGNAL)

    # -- the end -------------------------------------------------------------------------------------------------------------

    def abandon(self) -> list[Start]:
        """End the run for good: what is in no batch will be in none. Returns what was in flight; the loop cancels it."""
        running = list(self._running.values())
        for group in list(self._groups.values()):
            for slot in group.slots.values():
                if slot.state in _HELD:
                    start = Start(group.number, slot.number, slot.attempt, group.task, self.version)
                    self._emit(Dropped(start, Drop.CANCELLED))
            self._discard(group, Drop.CANCELLED, "the run ended")
        self._running.clear()
        self._unverified.clear()
        return running

    @property
    def done(self) -> bool:
        """Whether every batch up to `max_steps` has been committed."""
        return self.limits.max_steps is not None and self.step >= self.limits.max_steps

    @property
    def in_flight(self) -> int:
        """Episodes that run now."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Episodes that were issued and are neither dropped nor in a committed batch."""
        return sum(slot.state in _HELD for group in self._groups.values() for slot in group.slots.values())

    # -- private -------------------------------------------------------------------------------------------------------------

    def _planned_step(self, position: int) -> int:
        """The step that the group at `position` among those in no batch will be trained at."""
        return planned_step(self.step, position, self.limits.groups_per_batch)

    def _may_start(self, position: int) -> bool:
        return may_start(self._planned_step(position), self.version, self.limits.async_level)

    def _too_old(self, version: int) -> bool:
        return too_old(self.step, version, self.limits.max_off_policy_steps)

    def _open(self, now: float) -> Group[Result]:
        task = next(self._tasks)
        self._opened.append(now)
        group: Group[Result] = Group(self.groups_opened, task, {i: GroupSlot(i) for i in range(self.limits.group_size)})
        self._add(group)
        self.groups_opened += 1
        self._emit(Opened(group.number, task))
        return group

    def _end(self, episode: str) -> tuple[Start, Group[Result]]:
        start = self._running.pop(episode)
        self.ended += 1
        return start, self._groups[start.group]

    def _drop(self, group: Group[Result], start: Start, reason: Drop, detail: str = "", retried: bool = False) -> None:
        """End an episode of `group` untrained; with `retried` its slot is tried once more."""
        slot = group.slots[start.number]
        slot.state = State.PENDING if retried else State.FAILED
        slot.attempt += retried
        self._reindex(group)
        self._emit(Dropped(start, reason, detail, retried))

    def _retry(self, finished: Iterable[Finished[Result]], running: list[Start], detail: str) -> list[Start]:
        """Drop these episodes as stale and try their slots once more. Returns `running`."""
        for one in finished:
            group = self._groups[one.start.group]
            group.finished.remove(one)
            self._unverified.pop(one.start.episode, None)
            self._drop(group, one.start, Drop.STALE, detail, retried=True)
        for start in running:
            _, group = self._end(start.episode)
            self._drop(group, start, Drop.STALE, detail, retried=True)
        return running

    def _settle(self, group: Group[Result]) -> None:
        """Discard a complete group in which no episode has a result; another one takes its place."""
        if group.complete and not group.finished:
            self._discard(group, Drop.ERRORED, "no episode of the group has a result")

    def _discard(self, group: Group[Result], reason: Drop, detail: str) -> None:
        self._remove(group)
        self._emit(Discarded(group.number, self.step, reason, detail))

    def _drop_stale(self) -> None:
        """Drop finished episodes that are too old for the step that is collected. What is left of a group is another group."""
        for group in list(self._groups.values()):
            for finished in [one for one in group.finished if self._too_old(one.first)]:
                self.verify([finished.start.episode])  # the ledger has what is dropped, too
                group.finished.remove(finished)
                self._admitted.discard(group.number)
                self._drop(group, finished.start, Drop.STALE, BEYOND_BOUND)
            self._settle(group)

    def _add(self, group: Group[Result]) -> None:
        """Add a group, whose number is the highest."""
        self._groups[group.number] = group
        self._reindex(group)

    def _remove(self, group: Group[Result]) -> None:
        del self._groups[group.number]
        for numbers in (self._startable, self._complete, self._admitted):
            numbers.discard(group.number)

    def _reindex(self, group: Group[Result]) -> None:
        """Note that slots of the group have changed. One that is complete again is the gate's to look at again."""
        number, complete = group.number, group.complete
        if not complete:
            self._admitted.discard(number)
        for numbers, belongs in (
            (self._startable, group.next_slot is not None),
            (self._complete, complete and number not in self._admitted),
        ):
            if belongs:
                numbers.add(number)
            else:
                numbers.discard(number)
