"""reverse-text: data made the same everywhere, splits that cannot overlap, the reward of the original task."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reverse_text.data import split_of, texts


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_splits_share_no_text(train_seed: int, eval_seed: int) -> None:
    """Train and eval are disjoint for every pair of seeds."""
    assert not set(texts("train", 200, train_seed)) & set(texts("eval", 200, eval_seed))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_texts_are_distinct_and_within_bounds(split: Literal["train", "eval"]) -> None:
    """`n` different texts of the split, with the asked numbers of words."""
    found = texts(split, 300, seed=3, min_words=2, max_words=3)
    assert len(set(found)) == len(found) == 300
    assert {len(text.split()) for text in found} == {2, 3}
    assert all(split_of(text) == split for text in found)


def test_too_many_texts_is_an_error() -> None:
    """An exhausted pool is reported, never padded with repeats."""
    with pytest.raises(ValueError, match="only 93 distinct eval texts of 1 to 1 words, 94 asked for"):
        texts("eval", 94, max_words=1)
    assert len(texts("eval", 93, max_words=1)) == 93


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<reversed_text>olleh</reversed_text>", 1.0),
        ("Sure! <reversed_text>\n olleh \n</reversed_text> done", 1.0),
        ("<reversed_text>hello</reversed_text>", 0.4),  # matching blocks: "ll" or one letter either side -> 2*2/10
        ("olleh", 0.0),
        ("<reversed_text>olleh", 0.0),
        ("</reversed_text>olleh<reversed_text>", 0.0),
        ("<reversed_text></reversed_text>", 0.0),
    ],
)
def test_reward(reply: str, expected: float) -> None:
    """Ratio of matched characters between the tagged answer and the truth; nothing without a pair of tags."""
    from reverse_text.taskset import parse, similarity

    assert similarity(parse(reply), "olleh") == pytest.approx(expected)
