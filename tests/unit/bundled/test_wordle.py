"""wordle: words listed once, splits that cannot overlap, marks against a slow second implementation, rewards worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wordle.data import WORDS, split_of, words
from wordle.game import Game, marks, parse, play


def test_splits_are_a_partition() -> None:
    """Every word is in exactly one split, whatever the seed."""
    assert sorted(words("train", seed=1) + words("eval", seed=2)) == sorted(WORDS)
    assert all(split_of(word) == "eval" for word in words("eval"))
    assert words("train", 20) == words("train")[:20]


@pytest.mark.parametrize(
    ("split", "n", "message"),
    [
        ("test", 3, "split must be 'train' or 'eval', not 'test'"),
        ("eval", 10_000, "num_tasks must be from 1 to 156, the number of eval words, not 10000"),
        ("eval", 0, "num_tasks must be from 1 to 156"),
    ],
)
def test_nonsense_is_refused(split: str, n: int, message: str) -> None:
    """Settings that make no sense are named."""
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
def test_marks_of_repeated_letters(secret: str, guess: str) -> None:
    """Against the slow implementation; and no letter is marked more often than the secret has it."""
    found = marks(secret, guess)
    assert found == _slow_marks(secret, guess)
    for letter in "abcd":
        assert sum(mark != "X" for mark, g in zip(found, guess, strict=True) if g == letter) <= secret.count(letter)


@pytest.mark.parametrize(
    ("secret", "guess", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "nacre", "YYYYG"),
        ("abbey", "babes", "YYGGX"),
        ("abbey", "bobby", "YXGXG"),  # three b's, two in the secret: the right place and the first of the others
        ("steal", "eerie", "YXXXX"),
        ("light", "foamy", "XXXXX"),
    ],
)
def test_marks(secret: str, guess: str, expected: str) -> None:
    """By hand."""
    assert marks(secret, guess) == expected


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("<guess>crane</guess>", "crane"),
        ("Hmm. <guess>\n CRANE </guess>!", "crane"),
        ("<guess>crane</guess> or <guess>slate</guess>", "slate"),
        ("<guess>cranes</guess>", None),
        ("<guess>cr ne</guess>", None),
        ("<guess>naïve</guess>", None),
        ("<guess>crane", None),
        ("crane", None),
        ("", None),
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
        (_replies("slate", "crane"), True, True, 1.0, 5 / 6, 1.0),
        (_replies("slate") * 5 + _replies("crane"), True, True, 1.0, 1 / 6, 1.0),
        # slate / crane: a and e in their places.
        (_replies("slate") * 6 + _replies("crane"), True, False, 0.4, 0.0, 1.0),
        # nacre / crane: n, a, c, r elsewhere, e in its place.
        (_replies("slate", "nacre"), False, False, 0.6, 0.0, 1.0),
        (["no idea", *_replies("slate"), "?", "?"], False, False, 0.4, 0.0, 0.25),
        (["?"] * 6, True, False, 0.0, 0.0, 0.0),
        ([], False, False, 0.0, 0.0, 0.0),
        (_replies("crane", "slate"), True, True, 1.0, 1.0, 1.0),  # what comes after the end does not count
    ],
)
def test_rewards(replies: list[str], over: bool, solved: bool, partial: float, speed: float, form: float) -> None:
    """By hand, for the secret crane and six replies."""
    game = play("crane", replies, 6)
    assert (game.over, game.solved) == (over, solved)
    assert (game.partial, game.speed, game.format) == pytest.approx((partial, speed, form))


def test_answers() -> None:
    """What the player is told."""
    assert play("crane", _replies("nacre"), 6).answer() == "n a c r e\nY Y Y Y G\n5 left."
    assert play("crane", ["?", "?"], 6).answer() == "No guess of 5 letters in tags.\n4 left."
    assert Game("crane", (), 1).over is False
