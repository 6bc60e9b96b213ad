"""What the doctor shows beside its sentence."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.entrypoints import rl
from prime_rl.errors import UserError
from prime_rl.launcher.diagnosis import Diagnosis, Facts, ProcessFacts, State, Verdict
from prime_rl.launcher.doctor import examination
from prime_rl.monitor.status import ProcessStatus


def test_errors_of_a_log_are_shown_where_something_is_wrong(tmp_path: Path) -> None:
    """Contract: neither of a run that goes on after a restart, nor of a process that was stopped and was noisy on its way out."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "inference.log").write_text("EngineDeadError: it encountered an issue\nChildFailedError: \n")
    status = ProcessStatus("inference", 1, "serving", None, 1.0, 1.0, None, None)

    def shown(verdict: Verdict, outcome: str | None = None) -> list[str]:
        facts = Facts(
            2.0,
            ProcessFacts(State.ABSENT),
            {"inference": ProcessFacts(State.ALIVE, replace(status, outcome=outcome))},
        )
        lines = examination(tmp_path, facts, Diagnosis(verdict, "so it is"))
        return [line for line in lines if line.startswith("error")]

    assert shown(Verdict.STUCK) == ["error          inference.log: EngineDeadError: it encountered an issue"]
    assert shown(Verdict.FAILED, "failed: it was killed") == shown(Verdict.STUCK)
    assert shown(Verdict.MOVES) == []
    assert shown(Verdict.INTERRUPTED, "stopped") == []


@pytest.mark.parametrize(
    ("word", "answer"), [("docter", "did you mean `rl doctor RUN`"), ("run.toml", "there are `rl @ CONFIG.toml`")]
)
def test_what_is_no_command_is_answered_by_those_there_are(
    monkeypatch: pytest.MonkeyPatch, word: str, answer: str
) -> None:
    """Contract: a slip of the pen names the way on, and starts nothing."""
    monkeypatch.setattr(sys, "argv", ["rl", word, "outputs"])
    with pytest.raises(UserError, match=answer):
        rl._run()
