"""Results are kept line by line and never mixed; metrics are what counting every choice of attempts gives."""

import itertools
import math

import pytest

from prime_rl.config.shared import SamplingConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalPlan, EvalResults, pass_at_k


def result(reward=1.0, outcome=Outcome.OK, task="0", **more):
    return EpisodeResult("e", "env", task, outcome, reward=reward, input_tokens=10, output_tokens=4, **more)


def results(tasks, attempts, **settings):
    listed = [str(task) for task in range(tasks)]
    plan = EvalPlan("env", "env", SamplingConfig(), tasks, attempts, 100)
    return EvalResults(plan, listed, 3, "step_3", **settings)


def opened(directory, settings=(), **more):
    made = results(2, 2)
    made.open(directory, dict(settings), **more)
    return made


def metrics(*by_task, **settings):
    """Of the rewards of each task's attempts; None: it failed."""
    made = results(len(by_task), 100, **settings)
    for task, rewards in enumerate(by_task):
        for number, reward in enumerate(rewards):
            failed = {"outcome": Outcome.TIMEOUT} if reward is None else {}
            made.add(number, result(reward or 0.0, task=str(task), **failed))
    return made.metrics()


def test_what_was_added_is_read_again(tmp_path):
    """Contract: failed attempts are to be made again; a later line replaces an earlier one; tokens of all count."""
    made = opened(tmp_path)
    kept = {"rewards": {"a": 1.0, "b": math.nan}, "metrics": {"m": 2.0}, "prompt": "p", "completion": "c"}
    made.add(0, result(num_turns=2, **kept))
    made.add(1, result(outcome=Outcome.TIMEOUT, message="late"))
    assert len(made.rows) == 2
    made.close()
    made = opened(tmp_path)
    assert made.rows.keys() == {("0", 0)}
    wanted = {**kept, "rewards": {"a": 1.0}, "reward": 1.0, "num_turns": 2, "version": 3, "outcome": "ok"}
    assert made.rows["0", 0].items() >= wanted.items()
    assert made.line() == "env 1/4: avg@1 1"
    made.add(1, result(0.5))
    made.close()
    made = opened(tmp_path)
    assert (made.rows["0", 1]["reward"], made.input_tokens, made.output_tokens) == (0.5, 30, 12)
    made.close()


def test_other_settings_do_not_go_on_with_it(tmp_path):
    settings = {"sampling": {"temperature": 1.0, "top_p": 1.0}, "environment": {"args": {}}}
    made = opened(tmp_path / "s", settings)
    made.add(0, result())
    made.close()
    with pytest.raises(UserError, match=r"made with sampling.temperature = 1.0, and now it is 0.5: .*--clean"):
        opened(tmp_path / "s", settings | {"sampling": {"temperature": 0.5, "top_p": 1.0}})
    with pytest.raises(UserError, match=r"environment.args.split = null, and now it is \"eval\""):
        opened(tmp_path / "s", settings | {"environment": {"args": {"split": "eval"}}})
    made = opened(tmp_path / "s", {"seed": 1}, clean=True)
    assert made.rows == {}
    made.close()
    (tmp_path / "s" / "results.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match=r"line 1 of .* is damaged"):
        opened(tmp_path / "s", {"seed": 1})


def test_means_are_over_tasks_and_leave_failed_attempts_out():
    """Tasks (1, 0) and (1, failed): avg@2 = (0.5 + 1) / 2; the reward mean is over the three scored attempts."""
    measured = metrics([1.0, 0.0], [1.0, None])
    assert measured["avg@2"] == 0.75
    assert measured["reward/mean"] == pytest.approx(2 / 3)
    assert measured["errors/rate"] == 0.25
    assert measured["policy_version"] == 3
    nothing = metrics([None])
    assert "reward/mean" not in nothing  # never a reward of 0 that was not earned
    assert nothing["errors/rate"] == 1.0
    # The interval is over tasks, too: means 0, 1: s = 0.7071, 1.96 · s / √2 = 0.98, however often the attempts agree.
    assert metrics([0.0], [1.0])["avg@1/ci95"] == pytest.approx(0.98, abs=1e-4)
    assert metrics([0.0] * 100, [1.0] * 100)["avg@100/ci95"] == pytest.approx(0.98, abs=1e-4)
    assert "avg@1/ci95" not in metrics([0.0])


def test_pass_at_k_is_over_tasks_with_k_scored_attempts():
    measured = metrics([1.0, None], [0.0, 1.0], [None, None])
    assert measured["pass@1"] == pytest.approx((1.0 + 0.5) / 2)
    assert measured["pass@2"] == 1.0  # of the second task alone
    assert [name for name in metrics([1.0] * 7) if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4"]
    tasks = [[0.5, 1.0], [0.4, 0.0]]
    assert (metrics(*tasks)["pass@2"], metrics(*tasks, solved_at=0.4)["pass@2"]) == (0.5, 1.0)
    assert metrics([0.1 + 0.2], solved_at=0.3)["pass@1"] == 1.0


@pytest.mark.parametrize("attempts", range(1, 9))
def test_pass_at_k_is_a_share_of_all_choices(attempts):
    """Contract: for every n ≤ 8, c ≤ n, k ≤ n the share of the C(n, k) choices in which one solved the task."""
    for solved, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        choices = list(itertools.combinations([number < solved for number in range(attempts)], k))
        assert pass_at_k(attempts, solved, k) == pytest.approx(sum(map(any, choices)) / len(choices))
