"""What a reply, or a worked solution of a dataset, gives as its answer. Standard library only."""

import re

THINK, END_OF_THINKING = "<think>", "</think>"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
_SPACING = re.compile(r"\\[!,;: ]|\s+|~")
_DRESS = re.compile(r"\\(?:left|right|displaystyle|limits|$)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textrm|mathbf)\{([^{}]*)\}")


def after_thinking(reply: str) -> str:
    """What follows the last `</think>`; nothing where thinking began and did not end."""
    if END_OF_THINKING in reply:
        return reply.rpartition(END_OF_THINKING)[2]
    return "" if THINK in reply else reply


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{…}` holds, braces within it balanced; None without one. `\boxed 7` is 7, as in TeX."""
    for match in reversed(list(_BOXED.finditer(text))):
        if match.group(1) != "{":
            return text[match.end()]
        inside = _balanced(text, match.end())
        if inside is not None:
            return inside.strip()
    return None


def _balanced(text: str, start: int) -> str | None:
    """From `start`, which is behind an opening brace, to the brace that closes it; None where none does."""
    depth, place = 1, start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1  # \{ and \} are characters of the answer
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return text[start:place]
        place += 1
    return None


def boxed_answer(reply: str) -> str | None:
    """The answer of a reply: in its last box after the thinking. None: it gives none; an empty box is none."""
    return last_boxed(after_thinking(reply)) or None


def plain(answer: str) -> str:
    """The answer without what only its typesetting needs. Equal texts are equal answers; unequal ones may be."""
    answer = answer.strip().strip("$").rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    answer = _DRESS.sub("", answer)
    while (bare := _TEXT.sub(r"\1", answer)) != answer:
        answer = bare
    return _SPACING.sub("", answer)
