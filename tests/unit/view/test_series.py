"""Curves of rows that fit a screen."""

import pytest

from prime_rl.view.run_files import curve

EVERYTHING = (-1e18, 1e18)


def test_more_steps_than_points() -> None:
    """Contract: no more points than asked for, and the one spike among many rows is still seen."""
    rows = {step: {"step": step, "a": 99.0 if step == 65_432 else 1.0} for step in range(100_000)}
    shown = curve(rows, "a", 500, *EVERYTHING)
    assert {len(column) for column in shown.values()} == {500}
    assert (max(shown["max"]), max(shown["value"])) == (99.0, pytest.approx(1 + 98 / 200))
    near = curve(rows, "a", 500, 65_400, 65_440)
    assert (near["step"][0], near["step"][-1], max(near["value"])) == (65_400, 65_440, 99.0)


def test_times_that_few_steps_have() -> None:
    """Contract: times of a step can be added up: they have the same points, and one that was not logged is 0."""
    rows = {step: {"time/step": 1.0, **({"time/save_ckpt": 3.0} if step % 100 == 0 else {})} for step in range(1000)}
    for points, mean in ((5000, 3.0), (10, 0.03)):
        every, few = (curve(rows, key, points, *EVERYTHING) for key in ("time/step", "time/save_ckpt"))
        assert every["step"] == few["step"]
        assert few["value"][0] == pytest.approx(mean)
