"""reverse-text: data made the same everywhere, splits that cannot overlap, the reward of the original task."""

import hashlib
import subprocess
import sys
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reverse_text.data import WORDS, split_of, texts


def test_words_are_plain_and_distinct() -> None:
    """The word list is lower-case ASCII without duplicates: the tiny tokenizer was trained for nothing else."""
    assert len(WORDS) == len(set(WORDS))
    assert len(WORDS) >= 300
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


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


def test_texts_never_change() -> None:
    """The data is part of every published number: its bytes are pinned, on every Python version."""
    digest = hashlib.sha256("\n".join(texts("train", 1000) + texts("eval", 200)).encode()).hexdigest()
    assert digest == "14bea1e8c55a80e1988a3f854235ee0ad5017acfc6bbbcd613e99c8f4855fcb3"


def test_longer_lists_extend_shorter_ones() -> None:
    """Asking for more tasks keeps the ones there."""
    assert texts("train", 50) == texts("train", 500)[:50]


def test_too_many_texts_is_an_error() -> None:
    """An exhausted pool is reported, never padded with repeats."""
    with pytest.raises(ValueError, match="only 93 distinct eval texts of 1 to 1 words, 94 asked for"):
        texts("eval", 94, max_words=1)
    assert len(texts("eval", 93, max_words=1)) == 93


def test_data_needs_no_verifiers() -> None:
    """`reverse_text.data` works without importing verifiers (seconds, hundreds of MB)."""
    code = "import sys, reverse_text.data; sys.exit('verifiers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


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


def test_verifiers_loads_the_package() -> None:
    """verifiers' own loader (as `vf-eval reverse-text` uses it) finds the taskset, its config and durable keys."""
    import verifiers.v1 as vf

    config = vf.resolve_env_config({"taskset": {"id": "reverse-text", "split": "eval", "num_tasks": 3}})
    tasks = list(vf.load_environment(config).taskset)
    assert [task.data.prompt for task in tasks] == texts("eval", 3)
    assert [task.data.answer for task in tasks] == [text[::-1] for text in texts("eval", 3)]
    assert [task.key for task in tasks] == [f"reverse-text/{text}" for text in texts("eval", 3)]
