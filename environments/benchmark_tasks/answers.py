"""What a reply, or a worked solution of a dataset, gives as its answer. Standard library only."""

import re

THINK, END_OF_THINKING = "<think>", "</think>"
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_SPACING = re.compile(
    r"\\[!,;: ]|~|(?<![0-9])\s+|\s+(?![0-9])|\s(?=[0-9]{3}(?![0-9]))"
)  # 3 1/2 is not 31/2, but 1 000 is 1000
_DRESS = re.compile(r"\\(?:(?:left|right|displaystyle|limits)(?![A-Za-z])|$)")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textrm|mathbf)\{([^{}]*)\}")


def after_thinking(reply: str) -> str:
    """What follows the last `</think>`; nothing where thinking began and did not end."""
    if END_OF_THINKING in reply:
        return reply.rpartition(END_OF_THINKING)[2]
    return "" if THINK in reply else reply


def last_boxed(text: str) -> str | None:
    r"""Return what the last complete `\boxed{…}` holds, braces in it balanced, or None. `\boxed 7` is 7, as in TeX."""
    boxes = list(_BOXED.finditer(text))
    closed = _closing(text, {box.end() for box in boxes if box.group(1) == "{"})
    for box in reversed(boxes):
        if box.group(1) != "{":
            return text[box.end()]
        if box.end() in closed:
            return text[box.end() : closed[box.end()]].strip()
    return None


def _closing(text: str, starts: set[int]) -> dict[int, int]:
    """Return where the boxes that begin at `starts`, behind their braces, close, if they do. One pass: a reply may be
    nothing but boxes."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text, min(starts, default=len(text)) - 1):
        if brace.group() == "{":  # \{ and \} are characters of the answer
            opened.append(brace.end())
        elif brace.group() == "}" and opened and (start := opened.pop()) in starts:
            found[start] = brace.start()
    return found


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
