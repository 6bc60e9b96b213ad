"""Parking in the estimate and in the choice: what a budget takes off the GPU, what it costs, and when it is worth that."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from prime_rl.config.trainer import TrainerModel
from prime_rl.trainer import memory
from prime_rl.trainer.activations import affordable, parking_layers
from prime_rl.trainer.memory import (
    GIB,
    HOST_LINK,
    POINTWISE,
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


def test_parking_that_saves_little_is_left_out(shapes: dict[str, Shape]) -> None:
    """4B and 16k tokens in 109 GiB: some milliseconds could be saved of six tenths of a second. Simple things stay simple."""
    shape, job = shapes["4B"], Job(16384)
    plain = chosen(shape, 109)
    options = list(memory._options(TrainerModel(), shape))
    parking = memory._fastest_parking(options, shape, job, 109 * GIB, 100 * GIB)
    assert parking is not None
    assert parking.parked
    assert 0 < added_seconds(shape, job, plain) - added_seconds(shape, job, parking) < 0.01 * batch_seconds(shape, job)
    assert not plain.parked
    assert plain == chosen(shape, 109, activation_offload=False)


def test_everything_is_parked_where_a_part_is_too_little(shapes: dict[str, Shape]) -> None:
    """4B and 64k tokens in 75 GiB: all that attention leaves goes out, which the link carries, rather than that attention is computed again."""
    shape, job = shapes["4B"], Job(65536)
    settings = chosen(shape, 75, 65536)
    assert settings.parked == math.inf
    assert "full" not in settings.levels
    check_fit(shape, job, settings, 75)
    fitting = [
        replace(everywhere(shape, "full"), reshard=True, parked=eighths / 8 * HOST_LINK * forward_seconds(shape, job))
        for eighths in range(1, 9)
    ]
    assert any(fits(shape, job, partly, 75) for partly in fitting)
    assert all(added_seconds(shape, job, settings) < 0.5 * added_seconds(shape, job, partly) for partly in fitting)


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


def test_backward_has_two_blocks_back(shapes: dict[str, Shape]) -> None:
    """The one that is used and the one that comes; and one of the largest may be late."""
    shape, job = shapes["4B"], Job(16384)
    settings = Settings(("wide",) * 30 + ("pointwise",) * 6, 4096, reshard=False, parked=math.inf)
    moments = estimate(shape, job, settings).moments
    wide, pointwise = (job.tokens * kept_bytes(shape, level) for level in ("wide", "pointwise"))  # type: ignore[arg-type]
    assert moments["backward of a block (wide)"]["activations"] == 2 * wide + pointwise
    assert moments["backward of a block (pointwise)"]["activations"] == 3 * pointwise


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


def test_eager_blocks_park_only_what_can_be_reached(shapes: dict[str, Shape]) -> None:
    """Not compiled, a block that computes again parks its input alone."""
    shape = shapes["4B"]
    for compiled, level, kept in ((True, "wide", None), (False, "none", None), (False, "wide", 2 * 2560)):
        job = Job(16384, compiled=compiled)
        settings = replace(everywhere(shape, level), parked=math.inf)
        per_token = kept or kept_bytes(shape, level, compiled=compiled)  # type: ignore[arg-type]
        assert parked_bytes(shape, job, settings) == 34 * 16384 * per_token


def test_exported_weights_take_their_share_of_the_link(shapes: dict[str, Shape]) -> None:
    """What leaves in a forward pass beside 8 GB of weights costs nothing up to what the link carries, and its time beyond in every second pass, which
    the weights leave in. Eight shards leave so little of them that every block may park all that the link carries beside it."""
    shape, settings = shapes["4B"], everywhere(shapes["4B"], "none")
    beside = HOST_LINK * forward_seconds(shape, Job(16384))
    left = 36 * beside - 2 * shape.parameters

    def added(parked: float, shards: int = 1) -> float:
        job, parking = Job(16384, shards=shards), replace(settings, parked=parked / parking_layers(36, 1.0))
        assert parking.parked <= beside
        contended = 2 * parked_bytes(shape, job, parking) / POINTWISE
        return added_seconds(shape, job, parking) - added_seconds(shape, job, settings) - contended

    assert added(0.99 * left) == pytest.approx(0, abs=1e-9)
    assert added(1.5 * left) == pytest.approx(0.5 * left / 2 / HOST_LINK)
    assert added(beside * parking_layers(36, 1.0), shards=8) == pytest.approx(0, abs=1e-9)


def test_idle_time_of_the_link_is_not_saved_up(shapes: dict[str, Shape]) -> None:
    """Blocks that park more than the link carries beside them cost the rest of its time, however little others park; backward has twice the time."""
    shape, job = shapes["4B"], Job(65536, shards=8)
    settings = Settings(("attention",) * 18 + ("wide",) * 18, 4096, reshard=False, parked=0.0)
    everything = replace(settings, parked=math.inf)
    beside, wide = forward_seconds(shape, job), job.tokens * kept_bytes(shape, "wide") / HOST_LINK
    assert beside < wide < 2 * beside
    assert parked_bytes(shape, job, everything) + 2 * shape.parameters / 8 < HOST_LINK * 36 * beside
    added = added_seconds(shape, job, everything) - added_seconds(shape, job, settings)
    contended = 2 * parked_bytes(shape, job, everything) / POINTWISE
    assert added - contended == pytest.approx(16 * (wide - beside))
