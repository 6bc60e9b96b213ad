"""What the configuration means."""

from pathlib import Path

import pytest

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.plans import limits, most_in_flight, slots


@pytest.mark.parametrize(("workers", "max_workers", "expected"), [(2, None, 2 * 8 + 4), ("auto", 5, 5 * 8 + 4)])
def test_slots_count_the_workers_that_may_be(
    tmp_path: Path, workers: int | str, max_workers: int | None, expected: int
) -> None:
    """An environment that may grow gets the episodes that make it grow."""
    config = OrchestratorConfig(
        output_dir=tmp_path,
        environments=[
            {"id": "a", "workers": workers, "max_workers": max_workers, "max_concurrent": 8},
            {"id": "b", "workers": 1, "max_concurrent": 4},
        ],
        batch_size=1000, rollouts_per_example=10, async_level=1, max_concurrent=500,
    )  # fmt: skip
    assert slots(config) == most_in_flight(config) == limits(config).max_concurrent == expected
