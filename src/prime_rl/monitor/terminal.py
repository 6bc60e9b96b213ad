"""Rows that stay below the lines of a terminal, and what they are made of: progress, remaining time, a sparkline.

Without a terminal there are no rows, and lines are printed as they are. `rich`, which draws, is imported on terminals
only.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Self

from prime_rl.errors import say, until_closed

if TYPE_CHECKING:
    from rich.live import Live

COLUMNS = 120  # of a row at most
ETA_STEPS = 10  # the remaining time follows the mean of the last steps
_DRAW_SECONDS = 0.25  # between two drawings
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24

Spans = Sequence[tuple[str, str]]
"""A row: texts and their styles. Green works, yellow waits, red has failed; what matters less is dim."""


class LiveRegion(AbstractContextManager["LiveRegion"]):
    """Rows below the lines; nothing where stdout is no terminal. What this process prints appears above them."""

    def __init__(self) -> None:
        encoding = (getattr(sys.stdout, "encoding", None) or "").replace("-", "").lower()
        self._capable = os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and encoding == "utf8"
        self._live: Live | None = None  # while there are rows
        self._drawn = -math.inf

    @property
    def shown(self) -> bool:
        """Whether there are rows, which lines need not repeat."""
        return self._live is not None

    def say(self, text: str, style: str = "") -> None:
        """Print lines above the rows, on a terminal in this style."""
        if self._live is None:
            return say(text)
        from rich.text import Text

        with until_closed():  # as it is: where a line is too long the terminal wraps it, so that it can be copied
            self._live.console.print(Text.from_ansi(text, style=style), soft_wrap=True)

    def draw(self, rows: Callable[[], Iterable[Spans]]) -> None:
        """Show these rows in place of the last ones, unless those were drawn just now. The first ones are kept where
        the terminal is low."""
        if time.monotonic() - self._drawn < _DRAW_SECONDS or not (self._capable and sys.stdout.isatty()):
            return
        from rich.console import Group
        from rich.text import Text

        with until_closed():
            live = self._live = self._live or _start()
            width, height = os.get_terminal_size(sys.stdout.fileno())
            live.console.size = width or COLUMNS, height or 24  # a terminal may not know
            texts = [Text.assemble(*spans, no_wrap=True) for spans in rows()][: max(1, live.console.height // 2)]
            for text in texts:
                text.truncate(min(COLUMNS, live.console.width - 1), overflow="ellipsis")
            live.update(Group(*texts), refresh=True)
        self._drawn = time.monotonic()

    def close(self) -> None:
        """Remove the rows. Safe to call twice."""
        if self._live is not None:
            with until_closed():
                self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _start() -> "Live":
    from rich.console import Console
    from rich.live import Live

    # Of `print` and of log lines each is a whole line, which goes above the rows.
    console = Console(force_terminal=True, highlight=False, soft_wrap=True)
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=sys.stderr.isatty())
    live.start()
    console.show_cursor()  # a killed process leaves it so
    return live


def progress(done: int, total: int | None, unit: str, left: float | None) -> Spans:
    """`━━━━╌╌╌╌ 15/30 steps, ETA 1:20`. `total`: None where there is no end; `left`: seconds."""
    if not total:
        return [(f"{done} {unit}", "bold")]
    cells = min(done, total) * _BAR_CELLS // total
    eta = "" if left is None else f", ETA {minutes(left)}"
    return [("━" * cells, "green"), ("╌" * (_BAR_CELLS - cells), "dim"), (f" {done}/{total} {unit}", "bold"), (eta, "")]


def remaining(ends: Sequence[float], todo: int, now: float) -> float | None:
    """Seconds that `todo` more steps take at the pace of the last ones, which ended at `ends`; None before there are
    two. A step that takes longer than those before adds nothing."""
    if len(ends) < 2:
        return None
    pace = (ends[-1] - ends[0]) / (len(ends) - 1)
    return todo * pace - min(max(now - ends[-1], 0.0), pace if todo else 0.0)


def sparkline(values: Sequence[float], cells: int) -> str:
    """`▁▃▅█`: from the least to the most of the values; where they are more than `cells`, means of equal parts."""
    count = min(cells, len(values))
    bounds = [len(values) * cell // count for cell in range(count + 1)] if count else []
    means = [fmean(values[begin:end]) for begin, end in pairwise(bounds)]
    low, extent = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (mean - low) / extent) if extent else 0] for mean in means)


def minutes(seconds: float) -> str:
    """`75.2` → `1:15`, `3700` → `1:01:40`."""
    whole = math.floor(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
