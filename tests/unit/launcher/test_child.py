"""What is told of a process that has ended, by its log."""

from pathlib import Path

import pytest

from prime_rl.launcher.child import killed_rank, last_words

REPORT = """\
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_20:59:01
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 101)
  traceback : Signal 15 (SIGTERM) received by PID 101
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_20:59:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 102)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 102
============================================================
"""


@pytest.mark.parametrize(("code", "told"), [("-9", ["rank 1 was killed by SIGKILL"]), ("1", [])])
def test_the_rank_that_was_killed_first(code: str, told: list[str]) -> None:
    assert killed_rank(REPORT.format(code=code).splitlines()) == told
    assert killed_rank([]) == []


def test_last_words(tmp_path: Path) -> None:
    """An error for the user before a killed rank before the last lines; never a ruler."""
    log = tmp_path / "log"
    log.write_text(REPORT.format(code="-9"))
    assert last_words(log) == ["rank 1 was killed by SIGKILL"]
    log.write_text("error: the disk is full\n" + REPORT.format(code="1"))
    assert last_words(log) == ["error: the disk is full"]
    log.write_text(REPORT.format(code="1"))
    assert last_words(log)[-1].startswith("  traceback")
