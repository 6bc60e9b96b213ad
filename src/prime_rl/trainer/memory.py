"""Plan a GPU's memory before the first step: the first of an ordered list of settings whose estimated peak fits.

The bytes of each moment of a training step are formulas over the model's shape, checked against measured peaks of an
H200 (`tests/unit/trainer/test_memory.py`). The list goes from the fastest settings to the leanest.
"""

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from loguru import logger
from transformers import PreTrainedModel

from prime_rl.errors import UserError, one_line
from prime_rl.host_memory import available_bytes, local_ranks
from prime_rl.trainer import moe, recurrent
from prime_rl.trainer.activations import LAG, LEVELS
from prime_rl.trainer.parallel import World, gather
from prime_rl.trainer.source import attention_heads

if TYPE_CHECKING:
    from prime_rl.config.trainer import OptimConfig, Recompute, TrainerModel

GIB = 1 << 30
# Rates of an H200 in a step: FLOP/s of matrix products and of attention forward, bytes/s of pointwise kernels and of
# the host link each way.
PRODUCTS, ATTENTION, POINTWISE, HOST_LINK = 650e12, 640e12, 3.5e12, 54e9
EARLY_OFFLOAD_SECONDS = 5e-3  # seconds of a layer's forward pass from which copies beside it cost less than `wide` does
# Bytes that libraries take beside torch's allocator (NCCL, kernels, workspaces). 1 GiB was too little for NCCL.
OUTSIDE = 3 * GIB
RESERVE = 0.03  # of the estimate: gaps between tensors, and the estimate's own error
LARGEST_CHUNK = 8192  # tokens; with 16,384 the head is no faster
UNPLANNED_CHUNK = 4096
REMEDIES = (
    "what takes less: --model.activation-checkpointing full, --model.reshard-after-forward true, "
    "--model.activation-offload true, --optim.offload true, fewer tokens a micro-batch (seq_len), more GPUs"
)
HOST_SHARE = 0.5  # most of the host's available memory that is offloaded to, unless that is asked for by name


@dataclass(frozen=True)
class Shape:
    """What of a model, perhaps on the meta device, memory and time depend on; widths in elements.

    `feed_forward` is the inner width of the feed-forward layer, for a mixture of experts of all that one token is sent
    to, and of those that tokens share; `chosen` is how many one token is sent to (dense: 1). `mixed` is what the
    projections of a recurrent layer give for a token, `mixed_floats` what else it keeps, in float32; every layer counts
    as such and as one with attention.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    query: int  # of all heads together
    key_value: int
    feed_forward: int
    vocabulary: int
    parameters: int
    root_parameters: int  # embedding, last norm and head: of no layer
    trained: int  # of the parameters; the others are kept in the compute type
    trained_root: int
    experts: int = 0
    chosen: int = 1
    mixed: int = 0
    mixed_floats: int = 0

    @classmethod
    def of(cls, lm: PreTrainedModel) -> "Shape":
        text = lm.config.get_text_config()
        heads, key_value_heads, size = attention_heads(lm.config)
        total = sum(parameter.numel() for parameter in lm.parameters())
        in_layers = sum(parameter.numel() for parameter in lm.model.layers.parameters())
        trained = sum(parameter.numel() for parameter in lm.parameters() if parameter.requires_grad)
        trained_layers = sum(each.numel() for each in lm.model.layers.parameters() if each.requires_grad)
        experts, chosen, feed_forward = 0, 1, getattr(text, "intermediate_size", 0)
        for block, router, routed in moe.moe_blocks(lm)[-1:]:
            experts, chosen = routed.num_experts, moe.experts_per_token(lm)
            every, own, apart = (sum(p.numel() for p in part.parameters()) for part in (block, routed, router))
            feed_forward = (chosen * routed.down_proj[0].numel() + (every - own - apart) // 3) // text.hidden_size
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            key_value_heads=key_value_heads,
            query=heads * size,
            key_value=key_value_heads * size,
            feed_forward=feed_forward,
            vocabulary=text.vocab_size,
            parameters=total,
            root_parameters=total - in_layers,
            trained=trained,
            trained_root=trained - trained_layers,
            experts=experts,
            chosen=chosen,
            mixed=max(map(recurrent.projected_width, lm.model.layers)),
            mixed_floats=max(map(recurrent.kept_floats, lm.model.layers)),
        )


@dataclass(frozen=True)
class Job:
    """What is trained with one shape."""

    tokens: int  # most of a micro-batch
    itemsize: int = 2  # bytes of a computed number
    shards: int = 1
    ranks: int = 1
    state_bytes: float = 8.0  # of the optimizer, per parameter on the device
    published_bytes: float = 0.0  # of published weights, per parameter on the device


@dataclass(frozen=True)
class Settings:
    """What memory is traded for time with."""

    levels: "tuple[Recompute, ...]"  # what each layer computes again in backward
    head_chunk: int  # tokens whose logits exist at the same time
    reshard: bool  # whether gathered parameters are freed between forward and backward
    offloaded: tuple[int, ...] = ()  # the layers whose kept tensors are offloaded to host memory

    def __str__(self) -> str:
        levels = ", ".join(f"{level} in {count} layers" for level, count in Counter(self.levels).items())
        weights = "weights freed after forward" if self.reshard else "weights stay gathered"
        offloaded = f", {len(self.offloaded)} layers offloaded" if self.offloaded else ""
        return f"recompute {levels}, head in chunks of {self.head_chunk} tokens, {weights}{offloaded}"


@dataclass(frozen=True)
class Estimate:
    """Bytes by moment of a step and part, and of host memory that offloading takes. `parts` and `total` are those of
    the moment that takes most; `needed` leaves room for gaps."""

    moments: dict[str, dict[str, int]]
    offloaded: int = 0

    @property
    def moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> dict[str, int]:
        return self.moments[self.moment]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def needed(self) -> float:
        return self.total * (1 + RESERVE)

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{self.moment}: {', '.join(f'{name} {_gib(size)}' for name, size in largest if size)}"


def state_bytes(optim: "OptimConfig", shape: Shape) -> float:
    """Bytes of optimizer state on the GPU per parameter. Offloaded states visit the GPU when activations are gone."""
    if optim.offload:
        return 0.0
    if optim.type == "muon":  # one running mean for the matrices of the layers, two for the rest
        return 4.0 + 4.0 * shape.root_parameters / shape.parameters
    return 8.0


def kept_bytes(shape: Shape, job: Job, level: "Recompute") -> int:
    """What one compiled block keeps of a micro-batch for its backward pass."""
    s, rank = shape, LEVELS.index(level)
    numbers, floats = s.hidden, 0  # of the compute type, float32
    if rank <= LEVELS.index("attention"):  # attention's output and log-sum-exp
        numbers, floats = numbers + s.query, floats + s.heads
    if rank <= LEVELS.index("wide"):  # queries, keys, values, output of attention's last product; the router's logits
        numbers, floats = numbers + s.query + 2 * s.key_value + s.hidden, floats + s.experts
        numbers += s.mixed
    if rank <= LEVELS.index("pointwise"):  # gate and up
        numbers += 2 * s.feed_forward
    if level == "none":
        # Inputs of the products: two norms' outputs (experts: one copy each), the activation, rotated queries and keys.
        numbers += s.hidden + s.chosen * s.hidden + s.feed_forward + s.query + s.key_value
        floats += s.heads + s.key_value_heads + 2 + (s.hidden if s.experts else 0)  # statistics; the router's input
        floats += s.mixed_floats
    return job.tokens * (numbers * job.itemsize + 4 * floats)


def estimate(shape: Shape, job: Job, settings: Settings) -> Estimate:
    """Bytes at the moments of a step at which they may peak, later than the first step's first micro-batch."""
    s, size, tokens = shape, job.itemsize, job.tokens
    frozen = s.parameters - s.trained
    held = {
        "fp32 weights": 4 * s.trained // job.shards,
        "frozen weights": size * frozen // job.shards,
        "gradients": 4 * s.trained // job.shards,
        "optimizer states": int(job.state_bytes * s.trained) // job.shards,
        "published weights": int(job.published_bytes * s.parameters) // job.shards,
        # Those that stay: weights that are freed come and go around their use. A single rank has frozen ones already.
        "gathered weights": 0 if settings.reshard else size * (s.trained if job.ranks == 1 else s.parameters),
    }
    hidden, weight = tokens * s.hidden * size, s.vocabulary * s.hidden if s.trained_root else 0
    kept = {level: kept_bytes(s, job, level) for level in set(settings.levels)}
    summed = 4 if job.ranks == 1 else 8  # float32, before and after; a single rank's are the same
    of_layer, trained = (s.parameters - s.root_parameters) // s.layers, (s.trained - s.trained_root) // s.layers

    def on_gpu(blocks: int) -> int:
        """What so many blocks keep on the GPU: the last ones are there, whether they are offloaded or not."""
        gone = (kept[settings.levels[i]] for i in settings.offloaded if i < blocks - 1 - LAG)
        return sum(kept[level] for level in settings.levels[:blocks]) - sum(gone)

    everything = on_gpu(s.layers)
    logits = min(settings.head_chunk, tokens) * s.vocabulary * size
    moments = {
        "the head": {
            "activations": everything,
            # the last block's output, the rows of its norm that are trained on and their gradient
            "head": 3 * hidden + logits + 4 * weight,
            "weights of embedding and head": size * s.root_parameters if settings.reshard else 0,
        },
        "the head's gradient": {"activations": everything, "head": 3 * hidden + (4 + size) * weight},
        "the reduction of embedding and head": {"reduction": (size + summed) * s.trained_root},
    }
    plain = kept_bytes(s, job, "none")
    done = 0
    for level, run in groupby(settings.levels):
        done += len(list(run))
        moments[f"backward of a block ({level})"] = {
            "activations": on_gpu(done),
            "head": size * weight,
            "block in backward": plain - kept[level] + 2 * hidden + 4 * tokens * s.query,  # dq is summed in float32
            "reduction": (size + summed) * trained,
            # this block's, those of the next one, and what they are gathered into
            "weights of blocks": 3 * size * of_layer if settings.reshard else 0,
        }
    offloaded = sum(kept[settings.levels[layer]] for layer in settings.offloaded)
    return Estimate({name: held | parts for name, parts in moments.items()}, offloaded)


def forward_seconds(shape: Shape, job: Job) -> float:
    """Return seconds of one layer, for documents of an eighth of the tokens each: shorter ones need less attention."""
    s, tokens = shape, job.tokens
    products = 2 * tokens * s.hidden * (2 * s.query + 2 * s.key_value + 3 * s.feed_forward) / PRODUCTS
    numbers = 4 * s.hidden + 2 * (s.query + s.key_value) + 3 * s.feed_forward + 2 * (s.chosen - 1) * s.hidden
    return products + tokens * numbers * job.itemsize / POINTWISE + s.query * tokens**2 / 4 / ATTENTION


@dataclass(frozen=True)
class MemoryPlan:
    """The settings and the estimate that they follow from; None where nothing is planned (on CPU, without `tokens`)."""

    settings: Settings
    estimated: Estimate | None = None


def plan_memory(
    config: "TrainerModel",
    lm: PreTrainedModel,
    world: World,
    *,
    itemsize: int,
    tokens: int | None,
    optim: "OptimConfig | None",
    published: Callable[[int], float] | None = None,
) -> MemoryPlan:
    """Settle what `config` leaves open, alike on all ranks, and log on rank 0 what was chosen and why.

    `lm` may be on the meta device; `itemsize` and `tokens` are those of `Job`. `published` gives the bytes per
    parameter of weights published from this GPU, of the number of parameters.
    """
    shape = Shape.of(lm)
    if world.device.type != "cuda" or tokens is None:
        fastest = next(_fastest_first(config, shape, Job(tokens=1)))
        return MemoryPlan(replace(fastest, head_chunk=config.head_chunk or UNPLANNED_CHUNK))
    device_states = 8.0 if optim is None else state_bytes(optim, shape)
    published_bytes = 0.0 if published is None else published(shape.parameters)
    job = Job(tokens, itemsize, world.shards, world.size, device_states, published_bytes)
    # What torch may take of this rank's GPU.
    free = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device) - OUTSIDE
    limit = free if config.memory_limit is None else config.memory_limit * GIB
    # Rank 0 may keep its copy of the weights in host memory, and copies a durable version once more to write it.
    left = max(available_bytes() - 2 * itemsize * shape.parameters, 0)
    local = [HOST_SHARE * left / local_ranks(), float(limit)]
    host, budget = (min(values) for values in zip(*gather(world, local), strict=True))
    settings, estimated = choose(config, shape, job, budget, host)
    if world.is_main:
        text = (
            f"memory: {_gib(estimated.needed)} of {_gib(budget)} GiB "
            f"({'free' if config.memory_limit is None else 'memory_limit'}) for {tokens:,} tokens a micro-batch; "
            f"{settings}; estimated peak, in {estimated}"
        )
        if settings.offloaded:
            text += f"; {_gib(estimated.offloaded)} GiB of activations offloaded to host memory"
        if estimated.needed <= budget:
            logger.info(text)
        else:
            logger.warning(f"{text}; too little, if the estimate holds: {REMEDIES}")
    return MemoryPlan(settings, estimated)


def choose(config: "TrainerModel", shape: Shape, job: Job, budget: float, host: float) -> tuple[Settings, Estimate]:
    """The first settings that fit, and what they take; the leanest when none does.

    Args:
        budget: Bytes that torch may take of the GPU.
        host: Bytes of host memory that may be offloaded to, for each rank, unless that is asked for by name.
    """
    for settings in _fastest_first(config, shape, job):
        estimated = estimate(shape, job, settings)
        if estimated.offloaded > host and not config.activation_offload:
            settings = replace(settings, offloaded=())
            estimated = estimate(shape, job, settings)
        if estimated.needed <= budget:
            break
    return settings, estimated


def _fastest_first(config: "TrainerModel", shape: Shape, job: Job) -> Iterator[Settings]:
    """Each of the settings takes less memory than the one before. What `config` names is the same in all of them."""
    seconds = forward_seconds(shape, job)
    carried = HOST_LINK * seconds  # bytes that leave while a layer computes
    early = carried if seconds >= EARLY_OFFLOAD_SECONDS else 0.0
    # Of what is left, each change frees the most bytes for the time it adds.
    changes: list[tuple[Recompute, Recompute, int, bool, float]] = [
        ("none", "pointwise", LARGEST_CHUNK, False, 0.0),
        ("pointwise", "pointwise", LARGEST_CHUNK, True, 0.0),
        ("pointwise", "wide", LARGEST_CHUNK // 2, True, early),
        ("wide", "attention", LARGEST_CHUNK // 2, True, early),
        ("attention", "full", LARGEST_CHUNK // 4, True, carried),
        ("full", "full", LARGEST_CHUNK // 16, True, carried),
        ("full", "full", LARGEST_CHUNK // 16, True, math.inf),
    ]
    if config.activation_offload is not None:
        changes = [(*change[:4], math.inf if config.activation_offload else 0.0) for change in changes]
    for faster, leaner, chunk, reshard, rate in changes:
        for count in range(shape.layers + 1):
            levels: tuple[Recompute, ...] = (leaner,) * count + (faster,) * (shape.layers - count)
            if config.activation_checkpointing != "auto":
                levels = (config.activation_checkpointing,) * shape.layers
            yield Settings(
                levels,
                config.head_chunk or chunk,
                reshard if config.reshard_after_forward is None else config.reshard_after_forward,
                _offloaded(shape, job, levels, rate),
            )


def _offloaded(shape: Shape, job: Job, levels: "tuple[Recompute, ...]", rate: float) -> tuple[int, ...]:
    """Return layers to offload, as many as leave at `rate` bytes a layer; not the last: backward comes too soon."""
    layers, credit = [], 0.0
    for layer, level in enumerate(levels[: -1 - LAG]):
        size = kept_bytes(shape, job, level)
        credit = min(credit, size) + rate
        if credit >= size:
            credit -= size
            layers.append(layer)
    return tuple(layers)


def use_expandable_segments() -> None:
    """Let the allocator grow its segments, so that micro-batches of ever new lengths leave few gaps. An allocator set
    up by the user is left alone."""
    if "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        return
    with warnings.catch_warnings():  # 2.13 gives this function another, equally private name
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


@contextmanager
def watched(plan: MemoryPlan) -> Iterator[None]:
    """Explain running out of the GPU's memory: raise UserError that says what took it, and what takes less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = f"the GPU is out of memory: {one_line(error)}"
        if plan.estimated is not None:
            text += (
                f"; a step's estimate is {_gib(plan.estimated.total)} GiB, most of it in {plan.estimated}; {REMEDIES}"
            )
        raise UserError(text) from error


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
