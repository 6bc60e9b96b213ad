"""The rules of Wordle, and what a game that was played is worth. Standard library only."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LENGTH = 5
RIGHT, PRESENT, ABSENT = "G", "Y", "X"
OPEN_TAG, CLOSE_TAG = "<guess>", "</guess>"

_GUESS = re.compile(rf"{OPEN_TAG}\s*([A-Za-z]{{{LENGTH}}})\s*{CLOSE_TAG}")

RULES = (
    f"Guess a secret English word of {LENGTH} letters. Write each guess as {OPEN_TAG}word{CLOSE_TAG}. Every letter "
    f"gets a mark: {RIGHT} right place, {PRESENT} in the word but elsewhere, {ABSENT} not in the word."
)


def parse(reply: str) -> str | None:
    """The last well-formed guess in a reply, in lower case; None without one."""
    found = _GUESS.findall(reply)
    return found[-1].lower() if found else None


def marks(secret: str, guess: str) -> str:
    """Mark each letter of the guess, no letter more often than the secret has it: right places first, then the left."""
    spare = Counter(letter for letter, guessed in zip(secret, guess, strict=True) if letter != guessed)
    found = []
    for letter, guessed in zip(secret, guess, strict=True):
        if letter == guessed:
            found.append(RIGHT)
        elif spare[guessed] > 0:
            spare[guessed] -= 1
            found.append(PRESENT)
        else:
            found.append(ABSENT)
    return "".join(found)


@dataclass(frozen=True)
class Game:
    """What was played, reply by reply.

    Args:
        guesses: The guess of each reply up to the one that solves; None for a reply without a well-formed guess.
        limit: Replies that the game allows. One without a guess counts.
    """

    secret: str
    guesses: tuple[str | None, ...]
    limit: int

    @property
    def solved(self) -> bool:
        return self.secret in self.guesses

    @property
    def over(self) -> bool:
        return self.solved or len(self.guesses) >= self.limit

    @property
    def partial(self) -> float:
        """How near the last well-formed guess is, in [0, 1]: a letter in its place 1/5, elsewhere 1/10; 1: solved."""
        last = next((guess for guess in reversed(self.guesses) if guess is not None), None)
        if last is None:
            return 0.0
        found = marks(self.secret, last)
        return (found.count(RIGHT) + 0.5 * found.count(PRESENT)) / LENGTH

    @property
    def speed(self) -> float:
        """Share of replies not needed, the solving one included: 1 at the first, 1/limit at the last, 0 unsolved."""
        return (self.limit - len(self.guesses) + 1) / self.limit if self.solved else 0.0

    @property
    def format(self) -> float:
        """Share of the replies with a well-formed guess."""
        return sum(guess is not None for guess in self.guesses) / len(self.guesses) if self.guesses else 0.0

    def answer(self) -> str:
        """What the player is told after the last reply."""
        left = self.limit - len(self.guesses)
        last = self.guesses[-1]
        # With spaces a tokenizer gives every letter and every mark a token of its own.
        said = (
            f"{' '.join(last)}\n{' '.join(marks(self.secret, last))}"
            if last
            else f"No guess of {LENGTH} letters in tags."
        )
        return f"{said}\n{left} left."


def play(secret: str, replies: Iterable[str], limit: int) -> Game:
    """The game that these replies are; what comes after its end is ignored."""
    game = Game(secret, (), limit)
    for reply in replies:
        if game.over:
            break
        game = Game(secret, (*game.guesses, parse(reply)), limit)
    return game
