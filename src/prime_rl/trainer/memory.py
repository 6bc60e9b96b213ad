"""Which settings are the fastest that fit into a GPU's memory, decided before the first step; and what to do when they did not."""

import math
import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from loguru import logger
from transformers import PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.trainer.activations import LEVELS
from prime_rl.trainer.footprint import (
    HOST_LINK,
    Estimate,
    Job,
    Settings,
    Shape,
    added_seconds,
    batch_seconds,
    estimate,
    forward_seconds,
    least_seconds,
    parked_bytes,
    state_bytes,
)
from prime_rl.trainer.parallel import World, gather

if TYPE_CHECKING:
    from prime_rl.config.trainer import OptimConfig, Recompute, TrainerModel

GIB = 1 << 30
OUTSIDE = 3 * GIB
"""What libraries will take beside torch's allocator, once they are used: NCCL's buffers, kernels, workspaces. On an H200 1 GiB was too little: NCCL
found none left for its own."""
RESERVE = 0.03
"""Of the estimate: gaps between tensors, and the estimate's own error."""
HEAD_CHUNKS = (8192, 4096, 2048, 1024, 512)
"""Tokens; with 16,384 the head is no faster than with the first."""
UNPLANNED_CHUNK = 4096
HOST_SHARE = 0.5
"""Of the host's available memory, at most this much is taken for parking unless it is asked for by name."""
HOST_MOST = 0.9
"""And at most this much for everything that the trainer is known to need."""
WORTHWHILE = 0.01
"""Parking has to save this share of a micro-batch's time."""
LEAN = 0.05
"""Where a level is named, this share of a micro-batch's least time may go into saving memory by other means."""

_AGAIN = {
    "none": "nothing",
    "pointwise": "what is pointwise",
    "wide": "all but attention and the narrow products",
    "attention": "all but attention",
    "full": "everything",
}


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided and on what grounds. `job` and `budget` (bytes for torch) are None where nothing was planned: on CPU, or without `tokens`."""

    settings: Settings
    shape: Shape
    job: Job | None = None
    budget: float | None = None


def plan_memory(
    config: "TrainerModel",
    lm: PreTrainedModel,
    world: World,
    *,
    compiled: bool,
    itemsize: int,
    tokens: int | None,
    optim: "OptimConfig | None",
    published: Callable[[int], float] | None = None,
) -> MemoryPlan:
    """Settle what `config` leaves open, alike on all ranks, and say on rank 0 what was chosen and why.

    Args:
        lm: May be on the meta device.
        itemsize: Bytes of a computed number.
        tokens: Most tokens of a micro-batch.
        published: Bytes per parameter of published weights on this GPU, for a model of so many parameters (`rl.train.published_bytes`).
    """
    shape = Shape.of(lm)
    if world.device.type != "cuda" or tokens is None:
        return MemoryPlan(_unplanned(config, shape, world), shape)
    states = 8.0 if optim is None else state_bytes(optim, shape)
    job = Job(
        tokens,
        itemsize,
        world.shards,
        world.size,
        states,
        compiled,
        0.0 if published is None else published(shape.parameters),
    )
    host_bytes = _host_bytes(
        shape, job, 8.0 if optim is None else state_bytes(optim.model_copy(update={"offload": False}), shape)
    )
    host, budget = (min(values) for values in zip(*gather(world, [host_bytes, _budget(config, world)]), strict=True))
    settings = choose(config, shape, job, budget, host)
    plan = MemoryPlan(settings, shape, job, budget)
    if world.is_main:
        (logger.info if _fits(estimate(shape, job, settings), budget) else logger.warning)(describe(plan, config))
    return plan


def choose(config: "TrainerModel", shape: Shape, job: Job, budget: float, host: float) -> Settings:
    """The fastest settings that fit; the leanest when none does.

    Without a word of `config` about it, what blocks keep is parked in host memory, a part of it or all, where that is worthwhile or nothing else
    fits. Whoever names a level trades memory for time by hand, and gets what else saves memory as well, as long as it costs hardly any time.

    Args:
        budget: Bytes that torch may take of the GPU.
        host: Bytes of host memory there are for each rank.
    """
    options = list(_options(config, shape))
    best = _fastest(options, shape, job, budget)
    if config.activation_offload is None:
        parking = _fastest_parking(options, shape, job, budget, host)
        if parking is not None and (best is None or _is_worthwhile(parking, best, shape, job)):
            return parking
    if best is not None:
        return best if config.activation_checkpointing == "auto" else _leanest_beside(best, options, shape, job)
    if config.activation_offload is None:
        everything = (replace(settings, parked=math.inf) for settings in options)
        options += [settings for settings in everything if parked_bytes(shape, job, settings) <= host]
    return min(options, key=lambda s: estimate(shape, job, s).total)


def _fastest(options: list[Settings], shape: Shape, job: Job, budget: float) -> Settings | None:
    fitting = [settings for settings in options if _fits(estimate(shape, job, settings), budget)]
    return min(fitting, key=lambda s: (added_seconds(shape, job, s), estimate(shape, job, s).total), default=None)


def _leanest_beside(best: Settings, options: list[Settings], shape: Shape, job: Job) -> Settings:
    """The settings that take the least memory of those that are hardly slower than the best. Where ranks share the weights, what gathering them twice
    costs depends on what connects the ranks, which is not known."""
    most = added_seconds(shape, job, best) + LEAN * least_seconds(shape, job)
    alike = [settings for settings in options if job.shards == 1 or settings.reshard == best.reshard]
    return min(
        (settings for settings in alike if added_seconds(shape, job, settings) <= most),
        key=lambda s: (estimate(shape, job, s).total, added_seconds(shape, job, s)),
    )


def _fastest_parking(options: list[Settings], shape: Shape, job: Job, budget: float, host: float) -> Settings | None:
    """The fastest settings that fit because each block parks some of what the host link carries while it computes, or everything."""
    carried = HOST_LINK * forward_seconds(shape, job)
    budgets = [*(carried * eighths / 8 for eighths in range(1, 9)), math.inf]
    best, least = None, math.inf
    for seconds, plain in sorted(((added_seconds(shape, job, s), s) for s in options), key=lambda option: option[0]):
        if seconds >= least or _fits(estimate(shape, job, plain), budget):
            break  # parking makes nothing faster by itself
        parking = [replace(plain, parked=parked) for parked in budgets]
        # The more is parked, the less of the GPU and the more time is taken: the first that fits.
        first = bisect_left(parking, True, key=lambda s: _fits(estimate(shape, job, s), budget))
        for settings in parking[first : first + 1]:
            seconds = added_seconds(shape, job, settings)
            if seconds < least and parked_bytes(shape, job, settings) <= host:
                best, least = settings, seconds
    return best


def _is_worthwhile(parking: Settings, plain: Settings, shape: Shape, job: Job) -> bool:
    saved = added_seconds(shape, job, plain) - added_seconds(shape, job, parking)
    return saved >= WORTHWHILE * (batch_seconds(shape, job) + added_seconds(shape, job, parking))


def _options(config: "TrainerModel", shape: Shape) -> Iterator[Settings]:
    """All settings that `config` allows, as far as they park nothing by themselves."""
    chunks = HEAD_CHUNKS if config.head_chunk is None else [config.head_chunk]
    reshards = [False, True] if config.reshard_after_forward is None else [config.reshard_after_forward]
    for levels in _levels(config, shape.layers):
        for chunk in chunks:
            for reshard in reshards:
                yield Settings(levels, chunk, reshard, math.inf if config.activation_offload else 0.0)


def _levels(config: "TrainerModel", layers: int) -> "Iterator[tuple[Recompute, ...]]":
    """Mixes of two neighbouring levels, of which the first layers have the leaner one, where `config` does not say otherwise."""
    if config.activation_checkpointing != "auto":
        yield explicit_levels(config.activation_checkpointing, config.checkpointed_layers, layers)
    elif config.checkpointed_layers is not None:
        for level in LEVELS:
            yield explicit_levels(level, config.checkpointed_layers, layers)
    else:
        for faster, leaner in pairwise(LEVELS):
            for count in range(layers + (leaner == LEVELS[-1])):
                yield _mix(leaner, count, faster, layers)


def explicit_levels(level: "Recompute", count: int | None, layers: int) -> "tuple[Recompute, ...]":
    """`level` in the first `count` layers (None: in all), nothing computed again in the others."""
    return _mix(level, layers if count is None else min(count, layers), "none", layers)


def _mix(leaner: "Recompute", count: int, faster: "Recompute", layers: int) -> "tuple[Recompute, ...]":
    levels: list[Recompute] = [leaner] * count + [faster] * (layers - count)
    return tuple(levels)


def _unplanned(config: "TrainerModel", shape: Shape, world: World) -> Settings:
    level: Recompute = "none" if config.activation_checkpointing == "auto" else config.activation_checkpointing
    return Settings(
        levels=explicit_levels(level, config.checkpointed_layers, shape.layers),
        head_chunk=config.head_chunk or UNPLANNED_CHUNK,
        reshard=world.size > 1 if config.reshard_after_forward is None else config.reshard_after_forward,
        parked=math.inf if config.activation_offload else 0.0,
    )


def _fits(estimated: Estimate, budget: float) -> bool:
    return estimated.total * (1 + RESERVE) <= budget


def _budget(config: "TrainerModel", world: World) -> float:
    """Bytes of this rank's GPU that torch may take."""
    if config.memory_limit is not None:
        return config.memory_limit * GIB
    free, _ = torch.cuda.mem_get_info(world.device)
    return float(free + torch.cuda.memory_reserved(world.device) - OUTSIDE)


def _host_bytes(shape: Shape, job: Job, states: float) -> float:
    """Bytes of host memory that each rank of this host may park in: what the rank will need itself is left alone, the exported weights (of two bytes,
    twice), and the copy of weights and optimizer states (of so many bytes a parameter) from which a checkpoint is written beside the loop.
    """
    available = available_bytes() / local_ranks()
    offloaded = max(states - job.state_bytes, 0)
    needed = (2 * 2 + 4 + states + offloaded) * shape.parameters / job.shards
    return max(min(HOST_SHARE * available, HOST_MOST * available - needed), 0)


def use_expandable_segments() -> None:
    """Let the allocator grow its segments, so that micro-batches of ever new lengths leave few gaps. An allocator set up by the user is left alone."""
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return
    with warnings.catch_warnings():  # 2.13 gives this function another, equally private name
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def describe(plan: MemoryPlan, config: "TrainerModel") -> str:
    """What was chosen, what it takes, and what faster settings would need."""
    assert plan.job is not None
    assert plan.budget is not None
    shape, job, settings = plan.shape, plan.job, plan.settings
    estimated = estimate(shape, job, settings)
    fits = _fits(estimated, plan.budget)
    whose = "memory_limit" if config.memory_limit is not None else "free"
    text = [
        f"memory: {_gib(estimated.total * (1 + RESERVE))} of {_gib(plan.budget)} GiB ({whose}) for {job.tokens:,} tokens a micro-batch",
        f"backward computes again {_in_words(settings, shape, job)}",
        f"estimated peak, in {estimated.moment}: {listed(estimated.parts)}, reserve {_gib(estimated.total * RESERVE)} GiB",
    ]
    if not fits:
        text.append(f"too little, if the estimate holds; what would help most: {_remedies_listed(plan)}")
        return "; ".join(text)
    fastest = min(_options(config, shape), key=lambda s: added_seconds(shape, job, s))
    faster = added_seconds(shape, job, settings) - added_seconds(shape, job, fastest)
    if config.activation_checkpointing != "auto" and not settings.parked:
        text.append("as a level is named, memory is saved by other means as well where that costs hardly any time")
    if faster > 0:
        need = _gib(estimate(shape, job, fastest).total * (1 + RESERVE))
        text.append(
            f"the fastest way ({_in_words(fastest, shape, job)}) would need {need} GiB and save {faster * 1e3:.0f} ms"
        )
    return "; ".join(text)


def _in_words(settings: Settings, shape: Shape, job: Job) -> str:
    runs = [(level, len(list(run))) for level, run in groupby(settings.levels)]
    layers = ", ".join(
        _AGAIN[level] + (f" in {count} of {len(settings.levels)} layers" if len(runs) > 1 else "")
        for level, count in runs
    )
    parts = [layers, f"head in chunks of {min(settings.head_chunk, job.tokens)} tokens"]
    parts.append("weights freed after forward" if settings.reshard else "weights stay gathered")
    if settings.parked:
        parts.append(f"{_gib(parked_bytes(shape, job, settings))} GiB of activations parked in host memory")
    return ", ".join(parts)


def listed(parts: dict[str, int]) -> str:
    """The parts of an estimate and their GiB, the largest first."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in largest if size)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


# ---- out of memory


@dataclass(frozen=True)
class Figures:
    """Bytes: what torch has given to tensors now and at most, what it holds of the GPU, and the GPU's own account."""

    allocated: int
    peak: int
    reserved: int
    free: int
    total: int


@contextmanager
def watched(plan: MemoryPlan, device: torch.device) -> Iterator[None]:
    """Around what uses the GPU's memory.

    Raises:
        UserError: the memory did not suffice; says what took it, and what would help.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain_oom(error, plan, _figures(device)) from error


def _figures(device: torch.device) -> Figures:
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = (stats[f"{kind}_bytes.all.current"] for kind in ("allocated", "reserved"))
    return Figures(allocated, stats["allocated_bytes.all.peak"], reserved, *torch.cuda.mem_get_info(device))


def explain_oom(error: BaseException, plan: MemoryPlan, figures: Figures) -> UserError:
    """An out-of-memory error in words that help."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    others = max(figures.total - figures.free - figures.reserved, 0)
    text = [
        "the GPU is out of memory" + (f" ({asked[1]} more were asked for)" if asked else ""),
        f"tensors take {_gib(figures.allocated)} GiB (at most {_gib(figures.peak)}), torch holds {_gib(figures.reserved)} of "
        f"{_gib(figures.total)} GiB, {_gib(others)} are taken by others and by the driver",
    ]
    if plan.job is not None:
        estimated = estimate(plan.shape, plan.job, plan.settings)
        text.append(
            f"a step's estimate is {_gib(estimated.total)} GiB, most of it in {estimated.moment}: {listed(estimated.parts)}"
        )
        text.append(f"what would help most: {_remedies_listed(plan)}")
    return UserError("; ".join(text))


def remedies(plan: MemoryPlan) -> list[tuple[str, int]]:
    """Changes that free most of the GPU, and the bytes that each would free by the estimate; at most three, the best first."""
    assert plan.job is not None
    shape, job, settings = plan.shape, plan.job, plan.settings
    now = estimate(shape, job, settings).total

    def freed(job: Job = job, **changes: object) -> int:
        return now - estimate(shape, job, replace(settings, **changes)).total  # type: ignore[arg-type]

    def at(level: "Recompute") -> int:
        return freed(levels=(level,) * shape.layers)

    # The fastest level that frees about as much as the leanest one.
    level = next(level for level in LEVELS if at(level) >= 0.8 * at("full"))
    changes = [
        (f"--model.activation-checkpointing {level}", at(level)),
        ("--model.head-chunk 1024", freed(head_chunk=min(settings.head_chunk, 1024))),
        ("--model.reshard-after-forward true", freed(reshard=True)),
        ("--model.activation-offload true", freed(parked=math.inf)),
        ("--optim.offload true", freed(replace(job, state_bytes=0.0))),
        (f"half as many tokens a micro-batch (seq_len), {job.tokens // 2:,}", freed(replace(job, tokens=job.tokens // 2))),
        (f"{2 * job.ranks} GPUs", freed(replace(job, ranks=2 * job.ranks, shards=2 * job.shards))),
    ]  # fmt: skip
    return sorted((c for c in changes if c[1] > GIB // 100), key=lambda change: -change[1])[:3]


def _remedies_listed(plan: MemoryPlan) -> str:
    return ", ".join(f"{what} (-{_gib(size)} GiB)" for what, size in remedies(plan))
