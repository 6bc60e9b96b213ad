"""From documents to micro-batches on the device: the plan, the micro-batches, the thread that prepares them.

Every rank computes the same plan (which sample goes to which rank and micro-step) from lengths alone, and reads only
its own rows.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.trainer.parallel import World, agree, sum_over_ranks
from prime_rl.trainer.router_replay import Chosen, Routers, lay_out
from prime_rl.trainer.step_tokens import StepTokens
from prime_rl.wait import LEAST_POLL_SECONDS, TaskThread

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

LONGEST = 4096  # tokens of a made-up rollout, unless told otherwise


@dataclass(frozen=True)
class Document:
    """T tokens that attend to each other only; `streams` [K, T] are inputs of the token loss. Token t contributes to
    the loss when `loss_mask[t]`, except the first, which is predicted from nothing."""

    input_ids: Ints
    loss_mask: npt.NDArray[np.bool_]
    temperature: float
    streams: Floats
    experts: Chosen | None = None  # of the first tokens, by the engine

    @classmethod
    def of(cls, input_ids: Ints, temperature: float = 1.0, streams: int = 1) -> Self:
        """A document of which every token but the first is scored, and none has a weight."""
        mask = np.ones(len(input_ids), dtype=np.bool_)
        return cls(input_ids, mask, temperature, np.zeros((streams, len(input_ids)), dtype=np.float32))


@dataclass(frozen=True)
class MicroBatch:
    """T packed tokens of D documents (padding is one, too), L loss tokens, K streams; on the host or on a device.
    `loss_index` are the positions whose hidden state predicts a loss token, `labels` those tokens."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarting in every document
    cu_seqlens: Tensor  # [D + 1] int32
    boundaries: npt.NDArray[np.int32]  # the same, always on the host
    max_seqlen: int
    tokens: int  # without padding
    loss_index: Tensor  # [L] int64
    labels: Tensor  # [L] int64
    inv_temperature: Tensor  # [L] float32
    streams: Tensor  # [K, L] float32
    experts: Tensor | None = None  # router replay: `router_replay.Chosen` [M, T, experts of each] int16
    token_stats: Tensor | None = None  # [2, L] float32: the forward writes log-probabilities and entropies into it

    def documents(self) -> tuple[Tensor, int]:
        """The document of each loss token, [L] int64, and their number D."""
        return torch.searchsorted(self.cu_seqlens.long(), self.loss_index, right=True) - 1, len(self.cu_seqlens) - 1

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {name: change(part) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **changed)


@dataclass(frozen=True)
class Costs:
    """What a document of n tokens costs: linear · n + quadratic · n² (arbitrary unit)."""

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, lengths: Sequence[int] | Ints) -> npt.NDArray[np.float64]:
        sizes = np.asarray(lengths, dtype=np.float64)
        return self.linear * sizes + self.quadratic * sizes**2


def plan(lengths: Sequence[int] | Ints, seq_len: int, ranks: int, costs: Costs | None = None) -> list[list[list[int]]]:
    """Assign every sample to one micro-batch of one rank: plan[rank][micro_step] = ascending indices into `lengths`, of
    at most `seq_len` tokens together; as many micro-steps on every rank, some possibly empty.

    Ranks work in lockstep, so the micro-batches of one micro-step must cost the same. Samples go longest first into the
    cheapest bin with room; bins are sorted by cost and dealt in runs of `ranks`. Raises UserError if a sample is longer
    than `seq_len`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and sizes.max() > seq_len:
        raise UserError(
            f"sample {int(sizes.argmax())} has {int(sizes.max())} tokens, more than the trainer's seq_len {seq_len}: "
            "give trainer and orchestrator the same seq_len"
        )
    prices = (costs or Costs()).of(sizes)
    count = max(1, -(-int(sizes.sum()) // seq_len))
    count = -(-count // ranks) * ranks
    while (bins := _fill(sizes, prices, count, seq_len)) is None:
        count += ranks
    bins.sort(key=lambda documents: (-prices[documents].sum(), documents))
    return [[bins[start + rank] for start in range(0, count, ranks)] for rank in range(ranks)]


def _fill(sizes: Ints, prices: npt.NDArray[np.float64], count: int, seq_len: int) -> list[list[int]] | None:
    """Longest-first into the cheapest of `count` bins with room; None when a sample finds none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [seq_len] * count
    cheapest = [(0.0, number) for number in range(count)]  # a heap of the bins that take another sample: price, number
    order = np.argsort(-prices, kind="stable")
    for index, size, price in zip(order.tolist(), sizes[order].tolist(), prices[order].tolist(), strict=True):
        passed = []
        while cheapest and room[cheapest[0][1]] < size:
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        load, chosen = heapq.heappop(cheapest)
        bins[chosen].append(index)
        room[chosen] -= size
        for entry in (*passed, (load + price, chosen)):
            heapq.heappush(cheapest, entry)
    return [sorted(documents) for documents in bins]


def collate(
    documents: Sequence[Document], streams: int, multiple_of: int = 1, routers: Routers | None = None
) -> MicroBatch:
    """Lay documents one after the other. T is padded to a multiple of `multiple_of` (at least 2) by one more document
    without loss tokens. No documents give a micro-batch of padding: a rank without work still joins every collective.
    `streams` is K, which an empty sequence cannot tell; `routers` are those of a model that replays the choice of
    experts."""
    total = sum(len(document.input_ids) for document in documents)
    padding = max(-total % multiple_of, 2 if total < 2 else 0)
    padding += -(total + padding) % multiple_of
    if padding:
        nothing = np.zeros(padding, dtype=np.int64), np.zeros(padding, dtype=np.bool_)
        documents = [*documents, Document(*nothing, 1.0, np.zeros((streams, padding), dtype=np.float32))]
    lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int64)
    stops = np.cumsum(lengths)
    starts = stops - lengths

    ids = np.concatenate([document.input_ids for document in documents])
    trained = np.concatenate([document.loss_mask for document in documents])
    trained[starts] = False
    labels = np.flatnonzero(trained)
    cooling = np.array([1.0 / document.temperature for document in documents], dtype=np.float32)
    columns = np.concatenate([document.streams for document in documents], axis=1)
    boundaries = np.append(0, stops).astype(np.int32)
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(np.arange(len(ids)) - np.repeat(starts, lengths)),
        cu_seqlens=torch.from_numpy(boundaries),
        boundaries=boundaries,
        max_seqlen=int(lengths.max()),
        tokens=total,
        loss_index=torch.from_numpy(labels - 1),
        labels=torch.from_numpy(ids[labels]),
        inv_temperature=torch.from_numpy(np.repeat(cooling, lengths)[labels]),
        streams=torch.from_numpy(np.ascontiguousarray(columns[:, labels])),
        experts=routers and torch.from_numpy(lay_out([document.experts for document in documents], lengths, routers)),
    )


def concatenate(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Lay micro-batches on one device one after the other, for a model's backbone: what a loss reads is left out."""
    sizes = np.cumsum([0, *(len(batch.input_ids) for batch in batches[:-1])])
    rows = list(zip(batches, sizes.tolist(), strict=True))
    none = batches[0].loss_index[:0]
    return MicroBatch(
        input_ids=torch.cat([batch.input_ids for batch in batches]),
        position_ids=torch.cat([batch.position_ids for batch in batches]),
        cu_seqlens=torch.cat([batches[0].cu_seqlens[:1], *(batch.cu_seqlens[1:] + start for batch, start in rows)]),
        boundaries=np.concatenate([[0], *(batch.boundaries[1:] + start for batch, start in rows)]).astype(np.int32),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        tokens=sum(batch.tokens for batch in batches),
        loss_index=none, labels=none, inv_temperature=none.float(), streams=none.float()[None],
    )  # fmt: skip


def rollout_lengths(draw: np.random.Generator, count: int, longest: int = LONGEST) -> list[int]:
    """Random lengths like those of rollouts: lognormal, median 600, sigma 0.9, from 16 (or `longest`) to `longest`."""
    return draw.lognormal(np.log(600), 0.9, count).astype(np.int64).clip(min(16, longest), longest).tolist()


def pads_to(device: torch.device) -> int:
    """Micro-batches are padded to a multiple of so many tokens: compiled CUDA kernels are fastest on whole tiles."""
    return 128 if device.type == "cuda" else 1


def pinned(batches: Sequence[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """The same batches, for a GPU in pinned memory, so that copies run beside everything else."""
    return [batch.map(Tensor.pin_memory) for batch in batches] if device.type == "cuda" else list(batches)


def to_device(batch: MicroBatch, device: torch.device, sampled: StepTokens | None = None) -> MicroBatch:
    """Bring a micro-batch to the device, the next one of those whose tokens `sampled` collects. From pinned memory
    nothing waits for the copies."""
    moved = batch.map(lambda tensor: tensor.to(device, non_blocking=True))
    return moved if sampled is None else replace(moved, token_stats=sampled.room(len(batch.labels), device))


@dataclass(frozen=True)
class StepData:
    """One step: this rank's micro-batches, and what is known of all ranks' samples."""

    batches: list[MicroBatch]
    lengths: list[int]  # tokens of each of all ranks' samples
    samples: int = 0  # or rows of a dataset, that the step takes from the source: a resumed run goes on after them
    metrics: dict[str, float] = field(default_factory=dict)  # for the step's row
    groups: list[Ints] = field(default_factory=list)  # by micro-batch: each document's in the step (`rl.data.grouped`)
    group_count: int = 0  # groups of the step, over all ranks
    sampled: StepTokens | None = None  # of rollouts: this rank's

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


# Called again and again while a source waits, with what it waits for, who owes it, and the time limit in seconds.
OnWait = Callable[[str, str, float], None]


class StepSource:
    """Gives step after step: a thread, which asks no other rank, prepares one step ahead of the last one read, for at
    most `seconds` once it is read. Every rank calls every method but `prepare` and `exists` with the same step."""

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.costs = world, Costs()
        self.routers: Routers | None = None  # of a model that replays the engine's choice; set before the first `read`
        self._thread = TaskThread("data", "the thread that prepares it", seconds, world.use_device)
        self._submitted: int | None = None  # the step that the thread is at
        self._requested = Event()
        self._closed = False

    def start(self, costs: Costs, samples: int) -> None:
        """Pack by `costs`, and go on after `samples` samples. Called before the first `read`."""
        self.costs = costs

    def arrived(self, step: int) -> bool:
        """Whether the step's data can be read: the same answer on every rank."""
        return True

    def wait(self, step: int, stop: Callable[[], bool], on_wait: OnWait) -> bool:
        """Wait until the step's data can be read. False if a rank was asked to stop."""
        return sum_over_ranks(self.world, [stop()])[0] == 0

    def prepared(self, step: int) -> bool:
        """Whether `read` returns, or raises, at once. Where there are several ranks they may differ."""
        self._submit(step)
        return self._thread.idle

    def read(self, step: int) -> StepData:
        """This rank's micro-batches of a step; the thread goes on to the next one. Raises UserError if, on any rank, it
        is malformed, does not fit the model, or takes too long to prepare."""
        return agree(self.world, lambda: self._take(step))

    def close(self) -> None:
        """Let the thread end when it has finished the step that it is at, if any."""
        self._closed = True
        self._requested.set()
        self._thread.close()

    def exists(self, step: int) -> bool:
        """Whether this rank sees the step's data. Until it does, the thread polls, at most until the step is read."""
        return True

    def prepare(self, step: int) -> StepData:
        """Make the step's data, in the thread. What it raises is raised where the step is read."""
        raise NotImplementedError

    def pack(
        self, lengths: list[int], seq_len: int, streams: int, documents: Callable[[list[int]], Iterable[Document]]
    ) -> tuple[list[list[int]], list[MicroBatch]]:
        """Plan micro-batches of at most `seq_len` tokens, and make this rank's, ready for the device. `documents` gives
        those of some samples, with K `streams`. Returns the samples in each micro-batch as well."""
        mine, device = plan(lengths, seq_len, self.world.size, self.costs)[self.world.rank], self.world.device
        wanted = [index for indices in mine for index in indices]
        made, pads = dict(zip(wanted, documents(wanted), strict=True)), pads_to(device)
        for index, document in made.items():
            if (tokens := len(document.input_ids)) != lengths[index]:
                raise UserError(f"sample {index} has {tokens} tokens, and its batch says {lengths[index]}")
        return mine, pinned([collate([made[i] for i in part], streams, pads, self.routers) for part in mine], device)

    def _take(self, step: int) -> StepData:
        self._submit(step)
        self._requested.set()
        data: StepData | None = self._thread.results()[-1]
        assert data is not None, "read after it was closed"
        self._submit(step + 1)
        return data

    def _submit(self, step: int) -> None:
        if self._submitted != step:
            self._requested.clear()
            self._submitted = step
            self._thread.submit(f"data of step {step}", lambda: self._work(step))

    def _work(self, step: int) -> StepData | None:
        while not self.exists(step):
            if self._requested.wait(LEAST_POLL_SECONDS):  # bounded: `read` or `close` requests it
                break
        return None if self._closed else self.prepare(step)
