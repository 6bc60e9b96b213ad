"""The scheduler's contracts, alone and with its ledger: in a random world, and by hand."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.ledger import Ledger
from prime_rl.orchestrator.scheduler import Batch, Drop, Limits, Scheduler, Start, State
from support.scheduling import Counted, World


def limits_up_to(group: int, groups: int, level: int, concurrent: int, steps: int) -> st.SearchStrategy[Limits]:
    return st.builds(
        lambda size, count, level, slack, concurrent, steps: Limits(
            size * count, size, level, level + slack, concurrent, steps
        ),
        *map(st.integers, (1, 1, 0, 0, 1, 1), (group, groups, level, level, concurrent, steps)),
    )


def run(world: World) -> set[str]:
    """Run a world to its end. Returns the episodes that were trained.

    Each once, none too old, in full batches of all steps in order.
    """
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


@settings(max_examples=200, deadline=None)
@given(
    limits_up_to(4, 4, 3, 40, 8), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.7])
)
def test_every_run_ends_with_all_steps_in_order_and_conserves_episodes(limits, seed, failure_rate, turned_away):
    """Whatever the order of events, and however many groups are turned away: no episode unaccounted for, no deadlock."""
    world = World(limits, seed, failure_rate, turned_away)
    trained, scheduler = run(world), world.scheduler
    scheduler.abandon()
    assert (scheduler.in_flight, scheduler.held) == (0, 0)
    assert (len(trained), scheduler.issued) == (scheduler.trained, scheduler.trained + scheduler.dropped.total())


@settings(max_examples=25, deadline=None)
@given(limits_up_to(3, 3, 2, 12, 4), st.integers(0, 2**32), st.sampled_from([0.0, 0.5]))
def test_crashes_at_any_event_lose_and_double_nothing(limits, seed, turned_away):
    """After every restart, and at random moments between, the scheduler holds what the ledger says, and the ledger is
    conserved; at the end the ledger, opened once more, says of every episode how it ended."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(limits, seed, 0.2, turned_away, Path(directory))
        trained = run(world)
        world.scheduler.abandon()
        world.check()
        world.flush()
        world.ledger.close()
        counts = Ledger(Path(directory) / "ledger.sqlite").counts()
        assert (counts.in_flight, counts.finished, counts.batched, counts.difference) == (0, 0, len(trained), 0)


# -- by hand -----------------------------------------------------------------------------------------------------------


def start_all(scheduler: Counted) -> list[Start]:
    return list(iter(scheduler.next_start, None))


def finish(scheduler: Counted, *starts: Start | str, result: float = 1.0) -> None:
    for start in starts:
        scheduler.finish(start if isinstance(start, str) else start.episode, result)


def advance(scheduler: Counted) -> Batch:
    """Verify and commit a whole batch."""
    batch = scheduler.ready_batch()
    scheduler.verify(scheduler.unverified())
    scheduler.advance(batch.committed(batch.episodes))
    scheduler.check_conservation()
    return batch


def test_a_failed_episode_is_issued_again_in_its_place_under_a_new_name():
    """Work lost to a dead worker is issued again, up to max_attempts, then counted as lost."""
    scheduler = Counted(Limits(2, 2, 0, 0, 10, 1, max_attempts=3))
    first, second = start_all(scheduler)
    for attempt in (1, 2):
        assert scheduler.fail(first.episode, Drop.ERRORED, retry=True)
        first = scheduler.next_start()
        assert first.key == (0, 0, attempt)
    assert not scheduler.fail(first.episode, Drop.ERRORED, retry=True)
    finish(scheduler, second)
    (group,) = scheduler.ready_batch().groups
    assert [slot.state for slot in group.slots.values()] == [State.FAILED, State.FINISHED]
    scheduler.check_conservation()


def test_a_group_that_is_turned_away_makes_room_for_another():
    """Dynamic sampling: its episodes are dropped as filtered, with the gate's word, and the next batch is as full as any;
    the gate looks once."""
    gated = []

    def gate(group):
        gated.append(group.number)
        return None if any(finished.result for finished in group.finished) else "zero_advantage"

    scheduler = Counted(Limits(4, 2, 0, 0, 10, 1), gate=gate)
    for start in start_all(scheduler):
        finish(scheduler, start, result=float(start.group))
    assert scheduler.ready_batch() is None
    assert scheduler.dropped == {Drop.FILTERED: 2}
    assert scheduler.discards == [(0, "filtered", "zero_advantage")]
    scheduler.check_conservation()
    finish(scheduler, *start_all(scheduler))
    for _ in range(2):
        assert [group.number for group in scheduler.ready_batch().groups] == [1, 2]
    assert gated == [0, 1, 2]


def test_what_is_left_of_a_group_that_grew_stale_is_looked_at_again():
    """A group that was let through loses an episode to age: whether the rest can teach anything is the gate's to say."""
    sizes = []

    def gate(group):
        sizes.append(len(group.finished))
        return None if len(group.finished) > 1 else "alone"

    scheduler = Counted(Limits(2, 2, 2, 2, 10, 9), gate=gate)
    zero, one, two = ([scheduler.next_start().episode for _ in range(2)] for _ in range(3))
    for version in (1, 2):  # batches of later groups
        finish(scheduler, *two)
        advance(scheduler)
        scheduler.serve(version)
        two = [scheduler.next_start().episode for _ in range(2)] if version == 1 else []
    assert scheduler.fail(one.pop(), Drop.ERRORED, retry=True)
    finish(scheduler, *zero, *one, scheduler.next_start())  # the last one on version 2
    advance(scheduler)
    assert scheduler.dropped[Drop.STALE] == 1
    assert scheduler.ready_batch() is None
    assert sizes == [2, 2, 2, 2, 1]
    assert scheduler.held == 0
    scheduler.check_conservation()


@pytest.mark.parametrize("update", [Scheduler.serve, Scheduler.announce])
def test_versions_span_from_the_start_to_the_end_of_an_episode(update):
    """An episode that lived through an update, or through the beginning of one, records both versions."""
    scheduler = Counted(Limits(1, 1, 2, 2, 10, 10))
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
    scheduler = Counted(Limits(4, 2, 1, 8, 100, 10), step=3, version=3)
    starts = [scheduler.next_start() for _ in range(6)]
    finish(scheduler, *starts[:3])
    assert scheduler.begin_incarnation(1, {0: 0, 1: 1}) == starts[3:]
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
    """An incarnation that begins at the served version gives up nothing: what was sampled is of the same history."""
    scheduler = Counted(Limits(4, 2, 1, 8, 100, 10), step=3, version=3)
    starts = [scheduler.next_start() for _ in range(4)]
    finish(scheduler, starts[0])
    assert scheduler.begin_incarnation(1, {0: 0, 1: 3}) == []
    assert (scheduler.must_go_back, scheduler.dropped.total(), scheduler.incarnation) == (False, 0, 1)
    scheduler.serve(4)
    finish(scheduler, starts[1])  # in flight over the change: its last version is of the new incarnation
    assert scheduler.begin_incarnation(2, {0: 0, 1: 3, 2: 3}) == starts[2:]
    assert scheduler.dropped[Drop.STALE] == 3
    scheduler.check_conservation()


def test_a_server_that_fails_its_verification_takes_back_only_what_finished_since_the_last_one():
    """What was verified before stays, the rest is sampled again on the same version; what is not verified is in no batch."""
    scheduler = Counted(Limits(4, 2, 0, 8, 100, 10))
    starts = start_all(scheduler)
    finish(scheduler, starts[0])
    scheduler.verify(scheduler.unverified())
    finish(scheduler, starts[1])
    assert scheduler.invalidate("gone", scheduler.running_or_unverified()) == starts[2:]
    assert (scheduler.open[0], scheduler.dropped[Drop.STALE]) == ({"0.0.0"}, 3)
    again = start_all(scheduler)
    assert [start.episode for start in again] == ["0.1.1", "1.0.1", "1.1.1"]
    finish(scheduler, *again)
    scheduler.verify(["1.0.1", "1.1.1"])
    batch = scheduler.ready_batch()
    with pytest.raises(ValueError, match=r"the server that sampled 0\.1\.1 is not verified"):
        scheduler.advance(batch.committed(batch.episodes))
    advance(scheduler)


def test_a_run_that_ends_for_good_leaves_nothing_open():
    """Episodes in flight, finished and to be started again are dropped, with the reason that the run ended."""
    scheduler = Counted(Limits(4, 2, 1, 8, 3, 10))
    starts = start_all(scheduler)
    finish(scheduler, starts[0])
    assert scheduler.abandon() == starts[1:]
    assert scheduler.dropped[Drop.CANCELLED] == scheduler.issued == 3
    assert scheduler.discards == [(number, "cancelled", "the run ended") for number in (0, 1)]
    assert (scheduler.held, scheduler.in_flight) == (0, 0)
