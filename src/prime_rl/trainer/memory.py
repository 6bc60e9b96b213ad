"""Plan a GPU's memory before the first step: choose the fastest settings that fit, and say what to change if none does.

The bytes of each moment of a training step, and the time that saving some of them costs, are formulas over the model's
shape, checked against measured peaks on an H200 and against what blocks keep (`tests/unit/trainer/test_memory.py`).
"""

import math
import os
import re
import warnings
from bisect import bisect_left
from collections import Counter
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
from prime_rl.trainer.activations import LEVELS, offloading_layers
from prime_rl.trainer.parallel import World, gather
from prime_rl.trainer.source import attention_heads

if TYPE_CHECKING:
    from prime_rl.config.trainer import OptimConfig, Recompute, TrainerModel

GIB = 1 << 30
# Rates of an H200 inside a step: FLOP/s of matrix products and of attention forward, bytes/s of pointwise kernels and of
# the host link each way. On other GPUs their ratios hold roughly.
PRODUCTS, ATTENTION, POINTWISE, HOST_LINK = 650e12, 640e12, 3.5e12, 54e9
# Bytes/s of gathering weights over NVLink, and the fraction of that time not hidden by computation (an assumption).
GATHER, GATHER_EXPOSED = 300e9, 0.25
CHUNK_OVERHEAD = 1e-4  # seconds that each of the head's chunks takes to begin and end
EAGER_NONE = 1.6  # what uncompiled blocks keep at `none`, relative to compiled ones: 1.55 – 1.59 for three Qwen3 shapes
# Bytes that libraries take beside torch's allocator (NCCL's buffers, kernels, workspaces). 1 GiB was too little for NCCL.
OUTSIDE = 3 * GIB
RESERVE = 0.03  # of the estimate: gaps between tensors, and the estimate's own error
HEAD_CHUNKS = (8192, 4096, 2048, 1024, 512)  # tokens; with 16,384 the head is no faster than with the first
UNPLANNED_CHUNK = 4096
HOST_SHARE = 0.5  # most of the host's available memory that is offloaded to, unless that is asked for by name
HOST_MOST = 0.9  # most of it for everything that the trainer is known to need
WORTHWHILE = 0.01  # of a micro-batch's time: what offloading must save


# ---- the model, the work, the settings


@dataclass(frozen=True)
class Shape:
    """What of a model memory and time depend on; widths in elements.

    `feed_forward` is the inner width of the feed-forward layer, for a mixture of experts of all that one token is sent
    to; `chosen` is how many these are (dense: 1).
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
        heads, key_value_heads, head_size = attention_heads(lm.config)
        experts = getattr(text, "num_experts", None) or 0
        total = sum(parameter.numel() for parameter in lm.parameters())
        in_layers = sum(parameter.numel() for parameter in lm.model.layers.parameters())
        chosen = text.num_experts_per_tok if experts else 1
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            key_value_heads=key_value_heads,
            head_size=head_size,
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
    """Whether only these two are outside of the layers and the final norm: backward reads neither's weight, since an
    embedding's needs none and the head forms its gradients in forward."""
    apart = [lm.model.layers, *final_norm(lm), lm.get_input_embeddings(), lm.lm_head]
    known = {id(parameter) for module in apart for parameter in module.parameters()}
    return all(id(parameter) in known for parameter in lm.parameters())


@dataclass(frozen=True)
class Job:
    """What is trained with one shape.

    Args:
        tokens: Most tokens of a micro-batch.
        itemsize: Bytes of a computed number.
        state_bytes: Bytes of optimizer state per parameter on the device.
        published_bytes: Bytes of published weights per parameter on the device.
        logits: Copies of a chunk's logits that exist at a time.
    """

    tokens: int
    itemsize: int = 2
    shards: int = 1
    ranks: int = 1
    state_bytes: float = 8.0
    compiled: bool = True
    published_bytes: float = 0.0
    logits: int = 1


@dataclass(frozen=True)
class Settings:
    """What memory is traded for time with.

    Args:
        levels: What each layer computes again in backward.
        head_chunk: Tokens whose logits exist at the same time.
        reshard: Whether gathered parameters are freed between forward and backward.
        offloaded: Most bytes a block, on average, that are offloaded to host memory (0: nothing, inf: everything).
    """

    levels: "tuple[Recompute, ...]"
    head_chunk: int
    reshard: bool
    offloaded: float

    def __str__(self) -> str:
        levels = ", ".join(f"{level} in {count} layers" for level, count in Counter(self.levels).items())
        weights = "weights freed after forward" if self.reshard else "weights stay gathered"
        return f"recompute {levels}, head in chunks of {self.head_chunk} tokens, {weights}"


# ---- bytes


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
    """Bytes of optimizer state on the GPU per parameter. Offloaded states visit the GPU when activations are gone."""
    if optim.offload:
        return 0.0
    if optim.type == "sgd":
        return 4.0 if optim.momentum else 0.0
    if optim.type == "muon":  # one running mean for the matrices of the layers, two for the rest
        return 4.0 + 4.0 * shape.root_parameters / shape.parameters
    return 8.0


def kept_bytes(shape: Shape, level: "Recompute", itemsize: int = 2, compiled: bool = True) -> int:
    """What one block keeps of one token for its backward pass."""
    s, rank = shape, LEVELS.index(level)
    if level == "none" and not compiled:
        return int(EAGER_NONE * kept_bytes(shape, level, itemsize))
    numbers, floats = s.hidden, 0  # of the compute type, float32
    if rank <= LEVELS.index("attention"):  # attention's output and log-sum-exp
        numbers, floats = numbers + s.query, floats + s.heads
    if rank <= LEVELS.index("wide"):  # queries, keys, values, output of attention's last product; the router's logits
        numbers, floats = numbers + s.query + 2 * s.key_value + s.hidden, floats + s.experts
    if rank <= LEVELS.index("pointwise"):  # gate and up
        numbers += 2 * s.feed_forward
    if level == "none":
        # Inputs of the products: two norms' outputs (experts: a copy for each), the activation, rotated queries and keys.
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
    offloaded = _offloaded_layers(s, job, settings)
    # May still be on the device though counted as offloaded: tensors go whole, or a block is late.
    widest = tokens * size * max(s.query, s.chosen * s.hidden, s.feed_forward * (2 if s.experts else 1))
    block = max((_offloadable(s, job, level) for level in settings.levels[: len(offloaded)]), default=0)
    slack = int(min(block, max(settings.offloaded, widest)))
    summed = 4 if job.ranks == 1 else 8  # float32, before and after; a single rank's are the same

    def on_gpu(blocks: int) -> int:
        """What so many blocks keep, without what is offloaded: the last one's is about to leave, the one's before comes."""
        away = sum(offloaded[: max(blocks - 2, 0)])
        return sum(kept[level] for level in settings.levels[:blocks]) - max(away - slack, 0)

    everything = on_gpu(s.layers)
    logits = job.logits * min(settings.head_chunk, tokens) * s.vocabulary * size
    moments = {
        "the head": {
            "activations": everything,
            # the last block's output, the rows of its norm that are trained on and their gradient
            "head": 3 * hidden + logits + 4 * weight,
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
            "block in backward": plain - kept[level] + 2 * hidden + 4 * tokens * s.query,  # dq is summed in float32
            "reduction": (size + summed) * s.layer_parameters,
            # this block's, those of the next one, and what they are gathered into
            "weights of blocks": 3 * size * s.layer_parameters if settings.reshard else 0,
        }
    return Estimate({name: held | parts for name, parts in moments.items()})


def _offloaded_layers(shape: Shape, job: Job, settings: Settings) -> list[int]:
    """Bytes that each of the first layers offloads, on average; the others offload nothing."""
    first = settings.levels[: offloading_layers(shape.layers, settings.offloaded)]
    return [int(min(settings.offloaded, _offloadable(shape, job, level))) for level in first]


def _offloadable(shape: Shape, job: Job, level: "Recompute") -> int:
    """Bytes that a block can offload. Where it is not compiled, what a checkpoint keeps inside of it is out of reach:
    only the block's input leaves."""
    within_reach = level if job.compiled or level == "none" else "full"
    return job.tokens * kept_bytes(shape, within_reach, job.itemsize, job.compiled)


def offloaded_bytes(shape: Shape, job: Job, settings: Settings) -> int:
    """Bytes of host memory that offloading takes."""
    return sum(_offloaded_layers(shape, job, settings))


# ---- seconds


def added_seconds(shape: Shape, job: Job, settings: Settings) -> float:
    """What `settings` add to a micro-batch, compared with keeping everything. Its tokens count as one document, for
    which attention takes longest."""
    s, size, tokens = shape, job.itemsize, job.tokens
    recompute = {level: _recompute_seconds(s, level, job) for level in set(settings.levels)}
    seconds = sum(recompute[level] for level in settings.levels)
    # Each chunk of the head reads and writes its weight's float32 gradient.
    seconds += -(-tokens // settings.head_chunk) * (CHUNK_OVERHEAD + 8 * s.head_parameters / POINTWISE)
    if settings.reshard:  # two more passes that cast and gather the layers' weights
        weights = s.parameters - s.root_parameters
        local, foreign = weights / job.shards, size * weights * (job.shards - 1) / job.shards
        seconds += 2 * ((4 + size) * local / POINTWISE + GATHER_EXPOSED * foreign / GATHER)
    return seconds + _offload_seconds(s, job, _offloaded_layers(s, job, settings))


def _offload_seconds(shape: Shape, job: Job, offloaded: list[int]) -> float:
    """What the host link cannot carry beside the computation, and the memory bandwidth that it takes from that.

    In a step's first micro-batch the exported weights (two bytes each) leave as well; a step is taken to have two.
    """
    if not any(offloaded):
        return 0.0
    one = forward_seconds(shape, job)
    export, link = 2 * shape.parameters / job.shards / HOST_LINK, sum(offloaded) / HOST_LINK

    def late(seconds: float) -> float:
        """What the link needs beyond so many seconds a block: idle time beside one block does not help another."""
        return sum(max(size / HOST_LINK - seconds, 0) for size in offloaded)

    out = (max(link + export - shape.layers * one, late(one)) + late(one)) / 2
    return out + late(2 * one) + 2 * sum(offloaded) / POINTWISE


def forward_seconds(shape: Shape, job: Job) -> float:
    """Of one layer, for documents of an eighth of the tokens each: attention takes the less time the shorter they are."""
    pointwise = job.tokens * _pointwise_numbers(shape) * job.itemsize / POINTWISE
    return _products_seconds(shape, job.tokens) + pointwise + _attention_seconds(shape, job.tokens) / 8


def batch_seconds(shape: Shape, job: Job) -> float:
    """A micro-batch's matrix products, forward and backward, without attention, which depends on document lengths."""
    head = 2 * job.tokens * shape.head_parameters / PRODUCTS
    return 3 * (shape.layers * _products_seconds(shape, job.tokens) + head)


def _products_seconds(shape: Shape, tokens: int) -> float:
    s = shape
    return 2 * tokens * s.hidden * (2 * s.query + 2 * s.key_value + 3 * s.feed_forward) / PRODUCTS


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


# ---- the choice


@dataclass(frozen=True)
class MemoryPlan:
    """The settings and what they follow from. Where nothing is planned (on CPU, or without `tokens`), `job` and
    `budget` (bytes for torch) are None."""

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
    """Settle what `config` leaves open, alike on all ranks, and log on rank 0 what was chosen and why.

    Args:
        lm: May be on the meta device.
        itemsize: Bytes of a computed number.
        tokens: Most tokens of a micro-batch.
        published: Bytes per parameter of weights published from this GPU, given the number of parameters.
    """
    shape = Shape.of(lm)
    if world.device.type != "cuda" or tokens is None:
        return MemoryPlan(unplanned(config, shape, world), shape)
    device_states = total_states = 8.0
    if optim is not None:
        device_states = state_bytes(optim, shape)
        total_states = state_bytes(optim.model_copy(update={"offload": False}), shape)
    published_bytes = 0.0 if published is None else published(shape.parameters)
    job = Job(tokens, itemsize, world.shards, world.size, device_states, compiled, published_bytes)
    local = [_host_bytes(shape, job, total_states), _budget(config, world)]
    host, budget = (min(values) for values in zip(*gather(world, local), strict=True))
    plan = MemoryPlan(choose(config, shape, job, budget, host), shape, job, budget)
    if world.is_main:
        log = logger.info if _fits(estimate(shape, job, plan.settings), budget) else logger.warning
        log(describe(plan, config))
    return plan


def choose(config: "TrainerModel", shape: Shape, job: Job, budget: float, host: float) -> Settings:
    """The fastest settings that fit; the leanest when none does.

    Unless `config` says whether to offload, each block may offload eighths of what the host link carries while it
    computes, or everything: no more than makes the settings fit, and only where that saves time.

    Args:
        budget: Bytes that torch may take of the GPU.
        host: Bytes of host memory there are for each rank.
    """

    def cost(settings: Settings) -> float:
        seconds = added_seconds(shape, job, settings)
        unasked = settings.offloaded > 0 and config.activation_offload is None
        return seconds + (WORTHWHILE * (batch_seconds(shape, job) + seconds) if unasked else 0.0)

    def fits(settings: Settings) -> bool:
        return _fits(estimate(shape, job, settings), budget)

    def has_room(settings: Settings) -> bool:
        return offloaded_bytes(shape, job, settings) <= host

    carried = HOST_LINK * forward_seconds(shape, job)
    sizes = [] if config.activation_offload is not None else [*(carried * i / 8 for i in range(1, 9)), math.inf]
    options = sorted(_options(config, shape), key=cost)
    best, least = None, math.inf
    for plain in options:
        if cost(plain) >= least:
            break  # offloading makes nothing faster by itself
        # The more is offloaded, the less of the GPU and the more time is taken: the first that fits.
        variants = [plain, *(replace(plain, offloaded=size) for size in sizes)]
        first = bisect_left(variants, True, key=fits)
        for settings in variants[first : first + 1]:
            if cost(settings) < least and (settings is plain or has_room(settings)):
                best, least = settings, cost(settings)
    if best is not None:
        return best
    if sizes:
        everything = (replace(settings, offloaded=math.inf) for settings in options)
        options += [settings for settings in everything if has_room(settings)]
    return min(options, key=lambda settings: estimate(shape, job, settings).total)


def _options(config: "TrainerModel", shape: Shape) -> Iterator[Settings]:
    """All settings that `config` allows, as far as they offload nothing by themselves."""
    chunks = HEAD_CHUNKS if config.head_chunk is None else [config.head_chunk]
    reshards = [False, True] if config.reshard_after_forward is None else [config.reshard_after_forward]
    for levels in _levels(config, shape.layers):
        for chunk in chunks:
            for reshard in reshards:
                yield Settings(levels, chunk, reshard, math.inf if config.activation_offload else 0.0)


def _levels(config: "TrainerModel", layers: int) -> "Iterator[tuple[Recompute, ...]]":
    """The level that `config` names, or mixes of two neighbouring ones, the leaner of them in the first layers."""
    if config.activation_checkpointing != "auto":
        yield (config.activation_checkpointing,) * layers
        return
    for faster, leaner in pairwise(LEVELS):
        for count in range(layers + (leaner == LEVELS[-1])):
            yield (*[leaner] * count, *[faster] * (layers - count))


def unplanned(config: "TrainerModel", shape: Shape, world: World) -> Settings:
    """The settings where nothing is fitted to the memory."""
    level: Recompute = "none" if config.activation_checkpointing == "auto" else config.activation_checkpointing
    return Settings(
        levels=(level,) * shape.layers,
        head_chunk=config.head_chunk or UNPLANNED_CHUNK,
        reshard=world.size > 1 if config.reshard_after_forward is None else config.reshard_after_forward,
        offloaded=math.inf if config.activation_offload else 0.0,
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
    """Bytes of host memory that each rank of this host may offload to.

    Left alone is what the rank needs itself: the exported weights (of two bytes, twice), and the copy of weights and
    optimizer states (of so many bytes a parameter) from which a checkpoint is written beside the loop.
    """
    available = available_bytes() / local_ranks()
    offloaded_states = max(states - job.state_bytes, 0)
    needed = (2 * 2 + 4 + states + offloaded_states) * shape.parameters / job.shards
    return max(min(HOST_SHARE * available, HOST_MOST * available - needed), 0)


def use_expandable_segments() -> None:
    """Let the allocator grow its segments, so that micro-batches of ever new lengths leave few gaps.

    An allocator set up by the user is left alone.
    """
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return
    with warnings.catch_warnings():  # 2.13 gives this function another, equally private name
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


# ---- in words


def describe(plan: MemoryPlan, config: "TrainerModel") -> str:
    """What was chosen, and what it takes."""
    assert plan.job is not None
    assert plan.budget is not None
    shape, job, settings = plan.shape, plan.job, plan.settings
    estimated = estimate(shape, job, settings)
    limit = "memory_limit" if config.memory_limit is not None else "free"
    text = [
        f"memory: {_gib(estimated.total * (1 + RESERVE))} of {_gib(plan.budget)} GiB ({limit}) for {job.tokens:,} tokens "
        f"a micro-batch; {settings}",
        f"estimated peak, in {estimated.moment}: {listed(estimated.parts)}, reserve {_gib(estimated.total * RESERVE)} GiB",
    ]
    if settings.offloaded:
        text.append(f"{_gib(offloaded_bytes(shape, job, settings))} GiB of activations offloaded to host memory")
    if not _fits(estimated, plan.budget):
        text.append(f"too little, if the estimate holds; what would help most: {_remedies_listed(plan)}")
    return "; ".join(text)


def listed(parts: dict[str, int]) -> str:
    """The parts of an estimate and their GiB, the largest first."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in largest if size)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


# ---- out of memory


@contextmanager
def watched(plan: MemoryPlan, device: torch.device) -> Iterator[None]:
    """Explain running out of the GPU's memory: raise UserError that says what took it, and what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain_oom(error, plan, device) from error


def explain_oom(error: BaseException, plan: MemoryPlan, device: torch.device) -> UserError:
    """An out-of-memory error in words that help."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    stats, (free, total) = torch.cuda.memory_stats(device), torch.cuda.mem_get_info(device)
    allocated, reserved = (stats[f"{kind}_bytes.all.current"] for kind in ("allocated", "reserved"))
    text = [
        "the GPU is out of memory" + (f" ({asked[1]} more were asked for)" if asked else ""),
        f"tensors take {_gib(allocated)} GiB (at most {_gib(stats['allocated_bytes.all.peak'])}), torch holds "
        f"{_gib(reserved)} of {_gib(total)} GiB, {_gib(max(total - free - reserved, 0))} are taken by others and by "
        "the driver",
    ]
    if plan.job is not None:
        estimated = estimate(plan.shape, plan.job, plan.settings)
        size, parts = _gib(estimated.total), listed(estimated.parts)
        text.append(f"a step's estimate is {size} GiB, most of it in {estimated.moment}: {parts}")
        text.append(f"what would help most: {_remedies_listed(plan)}")
    return UserError("; ".join(text))


def _remedies_listed(plan: MemoryPlan) -> str:
    """The three changes that free most of the GPU, by the estimate, the best first."""
    assert plan.job is not None
    shape, job, settings = plan.shape, plan.job, plan.settings
    now = estimate(shape, job, settings).total

    def leaner(**changes: object) -> Settings:
        return replace(settings, **changes)  # type: ignore[arg-type]

    def freed(settings: Settings, job: Job = job) -> int:
        return now - estimate(shape, job, settings).total

    at = {level: freed(leaner(levels=(level,) * shape.layers)) for level in LEVELS}
    level = next(level for level in LEVELS if at[level] >= 0.8 * at["full"])  # the fastest that frees about as much
    fewer, more = replace(job, tokens=job.tokens // 2), replace(job, ranks=2 * job.ranks, shards=2 * job.shards)
    changes = [
        (f"--model.activation-checkpointing {level}", at[level]),
        ("--model.head-chunk 1024", freed(leaner(head_chunk=min(settings.head_chunk, 1024)))),
        ("--model.reshard-after-forward true", freed(leaner(reshard=True))),
        ("--model.activation-offload true", freed(leaner(offloaded=math.inf))),
        ("--optim.offload true", freed(settings, replace(job, state_bytes=0.0))),
        (f"half as many tokens a micro-batch (seq_len), {fewer.tokens:,}", freed(settings, fewer)),
        (f"{more.ranks} GPUs", freed(settings, more)),
    ]
    best = sorted((change for change in changes if change[1] > GIB // 100), key=lambda change: -change[1])[:3]
    return ", ".join(f"{what} (-{_gib(size)} GiB)" for what, size in best)
