"""kuhn-poker: every game there is, against its rules written out as a table."""

import itertools

from kuhn_poker.game import BET, DEALS, PASS, Deal, is_over, parse, payoff, play

# Who wins what at each end, by position: "showdown" by the card, else the position that the other folded to.
ENDS = {"pp": ("showdown", 1), "pbb": ("showdown", 2), "bb": ("showdown", 2), "bp": (0, 1), "pbp": (1, 1)}
HIGHER = {("J", "Q"): 1, ("J", "K"): 1, ("Q", "K"): 1, ("Q", "J"): 0, ("K", "J"): 0, ("K", "Q"): 0}
WORDS = {("", "p"): "check", ("", "b"): "bet", ("p", "p"): "check", ("p", "b"): "bet"}
WORDS |= {("b", "p"): "fold", ("b", "b"): "call", ("pb", "p"): "fold", ("pb", "b"): "call"}
BAD = ["", "bet", "<move>raise</move>", "<move></move>", "<move>call</move> <move>allin</move>"]


def _histories(prefix: str = "") -> list[str]:
    """All that the code lets end."""
    if is_over(prefix):
        return [prefix]
    return [end for action in (PASS, BET) for end in _histories(prefix + action)]


def _replies(deal: Deal, end: str) -> tuple[list[str], list[str]]:
    replies: tuple[list[str], list[str]] = ([], [])
    for index, action in enumerate(end):
        replies[(deal.first + index) % 2].append(f"I will <move>{WORDS[end[:index], action]}</move>")
    return replies


def test_all_games() -> None:
    """Six deals, either player first, five ends: ante and bet go to the higher card or to who did not fold."""
    assert sorted(_histories()) == sorted(ENDS)
    assert len({deal.id for deal in DEALS}) == 12
    assert {(deal.cards, deal.first) for deal in DEALS} == set(itertools.product(HIGHER, (0, 1)))
    for deal, (end, (winner, chips)) in itertools.product(DEALS, ENDS.items()):
        by_position = (deal.cards[deal.first], deal.cards[1 - deal.first])
        won = chips if (HIGHER[by_position] if winner == "showdown" else winner) == 0 else -chips
        outcome = play(deal, _replies(deal, end))
        assert (outcome.history, outcome.illegal, payoff(by_position, end)) == (end, None, won)
        assert (outcome.chips[deal.first], outcome.chips[1 - deal.first]) == (won, -won)


def test_illegal_moves_lose() -> None:
    """An illegal move, a missing reply too, costs two chips at every point, whatever the cards."""
    for deal, history, bad in itertools.product(DEALS[:2], ("", "p", "b", "pb"), [*BAD, None]):
        replies, player = _replies(deal, history), (deal.first + len(history)) % 2
        if bad is not None:
            replies[player].append(bad)
        outcome = play(deal, replies)
        assert (outcome.illegal, outcome.chips[player], outcome.chips[1 - player]) == (player, -2, 2)
    for history, word in itertools.product(("", "p", "b", "pb"), ("check", "bet", "fold", "call")):
        legal = (word in ("fold", "call")) == history.endswith("b")
        assert (parse(f"<move>{word.upper()}</move>", history) is not None) == legal
