"""Log format, metrics files and status files."""

import json
import logging
import math
import re
from pathlib import Path

import pytest

from prime_rl.monitor import Status, log, read_metrics, read_status
from prime_rl.monitor.monitor import JsonlWriter, metrics_path


@pytest.fixture(autouse=True)
def fresh_logging():
    root = logging.getLogger("prime_rl")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_log_lines_are_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """One format, no escape codes in a file."""
    log.setup("info", "trainer")
    log.get("prime_rl.x").info("hello %d", 3)
    log.get("other").debug("not shown")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    hello 3\n", capsys.readouterr().out)


def test_ranks_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Several ranks write one file: the rank is in the line."""
    log.setup("warning", "trainer.1")
    log.get(__name__).warning("low")
    assert "WARNING [trainer.1] low" in capsys.readouterr().out


def test_metrics_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flat object a line: step, time, finite numbers; non-finite ones dropped with one warning a key."""
    path = metrics_path(tmp_path, "trainer")
    writer = JsonlWriter(path)
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        logging.getLogger("prime_rl").propagate = True
        writer.write(0, {"loss/mean": 0.5, "bad": math.nan, "count": 3})
        writer.write(1, {"bad": math.inf})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(line) for line in lines] == [{"step", "time", "loss/mean", "count"}, {"step", "time"}]
    assert lines[0]["count"] == 3
    assert sum("bad" in record.getMessage() for record in caplog.records) == 1


def test_resume_appends_and_the_last_line_wins(tmp_path: Path) -> None:
    """A resumed run continues the file; a repeated step replaces the earlier one; a torn line harms nobody."""
    path = metrics_path(tmp_path, "trainer")
    first = JsonlWriter(path)
    for step in range(3):
        first.write(step, {"loss/mean": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 3, "loss/me')
    second = JsonlWriter(path)
    second.write(2, {"loss/mean": 9.0})
    second.write(2, {"eval/x/reward/mean": 0.25})
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[2]["loss/mean"], rows[2]["eval/x/reward/mean"]) == (9.0, 0.25)
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_status_says_phase_step_and_wait(tmp_path: Path) -> None:
    """Readers see changes at once, with subject, owner and a deadline that counts from the first call."""
    status = Status(tmp_path, "trainer")
    status.phase("loading the model")
    status.step(3)
    status.waiting("rollouts/step_3", "orchestrator", 60.0)
    first = read_status(tmp_path)["trainer"]
    status.waiting("rollouts/step_3", "orchestrator", 60.0)
    again = read_status(tmp_path)["trainer"]
    assert (first.phase, first.step) == ("loading the model", 3)
    assert first.waiting is not None
    assert first.waiting.deadline - first.waiting.since == pytest.approx(60.0)
    assert again.waiting == first.waiting
    status.phase("training")
    assert read_status(tmp_path)["trainer"].waiting is None
    status.done("finished")
    last = read_status(tmp_path)["trainer"]
    assert (last.phase, last.outcome) == ("done", "finished")


def test_heartbeats_are_throttled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait polled quickly does not write the file at every poll, a changed phase always does."""
    writes = 0
    original = Path.replace

    def counted(self: Path, target: Path) -> Path:
        nonlocal writes
        writes += 1
        return original(self, target)

    monkeypatch.setattr(Path, "replace", counted)
    status = Status(tmp_path, "trainer")
    for _ in range(50):
        status.waiting("x", "y", 1.0)
    assert writes < 10
    before = writes
    status.phase("a")
    status.phase("b")
    assert writes == before + 2
