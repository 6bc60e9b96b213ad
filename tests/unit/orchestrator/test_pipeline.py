"""Batches follow one another (DESIGN, "Pipeline"): the real scheduler in a simulated world, against its least step."""

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.scheduler import Limits, Scheduler
from support.pipeline import World, shortest_step, simulate
from support.scheduling import endless_tasks

NEAR = 1.1  # of the shortest step

# An engine of 20,000 tokens/s, at most 150 a request, batches of 128 x 128 tokens, training 0.3 s, a version 0.6 s.
LOCKED = World(1, 0.3, 0.6, batch=128, group=8)


def scaled(level: int, latency: float, train: float, sync: float, batch: int, group: int, gradual: bool) -> World:
    """A full engine samples a batch in 1 s; one request alone takes `latency` seconds."""
    return World(level, train, sync, batch, group, 128 / latency, 128.0 * batch, gradual)


worlds = st.builds(
    lambda groups, group, **options: scaled(batch=groups * group, group=group, **options),
    groups=st.sampled_from([1, 2, 5, 8]),
    group=st.sampled_from([1, 2, 4, 8]),
    level=st.integers(0, 4),
    latency=st.floats(0.02, 8.0),
    train=st.floats(0.01, 3.0),
    sync=st.floats(0.0, 3.0),
    gradual=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_a_step_takes_hardly_longer_than_it_must(world: World) -> None:
    """Contract: whether the engine is full or not, and whichever of generation, training and versions takes longest."""
    assert simulate(world).step(world.counted) <= NEAR * shortest_step(world)


def test_without_a_pace_batches_lock() -> None:
    """Without a pace two batches share the engine, end together, and the engine waits for the trainer."""
    assert simulate(LOCKED, paced=False).step(LOCKED.counted) > 1.25 * shortest_step(LOCKED)
    assert simulate(LOCKED).step(LOCKED.counted) <= 1.02 * shortest_step(LOCKED)


@pytest.mark.parametrize("world", [
    World(1, 1.7, 0.8, 256, 8, 45, 17_000, gradual=True, reply=512),  # two H100s, 256 rollouts of 512 tokens
    World(1, 0.4, 0.15, 128, 8, 110, 16_000, gradual=True),  # one H100 for both, 128 rollouts of 128
    World(1, 0.4, 0.15, 128, 8, 110, 14_000),
])  # fmt: skip
def test_steps_take_equally_long(world: World) -> None:
    """Contract: batches complete one by one, not two at a time: after the fifth no step takes 1.5 times the median."""
    course = simulate(world, steps=31)
    seconds = [later - earlier for earlier, later in itertools.pairwise(course.ends)][5:]
    assert max(seconds) <= 1.5 * statistics.median(seconds)


def test_only_what_comes_on_top_of_a_batch_is_paced() -> None:
    """Contract: with less than a batch in flight a group is opened at once; beyond, 0.9 of a step's time after the one
    a batch before it, and `opens_at` says when. A group that is open already is never held back."""
    core: Scheduler[None] = Scheduler(Limits(2, 2, 1, 8, 100), endless_tasks())

    def started(now: float) -> int:
        return len(list(iter(lambda: core.next_start(now), None)))

    def train() -> None:
        for episode in list(core._running)[:2]:
            core.finish(episode, None)
        core.verify(core.unverified())
        batch = core.ready_batch()
        core.advance(batch.committed(batch.episodes))

    assert (started(100.0), core.opens_at) == (4, None)
    train()
    train()
    core.serve(1)
    assert (started(110.0), core.opens_at) == (2, None)  # nothing else is in flight
    core.serve(2)
    assert (started(110.5), core.opens_at) == (0, 114.5)  # two batches were opened in 10 s
    core.fail("2.0.0", "errored", retry=True)
    assert started(111.0) == 1
    assert started(114.4) == 0
    assert started(114.5) == 2
