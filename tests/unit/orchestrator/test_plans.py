"""What the configuration means."""

from pathlib import Path

import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.plans import limits, most_in_flight, seats


@pytest.mark.parametrize(("max_workers", "expected"), [(None, 2 * 8 + 4), (5, 5 * 8 + 4)])
def test_seats_count_the_workers_that_may_be(tmp_path: Path, max_workers: int | None, expected: int) -> None:
    """An environment that may grow gets the episodes that make it grow."""
    config = OrchestratorConfig(
        output_dir=tmp_path,
        environments=[
            {"id": "a", "workers": 2, "max_workers": max_workers, "max_concurrent": 8},
            {"id": "b", "workers": 1, "max_concurrent": 4},
        ],
        batch_size=1000, rollouts_per_example=10, async_level=1, max_concurrent=500,
    )  # fmt: skip
    assert seats(config) == most_in_flight(config) == limits(config).max_concurrent == expected
