"""Results are kept line by line and never mixed; their metrics agree with what they estimate, counted out over every choice of attempts and tasks."""

import itertools
import json
import math
from fractions import Fraction

import pytest

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.evals.results import EvalResults, alone, pass_at_k, pass_hat_k


def result(reward=1.0, outcome=Outcome.OK, task="t", **more):
    return EpisodeResult("e", "env", task, outcome, reward=reward, input_tokens=10, output_tokens=4, **more)


def opened(directory, settings=(), **more):
    results = EvalResults("env", "step_3", 3, ["t", "u"], 2)
    results.open(directory, dict(settings), **more)
    return results


def metrics(*by_task, **settings):
    """Of the rewards of each task's attempts; None: it failed."""
    results = EvalResults("env", "step_3", 3, [str(task) for task in range(len(by_task))], 100, **settings)
    for task, rewards in enumerate(by_task):
        for number, reward in enumerate(rewards):
            failed = {"outcome": Outcome.TIMEOUT} if reward is None else {}
            results.add(number, result(reward or 0.0, task=str(task), **failed))
    return results.metrics()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_what_was_added_is_read_again(tmp_path):
    """Contract: failed attempts are to be made again; a later line replaces an earlier one; tokens of all of them count."""
    results = opened(tmp_path / "s")
    results.add(
        0, result(rewards={"a": 1.0, "b": math.nan}, metrics={"m": 2.0}, prompt="p", completion="c", num_turns=2)
    )
    results.add(1, result(outcome=Outcome.TIMEOUT, message="late"))
    assert len(results.done) == 2
    results.close()
    results = opened(tmp_path / "s")
    assert results.done == {("t", 0)}
    kept = results.attempts["t", 0]
    assert (kept.reward, kept.rewards, kept.metrics, kept.prompt, kept.completion, kept.num_turns) == (1.0, {"a": 1.0}, {"m": 2.0}, "p", "c", 2)  # fmt: skip
    assert results.progress() == "env 1/4 (reward 1.000)"
    results.add(1, result(0.5))
    results.close()
    results = opened(tmp_path / "s")
    assert results.attempts["t", 1].reward == 0.5
    assert (results.input_tokens, results.output_tokens) == (30, 12)
    results.close()


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_half_a_line_of_a_killed_writer_is_dropped(tmp_path, cut):
    results = opened(tmp_path / "s")
    for attempt in range(2):
        results.add(attempt, result())
    results.close()
    path = tmp_path / "s" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    results = opened(tmp_path / "s")
    assert set(results.attempts) == {("t", 0)}
    results.add(1, result(0.25))
    results.close()
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0, 0.25]
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(UserError, match=r"line 1 of .* is damaged"):
        opened(tmp_path / "s")


def test_other_settings_do_not_go_on_with_it(tmp_path):
    settings = {"sampling": {"temperature": 1.0, "top_p": 1.0}, "environment": {"args": {}}}
    results = opened(tmp_path / "s", settings)
    results.add(0, result())
    results.close()
    with pytest.raises(UserError, match=r"made with sampling.temperature = 1.0, and now it is 0.5: .*--clean"):
        opened(tmp_path / "s", settings | {"sampling": {"temperature": 0.5, "top_p": 1.0}})
    with pytest.raises(UserError, match=r"environment.args.split = nothing, and now it is \"eval\""):
        opened(tmp_path / "s", settings | {"environment": {"args": {"split": "eval"}}})
    results = opened(tmp_path / "s", {"seed": 1}, clean=True)
    assert results.attempts == {}
    results.close()


def test_two_do_not_write_at_once(tmp_path):
    with alone(tmp_path / "evals"):
        with pytest.raises(UserError, match="another evaluation is writing"), alone(tmp_path / "evals"):
            pass
    with alone(tmp_path / "evals"):
        pass


# -- the numbers -------------------------------------------------------------------------------------------------------


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


def test_pass_at_k_is_over_tasks_with_k_scored_attempts():
    measured = metrics([1.0, None], [0.0, 1.0], [None, None])
    assert measured["pass@1"] == pytest.approx((1.0 + 0.5) / 2)
    assert measured["pass@2"] == 1.0  # of the second task alone
    assert measured["pass^2"] == 0.0
    assert [name for name in metrics([1.0] * 7) if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4"]


def test_the_reward_that_counts_as_solved_is_an_option():
    tasks = [[0.5, 1.0], [0.4, 0.0]]
    assert metrics(*tasks)["pass@2"] == 0.5
    assert metrics(*tasks, solved_at=0.4)["pass@2"] == 1.0
    assert metrics([0.1 + 0.2], solved_at=0.3)["pass@1"] == 1.0


def test_the_interval_is_over_tasks_not_attempts():
    """Means 0, 1: s = 0.7071, 1.96 · s / sqrt(2) = 0.98. A hundred attempts that always agree say no more than one."""
    assert metrics([0.0], [1.0])["avg@1/ci95"] == pytest.approx(0.98, abs=1e-4)
    assert metrics([0.0] * 100, [1.0] * 100)["avg@100/ci95"] == pytest.approx(0.98, abs=1e-4)
    assert "avg@1/ci95" not in metrics([0.0])


@pytest.mark.parametrize("attempts", range(1, 9))
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_choices(attempts):
    """Contract: for every n ≤ 8, c ≤ n and k ≤ n, the share of the C(n, k) choices in which one, and all, solved the task."""
    for solved, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        choices = list(itertools.combinations([number < solved for number in range(attempts)], k))
        assert pass_at_k(attempts, solved, k) == pytest.approx(float(Fraction(sum(map(any, choices)), len(choices))))
        assert pass_hat_k(attempts, solved, k) == pytest.approx(float(Fraction(sum(map(all, choices)), len(choices))))
