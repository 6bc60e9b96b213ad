"""Parking in the estimate and in the choice: what a budget takes off the GPU, what it costs, and when it is worth that."""

import math
from dataclasses import replace

import pytest

from prime_rl.config.trainer import TrainerModel
from prime_rl.trainer import memory
from prime_rl.trainer.footprint import (
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
from prime_rl.trainer.memory import GIB
from prime_rl.trainer.offload import affordable, parking_layers
from support import memory as sizes
from support.memory import chosen, everywhere, fits

shapes = sizes.shapes


def test_a_part_is_parked_where_it_saves_time(shapes: dict[str, Shape]) -> None:
    """4B and 64k tokens: what the link carries beside the computation, in place of computing again; nothing with other words or without host memory."""
    shape, job = shapes["4B"], Job(65536)
    settings, plain = (chosen(shape, 136, 65536, activation_offload=parks) for parks in (None, False))
    assert 0 < settings.parked <= HOST_LINK * forward_seconds(shape, job)
    assert not plain.parked
    saved = added_seconds(shape, job, plain) - added_seconds(shape, job, settings)
    assert saved > 0.01 * batch_seconds(shape, job)
    assert fits(shape, job, settings, 136)
    assert chosen(shape, 136, 65536, host=0) == plain
    some = chosen(shape, 136, 65536, host=20 * GIB)
    assert 0 < parked_bytes(shape, job, some) <= 20 * GIB


def test_parking_that_saves_little_is_left_out(shapes: dict[str, Shape]) -> None:
    """With host memory for 5 GiB some milliseconds could be saved of three seconds: simple things stay simple."""
    shape, job = shapes["4B"], Job(65536)
    plain = chosen(shape, 136, 65536, host=5 * GIB)
    options = list(memory._options(TrainerModel(), shape))
    partly = memory._partly_parked(options, shape, job, 136 * GIB, 5 * GIB)
    assert partly is not None
    assert 0 < added_seconds(shape, job, plain) - added_seconds(shape, job, partly) < 0.01 * batch_seconds(shape, job)
    assert not plain.parked


def test_parking_needs_host_memory(shapes: dict[str, Shape]) -> None:
    """What would be parked has to fit there; asked for by name it is done all the same."""
    shape, job = shapes["4B"], Job(65536)
    settings = chosen(shape, 74.3, 65536, host=50 * GIB)
    assert settings.parked == math.inf
    assert parked_bytes(shape, job, settings) <= 50 * GIB
    assert not chosen(shape, 74.3, 65536, host=5 * GIB).parked
    assert chosen(shape, 74.3, 65536, host=0, activation_offload=True).parked == math.inf


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
    the weights leave in; shards leave less of them."""
    shape, settings = shapes["4B"], everywhere(shapes["4B"], "none")
    for shards in (1, 8):
        job = Job(16384, shards=shards)
        plain = added_seconds(shape, job, settings)
        carried = HOST_LINK * 36 * forward_seconds(shape, job) - 2 * shape.parameters / shards

        def added(share: float, job: Job = job, plain: float = plain, carried: float = carried) -> float:
            parking = replace(settings, parked=share * carried / parking_layers(36, 1.0))
            contended = 2 * parked_bytes(shape, job, parking) / POINTWISE
            return added_seconds(shape, job, parking) - plain - contended

        assert added(0.99) == pytest.approx(0, abs=1e-9)
        beyond = min(0.5 * carried, 2 * shape.parameters / shards)
        rest = 0.5 * carried - beyond  # does not go into a pass without weights either
        assert added(1.5) == pytest.approx((beyond / 2 + rest) / HOST_LINK)
