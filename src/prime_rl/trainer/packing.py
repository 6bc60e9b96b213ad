"""Packing documents into micro-batches: which sample goes to which rank and micro-step, and the flat arrays of one micro-batch.

Pure numpy. Every rank computes the same plan from the lengths alone, and reads only its own rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prime_rl.errors import UserError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


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
    """One micro-batch on the host: T packed tokens of D documents, L loss tokens, K streams.

    `loss_index` are the positions whose hidden state predicts a loss token, `labels` those tokens.
    """

    input_ids: Ints  # [T]
    position_ids: Ints  # [T], restarting in every document
    cu_seqlens: npt.NDArray[np.int32]  # [D + 1]
    max_seqlen: int
    loss_index: Ints  # [L]
    labels: Ints  # [L]
    inv_temperature: Floats  # [L]
    streams: Floats  # [K, L]
    lengths: Ints  # [documents], without padding


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
    order = np.argsort(-prices, kind="stable")
    capacity = max_documents or max(sizes.size, 1)
    count = max(1, -(-int(sizes.sum()) // seq_len), -(-sizes.size // capacity))
    count = -(-count // ranks) * ranks
    while (bins := _fill(sizes, prices, order, count, seq_len, capacity)) is None:
        count += ranks
    bins.sort(key=lambda members: (-prices[members].sum(), members))
    return [[bins[start + rank] for start in range(0, count, ranks)] for rank in range(ranks)]


def _fill(
    sizes: Ints, prices: npt.NDArray[np.float64], order: Ints, count: int, seq_len: int, capacity: int
) -> list[list[int]] | None:
    """Longest-first into the cheapest of `count` bins with room; None when a sample finds none."""
    load = np.zeros(count)
    room = np.full(count, seq_len, dtype=np.int64)
    slots = np.full(count, capacity, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in order:
        open_bins = (room >= sizes[index]) & (slots > 0)
        if not open_bins.any():
            return None
        chosen = int(np.where(open_bins, load, np.inf).argmin())
        bins[chosen].append(int(index))
        load[chosen] += prices[index]
        room[chosen] -= sizes[index]
        slots[chosen] -= 1
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
    starts = np.concatenate([[0], np.cumsum(extents)]).astype(np.int64)

    index, labels, inv_temperature = [], [], []
    columns = [np.zeros((streams, 0), dtype=np.float32)]
    for start, document in zip(starts[: len(documents)], documents, strict=True):
        trained = np.flatnonzero(document.loss_mask[1:]) + 1
        index.append(start + trained - 1)
        labels.append(document.input_ids[trained])
        inv_temperature.append(np.full(trained.size, 1.0 / document.temperature, dtype=np.float32))
        columns.append(document.streams[:, trained])
    none = np.zeros(0, dtype=np.int64)
    return HostBatch(
        input_ids=np.concatenate([*(d.input_ids for d in documents), np.zeros(padding, dtype=np.int64)]).astype(
            np.int64
        ),
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in extents]),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(extents.max()),
        loss_index=np.concatenate([none, *index]),
        labels=np.concatenate([none, *labels]),
        inv_temperature=np.concatenate([np.zeros(0, dtype=np.float32), *inv_temperature]),
        streams=np.concatenate(columns, axis=1).astype(np.float32),
        lengths=lengths,
    )
