"""alphabet-sort: data made the same everywhere, splits that share no people, scores worked out by hand."""

import pytest

from alphabet_sort.data import FIRST_NAMES, LAST_NAMES, Problem, parse, problems, scores, similarity

PROBLEM = Problem("last", (("Ada Wolf", "Bruno Abbot"), ("Clara Quinn",)))


def test_splits_share_no_people() -> None:
    """Whatever the seed, in another order, in other turns, or sorted otherwise."""
    assert Problem("first", (("Clara Quinn", "Bruno Abbot", "Ada Wolf"),)).split == PROBLEM.split
    assert Problem("last", (("Ada Wolf", "Bruno Abbot", "Clara Quinn"),)).id != PROBLEM.id
    people = [
        {frozenset(name for names in one.turns for name in names) for n in range(5) for one in problems(split, 60, n)}
        for split in ("train", "eval")
    ]  # fmt: skip
    assert not people[0] & people[1]


def test_problems_are_within_bounds() -> None:
    """Turns and names as asked; nobody shares a name, so that one order is right. Too many people are refused."""
    found = problems("train", 100, min_turns=1, max_turns=3, min_names=2, max_names=5)
    assert len({problem.id for problem in found}) == 100
    assert {len(problem.turns) for problem in found} == {1, 2, 3}
    assert {len(names) for problem in found for names in problem.turns} == {2, 3, 4, 5}
    assert {problem.by for problem in found} == {"first", "last"}
    with pytest.raises(ValueError, match="30 turns of 4 names are more than 80 people: lower max_turns or max_names"):
        problems("train", 3, max_turns=30)
    for problem in found:
        people = [name.split() for names in problem.turns for name in names]
        assert len({first for first, _ in people}) == len({last for _, last in people}) == len(people)


def test_parse() -> None:
    """The last whole pair of tags counts; anything else is no answer, never an error."""
    assert parse("First <sorted>no</sorted>, rather <sorted> A B \n\n C D</sorted>.") == ["A B", "C D"]
    for reply in ("<sorted></sorted>", "A B\nC D", "<sorted>A B", "A B</sorted>", "</sorted>A B<sorted>", ""):
        assert parse(reply) == []


def test_scores() -> None:
    """Similarity to the power, turn by turn; a missing turn is worth nothing, replies beyond the last are ignored."""
    right = ["<sorted>Bruno Abbot\nAda Wolf</sorted>", "<sorted>Bruno Abbot\nClara Quinn\nAda Wolf</sorted>"]
    assert scores(PROBLEM, right[:1], 4) == [1.0, 0.0]
    assert scores(PROBLEM, [*right, "<sorted>x</sorted>"], 4) == [1.0, 1.0]
    # "Ada Wolf\nBruno Abbot" and "Bruno Abbot\nAda Wolf" (20 characters each) share "Bruno Abbot": 2 * 11 / 40.
    assert scores(PROBLEM, ["<sorted>Ada Wolf\nBruno Abbot</sorted>"], 1) == [0.55, 0.0]
    assert scores(PROBLEM, ["<sorted>Ada Wolf\nBruno Abbot</sorted>"], 2) == [pytest.approx(0.3025), 0.0]
    # difflib ignores frequent characters of long texts unless told otherwise.
    names = [f"{first} {last}" for first, last in zip(FIRST_NAMES[:60], LAST_NAMES, strict=False)]
    assert similarity(names, names) == 1.0
    assert similarity(names[:-1], names) > 0.9
