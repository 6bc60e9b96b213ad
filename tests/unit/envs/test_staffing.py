"""How many workers, and when one is replaced."""

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.envs.staffing import Staff, to_start, why_replace

counts = st.integers(0, 200)
sizes = st.integers(1, 64)


@given(counts, counts, counts, sizes, st.integers(0, 64), sizes)
def test_growth(workers: int, starting: int, waiting: int, seats: int, more: int, at_once: int) -> None:
    """Never beyond the most, nor more at once than may start; none without need; and as many as the need is, where these allow."""
    starting = min(starting, workers)
    most = workers + more
    new = to_start(Staff(workers, starting, waiting), seats, most, at_once)
    assert 0 <= new <= more
    assert new == 0 or starting + new <= at_once
    room = (starting + new) * seats
    if new:
        assert room - seats < waiting  # without the last of them somebody would be left
    if workers + new < most and starting + new < at_once:
        assert waiting <= room


def test_growth_by_hand() -> None:
    """One that waits starts one; a hundred that wait for workers of thirty start four, but not those that are on their way."""
    assert to_start(Staff(1, 0, 1), 30, 8, 4) == 1
    assert to_start(Staff(1, 0, 100), 30, 8, 8) == 4
    assert to_start(Staff(4, 3, 100), 30, 8, 8) == 1
    assert to_start(Staff(1, 0, 100), 30, 3, 8) == 2
    assert to_start(Staff(1, 0, 100), 30, 8, 2) == 2
    assert to_start(Staff(1, 0, 0), 30, 8, 8) == 0


def test_replacement() -> None:
    """After so many episodes, beyond so much memory, and never where there is no limit."""
    assert why_replace(10**9, 1 << 50, None, None) is None
    assert why_replace(9, 0, 10, None) is None
    assert why_replace(10, 0, 10, None) == "has finished 10 episodes (recycle_episodes 10)"
    assert why_replace(0, 100 << 20, None, 100) is None
    assert why_replace(0, (100 << 20) + 1, None, 100) == "holds 100 MiB (recycle_mib 100)"
