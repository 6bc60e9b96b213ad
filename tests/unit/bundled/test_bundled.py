"""What holds for every bundled environment: fixed data, modules without verifiers, packages that verifiers loads."""

import hashlib
from typing import Any

import pytest

import alphabet_sort.data
import calculator.data
import reverse_text.data
import wordle.data


def _ids(problems: list[Any]) -> list[str]:
    return [problem.id for problem in problems]


@pytest.mark.parametrize(
    ("made", "digest"),
    [
        (wordle.data.words("train") + wordle.data.words("eval") + wordle.data.words("train", 50, seed=7),
         "479d2b0790c041e476dee5214ba22f42a4dd2b1880d75467674416ac8363f6c2"),
        (_ids(alphabet_sort.data.problems("train", 200) + alphabet_sort.data.problems("eval", 50)),
         "0f095b54836fa05fd2afeb60eaa949540b8f1d349bd468aa0bc52abcab0760c8"),
        (_ids(calculator.data.problems("train", 300) + calculator.data.problems("eval", 100)),
         "292e7b69d3cd861ed2ce93422bd846aa86909be3f272c119baa7464a197c480b"),
        (reverse_text.data.texts("train", 1000) + reverse_text.data.texts("eval", 200),
         "14bea1e8c55a80e1988a3f854235ee0ad5017acfc6bbbcd613e99c8f4855fcb3"),
    ],
    ids=["wordle", "alphabet-sort", "calculator", "reverse-text"],
)  # fmt: skip
def test_data_never_change(made: list[str], digest: str) -> None:
    """The data are part of every published number: their bytes are pinned, on every Python version."""
    assert hashlib.sha256("\n".join(made).encode()).hexdigest() == digest


@pytest.mark.parametrize(
    "make", [wordle.data.words, alphabet_sort.data.problems, calculator.data.problems, reverse_text.data.texts]
)
def test_longer_lists_extend_shorter_ones(make: Any) -> None:
    """Asking for more tasks keeps the ones there."""
    assert make("train", 20) == make("train", 60)[:20]
