"""What the examples give models to imitate is right, and holds nothing that is held out."""

import importlib.util
from pathlib import Path
from typing import Any

from calculator.data import parse, problems
from kuhn_poker.game import RULES, Deal
from kuhn_poker.game import play as play_poker
from wordle.data import split_of
from wordle.game import marks
from wordle.game import parse as guess_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"{name}_demonstrations", EXAMPLES / name / "demonstrations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_games_of_wordle() -> None:
    """Every guess is a training word that fits all marks before it; marks are a training word's; always the same."""
    rows = _script("wordle").games(50, seed=3)
    assert rows[:5] == _script("wordle").games(5, seed=3)
    solved = 0
    for row in rows:
        guesses = [guess_of(message["content"]) or "" for message in row["messages"] if message["role"] == "assistant"]
        told = [message["content"].splitlines()[1].replace(" ", "") for message in row["messages"][3::2]]
        assert all(split_of(guess) == "train" for guess in guesses)
        for later in range(1, len(guesses)):
            assert all(marks(guesses[later], guesses[turn]) == told[turn] for turn in range(later))
        solved += len(guesses) < 6
    assert solved > 35


def test_solutions_with_the_tool() -> None:
    """Every answer is right, and none of the problems is held out."""
    held_out = {problem.text for problem in problems("eval", 2000)}
    for problem in problems("train", 200):
        messages = _script_tool.solution(problem)["messages"]
        assert parse(messages[-1]["content"]) == problem.answer
        assert messages[-2]["content"] == str(problem.answer)
        assert messages[1]["content"] not in held_out


def test_games_of_kuhn_poker() -> None:
    """Every game is legal to its end, whatever the players do in it; all five ends occur."""
    ends = set()
    for number in range(100):
        sides = _script("self_play").game(f"0/{number}")
        assert [row["messages"][0]["content"] for row in sides] == [RULES] * 2
        replies = [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in sides]
        first = "act first" in sides[1]["messages"][1]["content"]
        cards = tuple(row["messages"][1]["content"].removeprefix("Your card is ")[0] for row in sides)
        outcome = play_poker(Deal((cards[0], cards[1]), int(first)), (replies[0], replies[1]))
        assert outcome.illegal is None
        ends.add(outcome.history)
    assert ends == {"pp", "pbp", "pbb", "bp", "bb"}


_script_tool = _script("tool_use")
