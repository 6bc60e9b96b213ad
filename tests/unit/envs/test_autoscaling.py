"""How many workers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.envs import pool
from prime_rl.envs.pool import worker_range, workers_wanted

counts = st.integers(0, 200)
sizes = st.integers(1, 64)


@given(sizes, st.booleans(), st.floats(0, 1), counts, sizes, st.integers(1, 4), st.integers(0, 64), st.integers(0, 32))
def test_the_number_that_a_load_calls_for(
    workers: int, starting: bool, use: float, episodes: int, slots: int, least: int, more: int, free: int
) -> None:
    """Within the bounds; as many as the episodes fill; beyond that only where the ready are busy, on idle cores, and once all are ready."""
    most = least + more
    wanted = workers_wanted(
        workers=workers, starting=int(starting), use=use * workers, episodes=episodes, slots=slots, least=least, most=most, free=free
    )  # fmt: skip
    assert least <= wanted <= most
    assert wanted == most or wanted * slots >= episodes
    if wanted > max(workers, math.ceil(episodes / slots), least):
        assert use > 0.6
        assert not starting
        assert wanted <= min(2 * workers, workers + free)
    if wanted < min(workers, most):
        assert not starting
        assert use * workers <= 0.6 * wanted + 1e-9


@given(st.floats(0.01, 40), st.integers(1, 64))
def test_it_settles(demand: float, cores: int) -> None:
    """A steady load gets, in a few rounds, as many workers as it keeps busy for 0.6 of the time, and keeps them; or all idle cores."""
    workers, seen = 1, []
    for _ in range(20):
        use = min(demand, workers)  # a worker is busy for all of the time at most
        free = cores - workers
        workers = workers_wanted(workers=workers, starting=0, use=use, episodes=1, slots=10**6, least=1, most=cores, free=free)  # fmt: skip
        seen.append(workers)
    assert set(seen[8:]) == {min(cores, math.ceil(demand / 0.6))}


@pytest.mark.parametrize(("cores", "environments", "least"), [(2, 1, 1), (8, 1, 2), (32, 1, 4), (32, 2, 2), (16, 9, 1)])
def test_settings(monkeypatch: pytest.MonkeyPatch, cores: int, environments: int, least: int) -> None:
    """A number is kept to; `auto` begins with one, or with some where there are cores for all environments, and never with more than it may have."""
    monkeypatch.setattr(pool, "cores", lambda: cores)
    assert worker_range(3, None) == (3, 3)
    assert worker_range("auto", None, environments) == (least, cores)
    assert worker_range("auto", 1, environments) == (1, 1)
