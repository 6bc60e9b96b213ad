"""Parking in the estimate and in the choice: what a budget takes off the GPU, what it costs, and when it is worth that."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from prime_rl.trainer.activations import affordable, parking_layers
from prime_rl.trainer.memory import (
    GIB,
    HOST_LINK,
    Job,
    Settings,
    Shape,
    added_seconds,
    batch_seconds,
    estimate,
    forward_seconds,
    kept_bytes,
    parked_bytes,
)
from support import memory as sizes
from support.memory import check_fit, chosen, everywhere, fits

shapes = sizes.shapes


# Chosen and measured on an H200 (`benchmarks/results/trainer_h200.json`, suite `bars`): 4B, thousands of tokens, GiB; bytes parked of each layer and the
# levels; and what is chosen where parking is forbidden.
MEASURED = [
    (16, 80, 0.121e9, {"wide": 36}, {"attention": 11, "wide": 25}),
    (64, 136, 1.571e9, {"wide": 18, "pointwise": 18}, {"attention": 4, "wide": 32}),
]


@pytest.mark.parametrize(("thousands", "gib", "parked", "levels", "plainly"), MEASURED, ids=lambda value: str(value))
def test_a_part_is_parked_where_it_saves_time(
    thousands: int, gib: float, parked: float, levels: dict[str, int], plainly: dict[str, int], shapes: dict[str, Shape]
) -> None:
    """What the link carries beside the computation, in place of computing again; nothing with other words or without host memory."""
    shape, job = shapes["4B"], Job(thousands * 1024)
    settings, plain = (chosen(shape, gib, job.tokens, activation_offload=parks) for parks in (None, False))
    assert Counter(settings.levels) == levels
    assert settings.parked == pytest.approx(parked, rel=0.005)
    assert settings.parked <= HOST_LINK * forward_seconds(shape, job)
    check_fit(shape, job, settings, gib)
    assert Counter(plain.levels) == plainly
    assert not plain.parked
    check_fit(shape, job, plain, gib)
    saved = added_seconds(shape, job, plain) - added_seconds(shape, job, settings)
    assert saved > 0.01 * batch_seconds(shape, job)
    assert chosen(shape, gib, job.tokens, host=0) == plain
    half = parked_bytes(shape, job, settings) / 2
    assert parked_bytes(shape, job, chosen(shape, gib, job.tokens, host=half)) <= half


def test_host_memory_is_used_as_far_as_it_goes(shapes: dict[str, Shape]) -> None:
    """The more there is of it, the more is parked, and the less is computed again."""
    shape, job = shapes["4B"], Job(65536)
    choices = [chosen(shape, 136, 65536, host=gib * GIB) for gib in (15, 30, 45, 60)]
    parked = [parked_bytes(shape, job, settings) / GIB for settings in choices]
    assert all(size <= gib for size, gib in zip(parked, (15, 30, 45, 60), strict=True))
    assert parked == sorted(set(parked))
    seconds = [added_seconds(shape, job, settings) for settings in choices]
    assert seconds == sorted(seconds, reverse=True)


def test_parking_needs_host_memory(shapes: dict[str, Shape]) -> None:
    """What would be parked has to fit there; asked for by name it is done all the same."""
    shape, job = shapes["4B"], Job(65536)
    for host in (20 * GIB, 50 * GIB):
        settings = chosen(shape, 75, 65536, host=host)
        assert settings.parked == math.inf
        assert 0.9 * min(host, 30 * GIB) < parked_bytes(shape, job, settings) <= host
        assert fits(shape, job, settings, 75)
    assert not chosen(shape, 75, 65536, host=5 * GIB).parked
    assert chosen(shape, 75, 65536, host=0, activation_offload=True).parked == math.inf


def test_more_parked_takes_less_of_the_gpu_and_more_time(shapes: dict[str, Shape]) -> None:
    """For mixes of levels, up to everything: neither estimate jumps back, and all but a few blocks' worth can leave."""
    shape, job = shapes["4B"], Job(65536)
    for levels in (("none",) * 36, ("wide",) * 30 + ("pointwise",) * 6):
        plain = Settings(levels, 4096, reshard=False, parked=0.0)  # type: ignore[arg-type]
        parking = [
            replace(plain, parked=parked) for parked in (0, 1, *(tenths * 1e8 for tenths in range(1, 60)), math.inf)
        ]
        totals = [estimate(shape, job, settings).total for settings in parking]
        assert totals == sorted(totals, reverse=True)
        seconds = [added_seconds(shape, job, settings) for settings in parking]
        assert seconds == sorted(seconds)
        moments = [estimate(shape, job, settings).moments["the head"]["activations"] for settings in parking]
        away = [moments[0] - activations for activations in moments]
        assert all(gone <= parked_bytes(shape, job, settings) for gone, settings in zip(away, parking, strict=True))
        assert moments[-1] == 3 * job.tokens * kept_bytes(shape, levels[-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["none", "pointwise", "wide", "attention", "full"])
def test_what_a_budget_takes_off_the_gpu(level: str, shapes: dict[str, Shape]) -> None:
    """No more is on the GPU, and no more in host memory, than estimated, when whole tensors go out by their credit."""
    shape, job = shapes["4B"], Job(65536)
    widths = {"full": [2560], "attention": [2560, 4096, 64], "wide": [2560, 4096, 64, 4096, 1024, 1024, 2560]}
    widths["pointwise"] = widths["none"] = [*widths["wide"], 9728, 9728]
    if level == "none":
        widths["none"] = [*widths["none"], 2560, 2560, 9728, 4096, 1024, 64, 16, 2, 2]
    sizes = [2 * job.tokens * width for width in widths[level]]
    kept = job.tokens * kept_bytes(shape, level)  # type: ignore[arg-type]
    assert sum(sizes) == kept
    for budget in (tenths * 1e8 for tenths in range(1, 60)):
        settings = replace(everywhere(shape, level), parked=budget)
        credit, away = 0.0, 0
        for _ in range(parking_layers(36, budget)):
            going, credit = affordable(sizes, credit + min(budget, kept))
            away += sum(sizes[i] for i in going)
        assert 36 * kept - away <= estimate(shape, job, settings).moments["the head"]["activations"]
        assert away <= parked_bytes(shape, job, settings)
