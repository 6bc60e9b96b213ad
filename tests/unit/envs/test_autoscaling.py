"""How many workers, and when one is replaced."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.envs import worker_pool
from prime_rl.envs.worker_pool import Bounds, Load, why_replace, worker_range, workers_wanted

counts = st.integers(0, 200)
sizes = st.integers(1, 64)


@given(sizes, counts, st.floats(0, 1), counts, sizes, st.integers(1, 4), st.integers(0, 64), st.integers(0, 32))
def test_the_number_that_a_load_calls_for(
    workers: int, starting: int, use: float, episodes: int, slots: int, least: int, more: int, free: int
) -> None:
    """Within the bounds; as many as the episodes fill; beyond that only where the ready are busy, on idle cores, and once all are ready."""
    starting = min(starting, workers)
    ready, bounds = workers - starting, Bounds(slots, least, least + more)
    wanted = workers_wanted(Load(workers, starting, use * ready, episodes), bounds, free)
    enough = math.ceil(episodes / slots)
    assert least <= wanted <= least + more
    assert wanted == bounds.most or wanted * slots >= episodes
    if wanted > max(workers, enough, least):
        assert use > 0.7
        assert starting == 0
        assert wanted <= min(2 * ready, workers + free)
    if wanted < min(workers, bounds.most):
        assert starting == 0
        assert use * ready <= 0.5 * wanted + 1e-9  # those that stay are at most half busy


@given(st.floats(0.01, 40), st.integers(1, 64))
def test_it_settles(demand: float, cores: int) -> None:
    """A steady load gets, in a few rounds, workers none of which is busy for more than 0.7 of the time, and keeps them; or all idle cores."""
    bounds, workers, history = Bounds(10**6, 1, cores), 1, []
    for _ in range(20):
        use = min(demand, workers)  # a worker is busy for all of the time at most
        free = cores - workers
        workers = workers_wanted(Load(workers, 0, use, 1), bounds, free)
        history.append(workers)
    assert demand / workers <= 0.7 or workers == cores
    assert workers == 1 or demand / workers > 0.34
    assert len(set(history[8:])) == 1


def test_by_hand() -> None:
    """A busy worker doubles, then waits for the start; slots need no idle core; a quarter of the load leaves half of the workers."""
    bounds = Bounds(100, 1, 16)
    assert workers_wanted(Load(1, 0, 1.0, 50), bounds, free=8) == 2
    assert workers_wanted(Load(1, 0, 1.0, 50), bounds, free=0) == 1
    assert workers_wanted(Load(2, 1, 1.0, 50), bounds, free=8) == 2
    assert workers_wanted(Load(4, 0, 4.0, 50), bounds, free=3) == 7
    assert workers_wanted(Load(1, 0, 0.1, 301), bounds, free=0) == 4
    assert workers_wanted(Load(4, 0, 1.0, 50), bounds, free=0) == 2
    assert workers_wanted(Load(3, 0, 0.0, 0), Bounds(100, 3, 3), free=9) == 3


@pytest.mark.parametrize(("cores", "environments", "least"), [(2, 1, 1), (8, 1, 2), (32, 1, 4), (32, 2, 2), (16, 9, 1)])
def test_settings(monkeypatch: pytest.MonkeyPatch, cores: int, environments: int, least: int) -> None:
    """A number is kept to; `auto` begins with one, or with some where there are cores for all environments, and never with more than it may have."""
    monkeypatch.setattr(worker_pool, "cores", lambda: cores)
    assert worker_range(3, None) == (3, 3)
    assert worker_range("auto", None, environments) == (least, cores)
    assert worker_range("auto", 1, environments) == (1, 1)


def test_replacement() -> None:
    """After so many episodes, beyond so much memory, and never where there is no limit."""
    assert why_replace(10**9, 1 << 50, None, None) is None
    assert why_replace(9, 0, 10, None) is None
    assert why_replace(10, 0, 10, None) == "has finished 10 episodes (recycle_episodes 10)"
    assert why_replace(0, 100 << 20, None, 100) is None
    assert why_replace(0, (100 << 20) + 1, None, 100) == "holds 100 MiB (recycle_mib 100)"
