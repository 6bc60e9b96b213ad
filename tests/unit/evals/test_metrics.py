"""pass@k, pass^k and intervals against what they estimate, counted out: every choice of k attempts, every resample of the tasks."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.evals.metrics import EvalReport, interval95, ks, mean, pass_at_k, pass_hat_k


@pytest.mark.parametrize("attempts", range(1, 9))
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_choices(attempts):
    """Contract: for every n ≤ 8, c ≤ n and k ≤ n, the share of the C(n, k) choices in which one, and all, solved the task."""
    for solved, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        outcomes = [place < solved for place in range(attempts)]
        choices = list(itertools.combinations(outcomes, k))
        assert pass_at_k(attempts, solved, k) == pytest.approx(float(Fraction(sum(map(any, choices)), len(choices))))
        assert pass_hat_k(attempts, solved, k) == pytest.approx(float(Fraction(sum(map(all, choices)), len(choices))))


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 1.0])
def test_they_are_unbiased(chance):
    """Contract: over all outcomes of n attempts, weighed by how likely they are, pass@k is 1 − (1−p)^k and pass^k is p^k."""
    n = 6
    weights = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        expected_any = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
        expected_all = sum(weight * pass_hat_k(n, c, k) for c, weight in enumerate(weights))
        assert expected_any == pytest.approx(1 - (1 - chance) ** k)
        assert expected_all == pytest.approx(chance**k)


@given(st.integers(1, 300), st.data())
def test_they_grow_and_shrink_with_k_and_agree_at_one(attempts, data):
    solved = data.draw(st.integers(0, attempts))
    some = [pass_at_k(attempts, solved, k) for k in range(1, attempts + 1)]
    every = [pass_hat_k(attempts, solved, k) for k in range(1, attempts + 1)]
    assert some[0] == pytest.approx(solved / attempts) == every[0]
    assert all(one <= two + 1e-12 for one, two in itertools.pairwise(some))
    assert all(one >= two - 1e-12 for one, two in itertools.pairwise(every))
    assert some[-1] == float(solved > 0)
    assert every[-1] == float(solved == attempts)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=5))
def test_the_interval_is_that_of_resampling_tasks(means):
    """Contract: tasks are drawn, not attempts. Over all T^T resamples of the tasks the mean varies by (T−1)/T of the squared standard error."""
    count = len(means)
    resampled = [sum(drawn) / count for drawn in itertools.product(means, repeat=count)]
    center = sum(resampled) / len(resampled)
    variance = sum((value - center) ** 2 for value in resampled) / len(resampled)
    half = interval95(means)
    assert half is not None
    assert (half / 1.959963984540054) ** 2 == pytest.approx(variance * count / (count - 1), abs=1e-12)


def test_attempts_at_one_task_do_not_narrow_the_interval():
    """Contract: a hundred attempts that always agree say no more than one."""

    def half(attempts):
        tasks = [[solved(1.0)] * attempts, [solved(0.0)] * attempts, [solved(1.0)] * attempts]
        return EvalReport("e", 0, 1.0, tasks).metrics()[f"eval/e/avg@{attempts}/ci95"]

    assert half(100) == pytest.approx(half(1))


def test_there_is_none_of_nothing_and_of_one():
    assert (interval95([]), interval95([1.0]), mean([]), ks(0), ks(1), ks(7), ks(8)) == (
        None,
        None,
        None,
        [],
        [1],
        [1, 2, 4],
        [1, 2, 4, 8],
    )


def solved(reward, outcome=Outcome.OK):
    return EpisodeResult("e", "env", "t", outcome, reward=reward)


def test_what_counts_as_solved_is_an_option():
    tasks = [[solved(0.5), solved(1.0)], [solved(0.4), solved(0.0)]]
    assert EvalReport("e", 0, 1.0, tasks).metrics()["eval/e/pass@2"] == 0.5
    assert EvalReport("e", 0, 1.0, tasks, solved_at=0.4).metrics()["eval/e/pass@2"] == 1.0
    assert EvalReport("e", 0, 1.0, [[solved(0.1 + 0.2)]], solved_at=0.3).metrics()["eval/e/pass@1"] == 1.0


def test_failed_attempts_are_no_attempts():
    """Contract: pass@k is over tasks with k scored attempts; a failed one is neither solved nor unsolved."""
    failed = solved(0.0, Outcome.TIMEOUT)
    metrics = EvalReport("e", 0, 1.0, [[solved(1.0), failed], [solved(0.0), solved(1.0)], [failed, failed]]).metrics()
    assert metrics["eval/e/pass@1"] == pytest.approx((1.0 + 0.5) / 2)
    assert metrics["eval/e/pass@2"] == 1.0  # of the second task alone
    assert metrics["eval/e/pass^2"] == 0.0
    assert metrics["eval/e/errors/rate"] == 0.5
