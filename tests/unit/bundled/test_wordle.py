"""wordle: words listed once, disjoint splits, marks against a slow second implementation, rewards by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wordle.data import WORDS, split_of, words
from wordle.game import marks, parse, play


def test_splits() -> None:
    """Every word is in exactly one split, whatever the seed; settings that make no sense are named."""
    assert sorted(words("train", seed=1) + words("eval", seed=2)) == sorted(WORDS)
    assert all(split_of(word) == "eval" for word in words("eval"))
    for split, n, message in (
        ("test", 3, "split must be 'train' or 'eval', not 'test'"),
        ("eval", 10_000, "num_tasks must be from 1 to 156, the number of eval words, not 10000"),
    ):
        with pytest.raises(ValueError, match=message):
            words(split, n)  # type: ignore[arg-type]


def _slow_marks(secret: str, guess: str) -> str:
    """Cross letters out: right places first, then each other letter takes the first that is left of its kind."""
    found = ["X"] * 5
    left: list[str | None] = list(secret)
    for place in range(5):
        if guess[place] == secret[place]:
            found[place], left[place] = "G", None
    for place in range(5):
        if found[place] == "X" and guess[place] in left:
            found[place] = "Y"
            left[left.index(guess[place])] = None
    return "".join(found)


@given(st.text("abc", min_size=5, max_size=5), st.text("abcd", min_size=5, max_size=5))
def test_marks(secret: str, guess: str) -> None:
    """Against the slow implementation, and by hand: of three b's two are marked: the right place, the first other."""
    assert marks(secret, guess) == _slow_marks(secret, guess)
    assert [marks("abbey", "bobby"), marks("crane", "nacre"), marks("light", "foamy")] == ["YXGXG", "YYYYG", "XXXXX"]


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("Hmm. <guess>\n CRANE </guess>!", "crane"),
        ("<guess>crane</guess> or <guess>slate</guess>", "slate"),
        *((f"<guess>{bad}</guess>", None) for bad in ("cranes", "cr ne", "naïve")),
        *((bad, None) for bad in ("<guess>crane", "crane", "")),
    ],
)
def test_parse(reply: str, guess: str | None) -> None:
    """The last well-formed guess; anything else is none, never an error."""
    assert parse(reply) == guess


def _replies(*guesses: str) -> list[str]:
    return [f"<guess>{guess}</guess>" for guess in guesses]


@pytest.mark.parametrize(
    ("replies", "over", "solved", "partial", "speed", "form"),
    [
        (_replies("crane"), True, True, 1.0, 1.0, 1.0),
        (_replies("slate") * 5 + _replies("crane"), True, True, 1.0, 1 / 6, 1.0),
        # slate / crane: a and e in their places.
        (_replies("slate") * 6 + _replies("crane"), True, False, 0.4, 0.0, 1.0),
        (["no idea", *_replies("slate"), "?", "?"], False, False, 0.4, 0.0, 0.25),
        ([], False, False, 0.0, 0.0, 0.0),
        (_replies("crane", "slate"), True, True, 1.0, 1.0, 1.0),  # what comes after the end does not count
    ],
)
def test_rewards(replies: list[str], over: bool, solved: bool, partial: float, speed: float, form: float) -> None:
    """By hand, for the secret crane and six replies."""
    game = play("crane", replies, 6)
    assert (game.over, game.solved) == (over, solved)
    assert (game.partial, game.speed, game.format) == pytest.approx((partial, speed, form))
