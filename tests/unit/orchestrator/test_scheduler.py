"""The scheduler's contracts, alone and with its ledger: in a random world, and by hand."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.ledger import Ledger
from prime_rl.orchestrator.scheduler import Drop, Limits, Scheduler, State
from support.scheduling import Counted, World


def advance(scheduler, batch):
    """Prove and commit a whole batch."""
    scheduler.verify(scheduler.unverified())
    scheduler.advance(batch.committed(batch.episodes))


def limits_up_to(group: int, groups: int, level: int, concurrent: int, steps: int) -> st.SearchStrategy[Limits]:
    return st.builds(
        lambda size, count, level, slack, concurrent, steps: Limits(size * count, size, level, level + slack, concurrent, steps),
        st.integers(1, group), st.integers(1, groups), st.integers(0, level), st.integers(0, level), st.integers(1, concurrent),
        st.integers(1, steps),
    )  # fmt: skip


def run(world: World) -> set[str]:
    """Run a world to its end. Returns the episodes that were trained: each once, none too old, in full batches of all steps in order."""
    world.run()
    limits, batches = world.limits, [batch for batch, _ in world.batches]
    assert [batch.step for batch in batches] == list(range(limits.max_steps))
    for batch in batches:
        numbers = [group.number for group in batch.groups]
        assert numbers == sorted(numbers)  # whatever finished first
        assert len(numbers) == limits.groups_per_batch
        for finished in (one for group in batch.groups for one in group.finished):
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
    """Whatever the order of events, and however many groups are turned away: no episode unaccounted for at any moment, no deadlock."""
    world = World(limits, seed, failure_rate, turned_away)
    trained, scheduler = run(world), world.scheduler
    scheduler.abandon()
    assert (scheduler.in_flight, scheduler.held) == (0, 0)
    assert (len(trained), scheduler.issued) == (scheduler.trained, scheduler.trained + scheduler.dropped.total())


@settings(max_examples=25, deadline=None)
@given(limits_up_to(3, 3, 2, 12, 4), st.integers(0, 2**32), st.sampled_from([0.0, 0.5]))
def test_crashes_at_any_event_lose_and_double_nothing(limits, seed, turned_away):
    """After every restart, and at random moments between, the scheduler holds what the ledger says, and the ledger is conserved; at the end the
    ledger, opened once more, says of every episode how it ended."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(limits, seed, 0.2, turned_away, Path(directory))
        trained = run(world)
        world.scheduler.abandon()
        world.check()
        world.ledger.trained_through(limits.max_steps)
        world.flush()
        world.ledger.close()
        found = Ledger(Path(directory) / "ledger.sqlite").counts()
        assert (found.in_flight, found.finished, found.batched) == (0, 0, 0)
        assert found.trained == len(trained)
        assert found.issued == found.trained + sum(found.dropped.values())


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
