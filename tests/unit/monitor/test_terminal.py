"""What rows of a terminal are made of, and that they leave the lines above them as they are."""

import re
from pathlib import Path

import pytest

from prime_rl.errors import say
from prime_rl.monitor.terminal import minutes, progress, remaining, sparkline
from support.processes import until
from support.terminal import Screen, Terminal, python


def test_a_sparkline_goes_from_the_least_to_the_most() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert [sparkline(values) for values in ([0.3], [-0.3, -0.3])] == ["▁", "▁▁"]


def test_the_remaining_time_follows_the_pace() -> None:
    """It counts down within a step, by no more than that step takes, and is not known before two steps have ended."""
    ends = [100.0, 110.0, 120.0]
    assert [remaining(ends, todo, now=120.0) for todo in (6, 1, 0)] == [60.0, 10.0, 0.0]
    assert [remaining(ends, 6, now) for now in (124.0, 130.0, 500.0, 90.0)] == [56.0, 50.0, 50.0, 60.0]
    assert remaining(ends, 0, now=500.0) == 0.0
    assert remaining([100.0], 6, now=101.0) is None


def test_progress_in_words() -> None:
    def text(*arguments) -> str:
        return "".join(text for text, _ in progress(*arguments))

    assert text(15, 30, "steps", 80.0) == "━" * 12 + "╌" * 12 + " 15/30 steps, ETA 1:20"
    assert text(30, 30, "steps", None) == "━" * 24 + " 30/30 steps"
    assert text(7, None, "steps", None) == "7 steps"
    assert [minutes(seconds) for seconds in (0.4, 75.2, 3700)] == ["0:00", "1:15", "1:01:40"]


def test_nothing_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\tb\n\x1b[31mä🙂\r\x9b\x7f")
    assert capsys.readouterr().out == "a\tb\n?[31mä🙂???\n"


PROGRAM = """
import os, sys, time, warnings
from loguru import logger
from prime_rl.errors import say
from prime_rl.monitor import log
from prime_rl.monitor.terminal import LiveRegion

how, rows, number = sys.argv[1], [[("state ", "bold"), ("x" * 200, "green")], [("second", "")]], 0
log.setup("info", "test")

def step(region, number):
    region._drawn = -1.0  # whatever the time
    region.draw(lambda: rows)
    for write in (region.say, say, logger.info, lambda text: print(text, file=sys.stderr)):
        write(f"{number} " + "long " * 30 + "end")

with LiveRegion() as region:
    step(region, 1)
    step(region, 2)
    if how in ("resize", "close"):
        print("change me", flush=True)
        while sys.stdout.isatty() and (how == "close" or os.get_terminal_size().columns != 40):
            time.sleep(0.01)
    step(region, 3)
    if how == "raise":
        1 / 0
    region._drawn = -1.0
    region.draw_progress(1, 4, "steps", lambda: ", loss 0.5\\x1b]0;t")
print("after")
"""


@pytest.mark.parametrize("how", ["end", "raise", "resize"])
def test_lines_are_whole_and_rows_are_removed(how: str) -> None:
    """Whoever prints them (`print`, the logger, stderr), and whatever their length, lines appear above the rows. These
    fit the width, also another one, and are gone at the end; the cursor stays."""
    terminal = Terminal(python(PROGRAM, how), columns=60)
    screen, before = Screen(60), ""
    if how == "resize":
        until(lambda: "change me\r\n" in terminal.text and terminal.text.endswith("second"), "end of the wide part")
        before = terminal.text
        terminal.resize(40)
        screen.feed(before)
        assert screen.lines[-2:] == ["state " + "x" * 52 + "…", "second"]
        screen.columns = 40
    screen.feed(terminal.wait(1 if how == "raise" else 0)[len(before) :])
    assert not any("state" in line or "second" in line for line in screen.lines)
    shown = "".join(screen.lines)
    assert shown.count("long " * 30 + "end") == 12
    assert [shown.count(f"{number} " + "long ") for number in (1, 2, 3)] == [4, 4, 4]
    assert ("crashed" in shown) == (how == "raise")
    assert ("after" in shown) == (how != "raise")
    assert screen.cursor


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """What is printed from then on is dropped, rows too, and the program goes on to its end."""
    terminal = Terminal(
        python(PROGRAM + "import pathlib; pathlib.Path(sys.argv[2]).touch()", "close", tmp_path / "end")
    )
    until(lambda: "change me" in terminal.text, "rows")
    terminal.hang_up()
    assert terminal.popen.wait(60) == 0
    assert (tmp_path / "end").exists()


def test_no_rows_and_no_escapes_elsewhere() -> None:
    """A dumb terminal gets lines only; NO_COLOR takes the colours and leaves the rows."""
    for name in ("dumb", ""):
        assert "\x1b" not in Terminal(python(PROGRAM, "end"), TERM=name, NO_COLOR="1").wait(0)
    plain = Terminal(python(PROGRAM, "end"), NO_COLOR="1").wait(0)
    assert "xxx…" in plain
    assert "━" * 6 + "╌" * 18 + " 1/4 steps, loss 0.5" in re.sub(r"\x1b\[\d+m", "", plain)
    assert "\x1b[32m" not in plain
    narrow = re.sub(r"\x1b\[\d+m", "", Terminal(python(PROGRAM, "end"), columns=30, NO_COLOR="1").wait(0))
    assert ("1/4 steps, loss 0.5" in narrow, "━" in narrow) == (True, False)
    assert "\x1b[32m" in Terminal(python(PROGRAM, "end")).wait(0)
