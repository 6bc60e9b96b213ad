"""People to sort by name, made here: no download, the same on every machine and Python version.

Standard library only, so that other parts (supervised warm-up, tests) can use it without importing verifiers.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

Split = Literal["train", "eval"]
By = Literal["first", "last"]

# One set of people in this many is held out.
EVAL_SHARE = 5

OPEN_TAG, CLOSE_TAG = "<sorted>", "</sorted>"
SYSTEM_PROMPT = (
    f"Sort people alphabetically as asked. Answer with the full names, one a line, between {OPEN_TAG} and {CLOSE_TAG}."
)

FIRST_NAMES: tuple[str, ...] = tuple(
    """
    Ada Adam Agnes Alan Alba Albert Alice Alma Amir Amos Ana Andre Anton April Arthur Astrid Aurora Axel Basil Beatrix
    Benno Bianca Boris Bruno Carla Carmen Casper Cecil Clara Claude Cora Cyrus Dahlia Daniel Daphne David Delia Diego
    Dora Edgar Edith Elias Elsa Emil Emma Enzo Erik Esther Eva Ezra Fabian Felix Fiona Flora Frank Freya Gavin George
    Gloria Greta Gustav Hanna Harold Hazel Hector Heidi Helena Henry Hugo Ida Igor Ines Ingrid Irene Isaac Ivan Ivy
    Jacob Jana Jasper Joan Jonas Joyce Judith Julia Karl Katya Klaus Lara Laura Lena Leo Lewis Lidia Linus Lola Louis
    Lucy Luna Magnus Mara Marco Martha Max Mila Milo Mira Nadia Naomi Nathan Nina Noah Nora Olaf Olga Olive Omar Oscar
    Otto Owen Paula Pedro Petra Philip Quentin Rafael Ralph Regina Rita Robin Rosa Ruben Ruth Samuel Sara Silas Simon
    Sofia Stella Sven Tamara Tara Teresa Theo Thomas Tilda Tobias Ulla Ursula Vera Victor Viola Wanda Walter Wilma
    Xavier Yara Yusuf Zelda Zoe
    """.split()  # noqa: SIM905
)

LAST_NAMES: tuple[str, ...] = tuple(
    """
    Abbot Adler Alder Archer Ashby Austen Baker Barlow Beck Bellamy Bishop Blake Bolton Bower Brandt Brook Burton Butler
    Carver Castle Chandler Chapman Clark Cole Conrad Cooper Cox Crane Cruz Dalton Dawson Dean Dixon Drake Dunn Eaton
    Ellis Emerson Evans Falk Farmer Faulkner Field Fisher Fletcher Foster Fox Frost Fuller Gallo Gardner Gibson Glover
    Grant Gray Green Gruber Hale Harper Hart Hayes Heath Hill Holland Holt Hooper Horn Howe Hunter Hurst Irving Jansen
    Jennings Jordan Keller Kemp Kent Klein Knight Koch Kramer Kruger Lambert Lang Larkin Lawson Leigh Lindgren Lloyd
    Lopez Lowe Lund Mann Marsh Mason Meyer Miller Monk Moore Morris Nash Neumann Nolan North Novak Nunez Oakley Olsen
    Ortega Osborn Page Parker Payne Pearson Perez Pike Pollard Porter Potter Quinn Ramos Reed Reyes Rhodes Rivera
    Rossi Rowe Sadler Salas Sawyer Schmidt Sharp Shaw Silva Skinner Slater Snow Stark Stone Sutton Taylor Thorne
    Tucker Turner Tyler Underwood Vance Vega Vogel Wagner Walsh Ward Weaver Webb West Wheeler White Winter Wolf Wood
    Yates York Young Zeller Zimmer
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Problem:
    """People who come in turns, and the name that they are sorted by.

    Args:
        turns: Full names ("First Last") that each turn brings. No first name and no last name occurs twice.
    """

    by: By
    turns: tuple[tuple[str, ...], ...]

    @property
    def id(self) -> str:
        """Durable: made from the content alone."""
        content = "|".join([self.by, *(",".join(names) for names in self.turns)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def split(self) -> Split:
        """Decided by who is in it: the same people are never in both splits, whatever their order, turns or sorting."""
        people = ",".join(sorted(name for names in self.turns for name in names))
        digest = hashlib.sha256(b"alphabet-sort/" + people.encode()).digest()
        return "eval" if int.from_bytes(digest[:8], "big") % EVAL_SHARE == 0 else "train"

    def message(self, turn: int) -> str:
        """What the user says in a turn."""
        names = "\n".join(self.turns[turn])
        if turn == 0:
            return f"Sort by {self.by} name:\n{names}"
        return f"Add these and sort everyone by {self.by} name again:\n{names}"

    def truth(self, turn: int) -> list[str]:
        """Everyone so far, sorted."""
        people = [name for names in self.turns[: turn + 1] for name in names]
        return sorted(people, key=lambda name: name.split()[0 if self.by == "first" else 1])


def parse(reply: str) -> list[str]:
    """The lines inside the last pair of tags, stripped, empty ones left out; none when the reply has no such pair."""
    before, closed, _ = reply.rpartition(CLOSE_TAG)
    _, opened, answer = before.rpartition(OPEN_TAG)
    return [line.strip() for line in answer.splitlines() if line.strip()] if opened and closed else []


def similarity(answer: list[str], truth: list[str]) -> float:
    """Return the ratio in [0, 1] of characters matched between two lists as text (difflib's blocks); 0: no answer."""
    return SequenceMatcher(None, "\n".join(answer), "\n".join(truth), autojunk=False).ratio() if answer else 0.0


def scores(problem: Problem, replies: list[str], power: float) -> list[float]:
    """Score each turn: similarity to the power `power`, which sets nearly right apart from right; 0 without a reply."""
    answers = [parse(reply) for reply in replies[: len(problem.turns)]]
    answers += [[]] * (len(problem.turns) - len(answers))
    return [similarity(answer, problem.truth(turn)) ** power for turn, answer in enumerate(answers)]


def problems(
    split: Split,
    n: int,
    seed: int = 0,
    *,
    by: Literal["first", "last", "both"] = "both",
    min_turns: int = 2,
    max_turns: int = 3,
    min_names: int = 2,
    max_names: int = 4,
) -> list[Problem]:
    """Return `n` distinct problems of `split`; their order depends on the settings alone, and a shorter list begins a
    longer one.

    Args:
        by: The name to sort by; "both": one or the other, by problem.
        min_names: Least people of a turn; `max_names`, most. No turn has fewer than one, the first none fewer than two.

    Raises ValueError for settings that make no sense.
    """
    _check(split, n, by, (min_turns, max_turns), (min_names, max_names))
    found: dict[str, Problem] = {}
    for problem in _draws(seed, by, (min_turns, max_turns), (min_names, max_names)):
        if len(found) >= n:  # there are over 10^8 problems of the least size: no list exhausts them
            break
        if problem.split == split:
            found.setdefault(problem.id, problem)
    return list(found.values())


def _check(split: str, n: int, by: str, turns: tuple[int, int], names: tuple[int, int]) -> None:
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', not {split!r}")
    if by not in ("first", "last", "both"):
        raise ValueError(f"by must be 'first', 'last' or 'both', not {by!r}")
    if n < 1:
        raise ValueError(f"num_tasks must be at least 1, not {n}")
    for name, (low, high), least in (("turns", turns, 1), ("names", names, 2)):
        if not least <= low <= high:
            raise ValueError(f"need {least} <= min_{name} <= max_{name}, not {low} and {high}")
    if turns[1] * names[1] > len(FIRST_NAMES) // 2:
        raise ValueError(
            f"{turns[1]} turns of {names[1]} names are more than {len(FIRST_NAMES) // 2} people: lower max_turns or "
            "max_names"
        )


def _draws(seed: int, by: str, turns: tuple[int, int], names: tuple[int, int]) -> Iterator[Problem]:
    """Yield problems forever from a hash chain: `random` does not promise the same choices in every Python version."""
    index = 0
    while True:
        draw = f"{seed}/{index}"
        count = turns[0] + _draw(f"{draw}/turns") % (turns[1] - turns[0] + 1)
        sizes = [names[0] + _draw(f"{draw}/names {turn}") % (names[1] - names[0] + 1) for turn in range(count)]
        firsts = _choose(FIRST_NAMES, sum(sizes), f"{draw}/first")
        lasts = _choose(LAST_NAMES, sum(sizes), f"{draw}/last")
        people = iter([f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)])
        key: By = by if by in ("first", "last") else ("first", "last")[_draw(f"{draw}/by") % 2]  # type: ignore[assignment]
        yield Problem(key, tuple(tuple(next(people) for _ in range(size)) for size in sizes))
        index += 1


def _choose(pool: tuple[str, ...], count: int, draw: str) -> list[str]:
    """`count` different ones, in the order drawn."""
    rest = list(pool)
    return [rest.pop(_draw(f"{draw} {number}") % len(rest)) for number in range(count)]


def _draw(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
