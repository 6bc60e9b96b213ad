"""kuhn-poker: every game there is, against its rules written out as a table."""

import itertools

import pytest

from kuhn_poker.game import BET, DEALS, PASS, Deal, is_over, message, parse, payoff, play, to_act

# Who wins what at each end, by position: "showdown" by the card, else the position that the other folded to.
ENDS = {"pp": ("showdown", 1), "pbb": ("showdown", 2), "bb": ("showdown", 2), "bp": (0, 1), "pbp": (1, 1)}
HIGHER = {("J", "Q"): 1, ("J", "K"): 1, ("Q", "K"): 1, ("Q", "J"): 0, ("K", "J"): 0, ("K", "Q"): 0}
WORDS = {("", "p"): "check", ("", "b"): "bet", ("p", "p"): "check", ("p", "b"): "bet"}
WORDS |= {("b", "p"): "fold", ("b", "b"): "call", ("pb", "p"): "fold", ("pb", "b"): "call"}


def _histories(prefix: str = "") -> list[str]:
    """All that the code lets end."""
    if is_over(prefix):
        return [prefix]
    return [end for action in (PASS, BET) for end in _histories(prefix + action)]


def test_the_ends() -> None:
    """There are five, and no others can be reached."""
    assert sorted(_histories()) == sorted(ENDS)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("cards", HIGHER)
def test_payoffs(cards: tuple[str, str], end: str) -> None:
    """All thirty: ante and bet, to the higher card or to who did not fold."""
    winner, chips = ENDS[end]
    winner = HIGHER[cards] if winner == "showdown" else winner
    assert payoff(cards, end) == (chips if winner == 0 else -chips)


def test_deals() -> None:
    """Six deals, each with either player first; durable ids."""
    assert len(DEALS) == len({deal.id for deal in DEALS}) == 12
    assert {deal.cards for deal in DEALS} == set(HIGHER)
    assert Deal(("K", "J"), 1).id == "KJ-2"


def _replies(deal: Deal, end: str) -> tuple[list[str], list[str]]:
    replies: tuple[list[str], list[str]] = ([], [])
    for index, action in enumerate(end):
        replies[(deal.first + index) % 2].append(f"I will <move>{WORDS[end[:index], action]}</move>")
    return replies


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("deal", DEALS, ids=lambda deal: deal.id)
def test_all_games(deal: Deal, end: str) -> None:
    """All sixty: the replies that make a history play it, and each player gets its chips whichever acts first."""
    outcome = play(deal, _replies(deal, end))
    by_position = (deal.cards[deal.first], deal.cards[1 - deal.first])
    won = payoff(by_position, end)
    assert (outcome.history, outcome.illegal) == (end, None)
    assert outcome.chips[deal.first] == won
    assert sum(outcome.chips) == 0


@pytest.mark.parametrize(
    "bad", ["", "bet", "<move>raise</move>", "<move></move>", "<move>call</move> <move>allin</move>"]
)
@pytest.mark.parametrize("history", ["", "p", "b", "pb"])
@pytest.mark.parametrize("deal", DEALS[:2], ids=lambda deal: deal.id)
def test_illegal_moves_lose(deal: Deal, history: str, bad: str) -> None:
    """At every point of the game: two chips to the other, whatever the cards; no legal game costs more."""
    replies = _replies(deal, history)
    player = (deal.first + len(history)) % 2
    replies[player].append(bad)
    outcome = play(deal, replies)
    assert outcome.illegal == player
    assert outcome.chips[player] == -2
    assert outcome.chips[1 - player] == 2
    assert min(-abs(payoff(cards, end)) for cards in HIGHER for end in ENDS) == -2


def test_words_of_another_moment_are_illegal() -> None:
    """One cannot fold to no bet, nor check to one."""
    for history, word in itertools.product(("", "p", "b", "pb"), ("check", "bet", "fold", "call")):
        legal = (word in ("fold", "call")) == history.endswith("b")
        assert (parse(f"<move>{word.upper()}</move>", history) is not None) == legal


def test_a_missing_reply_is_an_illegal_move() -> None:
    """A conversation that ended early is lost by who did not answer."""
    assert play(Deal(("K", "J"), 0), (["<move>check</move>"], [])).illegal == 1


def test_messages() -> None:
    """A player learns its card, its turn, what the other did and what it may do; never the other's card."""
    assert message("Q", "") == "Your card is Q. You act first. check or bet?"
    assert message("Q", "p") == "Your card is Q. You act second. Your opponent checks. check or bet?"
    assert message("Q", "b") == "Your card is Q. You act second. Your opponent bets. fold or call?"
    assert message("Q", "pb") == "Your opponent bets. fold or call?"


def test_value_of_the_game() -> None:
    """With the equilibrium strategies of Kuhn's paper, position 0 loses 1/18 chip a game: payoffs, turns and deals fit together."""
    alpha = 0.2  # any from 0 to 1/3
    bets = {
        ("J", ""): alpha, ("Q", ""): 0.0, ("K", ""): 3 * alpha,
        ("J", "pb"): 0.0, ("Q", "pb"): alpha + 1 / 3, ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0,
        ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0,
    }  # fmt: skip

    def value(cards: tuple[str, str], history: str) -> float:
        if is_over(history):
            return payoff(cards, history)
        bet = bets[cards[to_act(history)], history]
        return bet * value(cards, history + BET) + (1 - bet) * value(cards, history + PASS)

    assert sum(value(cards, "") for cards in HIGHER) / 6 == pytest.approx(-1 / 18)


def test_verifiers_loads_the_package() -> None:
    """verifiers' own loader finds taskset, environment with two seats, harness and settings; keys are durable."""
    import verifiers.v1 as vf

    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "kuhn-poker"}}))
    assert [task.key for task in env.taskset] == [f"kuhn-poker/{deal.id}" for deal in DEALS]
    assert {name for name, seat in env.config if isinstance(seat, vf.AgentConfig)} == {"player_1", "player_2"}
    few = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "kuhn-poker", "deals": ["KJ-2"]}}))
    assert [task.data.deal for task in few.taskset] == [Deal(("K", "J"), 1)]
    unknown = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "kuhn-poker", "deals": ["AA-1"]}}))
    with pytest.raises(ValueError, match="deals: there is no 'AA-1' \\(there are JQ-1"):
        list(unknown.taskset)
