"""The scheduler's contracts, driven by a random world without clock or network."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.scheduler import (
    Batched,
    Discarded,
    Drop,
    Dropped,
    Event,
    Finished,
    Issued,
    Limits,
    Opened,
    Scheduler,
    Start,
    State,
    Task,
)


def endless_tasks():
    return (Task("env", i, f"task-{i}") for i in itertools.count())


def advance(scheduler, batch):
    """Prove and commit a whole batch."""
    scheduler.verify(scheduler.unverified())
    scheduler.advance(batch.committed(batch.episodes))


class Counted(Scheduler[float]):
    """A scheduler whose events are counted, as a ledger would."""

    def __init__(self, limits: Limits, **kwargs) -> None:
        self.issued, self.trained, self.dropped = 0, 0, Counter()
        self.discards: list[tuple[int, str, str]] = []
        self.open: dict[int, set[str]] = {}  # verified and finished episodes by group
        self.opened_for: dict[int, int] = {}  # the step that each group was opened for, by how many stood before it
        self.standing: set[int] = set()
        super().__init__(limits, endless_tasks(), emit=self.count, **kwargs)

    def count(self, event: Event) -> None:
        match event:
            case Opened(group):
                self.opened_for[group] = self.step + len(self.standing) // self.limits.groups_per_batch
                self.standing.add(group)
            case Issued():
                self.issued += 1
            case Finished(start):
                self.open.setdefault(start.group, set()).add(start.episode)
            case Dropped(start, reason):
                self.open.get(start.group, set()).discard(start.episode)
                self.dropped[reason] += 1
            case Discarded(group, _, reason, detail):
                self.dropped[reason] += len(self.open.pop(group, ()))
                self.discards.append((group, str(reason), detail))
                self.standing.remove(group)
            case Batched():
                self.standing -= set(event.groups)
                self.trained += len(event.trained)
                self.dropped[Drop.FILTERED] += len(event.filtered)
                self.dropped[Drop.TRUNCATED] += len(event.truncated)

    def check_conservation(self) -> None:
        assert self.issued == self.trained + self.dropped.total() + self.held


class World:
    """A simulated trainer and fleet: finishes, fails and serves in random order, and records what the scheduler did."""

    def __init__(self, limits: Limits, seed: int, failure_rate: float, turned_away: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        gate = random.Random(seed + 1)
        self.scheduler = Counted(limits, gate=lambda group: "dull" if gate.random() < turned_away else None)
        self.failure_rate = failure_rate
        self.clock = 0.0
        self.running: list[Start] = []
        self.starts: list[Start] = []
        self.batches = []

    def run(self) -> None:
        for _ in range(20_000):
            if self.scheduler.done:
                return
            self.fill()
            self.advance()
            self.scheduler.check_conservation()
            assert self.scheduler.in_flight <= self.limits.max_concurrent
        raise AssertionError("the run did not end: the scheduler is stuck")

    def fill(self) -> None:
        self.clock += self.random.choice([0.0, 0.1, 1.0, 30.0])
        while (start := self.scheduler.next_start(self.clock)) is not None:
            self.running.append(start)
            self.starts.append(start)

    def doubt(self) -> None:
        """The server was started again: what is not proven is made again."""
        if self.random.random() < 0.5:  # one of several: what another one samples stays
            others = {start.episode for start in self.running if self.random.random() < 0.5}
            lost = self.scheduler.invalidate("gone", self.scheduler.running_or_unverified() - others)
            assert {start.episode for start in lost}.isdisjoint(others)
            self.running = [start for start in self.running if start not in lost]
            self.fill()
            return
        assert {
            start.episode for start in self.scheduler.invalidate("gone", self.scheduler.running_or_unverified())
        } == {start.episode for start in self.running}
        self.scheduler.retract()
        self.running.clear()
        self.fill()

    def advance(self) -> None:
        if self.random.random() < 0.02:
            self.doubt()
        choices = []
        if self.running:
            choices += ["land"] * 4
        if self.scheduler.version < self.scheduler.step:
            choices.append("serve")
        assert choices, "nothing is in flight, nothing to train: deadlock"
        if self.random.choice(choices) == "serve":
            for start in self.scheduler.serve(self.random.randint(self.scheduler.version + 1, self.scheduler.step)):
                self.running.remove(start)
        else:
            start = self.running.pop(self.random.randrange(len(self.running)))
            if self.random.random() < self.failure_rate:
                self.scheduler.fail(start.episode, Drop.ERRORED, retry=self.random.random() < 0.5)
            else:
                self.scheduler.finish(start.episode, self.random.random())
        while (batch := self.scheduler.ready_batch()) is not None:
            self.batches.append(batch)
            advance(self.scheduler, batch)


worlds = st.builds(
    lambda group, groups, level, slack, concurrency, steps: Limits(group * groups, group, level, level + slack, concurrency, steps),
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(1, 40), st.integers(1, 8),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(worlds, st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.7]))
def test_every_run_ends_with_all_steps_in_order_and_conserves_episodes(limits, seed, failure_rate, turned_away):
    """Whatever the order of events, and however many groups are turned away: batches 0 … max_steps-1, each full, no episode trained twice, none
    unaccounted for, no deadlock; every episode starts on a version that the async level allows for its step (DESIGN, "async level"), and none is
    trained later than max_off_policy_steps after the oldest version that sampled a token of it."""
    world = World(limits, seed, failure_rate, turned_away)
    world.run()
    assert (world.scheduler.dropped[Drop.FILTERED] > 0) <= bool(turned_away)
    assert [batch.step for batch in world.batches] == list(range(limits.max_steps))
    for batch in world.batches:
        numbers = [group.number for group in batch.groups]
        assert numbers == sorted(numbers)  # whatever finished first
        assert len(numbers) == limits.groups_per_batch
    finished = [(batch.step, one) for batch in world.batches for group in batch.groups for one in group.finished]
    assert len(finished) == len({one.start.episode for _, one in finished}) == world.scheduler.trained
    assert world.scheduler.in_flight == 0
    assert world.scheduler.issued == world.scheduler.trained + world.scheduler.dropped.total()
    for start in world.starts:
        planned = world.scheduler.opened_for[start.group]
        assert start.version >= max(0, planned - limits.async_level)
        assert planned < limits.max_steps
    for step, one in finished:
        assert step - one.first <= limits.max_off_policy_steps
        assert one.first <= one.last <= step


def test_a_retried_episode_is_issued_again_with_the_same_place_and_a_new_id():
    """Work lost to a dead worker is issued again, up to max_attempts, then counted as lost."""
    scheduler = Counted(Limits(2, 2, 0, 0, 10, 1, max_attempts=3))
    first, second = scheduler.next_start(), scheduler.next_start()
    assert scheduler.fail(first.episode, Drop.ERRORED, retry=True)
    again = scheduler.next_start()
    assert (again.group, again.number, again.attempt) == (first.group, first.number, 1)
    assert again.episode not in (first.episode, second.episode)
    assert scheduler.fail(again.episode, Drop.ERRORED, retry=True)
    last = scheduler.next_start()
    assert not scheduler.fail(last.episode, Drop.ERRORED, retry=True)
    scheduler.finish(second.episode, 1.0)
    (group,) = scheduler.ready_batch().groups
    assert [place.state for place in group.slots.values()] == [State.FAILED, State.FINISHED]
    scheduler.check_conservation()


def test_a_group_that_is_turned_away_makes_room_for_another():
    """Dynamic sampling: its episodes are dropped as filtered, with the gate's word, and the next batch is as full as any; the gate looks once."""
    looked = []

    def gate(group):
        looked.append(group.number)
        return None if any(finished.result for finished in group.finished) else "zero_advantage"

    scheduler = Counted(Limits(4, 2, 0, 0, 10, 1), gate=gate)
    for _ in range(4):
        start = scheduler.next_start()
        scheduler.finish(start.episode, float(start.group))
    assert scheduler.next_start() is None
    assert scheduler.ready_batch() is None
    assert scheduler.dropped == {Drop.FILTERED: 2}
    assert scheduler.discards == [(0, "filtered", "zero_advantage")]
    scheduler.check_conservation()
    for _ in range(2):
        start = scheduler.next_start()
        assert start.group == 2
        scheduler.finish(start.episode, 1.0)
    assert [group.number for group in scheduler.ready_batch().groups] == [1, 2]
    scheduler.ready_batch()
    assert looked == [0, 1, 2]


def test_what_is_left_of_a_group_that_grew_stale_is_looked_at_again():
    """A group that was let through loses an episode to age: whether the rest can teach anything is the gate's to say."""
    sizes = []

    def gate(group):
        sizes.append(len(group.finished))
        return None if len(group.finished) > 1 else "alone"

    scheduler = Counted(Limits(2, 2, 2, 2, 10, 9), gate=gate)
    zero, one, two = ([scheduler.next_start().episode for _ in range(2)] for _ in range(3))
    for version in (1, 2):  # batches of later groups
        for episode in two:
            scheduler.finish(episode, 1.0)
        advance(scheduler, scheduler.ready_batch())
        scheduler.serve(version)
        two = [scheduler.next_start().episode for _ in range(2)] if version == 1 else []
    assert scheduler.fail(one.pop(), Drop.ERRORED, retry=True)
    for episode in (*zero, *one, scheduler.next_start().episode):  # the last one on version 2
        scheduler.finish(episode, 1.0)
    advance(scheduler, scheduler.ready_batch())
    assert scheduler.dropped[Drop.STALE] == 1
    assert scheduler.ready_batch() is None
    assert sizes == [2, 2, 2, 2, 1]
    assert scheduler.held == 0
    scheduler.check_conservation()


def test_a_discarded_batch_is_collected_again_for_the_same_step():
    """A batch without signal is not a step: its episodes are dropped as filtered and the step stays."""
    scheduler = Counted(Limits(2, 1, 0, 0, 10, 1))
    for _ in range(2):
        scheduler.finish(scheduler.next_start().episode, 0.0)
    scheduler.verify(scheduler.unverified())
    scheduler.discard(scheduler.ready_batch())
    assert scheduler.step == 0
    assert scheduler.dropped[Drop.FILTERED] == 2
    assert scheduler.next_start() is not None
    scheduler.check_conservation()


@pytest.mark.parametrize("update", [Scheduler.serve, Scheduler.announce])
def test_versions_span_from_the_start_to_the_end_of_an_episode(update):
    """An episode that lived through an update, or through the beginning of one, records both versions; its age counts from the older one."""
    scheduler = Counted(Limits(1, 1, 2, 2, 10, 10))
    start = scheduler.next_start()
    update(scheduler, 1)
    scheduler.finish(start.episode, 0.0)
    (finished,) = scheduler.ready_batch().groups[0].finished
    assert (finished.first, finished.last) == (0, 1)


def test_what_an_incarnation_sampled_that_was_given_up_is_made_again_in_its_place():
    """The trainer went on from version 1 while 3 was served: finished and running episodes are dropped and tried again, on a version that the
    gate allows; nothing starts before the engines have gone back."""
    scheduler = Counted(Limits(4, 2, 1, 8, 100, 10), step=3, version=3)
    starts = [scheduler.next_start() for _ in range(6)]
    for start in starts[:3]:
        scheduler.finish(start.episode, 1.0)
    running = scheduler.begin_incarnation(1, {0: 0, 1: 1})
    assert [start.episode for start in running] == [start.episode for start in starts[3:]]
    assert scheduler.dropped[Drop.STALE] == 6
    assert scheduler.must_go_back
    assert scheduler.next_start() is None
    scheduler.go_back(1)
    assert scheduler.next_start() is None  # step 3 needs version 2
    scheduler.serve(2)
    again = scheduler.next_start()
    assert (again.episode, again.version) == ("0.0.1", 2)
    scheduler.check_conservation()


def test_what_counts_in_the_new_incarnation_too_is_kept():
    """An incarnation that begins at the version that is served gives up nothing: what was sampled is of the same history."""
    scheduler = Counted(Limits(4, 2, 1, 8, 100, 10), step=3, version=3)
    starts = [scheduler.next_start() for _ in range(4)]
    scheduler.finish(starts[0].episode, 1.0)
    assert scheduler.begin_incarnation(1, {0: 0, 1: 3}) == []
    assert not scheduler.must_go_back
    assert scheduler.dropped.total() == 0
    assert scheduler.incarnation == 1
    scheduler.serve(4)
    scheduler.finish(starts[1].episode, 1.0)  # in flight over the change: its last version is of the new incarnation
    assert scheduler.begin_incarnation(2, {0: 0, 1: 3, 2: 3}) == starts[2:]
    assert scheduler.dropped[Drop.STALE] == 3
    scheduler.check_conservation()


def test_an_unproven_server_takes_back_only_what_finished_since_the_last_proof():
    """A server that lost its weights: what was proven before stays, the rest is made again on the same version."""
    scheduler = Counted(Limits(4, 2, 0, 8, 100, 10))
    starts = [scheduler.next_start() for _ in range(4)]
    scheduler.finish(starts[0].episode, 1.0)
    scheduler.verify(scheduler.unverified())
    scheduler.finish(starts[1].episode, 1.0)
    assert scheduler.invalidate("gone", scheduler.running_or_unverified()) == starts[2:]
    assert (scheduler.open, scheduler.dropped[Drop.STALE]) == ({0: {"0.0.0"}}, 3)
    assert [scheduler.next_start().episode for _ in range(3)] == ["0.1.1", "1.0.1", "1.1.1"]
    scheduler.check_conservation()


def test_a_batch_that_is_not_proven_cannot_be_committed():
    """Nothing that a server may have sampled with other weights reaches a batch."""
    scheduler = Counted(Limits(1, 1, 0, 0, 1))
    scheduler.finish(scheduler.next_start().episode, 1.0)
    batch = scheduler.ready_batch()
    with pytest.raises(ValueError, match=r"the server that sampled 0\.0\.0 is not verified"):
        scheduler.advance(batch.committed(batch.episodes))


def test_every_finished_episode_of_a_batch_is_accounted_for():
    """Trained, filtered or truncated: one that is forgotten is an error."""
    scheduler = Counted(Limits(2, 2, 0, 0, 2))
    for _ in range(2):
        scheduler.finish(scheduler.next_start().episode, 1.0)
    scheduler.verify(scheduler.unverified())
    with pytest.raises(ValueError, match="not every finished episode"):
        scheduler.advance(scheduler.ready_batch().committed(["0.0.0"]))
    scheduler.advance(scheduler.ready_batch().committed(["0.0.0"], truncated=["0.1.0"]))
    assert scheduler.dropped == {Drop.TRUNCATED: 1, Drop.FILTERED: 0}
    scheduler.check_conservation()


def test_a_run_that_ends_for_good_leaves_nothing_open():
    """Episodes in flight, finished and to be started again are dropped, with the reason that the run ended."""
    scheduler = Counted(Limits(4, 2, 1, 8, 3, 10))
    starts = [scheduler.next_start() for _ in range(3)]
    scheduler.finish(starts[0].episode, 1.0)
    assert scheduler.abandon() == starts[1:]
    assert scheduler.dropped[Drop.CANCELLED] == scheduler.issued == 3
    assert scheduler.discards == [(number, "cancelled", "the run ended") for number in (0, 1)]
    assert (scheduler.held, scheduler.in_flight) == (0, 0)


def test_what_cannot_be_is_refused():
    """A version older than the served one."""
    with pytest.raises(ValueError, match="older"):
        Counted(Limits(1, 1, 0, 0, 1), version=3, step=3).serve(2)
