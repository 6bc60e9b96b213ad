"""Packing documents into micro-batches: which sample goes to which rank and micro-step, and the two flat buffers of one micro-batch.

Every rank computes the same plan from the lengths alone, and reads only its own rows.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.errors import UserError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

LONGEST = 4096  # tokens of a made-up rollout, unless told otherwise


@dataclass(frozen=True)
class Document:
    """T tokens that attend to each other only. Token t contributes to the loss when `loss_mask[t]`, predicted from the tokens before it;
    the first token is predicted from nothing and never contributes. `streams` [K, T] are inputs of the token loss."""

    input_ids: Ints
    loss_mask: npt.NDArray[np.bool_]
    temperature: float
    streams: Floats


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch on the host: T packed tokens of D documents (padding is one, too), L loss tokens, K streams.

    It lies in two buffers, so that two copies bring it to a GPU; `batch.to_device` makes the views of them.

    Args:
        ints: int64: input ids [T], position ids [T], loss index [L], labels [L], cu_seqlens [D + 1].
        floats: float32: inverse temperatures [L], streams [K, L].
        sizes: T, L, D and K.
        max_seqlen: Tokens of the longest document.
        lengths: [documents], without padding.
    """

    ints: Tensor
    floats: Tensor
    sizes: tuple[int, int, int, int]
    max_seqlen: int
    lengths: Ints

    @property
    def int_counts(self) -> list[int]:
        tokens, loss_tokens, documents, _ = self.sizes
        return [tokens, tokens, loss_tokens, loss_tokens, documents + 1]

    @property
    def float_counts(self) -> list[int]:
        return [self.sizes[1], self.sizes[3] * self.sizes[1]]

    @property
    def streams(self) -> Floats:
        """[K, L], a view: what is written to it is written to the batch."""
        return parts(self.floats, self.float_counts)[1].view(self.sizes[3], self.sizes[1]).numpy()

    def documents(self) -> Ints:
        """[L]: the document of each loss token."""
        _, _, loss_index, _, ends = parts(self.ints, self.int_counts)
        return np.searchsorted(ends.numpy(), loss_index.numpy(), side="right") - 1


def parts(buffer: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of a flat buffer that holds parts of so many elements."""
    return [buffer[start : start + count] for start, count in zip(_starts(counts), counts, strict=False)]


def _starts(counts: Sequence[int]) -> list[int]:
    """Where each part begins, at multiples of 32 elements (kernels are compiled for aligned addresses); the last number is the buffer's length."""
    return [0, *accumulate(-(-count // 32) * 32 for count in counts)]


@dataclass(frozen=True)
class Costs:
    """What a document of n tokens costs: linear · n + quadratic · n² (arbitrary unit)."""

    linear: float = 1.0
    quadratic: float = 0.0

    def of(self, lengths: Ints) -> npt.NDArray[np.float64]:
        return self.linear * lengths + self.quadratic * lengths.astype(np.float64) ** 2


def plan(
    lengths: Sequence[int] | Ints,
    seq_len: int,
    ranks: int,
    costs: Costs | None = None,
    max_documents: int | None = None,
) -> list[list[list[int]]]:
    """Assign every sample to one micro-batch of one rank.

    Ranks work in lockstep micro-step by micro-step, so what counts is that the micro-batches of one micro-step cost the same. Samples go
    longest first into the cheapest bin with room; bins are sorted by cost and dealt in runs of `ranks`.

    Args:
        lengths: Tokens of each sample.
        seq_len: Most tokens of a micro-batch.
        max_documents: Most samples of a micro-batch.

    Returns:
        plan[rank][micro_step] = ascending sample indices; as many micro-steps on every rank, some of them possibly empty.

    Raises:
        UserError: a sample is longer than `seq_len`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and sizes.max() > seq_len:
        raise UserError(
            f"sample {int(sizes.argmax())} has {int(sizes.max())} tokens, more than the trainer's seq_len {seq_len}: "
            "give trainer and orchestrator the same seq_len"
        )
    prices = (costs or Costs()).of(sizes)
    capacity = max_documents or max(sizes.size, 1)
    count = max(1, -(-int(sizes.sum()) // seq_len), -(-sizes.size // capacity))
    count = -(-count // ranks) * ranks
    while (bins := _fill(sizes, prices, count, seq_len, capacity)) is None:
        count += ranks
    bins.sort(key=lambda members: (-prices[members].sum(), members))
    return [[bins[start + rank] for start in range(0, count, ranks)] for rank in range(ranks)]


def _fill(
    sizes: Ints, prices: npt.NDArray[np.float64], count: int, seq_len: int, capacity: int
) -> list[list[int]] | None:
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
        if len(bins[chosen]) < capacity:
            passed.append((load + price, chosen))
        for entry in passed:
            heapq.heappush(cheapest, entry)
    return [sorted(members) for members in bins]


def collate(documents: Sequence[Document], streams: int, multiple_of: int = 1) -> HostBatch:
    """Lay documents one after the other.

    An empty sequence gives a micro-batch of padding only, which has no loss tokens: a rank without work still takes part in every collective.

    Args:
        streams: K, which an empty sequence cannot tell.
        multiple_of: T is padded to a multiple of this (at least 2) by one more document without loss tokens.
    """
    lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int64)
    total = int(lengths.sum())
    padding = max(-total % multiple_of, 2 if total < 2 else 0)
    padding += -(total + padding) % multiple_of
    extents = np.append(lengths, padding) if padding else lengths
    ends = np.cumsum(extents)
    starts = ends - extents

    ids = np.concatenate([*(document.input_ids for document in documents), np.zeros(padding, dtype=np.int64)])
    trained = np.concatenate([*(document.loss_mask for document in documents), np.zeros(padding, dtype=np.bool_)])
    trained[starts] = False
    labels = np.flatnonzero(trained)
    owner = np.searchsorted(ends, labels, side="right")
    cooling = np.array([1.0 / document.temperature for document in documents], dtype=np.float32)
    columns = [np.zeros((streams, 0), dtype=np.float32), *(document.streams for document in documents)]
    return HostBatch(
        _buffer(
            np.int64, ids, np.arange(len(ids)) - np.repeat(starts, extents), labels - 1, ids[labels], np.append(0, ends)
        ),
        _buffer(np.float32, cooling[owner], np.concatenate(columns, axis=1)[:, labels].reshape(-1)),
        (len(ids), len(labels), len(extents), streams),
        int(extents.max()),
        lengths,
    )


def _buffer(dtype: npt.DTypeLike, *filled: npt.NDArray[np.generic]) -> Tensor:
    starts = _starts([len(part) for part in filled])
    buffer = np.zeros(starts[-1], dtype=dtype)
    for start, part in zip(starts, filled, strict=False):
        buffer[start : start + len(part)] = part
    return torch.from_numpy(buffer)


def rollout_lengths(draw: np.random.Generator, count: int, longest: int = LONGEST) -> list[int]:
    """Made-up lengths that are spread as those of rollouts: lognormal, median 600, sigma 0.9, from 16 (where that is possible) to `longest`."""
    return draw.lognormal(np.log(600), 0.9, count).astype(np.int64).clip(min(16, longest), longest).tolist()
