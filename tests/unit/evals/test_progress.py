"""Without a terminal an evaluation says now and then how far it is, of each environment."""

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.evals import report
from prime_rl.evals.report import Bars


def result(reward, outcome=Outcome.OK):
    return EpisodeResult("e", "env", "t", outcome, reward=reward)


def test_a_line_now_and_then(heard, monkeypatch):
    with Bars("step_3", {"one": 4, "two": 2}) as bars:
        bars.add("one", result(1.0))
        assert heard.messages == []  # too soon
        monkeypatch.setattr(report, "LINE_SECONDS", -1.0)
        bars.add("one", result(0.5))
        bars.add("two", result(0.0, Outcome.TIMEOUT))
    assert heard.messages == [
        "step_3: one 2/4 (reward 0.750), two 0/2 (no reward yet)",
        "step_3: one 2/4 (reward 0.750), two 1/2 (no reward yet, 1 failed)",
    ]
    assert bars.done == 3
