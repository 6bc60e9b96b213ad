"""What fine-tuning trains on, one step at a time: a stream of tokenized rows, cut into steps and packed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from loguru import logger
from transformers import PreTrainedTokenizerBase

from prime_rl.errors import UserError
from prime_rl.trainer.packing import (
    LONGEST,
    Costs,
    Document,
    HostBatch,
    Prefetch,
    collate,
    pinned,
    plan,
    rollout_lengths,
)
from prime_rl.trainer.parallel import World, agree
from prime_rl.trainer.sft.render import RowRenderer, Rows, Tokens

if TYPE_CHECKING:
    from prime_rl.config.sft import SFTData

STREAMS = 1  # of the cross-entropy token loss: weight / (loss tokens of the whole step)

Tokenizer = Callable[[int], list[Tokens]]
"""The samples of a row, by its index."""


@dataclass(frozen=True)
class StepData:
    """One step: this rank's micro-batches, and counts over all ranks.

    Args:
        drawn: Rows taken from the stream before the next step, since its very beginning: where to go on after a resume.
        dropped: Rows passed over in this step, by reason.
        capacity: Tokens that the step could have held.
    """

    batches: list[HostBatch]
    lengths: list[int]
    loss_tokens: int
    drawn: int
    dropped: dict[str, int]
    capacity: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def row_order(rows: int, drawn: int, shuffle: bool, seed: int) -> Iterator[int]:
    """Row indices without end, one permutation per epoch, beginning after the first `drawn` of them."""
    epoch, offset = divmod(drawn, rows)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
        yield from order[offset:].tolist()
        epoch, offset = epoch + 1, 0


class RowStream:
    """Tokenized rows in the order of `row_order`, without those that cannot be trained on, which are counted.

    Nothing is truncated: half a conversation would teach to break off. `peek` and `take` let a step leave the row that no longer fits. The
    samples of a row stay in one step, so that `drawn` rows say where to go on.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, seq_len: int, *, shuffle: bool, seed: int, drawn: int) -> None:
        self._tokenizer, self._rows, self._seq_len = tokenizer, rows, seq_len
        self._order = row_order(rows, drawn, shuffle, seed)
        self._next: list[Tokens] | None = None
        self.drawn = drawn
        self._index = 0  # of that row
        self._skipped = 0  # of the next row: drawn, but not yet part of a step
        self.dropped: Counter[str] = Counter()

    def peek(self) -> list[Tokens]:
        """The samples of the next row that can be trained on.

        Raises:
            UserError: whole epochs went by without one, or a row is malformed (says which).
        """
        while self._next is None:
            self._index = next(self._order)
            try:
                self._next = self._tokenizer(self._index)
            except UserError as error:
                raise UserError(f"dataset row {self._index}: {error}") from error
            longest = max(len(sample.input_ids) for sample in self._next)
            if longest > self._seq_len:
                self.drop("too_long", f"its {longest} tokens exceed seq_len {self._seq_len}")
            elif not any(sample.loss_mask[1:].any() for sample in self._next):
                self.drop("untrained", "no token of it is trained")
        return self._next

    def take(self) -> list[Tokens]:
        """The same, and go on to the one after it."""
        samples = self.peek()
        self._next = None
        self.drawn += self._skipped + 1
        self._skipped = 0
        return samples

    def drop(self, reason: str, why: str) -> None:
        """Pass over the next row, and count it.

        Raises:
            UserError: so many were passed over in a row that a whole epoch is among them, however it was shuffled.
        """
        self._next = None
        if not self.dropped[reason]:
            logger.warning("dropped row {}: {} (further ones are counted as data/dropped_{})", self._index, why, reason)
        self.dropped[reason] += 1
        self._skipped += 1
        if self._skipped >= 2 * self._rows - 1:
            raise UserError(
                f"no row of the dataset can be trained on: {self.dropped['too_long']} times one exceeded data.seq_len {self._seq_len}, "
                f"{self.dropped['untrained']} times one had no trained token (see data.loss_mask)"
            )


def fill(stream: RowStream, rows: int, seq_len: int) -> list[Tokens]:
    """Take what fits into `rows` rows of `seq_len` tokens, first fit. The first row whose samples fit nowhere is left for the next step."""
    room = np.full(rows, seq_len)
    taken: list[Tokens] = []
    while (left := _place(stream.peek(), room)) is not None or not taken:
        if left is None:
            stream.drop("too_long", f"its {len(stream.peek())} samples exceed a step of {rows} × {seq_len} tokens")
            continue
        room = left
        taken += stream.take()
    return taken


def _place(samples: list[Tokens], room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """The room that is left after all of `samples`; None if they do not fit."""
    left = room.copy()
    for sample in samples:
        fits = np.flatnonzero(left >= len(sample.input_ids))
        if not fits.size:
            return None
        left[fits[0]] -= len(sample.input_ids)
    return left


def pack(
    samples: Sequence[Tokens],
    config: "SFTData",
    world: World,
    costs: Costs,
    multiple_of: int,
    drawn: int,
    dropped: dict[str, int],
) -> StepData:
    """A step of these samples. Every rank packs the same ones, and keeps its own share."""
    loss_tokens = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    lengths = [len(sample.input_ids) for sample in samples]
    mine = plan(lengths, config.micro_batch_size * config.seq_len, world.size, costs)[world.rank]
    batches = [collate([_document(samples[i], loss_tokens) for i in indices], STREAMS, multiple_of) for indices in mine]
    room = config.batch_size * config.seq_len
    return StepData(pinned(batches, world.device), lengths, loss_tokens, drawn, dropped, room)


def _document(sample: Tokens, loss_tokens: int) -> Document:
    weights = np.full((STREAMS, len(sample.input_ids)), 1.0 / loss_tokens, dtype=np.float32)
    return Document(sample.input_ids, sample.loss_mask, 1.0, weights)


class RowData:
    """Steps of a dataset. Rank for rank the same stream is read, so the number of ranks changes neither the steps nor where a resumed run goes on.

    The next step is tokenized by a thread while this one is trained.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        config: "SFTData",
        world: World,
        *,
        vocabulary: int,
        seed: int,
        drawn: int,
        costs: Costs,
        multiple_of: int,
        timeout: float,
        stop_ids: Sequence[int] = (),
    ) -> None:
        renderer = RowRenderer(tokenizer, config.loss_mask, stop_ids)

        def tokens(index: int) -> list[Tokens]:
            samples = renderer.samples(rows[index])
            for sample in samples:
                check_vocabulary(sample, vocabulary, tokenizer)
            return samples

        self._stream = RowStream(tokens, len(rows), config.seq_len, shuffle=config.shuffle, seed=seed, drawn=drawn)
        self._config, self._world, self._costs, self._multiple_of = config, world, costs, multiple_of
        self._ahead = Prefetch(self._prepare, world.device, timeout)

    def read(self, step: int) -> StepData:
        """
        Raises:
            UserError: a row is malformed, or none can be trained on.
            WaitTimeout: tokenizing a step takes longer than `timeout`.
        """
        return agree(self._world, lambda: self._ahead.take(step))

    def close(self) -> None:
        """Let the thread end when it has finished the step that it is at."""
        self._ahead.close()

    def _prepare(self, step: int) -> StepData:
        """The stream's next step. The thread comes here once a step, in order."""
        before = self._stream.dropped.copy()
        samples = fill(self._stream, self._config.batch_size, self._config.seq_len)
        dropped = {reason: self._stream.dropped[reason] - before[reason] for reason in ("too_long", "untrained")}
        return pack(samples, self._config, self._world, self._costs, self._multiple_of, self._stream.drawn, dropped)


def check_vocabulary(tokens: Tokens, vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a token that the model has no embedding of."""
    if len(tokens.input_ids) and tokens.input_ids.max() >= vocabulary:
        worst = int(tokens.input_ids.max())
        raise UserError(
            f"token {worst} ({tokenizer.decode([worst])!r}), but the model has only {vocabulary}: whose tokenizer is this?"
        )


class FakeRows:
    """Random tokens, every one trained, the same for one seed on any number of ranks. Needs no dataset.

    Lengths are `seq_len` each (`fixed`), uniform in [seq_len / 8, seq_len] (`variable`), or spread as those of rollouts (`lognormal`).
    """

    def __init__(
        self,
        config: "SFTData",
        world: World,
        *,
        vocabulary: int,
        costs: Costs,
        multiple_of: int,
        seed: int,
        timeout: float,
    ) -> None:
        self._config, self._world, self._costs = config, world, costs
        self._vocabulary, self._multiple_of, self._seed = vocabulary, multiple_of, seed
        self._ahead = Prefetch(self._make, world.device, timeout)

    def read(self, step: int) -> StepData:
        return agree(self._world, lambda: self._ahead.take(step))

    def close(self) -> None:
        self._ahead.close()

    def _make(self, step: int) -> StepData:
        config = self._config
        draws = np.random.default_rng([self._seed, step])
        samples: list[Tokens] = []
        room = config.batch_size * config.seq_len
        while (length := self._length(draws)) <= room:
            samples.append(Tokens(draws.integers(0, self._vocabulary, length), np.ones(length, dtype=np.bool_)))
            room -= length
        return pack(samples, config, self._world, self._costs, self._multiple_of, drawn=0, dropped={})

    def _length(self, draws: np.random.Generator) -> int:
        seq_len, fake = self._config.seq_len, self._config.fake
        if fake is None or fake.type == "fixed":
            return seq_len
        if fake.type == "lognormal":
            return rollout_lengths(draws, 1, min(LONGEST, seq_len))[0]
        return int(draws.integers(max(2, seq_len // 8), seq_len, endpoint=True))
