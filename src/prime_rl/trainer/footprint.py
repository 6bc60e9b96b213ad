"""What a training step takes: bytes on one GPU at each of its moments, and the time that saving some of them costs.

Formulas over the model's shape, checked against measured peaks on an H200 and against what blocks really keep
(`tests/unit/trainer/test_memory.py`). What is counted of activations is what compiled blocks keep.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from prime_rl.trainer.activations import LEVELS
from prime_rl.trainer.offload import parking_layers

if TYPE_CHECKING:
    from prime_rl.config.trainer import OptimConfig, Recompute

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
    return 8.0 if optim.state == "float32" else 2.0 + 2 * 4 / 256


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
