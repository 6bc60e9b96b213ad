"""The rules of Kuhn poker (Kuhn 1950): three cards, two players, ante and one bet of one chip. Standard library only.

A history is a string of actions, `p` (pass: check, or fold to a bet) and `b` (bet, or call one). It ends as pp, pbp,
pbb, bp or bb. Position 0 acts first.
"""

import itertools
import re
from dataclasses import dataclass

CARDS = "JQK"  # in ascending order
PASS, BET = "p", "b"
OPEN_TAG, CLOSE_TAG = "<move>", "</move>"

LOST_BY_ILLEGAL_MOVE = 2
"""Chips: the most that a game can cost, so that no illegal move is better than a legal one."""

_MOVE = re.compile(rf"{OPEN_TAG}\s*([A-Za-z]+)\s*{CLOSE_TAG}")

RULES = (
    "Two players each ante 1 chip and get one card of J < Q < K. Check or bet 1 chip; a bet can be called or folded "
    f"to. At a showdown the higher card wins the pot. Answer {OPEN_TAG}word{CLOSE_TAG} with a legal word; another "
    f"loses {LOST_BY_ILLEGAL_MOVE} chips."
)


@dataclass(frozen=True)
class Deal:
    """The cards of player 1 and player 2, and which of them (0 or 1) acts first."""

    cards: tuple[str, str]
    first: int

    @property
    def id(self) -> str:
        """Durable, such as KJ-2: player 1 has the king, player 2 the jack and acts first."""
        return f"{''.join(self.cards)}-{self.first + 1}"

    def player(self, position: int) -> int:
        """Who acts in a position; and the position that a player acts in."""
        return (self.first + position) % 2


DEALS = [Deal((one, two), first) for one, two in itertools.permutations(CARDS, 2) for first in (0, 1)]


def is_over(history: str) -> bool:
    return len(history) >= 2 and history != PASS + BET


def to_act(history: str) -> int:
    """The position whose turn it is."""
    return len(history) % 2


def words(history: str) -> dict[str, str]:
    """The legal words of who is to act, and the action that each is."""
    return {"fold": PASS, "call": BET} if history.endswith(BET) else {"check": PASS, "bet": BET}


def parse(reply: str, history: str) -> str | None:
    """The action of a reply's last move; None when it has none, or none that is legal."""
    found = _MOVE.findall(reply)
    return words(history).get(found[-1].lower()) if found else None


def payoff(cards: tuple[str, str], history: str) -> int:
    """Chips that position 0 wins (loses, if negative) in a finished game; position 1 gets the opposite.

    Args:
        cards: By position.
    """
    if not is_over(history):
        raise ValueError(f"the game is not over after {history!r}")
    if history.endswith(BET + PASS):  # who folded loses the ante
        return 1 if to_act(history) == 0 else -1
    stake = 2 if history.endswith(BET) else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


@dataclass(frozen=True)
class Outcome:
    """How a game ended.

    Args:
        chips: What player 1 and player 2 win or lose; they add up to 0.
        illegal: The player (0 or 1) whose illegal or missing move ended it.
    """

    chips: tuple[int, int]
    history: str
    illegal: int | None = None


def play(deal: Deal, replies: tuple[list[str], list[str]]) -> Outcome:
    """Return the game of these replies of player 1 and player 2. Not to answer is an illegal move."""
    history, spoken = "", [iter(replies[0]), iter(replies[1])]
    while not is_over(history):
        player = deal.player(to_act(history))
        action = parse(next(spoken[player], ""), history)
        if action is None:
            lost = LOST_BY_ILLEGAL_MOVE
            return Outcome((-lost, lost) if player == 0 else (lost, -lost), history, illegal=player)
        history += action
    won = payoff((deal.cards[deal.player(0)], deal.cards[deal.player(1)]), history)
    return Outcome((won, -won) if deal.first == 0 else (-won, won), history)


def message(card: str, history: str) -> str:
    """What the player who is to act is told: the card at the first turn, what happened since, and the legal words."""
    position = to_act(history)
    said = f"Your card is {card}. You act {('first', 'second')[position]}." if len(history) < 2 else ""
    if history:
        said += f" Your opponent {'bets' if history.endswith(BET) else 'checks'}."
    return f"{said} {' or '.join(words(history))}?".strip()
