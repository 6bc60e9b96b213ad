"""Rows that stay below the lines of a terminal, and what they are made of: progress, remaining time, a sparkline.

Elsewhere lines are printed as they are. `rich`, which draws, is imported on terminals only.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from prime_rl.errors import printable, say, until_closed

if TYPE_CHECKING:
    from rich.live import Live

MAX_WIDTH = 120  # of a row, in columns
_DRAW_SECONDS = 0.25  # between two drawings
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24

Spans = Sequence[tuple[str, str]]
"""A row: texts and their styles. Green works, yellow waits, red has failed; what matters less is dim."""


class LiveRegion(AbstractContextManager["LiveRegion"]):
    """Rows below the lines; nothing where stdout is no terminal. What this process prints appears above them."""

    def __init__(self) -> None:
        terminal, encoding = os.environ.get("TERM") or "dumb", f"{sys.stdout.encoding}".lower()
        self._capable = terminal not in ("dumb", "unknown") and encoding == "utf-8"
        self._drawn = -math.inf
        self._first: tuple[float, int] | None = None  # when progress was first shown, and how much it was
        self.live: Live | None = None  # while there are rows

    def say(self, text: str, style: str = "") -> None:
        """Print lines above the rows, on a terminal in this style."""
        if self.live is None:
            return say(text)
        with until_closed():
            self.live.console.print(printable(text), style=style)

    def draw(self, rows: Callable[[], Iterable[Spans]]) -> None:
        """Show these rows in place of the last ones, unless those were drawn just now. Only the first are kept if
        the terminal has few lines."""
        due = time.monotonic() - self._drawn >= _DRAW_SECONDS
        if not (due and self._capable and sys.stdout.isatty()):
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        with until_closed():
            if self.live is None:
                # Lines are printed as they are: the terminal wraps those that are too long, so that they can be copied.
                console = Console(force_terminal=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
                own = sys.stderr.isatty()
                self.live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=own)
                self.live.start()
                console.show_cursor()  # a killed process may have hidden it
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
            self.live.console.size = size = (columns or MAX_WIDTH, lines or 24)  # a terminal may not know
            bars = size[0] > 2 * _BAR_CELLS  # or numbers alone
            shown = [[(printable(text), style) for text, style in row if bars or text.strip("━╌")] for row in rows()]
            texts = [Text.assemble(*spans, no_wrap=True) for spans in shown][: max(1, size[1] // 2)]
            for text in texts:
                text.truncate(min(MAX_WIDTH, size[0] - 1), overflow="ellipsis")
            self.live.update(Group(*texts), refresh=True)
        self._drawn = time.monotonic()

    def draw_progress(self, done: int, total: int | None, unit: str, more: Callable[[], str]) -> None:
        """Show one row: how much is done, the remaining time at the pace since the first call, and what `more` says."""
        now = time.monotonic()
        began, first = self._first = self._first or (now, done)
        left = (now - began) * (total - done) / (done - first) if total and done > first else None
        self.draw(lambda: [[*progress(done, total, unit, left), (more(), "")]])

    def close(self) -> None:
        """Remove the rows. Safe to call twice."""
        if self.live is not None:
            with until_closed():
                self.live.stop()
            self.live = None

    def __exit__(self, *exc: object) -> None:
        self.close()


def progress(done: int, total: int | None, unit: str, left: float | None) -> Spans:
    """`━━━━╌╌╌╌ 15/30 steps, ETA 1:20`. `total`: None where there is no end; `left`: seconds."""
    if not total:
        return [(f"{done} {unit}", "bold")]
    cells = min(done, total) * _BAR_CELLS // total
    eta = "" if left is None else f", ETA {minutes(left)}"
    return [("━" * cells, "green"), ("╌" * (_BAR_CELLS - cells), "dim"), (f" {done}/{total} {unit}", "bold"), (eta, "")]


def remaining(times: Sequence[float], todo: int, now: float) -> float | None:
    """Seconds that `todo` more steps take at the pace of the last ones, which ended at `times`; None before there are
    two. A step that takes longer than those before adds nothing."""
    if len(times) < 2:
        return None
    pace = (times[-1] - times[0]) / (len(times) - 1)
    return todo * pace - min(max(now - times[-1], 0.0), pace if todo else 0.0)


def sparkline(values: Sequence[float]) -> str:
    """`▁▃▅█`: from the least of the values to the most."""
    low, extent = min(values), max(values) - min(values)
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * (value - low) / extent) if extent else 0] for value in values)


def minutes(seconds: float) -> str:
    """`75.2` → `1:15`, `3700` → `1:01:40`."""
    whole = math.floor(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
