"""What fine-tuning trains on, one step at a time: a stream of tokenized rows, cut into steps and packed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from loguru import logger

from prime_rl.config import SFTConfig
from prime_rl.errors import UserError
from prime_rl.trainer.packing import (
    LONGEST,
    Costs,
    Document,
    OnWait,
    StepData,
    StepSource,
    micro_batches,
    plan,
    rollout_lengths,
)
from prime_rl.trainer.parallel import World, agree, on_main
from prime_rl.trainer.sft.render import RowRenderer, Tokens, load_rows
from prime_rl.trainer.source import Source, load_tokenizer, stop_ids

STREAMS = 1  # of the cross-entropy token loss: weight / (loss tokens of the whole step)

_CHECKED_ROWS = 16  # before the model is loaded

Tokenizer = Callable[[int], list[Tokens]]
"""The samples of a row, by its index."""


def row_order(rows: int, taken: int, shuffle: bool, seed: int) -> Iterator[int]:
    """Row indices without end, one permutation per epoch, beginning after the first `taken` of them."""
    epoch, offset = divmod(taken, rows)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
        yield from order[offset:].tolist()
        epoch, offset = epoch + 1, 0


class RowStream:
    """Steps of tokenized rows in the order of `row_order`, without rows that cannot be trained on, which are counted.

    Nothing is truncated: half a conversation would teach to break off. The samples of a row stay in one step, so that
    `taken` rows say where to resume.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int, seq_len: int, *, shuffle: bool, seed: int, taken: int) -> None:
        self._tokenizer, self._rows, self._seq_len = tokenizer, rows, seq_len
        self._order = row_order(rows, taken, shuffle, seed)
        self._next: tuple[int, list[Tokens]] | None = None  # the row that the last step had no room for
        self._drops = 0  # since the last row that was trained on
        self.taken = taken
        self.dropped: Counter[str] = Counter()

    def step(self, rows: int) -> list[Tokens]:
        """What fits into `rows` packed rows of `seq_len` tokens, first fit, up to the first row whose samples do not.

        Raises UserError if whole epochs have nothing to train on, or a row is malformed (says which).
        """
        room = np.full(rows, self._seq_len)
        step: list[Tokens] = []
        while True:
            if self._next is None:
                index = next(self._order)
                self._next = index, self._tokenizer(index)
            index, samples = self._next
            longest = max(len(sample.input_ids) for sample in samples)
            left = _place(samples, room)
            if longest > self._seq_len:
                self._drop(index, "too_long", f"its {longest} tokens exceed seq_len {self._seq_len}")
            elif not any(sample.loss_mask[1:].any() for sample in samples):
                self._drop(index, "untrained", "no token of it is trained")
            elif left is not None:
                room, self._drops = left, 0
                step += samples
            elif step:
                return step
            else:
                what = f"its {len(samples)} samples exceed a step of {rows} × {self._seq_len} tokens"
                self._drop(index, "too_long", what)
            self._next = None
            self.taken += 1

    def _drop(self, index: int, reason: str, why: str) -> None:
        """Count a row. Raises UserError once a whole epoch is among those in sequence, however it was shuffled."""
        if not self.dropped[reason]:
            logger.warning("dropped row {}: {} (further ones are counted as data/dropped_{})", index, why, reason)
        self.dropped[reason] += 1
        self._drops += 1
        if self._drops >= 2 * self._rows - 1:
            raise UserError(
                f"no row of the dataset can be trained on: {self.dropped['too_long']} times one exceeded data.seq_len "
                f"{self._seq_len}, {self.dropped['untrained']} times one had no trained token (see data.loss_mask)"
            )


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
    samples: Sequence[Tokens], config: SFTConfig, world: World, costs: Costs, taken: int, dropped: dict[str, int]
) -> StepData:
    """A step of these samples, for which `taken` rows were taken. Every rank packs the same, and keeps its own share."""
    data = config.data
    loss_tokens = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    lengths = [len(sample.input_ids) for sample in samples]
    mine = plan(lengths, data.micro_batch_size * data.seq_len, world.size, costs)[world.rank]
    documents = {index: _document(samples[index], loss_tokens) for indices in mine for index in indices}
    metrics = {
        "data/samples": len(lengths),
        "data/loss_tokens": loss_tokens,
        "data/packing_efficiency": sum(lengths) / (data.batch_size * data.seq_len),
        **{f"data/dropped_{reason}": count for reason, count in dropped.items()},
    }
    return StepData(micro_batches(mine, documents, STREAMS, world.device), lengths, taken, metrics)


def _document(sample: Tokens, loss_tokens: int) -> Document:
    weights = np.full((STREAMS, len(sample.input_ids)), 1.0 / loss_tokens, dtype=np.float32)
    return Document(sample.input_ids, sample.loss_mask, 1.0, weights)


class RowData(StepSource):
    """Steps of a dataset. Every rank reads the same stream: the number of ranks changes no step, resumed or not.

    The first rows are tokenized at once, so that a dataset of another form is refused before the model is loaded: raises
    UserError if the dataset or the tokenizer cannot be loaded, or one of the first rows is malformed.
    """

    def __init__(self, config: SFTConfig, world: World, source: Source, on_wait: OnWait) -> None:
        self.config, self.vocabulary = config, source.config.get_text_config().vocab_size
        self.tokenizer = agree(world, lambda: load_tokenizer(source))
        on_main(world, lambda: len(load_rows(config.data)))  # downloads what is missing, and fills the cache
        self.rows = agree(world, lambda: load_rows(config.data))
        self._renderer = RowRenderer(self.tokenizer, source.name, config.data.loss_mask, stop_ids(source))
        on_main(world, lambda: [len(self.tokens(index)) for index in range(min(_CHECKED_ROWS, len(self.rows)))])
        self._stream = self._from(0)
        super().__init__(world, config.dist_timeout)

    def start(self, costs: Costs, samples: int) -> None:
        super().start(costs, samples)
        self._stream = self._from(samples)

    def _from(self, taken: int) -> RowStream:
        data = self.config.data
        return RowStream(
            self.tokens, len(self.rows), data.seq_len, shuffle=data.shuffle, seed=self.config.seed, taken=taken
        )

    def tokens(self, index: int) -> list[Tokens]:
        """The samples of a row. Raises UserError, with the row's number, for one that is malformed."""
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

    def prepare(self, step: int) -> StepData:
        """The stream's next step. The thread comes here once a step, in order."""
        stream, data = self._stream, self.config.data
        taken, before = stream.taken, stream.dropped.copy()
        samples = stream.step(data.batch_size)
        dropped = {reason: stream.dropped[reason] - before[reason] for reason in ("too_long", "untrained")}
        return pack(samples, self.config, self.world, self.costs, stream.taken - taken, dropped)


class FakeRows(StepSource):
    """Random tokens, every one trained, the same for one seed on any number of ranks. Needs no dataset.

    Lengths are `seq_len` each (`fixed`), uniform in [seq_len / 8, seq_len] (`variable`), or spread as those of rollouts
    (`lognormal`).
    """

    def __init__(self, config: SFTConfig, world: World, source: Source, on_wait: OnWait) -> None:
        self.config, self.vocabulary = config, source.config.get_text_config().vocab_size
        super().__init__(world, config.dist_timeout)

    def prepare(self, step: int) -> StepData:
        draws = np.random.default_rng([self.config.seed, step])
        samples: list[Tokens] = []
        room = self.config.data.batch_size * self.config.data.seq_len
        while (length := self._length(draws)) <= room:
            samples.append(Tokens(draws.integers(0, self.vocabulary, length), np.ones(length, dtype=np.bool_)))
            room -= length
        return pack(samples, self.config, self.world, self.costs, 0, {})

    def _length(self, draws: np.random.Generator) -> int:
        seq_len, fake = self.config.data.seq_len, self.config.data.fake
        if fake is None or fake.type == "fixed":
            return seq_len
        if fake.type == "lognormal":
            return rollout_lengths(draws, 1, min(LONGEST, seq_len))[0]
        return int(draws.integers(max(2, seq_len // 8), seq_len, endpoint=True))
