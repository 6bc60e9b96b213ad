"""The stream of samples, its steps, and their packing."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config import SFTConfig
from prime_rl.config.sft import SFTData
from prime_rl.errors import UserError
from prime_rl.trainer.packing import Costs
from prime_rl.trainer.parallel import World
from prime_rl.trainer.sft.render import Tokens
from prime_rl.trainer.sft.rows import RowData, row_order, row_steps
from prime_rl.trainer.source import find_model


def sample(length: int, trained: int = 1) -> Tokens:
    return Tokens(np.full(length, length), np.arange(length) >= length - trained)


def steps(rows: list[list[Tokens]], batch_size: int, taken: int = 0) -> Iterator[tuple[list[int], int, dict[str, int]]]:
    """Steps of `batch_size` × 10 tokens: lengths of samples, rows taken, rows dropped."""
    data = SFTData(seq_len=10, batch_size=batch_size, shuffle=False)
    for samples, used, dropped in row_steps(lambda index: rows[index], len(rows), data, 0, taken):
        yield [len(one.input_ids) for one in samples], used, dict(dropped)


def rows_of(lengths: list[int]) -> list[list[Tokens]]:
    """Rows of one sample of these lengths; a negative length is a row without trained tokens."""
    return [[sample(n) if n > 0 else sample(-n, 0)] for n in lengths]


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(0, 40), st.booleans())
def test_order(rows: int, drawn: int, shuffle: bool) -> None:
    """Every epoch is a permutation (unshuffled: the file); going on after `drawn` rows gives the same order."""
    whole = list(itertools.islice(row_order(rows, 0, shuffle, 1), drawn + 2 * rows))
    assert sorted(whole[:rows]) == sorted(whole[rows : 2 * rows]) == list(range(rows))
    assert shuffle or whole[:rows] == list(range(rows))
    assert list(itertools.islice(row_order(rows, drawn, shuffle, 1), 2 * rows)) == whole[drawn:]


@settings(deadline=None)
@given(st.lists(st.integers(-12, 12).filter(bool), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 5))
def test_steps_and_resume(lengths: list[int], rows: int, count: int) -> None:
    """Steps take the usable rows in order, whole, leaving none out; a stream begun mid-way goes on with the next."""
    usable = [n for n in lengths if 2 <= n <= 10]
    if not usable:
        return
    source, done = steps(rows_of(lengths), rows), 0
    made = []
    for _ in range(count):
        step, used, _ = next(source)
        made.append(step)
        done += used
    flat = list(itertools.chain(*made))
    assert flat == list(itertools.islice(itertools.cycle(usable), len(flat)))
    assert all(sum(step) <= rows * 10 for step in made)
    assert next(steps(rows_of(lengths), rows, done)) == next(source)


def test_samples_of_a_row_stay_together() -> None:
    """A step takes all samples of a row or leaves it to the next; a row too large for any step is counted."""
    rows = [[sample(6), sample(8)], [sample(3)], [sample(9), sample(9), sample(9)], [sample(2), sample(5)]]
    assert list(itertools.islice(steps(rows, 2), 3)) == [
        ([6, 8, 3], 3, {"too_long": 1}), ([2, 5], 1, {}), ([6, 8, 3], 3, {"too_long": 1})
    ]  # fmt: skip


def test_dropped_rows_are_counted() -> None:
    """Too long and untrained samples are passed over and counted, never cut; a row whose only trained token is its
    first counts as untrained. They belong to the step that they come before the end of."""
    made = list(itertools.islice(steps(rows_of([11, 4, -5, 1, 12, 3]), 1), 2))
    assert made == [([4, 3], 7, {"too_long": 3, "untrained": 2}), ([4, 3], 6, {"untrained": 2, "too_long": 2})]


def test_nothing_to_train_on() -> None:
    """A dataset without a single usable row is refused after two looks at each at most, with the reasons."""
    with pytest.raises(
        UserError, match="no row .*: 3 times one exceeded data.seq_len 10, 2 times one had no trained token"
    ):
        next(steps(rows_of([11, -5, 12]), 1))


def data(directory: Path, model: Path, world: World, rows: list[dict[str, Any]], **settings: Any) -> RowData:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTConfig.model_validate(
        {"output_dir": directory, "data": {"name": str(path), "seq_len": 64, "shuffle": False, **settings}}
    )
    source = RowData(config, world, find_model(str(model)))
    source.start(Costs(), 0)
    return source


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_weights_of_a_step_sum_to_one(micro_batch_size: int, tied_model: Path, tmp_path: Path, world: World) -> None:
    """Every loss token of a step weighs the same, whatever micro-batch it is in; nothing is lost in packing."""
    rows = [{"prompt": "a" * i, "completion": "b" * (i % 5 + 1)} for i in range(1, 20)]
    source = data(tmp_path, tied_model, world, rows, batch_size=4, micro_batch_size=micro_batch_size)
    step = source.read(0)
    source.close()
    weights = np.concatenate([batch.streams[0].numpy() for batch in step.batches])
    assert weights.size == step.metrics["data/loss_tokens"]
    np.testing.assert_allclose(weights, 1 / step.metrics["data/loss_tokens"], rtol=1e-6)
    assert sum(len(batch.input_ids) for batch in step.batches) == step.tokens
    assert step.metrics["data/packing_efficiency"] == step.tokens / 256
    assert max(len(batch.input_ids) for batch in step.batches) <= 64 * micro_batch_size
    # Completions of i % 5 + 1 letters, each with the end of its turn.
    assert step.metrics["data/loss_tokens"] == sum(i % 5 + 2 for i in range(1, step.samples + 1))


def test_a_bad_row_is_named(tied_model: Path, tmp_path: Path, world: World) -> None:
    """A malformed row is refused with its number: an early one before the model is loaded, a later one when read."""
    rows: list[dict[str, Any]] = [{"prompt": "a", "completion": "b"}] * 20
    for bad in (1, 19):
        rows[bad] = {"prompt": "a", "completion": 7}
    with pytest.raises(UserError, match="dataset row 1: `completion` is 7"):
        data(tmp_path, tied_model, world, rows)
    rows[1] = rows[0]
    source = data(tmp_path, tied_model, world, rows)
    with pytest.raises(UserError, match="dataset row 19: `completion` is 7"):
        source.read(0)
    source.close()
