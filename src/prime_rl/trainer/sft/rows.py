"""What fine-tuning trains on, one step at a time: a stream of tokenized rows, cut into steps and packed."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from loguru import logger

from prime_rl.config import SFTConfig
from prime_rl.config.sft import SFTData
from prime_rl.errors import UserError
from prime_rl.trainer.packing import LONGEST, Costs, Document, StepData, StepSource, rollout_lengths
from prime_rl.trainer.parallel import World, agree, on_main
from prime_rl.trainer.sft.render import RowRenderer, Tokens, load_rows
from prime_rl.trainer.source import Source, load_tokenizer, stop_ids

STREAMS = 1  # of the cross-entropy token loss: weight / (loss tokens of the whole step)

_CHECKED_ROWS = 16  # before the model is loaded
_FAKE_ROWS = 1 << 16


def row_order(rows: int, taken: int, shuffle: bool, seed: int) -> Iterator[int]:
    """Row indices without end, one permutation per epoch, beginning after the first `taken` of them."""
    epoch, offset = divmod(taken, rows)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
        yield from order[offset:].tolist()
        epoch, offset = epoch + 1, 0


def row_steps(
    tokenize: Callable[[int], list[Tokens]], rows: int, data: SFTData, seed: int, taken: int
) -> Iterator[tuple[list[Tokens], int, Counter[str]]]:
    """Yield the samples of step after step (what fits into `batch_size` packed rows of `seq_len` tokens, first fit),
    the rows taken for them, and how many of those were dropped, by reason.

    Rows come in the order of `row_order`; `tokenize` goes from the index of one to its samples, which are all in one
    step. Rows that cannot be trained on are dropped: nothing is truncated, because half a conversation would teach to
    break off. Raises UserError if whole epochs have nothing to train on, or a row is malformed.
    """
    empty = np.full(data.batch_size, data.seq_len)
    room, step, used, dropped = empty, list[Tokens](), 0, Counter[str]()
    reported, unusable = set[str](), 0  # rows in sequence that were dropped
    for index in row_order(rows, taken, data.shuffle, seed):
        samples = tokenize(index)
        alone = _place(samples, empty)
        is_trained = any(sample.loss_mask[1:].any() for sample in samples)
        if alone is not None and is_trained:
            if (left := _place(samples, room)) is None:
                yield step, used, dropped
                left, step, used, dropped = alone, [], 0, Counter()
            room, unusable = left, 0
            step += samples
        else:
            longest = max(len(sample.input_ids) for sample in samples)
            size = f"{len(samples)} samples of at most {longest} tokens exceed {data.batch_size} × {data.seq_len}"
            reason, why = ("too_long", size) if alone is None else ("untrained", "no token of it is trained")
            if reason not in reported:
                reported.add(reason)
                logger.warning("dropped row {}: {} (more are counted as data/dropped_{})", index, why, reason)
            dropped[reason] += 1
            unusable += 1
            if unusable >= 2 * rows - 1:  # a whole epoch is among them, however it was shuffled
                raise UserError(
                    f"no row of the dataset can be trained on: {dropped['too_long']} times one exceeded data.seq_len "
                    f"{data.seq_len}, {dropped['untrained']} times one had no trained token (see data.loss_mask)"
                )
        used += 1


def _place(samples: list[Tokens], room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """The room that is left after all of `samples`; None if they do not fit."""
    left = room.copy()
    for sample in samples:
        fits = np.flatnonzero(left >= len(sample.input_ids))
        if not fits.size:
            return None
        left[fits[0]] -= len(sample.input_ids)
    return left


def fake_row(data: SFTData, vocabulary: int, seed: int, index: int) -> list[Tokens]:
    """A sample of random tokens, every one trained, for measurements. Its length is `seq_len` (`fixed`), uniform in
    [seq_len / 8, seq_len] (`variable`), or as of rollouts (`lognormal`)."""
    draws, length = np.random.default_rng([seed, index]), data.seq_len
    if data.fake is not None and data.fake.type == "lognormal":
        length = rollout_lengths(draws, 1, min(LONGEST, length))[0]
    elif data.fake is not None and data.fake.type == "variable":
        length = int(draws.integers(max(2, length // 8), length, endpoint=True))
    return [Tokens(draws.integers(0, vocabulary, length), np.ones(length, dtype=np.bool_))]


class RowData(StepSource):
    """Steps of a dataset, or of fake rows. Every rank reads the same: the number of ranks changes no step. The first
    rows are tokenized at once, so that a dataset of another form is refused before the model loads. Raises UserError if
    the dataset or the tokenizer cannot be loaded, or one of the first rows is malformed."""

    def __init__(self, config: SFTConfig, world: World, source: Source) -> None:
        self.config, self.vocabulary = config, source.vocabulary
        self.rows: Any = range(_FAKE_ROWS)
        if config.data.fake is None:
            self.tokenizer = agree(world, lambda: load_tokenizer(source))
            on_main(world, lambda: len(load_rows(config.data)))  # downloads what is missing, and fills the cache
            self.rows = agree(world, lambda: load_rows(config.data))
            self._renderer = RowRenderer(self.tokenizer, source.name, config.data.loss_mask, stop_ids(source))
            on_main(world, lambda: [len(self.tokens(index)) for index in range(min(_CHECKED_ROWS, len(self.rows)))])
        super().__init__(world, config.dist_timeout)

    def start(self, costs: Costs, samples: int) -> None:
        super().start(costs, samples)
        self._steps = row_steps(self.tokens, len(self.rows), self.config.data, self.config.seed, samples)

    def prepare(self, step: int) -> StepData:
        """Return the next step. One thread calls this once a step, in order. Every rank packs all, keeps its share."""
        samples, taken, dropped = next(self._steps)
        data = self.config.data
        loss_tokens = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
        lengths = [len(sample.input_ids) for sample in samples]

        def documents(wanted: list[int]) -> Iterator[Document]:
            for ids, mask in ((samples[index].input_ids, samples[index].loss_mask) for index in wanted):
                yield Document(ids, mask, 1.0, np.full((STREAMS, len(ids)), 1.0 / loss_tokens, dtype=np.float32))

        _, batches = self.pack(lengths, data.micro_batch_size * data.seq_len, STREAMS, documents)
        metrics = {
            "data/samples": len(lengths),
            "data/loss_tokens": loss_tokens,
            "data/packing_efficiency": sum(lengths) / (data.batch_size * data.seq_len),
            "data/dropped_too_long": dropped["too_long"],
            "data/dropped_untrained": dropped["untrained"],
        }
        return StepData(batches, lengths, taken, metrics)

    def tokens(self, index: int) -> list[Tokens]:
        """The samples of a row. Raises UserError, with the row's number, for one that is malformed."""
        if self.config.data.fake is not None:
            return fake_row(self.config.data, self.vocabulary, self.config.seed, index)
        try:
            samples = self._renderer.samples(self.rows[index])
            worst = max((int(sample.input_ids.max()) for sample in samples if len(sample.input_ids)), default=0)
            if worst >= self.vocabulary:
                text = self.tokenizer.decode([worst])
                raise UserError(
                    f"token {worst} ({text!r}), but the model has only {self.vocabulary}: whose tokenizer is this?"
                )
        except UserError as error:
            raise UserError(f"dataset row {index}: {error}") from error
        return samples
