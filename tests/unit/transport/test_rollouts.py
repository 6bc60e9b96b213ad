"""Batches of samples arrive as they were sent, row by row."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.transport.commit import CommitError
from prime_rl.transport.rollouts import FILE, SCHEMA, Sample, as_array, open_batch, write_batch
from support.committing import commit_empty


def make_sample(number: int, length: int = 5, **changes) -> Sample:
    ids, mask = [number * 100 + i for i in range(length)], [i >= 2 for i in range(length)]
    logprobs = [-0.5 * i if m else 0.0 for i, m in enumerate(mask)]
    advantages = [0.25 if m else 0.0 for m in mask]
    names = f"sample-{number}", "group-0", "task-0", "reverse-text"
    return dataclasses.replace(Sample(*names, [0, 1], ids, mask, logprobs, advantages, 0.5, 0.1), **changes)


def same(left: Sample, right: Sample) -> bool:
    for field in dataclasses.fields(Sample):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if (a is None) != (b is None) or (a is not None and not np.array_equal(np.asarray(a), np.asarray(b))):
            return False
    return True


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.data())
def test_rows_come_back_as_written_in_the_order_asked(tmp_path_factory, lengths, data):
    envs = ("sums", "reverse-text", "alphabet")
    chosen = data.draw(st.sampled_from([None, np.uint8, np.uint16]))
    samples = [
        make_sample(
            i,
            n,
            env=envs[i % 3],
            ce_weight=[1.0] * n if i % 2 else None,
            routed_experts=None if chosen is None or i % 3 == 2 else np.arange(6 * n - 6, dtype=chosen).reshape(-1, 6),
        )
        for i, n in enumerate(lengths)
    ]
    batch = open_batch(write_batch(tmp_path_factory.mktemp("rollouts"), 7, samples))
    order = data.draw(st.permutations(range(len(samples))))
    wanted = order[: data.draw(st.integers(0, len(samples)))]
    assert all(same(row, samples[i]) for row, i in zip(batch.rows(wanted), wanted, strict=True))
    assert batch.step == 7
    assert batch.lengths.tolist() == lengths
    assert batch.manifest.extra["loss_tokens"] == [max(n - 2, 0) for n in lengths]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0] * 4}, "logprobs has 4 entries for 5 tokens"),
        ({"loss_mask": [True] * 6}, "loss_mask has 6"),
        ({"logprobs": [-1.0] * 5}, "logprobs is not zero off the loss mask"),
        ({"advantages": [1.0] * 5}, "advantages is not zero off"),
        ({"logprobs": [0, 0, math.nan, 0, 0]}, "not finite"),
        ({"rl_weight": [1.0]}, "rl_weight has 1"),
        ({"routed_experts": np.zeros((6, 4), dtype=np.uint8)}, "routed_experts of 6 of 5 tokens"),
    ],
)
def test_misaligned_streams_never_reach_a_batch(tmp_path, changes, message):
    """Tokens in, tokens out: a sample whose streams do not fit is refused before anything is written."""
    with pytest.raises(ValueError, match=message):
        write_batch(tmp_path, 0, [make_sample(0, **changes)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check_bytes", [True, False])
def test_a_damaged_batch_is_refused(tmp_path, check_bytes):
    """A flipped bit is found by the reader that hashes, a truncated file by all; neither is trained."""
    directory = write_batch(tmp_path, 0, [make_sample(0)])
    data = bytearray((directory / FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / FILE).write_bytes(data if check_bytes else data[:-1])
    with pytest.raises(CommitError, match="does not match the manifest" if check_bytes else FILE):
        open_batch(directory, check_bytes=check_bytes)
    commit_empty(tmp_path / "step_1", 1)
    with pytest.raises(CommitError, match="not as a batch"):
        open_batch(tmp_path / "step_1")


@pytest.mark.parametrize(("values", "dtype"), [([1.5], np.int32), (np.ones(2), np.int32), (["x"], np.float32)])
def test_numbers_of_another_kind_are_refused(values, dtype):
    """Nothing is rounded to an integer on its way into a batch."""
    with pytest.raises(TypeError, match="Cannot cast"):
        as_array(values, dtype)


def test_every_column_is_valid_arrow(tmp_path):
    """Arrow's own full validation finds nothing wrong, and other readers (pandas, DuckDB) see the same values."""
    samples = [
        make_sample(i, i % 9 + 1, ref_logprobs=[0.5] * (i % 9 + 1) if i % 3 else None, task_id="ü" * (i % 4))
        for i in range(21)
    ]
    table = pa.ipc.open_file(str(write_batch(tmp_path, 0, samples) / FILE)).read_all()
    table.validate(full=True)
    assert table.schema == SCHEMA
    for column in ("sample_id", "task_id", "loss_mask", "ref_logprobs", "input_ids"):
        assert table.column(column).to_pylist() == [getattr(sample, column) for sample in samples]
