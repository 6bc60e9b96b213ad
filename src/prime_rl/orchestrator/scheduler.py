"""The scheduler of asynchronous RL: what may start, what is a batch, what is too old. No clock, no network, no file.

In synchronous RL the servers sample a batch, the trainer trains on it, the servers load the new version of the policy
and sample the next batch: one half of the machines always waits for the other. In asynchronous RL the servers sample
later batches while the trainer works on an earlier one. The price is staleness: a batch was sampled, in part, by
versions older than the one that it improves. This file keeps both sides busy within bounds on that staleness.

    async_level = 2: the batches of steps 0 to 4 are committed, the servers serve version 5
    groups, in the order of opening | of step 5 | of step 6 | of step 7 | of step 8
    may an episode start?           | yes       | yes       | yes       | only on version 6 or newer

It answers three questions:

* *What may start now?* (`next_start`) Groups are opened in the order of the task stream, and the batch of a step is the
  `batch_size / group_size` complete ones with the lowest numbers. So a group's position among those in no batch says
  which step it is for. An episode for step n starts only on a policy version >= max(0, n - async_level): with level 0
  nothing starts before the trainer has caught up (synchronous, on-policy), with k the servers work up to k steps ahead.
  Batches are *staggered*: the episodes of one batch start at once, those beyond it at a pace, so that batches complete
  one after the other.
* *What is a batch?* (`ready_batch`) The complete groups with the lowest numbers, whatever finished first. A group is
  judged once the servers that sampled it are verified: one without a learning signal may be rejected, and another one
  is opened in its place (dynamic sampling).
* *What does not count?* A sample is trained at most `max_off_policy_steps` after the oldest version that sampled one of
  its tokens; what could only be trained later is cancelled or dropped. What was sampled by a superseded incarnation of
  the trainer, or by a server that failed its verification, is dropped and sampled again in the same place.

The loop (`orchestrator.py`) reports what happened (`finish`, `fail`, `serve`) and does what comes out (`next_start`,
`ready_batch`). Every change of an episode is emitted as an `Event`; the ledger stores them and is the only count of
episodes. The rules themselves are in `transport/protocol.py`. Simulators and property tests drive this very class.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, takewhile
from typing import Any, Generic, TypeVar

from prime_rl.transport.protocol import may_batch, may_start, planned_step, too_old

Result = TypeVar("Result")

BEYOND_BOUND = "beyond max_off_policy_steps"
PACE = 0.9  # fraction of the recent step time to leave between batch starts; below 1 so that steps can get shorter
_CYCLES = 3  # of `async_level + 1` steps each; the shortest one gives the step time


# -- tasks, groups, episodes -----------------------------------------------------------------------------------------


class State(StrEnum):
    """State of a slot of a group."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"  # with a result
    FAILED = "failed"  # without a result, and no attempt is left


class Drop(StrEnum):
    """Why an episode was not trained."""

    STALE = "stale"  # beyond the off-policy bound, or sampled by superseded or unverified weights
    FILTERED = "filtered"  # it carries no learning signal, a filter leaves it out, or no sampled token fits a sample
    ERRORED = "errored"  # the environment failed, or no attempt was left
    CANCELLED = "cancelled"  # the run ended before that, or `Ledger.reconcile` found its batch gone or without it
    TIMEOUT = "timeout"  # it passed its deadline


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
class Task:
    """One row of an environment's dataset."""

    env: str
    index: int
    task_id: str


@dataclass(frozen=True)
class Start:
    """An episode to start now: in slot `number` of its group, while the servers serve `version`."""

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
    """A finished episode: versions `first` … `last` of the trainer's `incarnation` may have sampled its tokens."""

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
    def ended(self) -> bool:
        """Whether none of its episodes runs or is to be started."""
        return all(slot.state in (State.FINISHED, State.FAILED) for slot in self.slots.values())

    @property
    def next_slot(self) -> GroupSlot | None:
        return next((slot for slot in self.slots.values() if slot.state is State.PENDING), None)


@dataclass(frozen=True)
class Batch(Generic[Result]):
    """Complete groups, ready to be trained at `step`, in the order in which they were opened."""

    step: int
    groups: list[Group[Result]]

    @property
    def finished(self) -> list[Finished[Result]]:
        return [finished for group in self.groups for finished in group.finished]

    @property
    def episodes(self) -> set[str]:
        return {finished.start.episode for finished in self.finished}

    def committed(self, trained: Iterable[str], filtered: Iterable[str] = ()) -> "Batched":
        """Make the event of its commit. The arguments are `Batched`'s."""
        tasks = {group.number: group.task for group in self.groups}
        return Batched(self.step, tasks, list(trained), list(filtered))


# -- events: what the scheduler emits and the ledger stores. A result that was verified is emitted as `Finished`. ----


@dataclass(frozen=True)
class Issued:
    """An episode started, in incarnation `incarnation` of the trainer; the first of a group opens it."""

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
    """A group left without a batch: what was finished or in flight of it is dropped."""

    group: int
    reason: Drop
    detail: str


@dataclass(frozen=True)
class Batched:
    """The batch of `step` was committed. Every finished episode of its groups is trained or filtered."""

    step: int
    groups: Mapping[int, Task]  # by their numbers
    trained: Sequence[str]  # with samples in it
    filtered: Sequence[str]  # left out of it

    @property
    def episodes(self) -> set[str]:
        return {*self.trained, *self.filtered}


Event = Issued | Finished[Any] | Dropped | Discarded | Batched


# -- the scheduler ---------------------------------------------------------------------------------------------------


class Scheduler(Generic[Result]):
    """The scheduler's state.

    Args:
        tasks: Endless iterator over tasks, in the order in which groups are opened.
        gate: Returns why a group that ended and is verified should not be trained, or None. One that it rejects leaves
            room for another, so that batches stay full.
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
        self.step = step  # the one whose batch is collected
        self.version = self.announced = version  # served; newest version that may have sampled tokens
        self.incarnation = incarnation
        self.must_go_back = False  # another incarnation superseded the served version: nothing starts until `go_back`
        self.opens_at: float | None = None  # when the next group may be opened, if only the pace delays it
        self.groups_opened = 0
        self._tasks, self._emit, self._gate = tasks, emit, gate
        self._groups: dict[int, Group[Result]] = {}  # in no batch yet, in the order of opening
        # Numbers of groups, kept up to date by `_update_group`: there may be thousands, and events as many a second.
        self._startable: set[int] = set()  # with an episode to start
        self._ended: set[int] = set()
        self._complete: set[int] = set()  # those that ended, are verified, and are let through by the gate
        # When groups were opened: those of the last cycles, and one more.
        self._opened: deque[float] = deque(maxlen=_CYCLES * (limits.async_level + 1) * limits.groups_per_batch + 1)
        self._running: dict[str, Start] = {}
        self._unverified: dict[str, Finished[Result]] = {}  # finished since the servers were last verified

    def restore(self, groups: Iterable[Group[Result]]) -> None:
        """Continue with the open groups of an earlier orchestrator, in the order of opening. All finished is verified.

        Call `begin_incarnation` afterwards: versions may have been superseded meanwhile.
        """
        for group in groups:
            self._groups[group.number] = group
            self._update_group(group)
        self._drop_stale()

    # -- what may start -----------------------------------------------------------------------------------------------

    def next_start(self, now: float = 0.0) -> Start | None:
        """Start the next episode that may start now. Opened groups are continued before a new one is opened.

        `now`: seconds on the caller's clock. A constant value switches the pace off.
        """
        self.opens_at = None
        if self.must_go_back or len(self._running) >= self.limits.max_concurrent:
            return None
        if self._startable:
            group = self._groups[min(self._startable)]
            later = sum(1 for _ in takewhile(lambda number: number != group.number, reversed(self._groups)))
            if not self._may_start(len(self._groups) - 1 - later):  # the servers went back
                return None
        else:
            if not self._may_start(len(self._groups)):
                return None
            if (paced := self.paced_until()) is not None and paced > now:
                self.opens_at = paced
                return None
            slots = {number: GroupSlot(number) for number in range(self.limits.group_size)}
            group = self._groups[self.groups_opened] = Group(self.groups_opened, next(self._tasks), slots)
            self.groups_opened += 1
            self._opened.append(now)
        slot = group.next_slot
        assert slot is not None  # or the group could not be started
        start = Start(group.number, slot.number, slot.attempt, group.task, self.version)
        self._running[start.episode] = start
        slot.state = State.RUNNING
        self._update_group(group)
        self._emit(Issued(start, self.incarnation))
        return start

    def paced_until(self) -> float | None:
        """Earliest time at which the next group may be opened; None: at any time.

        Batches that start together share the servers and finish together; servers and trainer would then be idle in
        turn. So with a full batch in flight, a group is opened no earlier than `PACE` x step time after the group one
        batch earlier. The step time is the shortest recent time in which `async_level + 1` batches were opened, divided
        by their number: the shortest, because anything else may have delayed the others.
        """
        batch, level, opened = self.limits.groups_per_batch, self.limits.async_level, self._opened
        cycle = (level + 1) * batch
        if len(self._running) < self.limits.batch_size or len(opened) <= cycle:
            return None
        starts = [opened[index] for index in range(-1, -len(opened) - 1, -cycle)]
        seconds = min(later - earlier for later, earlier in pairwise(starts))
        return opened[-batch] + PACE * seconds / (level + 1)

    def _may_start(self, position: int) -> bool:
        """Return whether `max_steps` and the served version allow the step of the group at unbatched `position`."""
        step, last = planned_step(self.step, position, self.limits.groups_per_batch), self.limits.max_steps
        return (last is None or step < last) and may_start(step, self.version, self.limits.async_level)

    # -- how episodes end ---------------------------------------------------------------------------------------------

    def finish(self, episode: str, result: Result) -> None:
        """Take the result of an episode; it can be trained once the servers are verified (`verify`)."""
        start = self._running.pop(episode)
        group = self._groups[start.group]
        finished = Finished(start, start.version, self.announced, result, self.incarnation)
        self._unverified[episode] = finished
        insort(group.finished, finished, key=lambda one: one.start.number)
        group.slots[start.number].state = State.FINISHED
        self._update_group(group)
        if self._too_old(finished.first):
            self._drop_stale()

    def fail(self, episode: str, reason: Drop, detail: str = "", retry: bool = False) -> bool:
        """End an episode without a result. Returns whether it is issued again: with `retry`, up to `max_attempts`."""
        start = self._running[episode]
        retried = retry and start.attempt + 1 < self.limits.max_attempts
        self._drop([start], reason, detail, retried)
        return retried

    def _drop(self, starts: Sequence[Start], reason: Drop, detail: str, retried: bool = False) -> None:
        """End episodes untrained; with `retried` their slots are tried once more."""
        groups = {start.group: self._groups[start.group] for start in starts}
        for start in starts:
            self._running.pop(start.episode, None)
            self._unverified.pop(start.episode, None)
            group, slot = groups[start.group], groups[start.group].slots[start.number]
            group.finished = [one for one in group.finished if one.start != start]
            slot.attempt += retried
            slot.state = State.PENDING if retried else State.FAILED
            self._emit(Dropped(start, reason, detail, retried))
        for group in groups.values():
            self._update_group(group, reason)

    def _retry(self, finished: Iterable[Finished[Result]], running: list[Start], detail: str) -> list[Start]:
        """Drop these episodes as stale and try their slots once more. Returns `running`; the loop cancels it."""
        self._drop([*(one.start for one in finished), *running], Drop.STALE, detail, retried=True)
        return running

    # -- versions of the policy ---------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """Begin an update to `version`: tokens sampled from now on may be of it, though `serve` is yet to come."""
        if version < self.version:
            raise ValueError(f"version {version} is older than the served {self.version}")
        self.announced = max(self.announced, version)

    def retract(self) -> None:
        """Take back an announced update that failed, once no episode can hold tokens of that version."""
        self.announced = self.version

    def serve(self, version: int) -> list[Start]:
        """End the update: the servers serve `version` from now on.

        Episodes in flight that could only be trained too late are dropped, and returned: the loop cancels them.
        """
        self.announce(version)
        self.version = version
        stale = [start for start in self._running.values() if self._too_old(start.version)]
        for start in stale:
            self.fail(start.episode, Drop.STALE, BEYOND_BOUND)
        return stale

    def begin_incarnation(self, incarnation: int, incarnations: Mapping[int, int]) -> list[Start]:
        """Enter the trainer's incarnation `incarnation`: what superseded versions sampled is sampled again.

        Returns what was in flight; the loop cancels it. If `must_go_back` is set then, nothing starts before `go_back`.
        """

        def superseded(first: int, last: int, made_in: int) -> bool:
            return not may_batch(first, last, made_in, incarnations)

        finished = [one for group in self._groups.values() for one in group.finished]
        running = self._retry(
            [one for one in finished if superseded(one.first, one.last, one.incarnation)],
            [one for one in self._running.values() if superseded(one.version, self.announced, self.incarnation)],
            f"sampled by a version that incarnation {incarnation} superseded",
        )
        self.must_go_back = self.must_go_back or superseded(self.version, self.announced, self.incarnation)
        self.incarnation = incarnation
        return running

    def go_back(self, version: int) -> None:
        """Serve `version` of the present incarnation; it may be older than what was served before."""
        if self._running and version < self.announced:
            raise ValueError(f"{len(self._running)} episodes in flight were sampled by later versions than {version}")
        self.version = self.announced = version
        self.must_go_back = False

    def _too_old(self, version: int) -> bool:
        return too_old(self.step, version, self.limits.max_off_policy_steps)

    def _drop_stale(self) -> None:
        """Drop finished episodes that are too old for the step that is collected."""
        finished = [one for group in self._groups.values() for one in group.finished]
        self._drop([one.start for one in finished if self._too_old(one.first)], Drop.STALE, BEYOND_BOUND)

    # -- what the servers served --------------------------------------------------------------------------------------

    def unverified(self) -> list[str]:
        """Episodes that finished since the last verification. Ask before the servers are asked, and `verify` these."""
        return list(self._unverified)

    def running_or_unverified(self) -> set[str]:
        """Episodes in flight, and those that finished since the last verification."""
        return {*self._running, *self._unverified}

    def verify(self, episodes: Iterable[str]) -> None:
        """Count these: the servers were verified after they had finished. Groups that are complete now are judged."""
        verified = [one for episode in episodes if (one := self._unverified.pop(episode, None)) is not None]
        for finished in verified:
            self._emit(finished)
        for number in dict.fromkeys(finished.start.group for finished in verified):
            self._update_group(self._groups[number])

    def invalidate(self, detail: str, episodes: Collection[str]) -> list[Start]:
        """Drop and retry those of `episodes` that are in flight or unverified: the server that sampled them failed.

        Returns what was in flight; the loop cancels it.
        """
        unverified = [finished for name, finished in self._unverified.items() if name in episodes]
        return self._retry(unverified, [start for name, start in self._running.items() if name in episodes], detail)

    # -- what is a batch ----------------------------------------------------------------------------------------------

    @property
    def batch_ended(self) -> bool:
        """Whether enough groups for a batch have ended, verified or not."""
        return len(self._ended) >= self.limits.groups_per_batch

    def ready_batch(self) -> Batch[Result] | None:
        """The batch of the current step if enough groups are complete, whatever the order of their results."""
        count = self.limits.groups_per_batch
        if len(self._complete) < count:
            return None
        return Batch(self.step, [self._groups[number] for number in sorted(self._complete)[:count]])

    def advance(self, batched: Batched) -> None:
        """Advance to the next step: the batch is committed. What is too old for that step is dropped.
        Raises ValueError: these are not all finished episodes of the batch."""
        batch = Batch(batched.step, [self._groups[number] for number in batched.groups])
        if batched.episodes != batch.episodes:
            raise ValueError(f"step {batch.step}: not every finished episode of the batch is trained or dropped")
        for group in batch.groups:
            self._remove(group)
        self.step += 1
        self._emit(batched)
        self._drop_stale()

    def discard(self, batch: Batch[Result]) -> None:
        """Collect another batch for the same step: this one carries no learning signal at all."""
        for group in batch.groups:
            self._discard(group, Drop.FILTERED, "no signal in the whole batch")

    def _discard(self, group: Group[Result], reason: Drop, detail: str) -> None:
        """Remove a group that goes into no batch; another one takes its place."""
        self._remove(group)
        self._emit(Discarded(group.number, reason, detail))

    # -- the end ------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """End the run for good: what is in no batch will be in none. The loop cancels what is in flight."""
        self._running, self._unverified = {}, {}
        for group in list(self._groups.values()):
            self._discard(group, Drop.CANCELLED, "the run ended")

    @property
    def done(self) -> bool:
        """Whether every batch up to `max_steps` has been committed."""
        return self.limits.max_steps is not None and self.step >= self.limits.max_steps

    @property
    def held(self) -> int:
        """Episodes that were issued and are neither dropped nor in a committed batch."""
        return len(self._running) + sum(len(group.finished) for group in self._groups.values())

    # -- the groups ---------------------------------------------------------------------------------------------------

    def _update_group(self, group: Group[Result], dropped: Drop = Drop.ERRORED) -> None:
        """Note whether a changed group is startable, ended or complete; discard a rejected or emptied one."""
        ended = group.ended
        complete = ended and not any(finished.start.episode in self._unverified for finished in group.finished)
        if ended and not group.finished:
            self._discard(group, dropped, "no episode of the group has a result")
        elif complete and (reason := self._gate(group)) is not None:
            self._discard(group, Drop.FILTERED, reason)
        else:
            startable = group.next_slot is not None
            for numbers, belongs in ((self._startable, startable), (self._ended, ended), (self._complete, complete)):
                if belongs:
                    numbers.add(group.number)
                else:
                    numbers.discard(group.number)

    def _remove(self, group: Group[Result]) -> None:
        del self._groups[group.number]
        for numbers in (self._startable, self._ended, self._complete):
            numbers.discard(group.number)
