"""Plan a GPU's memory before the first step: the fastest settings that fit; and say what to change when they did not.

The bytes of each moment of a training step, and the time that saving some of them costs, are formulas over the model's shape, checked against
measured peaks on an H200 and against what blocks really keep (`tests/unit/trainer/test_memory.py`). Compiled blocks are assumed.
"""

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
from torch import nn
from transformers import PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.trainer.activations import LEVELS, parking_layers
from prime_rl.trainer.parallel import World, gather

if TYPE_CHECKING:
    from prime_rl.config.trainer import OptimConfig, Recompute, TrainerModel


# Rates of an H200 inside a step (matrix products, attention forward, pointwise kernels, host link each way); on other GPUs their ratios hold roughly.
PRODUCTS, ATTENTION, POINTWISE, HOST_LINK = 650e12, 640e12, 3.5e12, 54e9
GATHER, GATHER_EXPOSED = 300e9, 0.25
"""Bytes per second of gathering weights over NVLink, and the share of that time for which computation does not make up (an assumption)."""
CHUNK_OVERHEAD = 1e-4
"""Seconds that each of the head's chunks takes to begin and end."""
EAGER_NONE = 1.6
"""What uncompiled blocks keep at `none`, relative to compiled ones: 1.55 – 1.59 counted on three Qwen3 shapes."""


@dataclass(frozen=True)
class Shape:
    """What of a model memory and time depend on; widths in elements.

    `feed_forward` is the inner width of the feed-forward layer, for a mixture of experts of all that one token is sent to; `chosen` is how many
    these are (dense: 1).
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    parameters: int
    root_parameters: int  # embedding, last norm and head: of no layer
    experts: int = 0
    chosen: int = 1
    root_is_read_once: bool = True

    @classmethod
    def of(cls, lm: PreTrainedModel) -> "Shape":
        """From a model, which may be on the meta device."""
        text = lm.config.get_text_config()
        heads, experts = text.num_attention_heads, getattr(text, "num_experts", None) or 0
        total = sum(parameter.numel() for parameter in lm.parameters())
        in_layers = sum(parameter.numel() for parameter in lm.model.layers.parameters())
        chosen = text.num_experts_per_tok if experts else 1
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            feed_forward=chosen * text.moe_intermediate_size if experts else text.intermediate_size,
            vocabulary=text.vocab_size,
            parameters=total,
            root_parameters=total - in_layers,
            experts=experts,
            chosen=chosen,
            root_is_read_once=_root_is_embedding_and_head(lm),
        )

    @property
    def query(self) -> int:
        return self.heads * self.head_size

    @property
    def key_value(self) -> int:
        return self.key_value_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        return (self.parameters - self.root_parameters) // self.layers

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden


def final_norm(lm: PreTrainedModel) -> list[nn.Module]:
    """The norm before the head, where it has the usual name."""
    return [module for name, module in lm.model.named_children() if name == "norm"]


def _root_is_embedding_and_head(lm: PreTrainedModel) -> bool:
    """Whether nothing but these two is outside of the layers and the final norm. An embedding's backward reads no weight, and the head forms its
    gradients in forward."""
    apart = [lm.model.layers, *final_norm(lm), lm.get_input_embeddings(), lm.lm_head]
    known = {id(parameter) for module in apart for parameter in module.parameters()}
    return all(id(parameter) in known for parameter in lm.parameters())


@dataclass(frozen=True)
class Job:
    """What is trained with one shape: tokens of a micro-batch, bytes of a computed number, GPUs, bytes of optimizer state on the GPU per parameter,
    and of weights that are published from there."""

    tokens: int
    itemsize: int = 2
    shards: int = 1
    ranks: int = 1
    state_bytes: float = 8.0
    compiled: bool = True
    published_bytes: float = 0.0


@dataclass(frozen=True)
class Settings:
    """What memory is traded for time with.

    Args:
        levels: What each layer computes again in backward.
        head_chunk: Tokens whose logits exist at the same time.
        reshard: Whether gathered parameters are freed between forward and backward.
        parked: Bytes of what a block keeps that are parked in host memory, on average at most (0: nothing, inf: everything).
    """

    levels: "tuple[Recompute, ...]"
    head_chunk: int
    reshard: bool
    parked: float


@dataclass(frozen=True)
class Estimate:
    """Bytes by moment of a step and part. `parts` and `total` are those of the moment that takes most."""

    moments: dict[str, dict[str, int]]

    @property
    def moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        return self.moments[self.moment]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def state_bytes(optim: "OptimConfig", shape: Shape) -> float:
    """Bytes of optimizer state on the GPU per parameter. States in host memory visit the GPU when activations are gone."""
    if optim.offload:
        return 0.0
    if optim.type == "sgd":
        return 4.0 if optim.momentum else 0.0
    if optim.type == "muon":  # one running mean for the matrices of the layers, two for the rest
        return 4.0 + 4.0 * shape.root_parameters / shape.parameters
    return 8.0


def kept_bytes(shape: Shape, level: "Recompute", itemsize: int = 2, compiled: bool = True) -> int:
    """What one block keeps of one token for its backward pass."""
    s = shape
    if level == "none" and not compiled:
        return int(EAGER_NONE * kept_bytes(shape, level, itemsize))
    numbers, floats = s.hidden, 0  # of the compute type, float32
    if level != "full":  # attention's output and log-sum-exp
        numbers, floats = numbers + s.query, floats + s.heads
    if level in (
        "none",
        "pointwise",
        "wide",
    ):  # queries, keys, values, output of attention's last product; the router's logits
        numbers, floats = numbers + s.query + 2 * s.key_value + s.hidden, floats + s.experts
    if level in ("none", "pointwise"):  # gate and up
        numbers += 2 * s.feed_forward
    if (
        level == "none"
    ):  # inputs of the products: two norms' outputs (experts: a copy for each), the activation, rotated queries and keys
        numbers += s.hidden + s.chosen * s.hidden + s.feed_forward + s.query + s.key_value
        floats += s.heads + s.key_value_heads + 2 + (s.hidden if s.experts else 0)  # statistics; the router's input
    return numbers * itemsize + 4 * floats


def estimate(shape: Shape, job: Job, settings: Settings) -> Estimate:
    """Bytes at the moments of a step at which they may peak, later than the first step's first micro-batch."""
    s, size, tokens = shape, job.itemsize, job.tokens
    root_stays = 0 if s.root_is_read_once else s.root_parameters
    held = {
        "fp32 weights": 4 * s.parameters // job.shards,
        "gradients": 4 * s.parameters // job.shards,
        "optimizer states": int(job.state_bytes * s.parameters) // job.shards,
        "published weights": int(job.published_bytes * s.parameters) // job.shards,
        # Those that stay: weights that are freed come and go around their use.
        "gathered weights": size * (root_stays if settings.reshard else s.parameters),
    }
    hidden, weight = tokens * s.hidden * size, s.head_parameters
    kept = {level: tokens * kept_bytes(s, level, size, job.compiled) for level in set(settings.levels)}
    parks, slack = _parks(s, job, settings), _slack(s, job, settings)
    summed = 4 if job.ranks == 1 else 8  # float32, before and after; a single rank's are the same

    def on_gpu(blocks: int) -> int:
        """What so many blocks keep, less what of it is away: that of the last one is used or about to leave, that of the one before comes."""
        away = sum(parks[: max(blocks - 2, 0)])
        return sum(kept[level] for level in settings.levels[:blocks]) - max(away - slack, 0)

    everything = on_gpu(s.layers)
    moments = {
        "the head": {
            "activations": everything,
            # the last block's output, the rows of its norm that are trained on and their gradient
            "head": 3 * hidden + min(settings.head_chunk, tokens) * s.vocabulary * size + 4 * weight,
            "weights of embedding and head": size * (s.root_parameters - root_stays) if settings.reshard else 0,
        },
        "the head's gradient": {"activations": everything, "head": 3 * hidden + (4 + size) * weight},
        "the reduction of embedding and head": {"reduction": (size + summed) * s.root_parameters},
    }
    plain = tokens * kept_bytes(s, "none", size, job.compiled)
    done = 0
    for level, run in groupby(settings.levels):
        done += len(list(run))
        moments[f"backward of a block ({level})"] = {
            "activations": on_gpu(done),
            "head": size * weight,
            "block in backward": plain
            - kept[level]
            + 2 * hidden
            + 4 * tokens * s.query,  # attention sums dq in float32
            "reduction": (size + summed) * s.layer_parameters,
            # this block's, those of the next one, and what they are gathered into
            "weights of blocks": 3 * size * s.layer_parameters if settings.reshard else 0,
        }
    return Estimate({name: held | parts for name, parts in moments.items()})


def _parks(shape: Shape, job: Job, settings: Settings) -> list[int]:
    """Bytes that each of the first layers parks, on average; the others nothing."""
    parkable = {level: _parkable(shape, job, level) for level in set(settings.levels)}
    parking = settings.levels[: parking_layers(shape.layers, settings.parked)]
    return [int(min(settings.parked, parkable[level])) for level in parking]


def _parkable(shape: Shape, job: Job, level: "Recompute") -> int:
    """What a block could park: where it is not compiled, what a checkpoint keeps inside of it cannot be reached."""
    if job.compiled or level == "none":
        return job.tokens * kept_bytes(shape, level, job.itemsize, job.compiled)
    return job.tokens * shape.hidden * job.itemsize


def _slack(shape: Shape, job: Job, settings: Settings) -> int:
    """Bytes that may be on the device though they count as parked: tensors go whole, so the widest may wait for credit, or a block is late."""
    s = shape
    widest = max(s.query, s.chosen * s.hidden, s.feed_forward * (2 if s.experts else 1))
    parking = settings.levels[: parking_layers(s.layers, settings.parked)]
    block = max((_parkable(s, job, level) for level in set(parking)), default=0)
    return int(min(block, max(settings.parked, job.tokens * widest * job.itemsize)))


def parked_bytes(shape: Shape, job: Job, settings: Settings) -> int:
    """What is in host memory meanwhile."""
    return sum(_parks(shape, job, settings))


def added_seconds(shape: Shape, job: Job, settings: Settings) -> float:
    """What `settings` add to a micro-batch, compared with keeping everything. The tokens are taken for one document, attention's dearest case."""
    s, size, tokens = shape, job.itemsize, job.tokens
    again = {level: _recompute_seconds(s, level, job) for level in set(settings.levels)}
    seconds = sum(again[level] for level in settings.levels)
    chunks = -(-tokens // settings.head_chunk)
    seconds += chunks * (
        CHUNK_OVERHEAD + 8 * s.head_parameters / POINTWISE
    )  # each reads and writes the weight's float32 gradient
    if settings.reshard:  # two more passes that cast and gather the layers' weights
        weights = s.parameters - s.root_parameters
        local, foreign = weights / job.shards, size * weights * (job.shards - 1) / job.shards
        seconds += 2 * ((4 + size) * local / POINTWISE + GATHER_EXPOSED * foreign / GATHER)
    return seconds + _parking_seconds(s, job, _parks(s, job, settings))


def _parking_seconds(shape: Shape, job: Job, parks: list[int]) -> float:
    """What the link cannot carry beside the computation; and both ways it takes memory bandwidth from that.

    In a step's first micro-batch the exported weights (of two bytes) leave as well: of two, which a step is taken to have, in every second one.
    """
    if not any(parks):
        return 0.0
    one = forward_seconds(shape, job)
    export, link, late = 2 * shape.parameters / job.shards / HOST_LINK, sum(parks) / HOST_LINK, _late(parks, one)
    out = (max(link + export - shape.layers * one, late) + late) / 2
    return out + _late(parks, 2 * one) + 2 * sum(parks) / POINTWISE


def _late(parks: list[int], seconds: float) -> float:
    """What the link needs beyond so many seconds a block. Time that it has left beside one block cannot be saved up for another."""
    return sum(max(parked / HOST_LINK - seconds, 0) for parked in parks)


def forward_seconds(shape: Shape, job: Job) -> float:
    """Of one layer, for documents of an eighth of the tokens each: attention takes the less time the shorter they are."""
    pointwise = job.tokens * _pointwise_numbers(shape) * job.itemsize / POINTWISE
    return products_seconds(shape, job.tokens) + pointwise + _attention_seconds(shape, job.tokens) / 8


def products_seconds(shape: Shape, tokens: int) -> float:
    """Of one layer's matrix products in forward, attention's apart."""
    s = shape
    return 2 * tokens * s.hidden * (2 * s.query + 2 * s.key_value + 3 * s.feed_forward) / PRODUCTS


def batch_seconds(shape: Shape, job: Job) -> float:
    """A micro-batch's products, forward and backward, with nothing computed again. Attention is left out: it depends on the documents' lengths."""
    head = 2 * job.tokens * shape.head_parameters / PRODUCTS
    return 3 * (shape.layers * products_seconds(shape, job.tokens) + head)


def least_seconds(shape: Shape, job: Job) -> float:
    """A micro-batch's time, forward and backward, with nothing computed again; documents are taken as short as `forward_seconds` does."""
    return 3 * (shape.layers * forward_seconds(shape, job) + 2 * job.tokens * shape.head_parameters / PRODUCTS)


def _recompute_seconds(shape: Shape, level: "Recompute", job: Job) -> float:
    s, rank = shape, LEVELS.index(level)
    products = numbers = 0
    if rank >= LEVELS.index("pointwise"):  # norms, rotary embedding, activation
        numbers = _pointwise_numbers(s)
    if rank >= LEVELS.index("wide"):
        products += 2 * s.feed_forward * s.hidden
    if rank >= LEVELS.index("attention"):
        products += 2 * (s.query + s.key_value) * s.hidden
    seconds = job.tokens * (2 * products / PRODUCTS + numbers * job.itemsize / POINTWISE)
    return seconds + _attention_seconds(s, job.tokens) if level == "full" else seconds


def _pointwise_numbers(shape: Shape) -> int:
    """Of one token in one layer, read and written between the products."""
    s = shape
    return 4 * s.hidden + 2 * (s.query + s.key_value) + 3 * s.feed_forward + 2 * (s.chosen - 1) * s.hidden


def _attention_seconds(shape: Shape, tokens: int) -> float:
    return 2 * shape.query * tokens**2 / ATTENTION


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
        published: Bytes per parameter of published weights on this GPU, for a model of so many parameters (`weight_publisher.published_bytes`).
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
        yield (config.activation_checkpointing,) * layers
    else:
        for faster, leaner in pairwise(LEVELS):
            for count in range(layers + (leaner == LEVELS[-1])):
                yield _mix(leaner, count, faster, layers)


def _mix(leaner: "Recompute", count: int, faster: "Recompute", layers: int) -> "tuple[Recompute, ...]":
    levels: list[Recompute] = [leaner] * count + [faster] * (layers - count)
    return tuple(levels)


def _unplanned(config: "TrainerModel", shape: Shape, world: World) -> Settings:
    level: Recompute = "none" if config.activation_checkpointing == "auto" else config.activation_checkpointing
    return Settings(
        levels=(level,) * shape.layers,
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
