"""Arithmetic word problems, made here: no download, the same on every machine and Python version.

Standard library only, so that other parts (supervised warm-up, tests) can use it without importing verifiers.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from calculator.arithmetic import evaluate

Split = Literal["train", "eval"]

# One problem in this many is held out.
EVAL_SHARE = 5

OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"
SYSTEM_PROMPT = f"Calculate with the tool. Answer with the number in {OPEN_TAG}{CLOSE_TAG}."

# Far below the number of different problems, so that drawing finds new ones.
MAX_PROBLEMS = 100_000

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class Template:
    """A kind of problem.

    Args:
        text: With {a}, {b}, … in place of numbers.
        expression: What is asked for, in the same letters.
        ranges: From and to, both included, of each letter in turn. With the ranges of all kinds all answers make sense
            (no negative number of loaves).
    """

    name: str
    text: str
    expression: str
    ranges: tuple[tuple[int, int], ...]


TEMPLATES = (
    Template(
        "bakery",
        "A baker fills {a} trays with {b} rolls each and sells {c} rolls. How many are left?",
        "{a}*{b}-{c}",
        ((12, 96), (12, 48), (10, 140)),
    ),
    Template(
        "train",
        "A train with {a} coaches of {b} seats has {c} free seats. How many seats are taken?",
        "{a}*{b}-{c}",
        ((6, 24), (48, 96), (5, 250)),
    ),
    Template(
        "wages",
        "Three workers earn {a}, {b} and {c} a week. What do they earn together in {d} weeks?",
        "({a}+{b}+{c})*{d}",
        ((210, 980), (210, 980), (210, 980), (3, 52)),
    ),
    Template(
        "fence",
        "A rectangular field is {a} m long and {b} m wide. A metre of fence costs {c}. What does the whole fence cost?",
        "2*({a}+{b})*{c}",
        ((35, 480), (25, 320), (3, 49)),
    ),
    Template(
        "library",
        "A library has {a} shelves of {b} books. It lends {c} and buys {d}. How many books are there now?",
        "{a}*{b}-{c}+{d}",
        ((24, 190), (28, 64), (40, 600), (15, 400)),
    ),
    Template(
        "orchard",
        "Each of {a} rows has {b} trees, each tree gives {c} kg of fruit. How many kg is that?",
        "{a}*{b}*{c}",
        ((7, 60), (8, 55), (12, 95)),
    ),
    Template(
        "savings",
        "Someone has {a} and saves {b} a month for {c} months, then spends {d}. How much is left?",
        "{a}+{b}*{c}-{d}",
        ((400, 9000), (45, 860), (6, 60), (100, 650)),
    ),
    Template(
        "pumps",
        "One pump moves {a} litres a minute, another {b}. How many litres do both move in {c} minutes?",
        "({a}+{b})*{c}",
        ((17, 240), (17, 240), (13, 180)),
    ),
    Template(
        "eggs",
        "A farm packs {a} eggs into boxes of {b}. How many eggs are left over?",
        "{a}%{b}",
        ((500, 9999), (6, 36)),
    ),
    Template(
        "boxes",
        "How many boxes of {b} can be filled with {a} bottles?",
        "{a}//{b}",
        ((500, 9999), (6, 36)),
    ),
    Template(
        "cubes",
        "A cube of edge {a} cm is built of cubes of 1 cm. {b} of them are painted. How many are not?",
        "{a}**3-{b}",
        ((6, 40), (10, 200)),
    ),
)


@dataclass(frozen=True)
class Problem:
    template: Template
    numbers: tuple[int, ...]

    @property
    def id(self) -> str:
        """Durable and readable, such as bakery/24/36/100."""
        return "/".join([self.template.name, *map(str, self.numbers)])

    @property
    def split(self) -> Split:
        """Decided by the problem itself: none can be in both, whatever the seed."""
        return "eval" if _draw(f"calculator/{self.id}") % EVAL_SHARE == 0 else "train"

    @property
    def text(self) -> str:
        return self.template.text.format(**self._letters)

    @property
    def expression(self) -> str:
        """One that gives the answer."""
        return self.template.expression.format(**self._letters)

    @property
    def answer(self) -> int:
        return int(evaluate(self.expression))

    @property
    def _letters(self) -> dict[str, int]:
        return dict(zip("abcd", self.numbers, strict=False))


def parse(reply: str) -> Fraction | None:
    """The number inside the last pair of tags, with or without commas between its digits; None without one."""
    before, closed, _ = reply.rpartition(CLOSE_TAG)
    _, opened, inside = before.rpartition(OPEN_TAG)
    number = inside.strip().replace(",", "")
    if not opened or not closed or not _NUMBER.fullmatch(number) or len(number) > 50:
        return None
    return Fraction(number)


def problems(split: Split, n: int, seed: int = 0) -> list[Problem]:
    """Return `n` distinct problems of `split`; their order depends on `seed` alone, a shorter list begins a longer one.

    Raises ValueError when more are asked for than `MAX_PROBLEMS`.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', not {split!r}")
    if not 1 <= n <= MAX_PROBLEMS:
        raise ValueError(f"num_tasks must be from 1 to {MAX_PROBLEMS}, not {n}")
    found: dict[str, Problem] = {}
    for problem in _draws(seed):
        if len(found) >= n:
            break
        if problem.split == split:
            found.setdefault(problem.id, problem)
    return list(found.values())


def _draws(seed: int) -> Iterator[Problem]:
    """Yield problems forever from a hash chain: `random` does not promise the same choices in every Python version."""
    index = 0
    while True:
        template = TEMPLATES[_draw(f"{seed}/{index}/template") % len(TEMPLATES)]
        numbers = (
            low + _draw(f"{seed}/{index}/{place}") % (high - low + 1)
            for place, (low, high) in enumerate(template.ranges)
        )
        yield Problem(template, tuple(numbers))
        index += 1


def _draw(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
