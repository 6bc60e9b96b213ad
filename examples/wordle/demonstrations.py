"""Games of Wordle to imitate, as messages, one game a line.

    uv run python examples/wordle/demonstrations.py [--games 2000] [--seed 0] [--output OUTPUT.jsonl]

The player guesses training words that fit all marks so far, drawn from a hash: the file is the same everywhere.
Held-out words are neither secrets nor guesses.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from wordle.data import words
from wordle.game import RULES, marks, play

MAX_TURNS = 6


def game(secret: str, name: str) -> list[dict[str, str]]:
    """The messages of one game."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": f"You have {MAX_TURNS} guesses."}]
    fitting, replies = words("train"), []
    while True:
        guess = min(fitting, key=lambda word: hashlib.sha256(f"{name}/{len(replies)}/{word}".encode()).digest())
        replies.append(f"<guess>{guess}</guess>")
        messages.append({"role": "assistant", "content": replies[-1]})
        played = play(secret, replies, MAX_TURNS)
        if played.over:
            return messages
        messages.append({"role": "user", "content": played.answer()})
        found = marks(secret, guess)
        fitting = [word for word in fitting if marks(word, guess) == found and word != guess]


def games(count: int, seed: int) -> list[dict[str, Any]]:
    secrets = words("train", seed=seed)
    return [{"messages": game(secrets[number % len(secrets)], f"{seed}/{number}")} for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/wordle-sft/demonstrations.jsonl"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(json.dumps(row) + "\n" for row in games(options.games, options.seed)))
    print(f"{options.games} games in {options.output}")


if __name__ == "__main__":
    main()
