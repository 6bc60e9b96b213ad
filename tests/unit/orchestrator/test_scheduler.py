"""The scheduler's contracts: with its ledger in a random world, and by hand."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.ledger import Ledger
from prime_rl.orchestrator.scheduler import Batch, Discarded, Drop, Dropped, Event, Limits, Scheduler, Start, State
from support.scheduling import World, endless_tasks


def limits_up_to(group: int, groups: int, level: int, concurrent: int, steps: int) -> st.SearchStrategy[Limits]:
    return st.builds(
        lambda size, count, level, slack, concurrent, steps: Limits(
            size * count, size, level, level + slack, concurrent, steps
        ),
        *map(st.integers, (1, 1, 0, 0, 1, 1), (group, groups, level, level, concurrent, steps)),
    )


def run(world: World) -> set[str]:
    """Run a world to its end. Returns the episodes that were trained.
    Each once, none too old, in full batches of all steps in order."""
    world.run()
    limits, batches = world.limits, [batch for batch, _ in world.batches]
    assert [batch.step for batch in batches] == list(range(limits.max_steps))
    for batch in batches:
        numbers = [group.number for group in batch.groups]
        assert numbers == sorted(numbers)  # whatever finished first
        assert len(numbers) == limits.groups_per_batch
        for finished in batch.finished:
            assert batch.step - finished.first <= limits.max_off_policy_steps
            assert finished.first <= finished.last <= batch.step
    trained = [episode for _, episodes in world.batches for episode in episodes]
    assert len({episode.rpartition(".")[0] for episode in trained}) == len(trained)  # no two attempts at one place
    return set(trained)


@settings(max_examples=40, deadline=None)
@given(
    limits_up_to(3, 3, 3, 20, 4),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([0.0, 0.6]),
    st.sampled_from([0.0, 0.1]),
)
def test_every_run_ends_with_all_steps_in_order_and_loses_and_doubles_nothing(limits, seed, failures, away, crashes):
    """Whatever the order of events, however many groups are turned away, with crashes at any of them: there is no
    deadlock, at random moments and after every restart the scheduler holds what the ledger says, and at the end the
    ledger, opened once more, says of every episode how it ended."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(limits, seed, Path(directory), failure_rate=failures, turned_away=away, crash_rate=crashes)
        trained = run(world)
        world.running.clear()
        world.scheduler.abandon()
        world.check()
        world.ledger.close()
        counts = Ledger(Path(directory) / "ledger.sqlite").counts()
        assert (counts.in_flight, counts.finished, counts.batched, counts.difference) == (0, 0, len(trained), 0)


class Recorded(Scheduler[Any]):
    """A scheduler that keeps its events."""

    def __init__(self, limits: Limits, **kwargs: Any) -> None:
        self.events: list[Event] = []
        super().__init__(limits, endless_tasks(), emit=self.events.append, **kwargs)

    @property
    def stale(self) -> int:
        return sum(isinstance(event, Dropped) and event.reason is Drop.STALE for event in self.events)


def start_all(scheduler: Recorded) -> list[Start]:
    return list(iter(scheduler.next_start, None))


def finish(scheduler: Recorded, *starts: Start | str, result: float = 1.0) -> None:
    """Finish episodes, on servers that are verified at once."""
    for start in starts:
        scheduler.finish(start if isinstance(start, str) else start.episode, result)
    scheduler.verify(scheduler.unverified())


def advance(scheduler: Recorded) -> Batch:
    """Commit a whole batch."""
    batch = scheduler.ready_batch()
    scheduler.advance(batch.committed(batch.episodes))
    return batch


def test_a_failed_episode_is_issued_again_in_its_place_under_a_new_name():
    """Work lost to a dead worker is issued again, up to max_attempts, then counted as lost."""
    scheduler = Recorded(Limits(2, 2, 0, 0, 10, 1, max_attempts=3))
    first, second = start_all(scheduler)
    for attempt in (1, 2):
        assert scheduler.fail(first.episode, Drop.ERRORED, retry=True)
        first = scheduler.next_start()
        assert first.key == (0, 0, attempt)
    assert not scheduler.fail(first.episode, Drop.ERRORED, retry=True)
    finish(scheduler, second)
    (group,) = scheduler.ready_batch().groups
    assert [slot.state for slot in group.slots.values()] == [State.FAILED, State.FINISHED]


def test_a_group_that_is_turned_away_makes_room_for_another():
    """Dynamic sampling: its episodes are dropped with the gate's word, once; the next batch is as full as any."""
    gated = []

    def gate(group):
        gated.append(group.number)
        return None if any(finished.result for finished in group.finished) else "zero_advantage"

    scheduler = Recorded(Limits(4, 2, 0, 0, 10, 1), gate=gate)
    for start in start_all(scheduler):
        finish(scheduler, start, result=float(start.group))
    assert scheduler.ready_batch() is None
    assert Discarded(0, Drop.FILTERED, "zero_advantage") in scheduler.events
    finish(scheduler, *start_all(scheduler))
    for _ in range(2):
        assert [group.number for group in scheduler.ready_batch().groups] == [1, 2]
    assert gated == [0, 1, 2]


def test_what_is_left_of_a_group_that_grew_stale_is_looked_at_again():
    """A group that was let through loses an episode to age: the gate says whether the rest can teach anything."""
    sizes = []

    def gate(group):
        sizes.append(len(group.finished))
        return None if len(group.finished) > 1 else "alone"

    scheduler = Recorded(Limits(2, 2, 2, 2, 10, 9), gate=gate)
    zero, one, two = ([scheduler.next_start().episode for _ in range(2)] for _ in range(3))
    for version in (1, 2):  # batches of later groups
        finish(scheduler, *two)
        advance(scheduler)
        scheduler.serve(version)
        two = [scheduler.next_start().episode for _ in range(2)] if version == 1 else []
    assert scheduler.fail(one.pop(), Drop.ERRORED, retry=True)
    finish(scheduler, *zero, *one, scheduler.next_start())  # the last one on version 2
    advance(scheduler)
    assert scheduler.stale == 1
    assert scheduler.ready_batch() is None
    assert sizes == [2, 2, 2, 2, 1]
    assert scheduler.held == 0


@pytest.mark.parametrize("update", [Scheduler.serve, Scheduler.announce])
def test_versions_span_from_the_start_to_the_end_of_an_episode(update):
    """An episode that lived through an update, or through the beginning of one, records both versions."""
    scheduler = Recorded(Limits(1, 1, 2, 2, 10, 10))
    start = scheduler.next_start()
    update(scheduler, 1)
    finish(scheduler, start)
    (finished,) = scheduler.ready_batch().finished
    assert (finished.first, finished.last) == (0, 1)
    scheduler.serve(1)
    with pytest.raises(ValueError, match="older"):
        scheduler.serve(0)


def test_what_an_incarnation_sampled_that_was_given_up_is_sampled_again_in_its_place():
    """The trainer went on from version 1 while 3 was served: finished and running episodes are dropped and tried again,
    on a version that the async level allows; nothing starts before the servers have gone back."""
    scheduler = Recorded(Limits(4, 2, 1, 8, 100, 10), step=3, version=3)
    starts = [scheduler.next_start() for _ in range(6)]
    finish(scheduler, *starts[:3])
    assert scheduler.begin_incarnation(1, {0: 0, 1: 1}) == starts[3:]
    assert scheduler.stale == 6
    assert scheduler.must_go_back
    assert scheduler.next_start() is None
    scheduler.go_back(1)
    assert scheduler.next_start() is None  # step 3 needs version 2
    scheduler.serve(2)
    again = scheduler.next_start()
    assert (again.episode, again.version) == ("0.0.1", 2)


def test_what_counts_in_the_new_incarnation_too_is_kept():
    """An incarnation that begins at the served version gives up nothing: what was sampled is of the same history."""
    scheduler = Recorded(Limits(4, 2, 1, 8, 100, 10), step=3, version=3)
    starts = [scheduler.next_start() for _ in range(4)]
    finish(scheduler, starts[0])
    assert scheduler.begin_incarnation(1, {0: 0, 1: 3}) == []
    assert (scheduler.must_go_back, scheduler.stale, scheduler.incarnation) == (False, 0, 1)
    scheduler.serve(4)
    finish(scheduler, starts[1])  # in flight over the change: its last version is of the new incarnation
    assert scheduler.begin_incarnation(2, {0: 0, 1: 3, 2: 3}) == starts[2:]
    assert scheduler.stale == 3


def test_a_server_that_fails_its_verification_takes_back_only_what_finished_since_the_last_one():
    """What was verified stays, the rest is sampled again on the same version; no batch or gate sees it before."""
    gated = []
    scheduler = Recorded(Limits(4, 2, 0, 8, 100, 10), gate=lambda group: gated.append(group.number))
    starts = start_all(scheduler)
    finish(scheduler, starts[0])
    scheduler.finish(starts[1].episode, 1.0)
    assert scheduler.invalidate("gone", scheduler.running_or_unverified()) == starts[2:]
    assert (scheduler.held, scheduler.stale) == (1, 3)
    again = start_all(scheduler)
    assert [start.episode for start in again] == ["0.1.1", "1.0.1", "1.1.1"]
    for start in again:
        scheduler.finish(start.episode, 1.0)
    scheduler.verify(["1.0.1", "1.1.1"])
    assert (scheduler.batch_ended, scheduler.ready_batch(), gated) == (True, None, [1])
    scheduler.verify(["0.1.1"])
    assert gated == [1, 0]
    advance(scheduler)
