"""Kuhn poker of two players who move at random, as messages, one player's side a line: for the form, not for the play.

uv run python examples/self_play/demonstrations.py [--games 1000] [--seed 0] [--output OUTPUT.jsonl]
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from kuhn_poker.game import CLOSE_TAG, DEALS, OPEN_TAG, RULES, is_over, message, to_act, words


def game(name: str) -> list[dict[str, Any]]:
    """Both sides of one game."""
    deal = DEALS[_draw(f"{name}/deal") % len(DEALS)]
    sides: tuple[list[dict[str, str]], ...] = ([], [])
    history = ""
    while not is_over(history):
        player = deal.player(to_act(history))
        word = sorted(words(history))[_draw(f"{name}/{history}") % 2]
        sides[player].append({"role": "user", "content": message(deal.cards[player], history)})
        sides[player].append({"role": "assistant", "content": f"{OPEN_TAG}{word}{CLOSE_TAG}"})
        history += words(history)[word]
    return [{"messages": [{"role": "system", "content": RULES}, *side]} for side in sides]


def _draw(name: str) -> int:
    # Not the `random` module, which does not promise the same choices in every Python version.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/self-play-sft/demonstrations.jsonl"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for number in range(options.games) for row in game(f"{options.seed}/{number}")]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.games} games in {options.output}")


if __name__ == "__main__":
    main()
