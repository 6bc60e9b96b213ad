"""The task stream: endless, seeded, and resumable by a count."""

import itertools
from collections import Counter

import pytest

from prime_rl.config.orchestrator import CurriculumConfig
from prime_rl.envs.protocol import EndlessTasks
from prime_rl.errors import UserError
from prime_rl.orchestrator.scheduler import Task
from prime_rl.orchestrator.tasks import Curriculum, request_seed, task_stream, tasks_of_env


def tasks(env, count):
    return [Task(env, i, f"{env}-{i}") for i in range(count)]


def take(stream, count):
    return list(itertools.islice(stream, count))


def test_every_task_comes_once_an_epoch_in_a_new_order():
    """Two epochs hold each task twice; the orders differ."""
    drawn = take(task_stream({"a": tasks("a", 20)}, {"a": 1.0}, 0), 40)
    first, second = drawn[:20], drawn[20:]
    assert sorted(task.index for task in first) == sorted(task.index for task in second) == list(range(20))
    assert first != second


def test_the_seed_decides():
    """Same seed, same stream; another seed differs."""
    sources = {"a": tasks("a", 7), "b": tasks("b", 5)}
    ratios = {"a": 2.0, "b": 1.0}
    whole = take(task_stream(sources, ratios, 3), 50)
    assert take(task_stream(sources, ratios, 3), 50) == whole
    assert take(task_stream(sources, ratios, 4), 50) != whole


def test_environments_are_drawn_by_their_ratio():
    """3 : 1 within sampling error of a fixed seed."""
    counts = Counter(
        task.env for task in take(task_stream({"a": tasks("a", 5), "b": tasks("b", 5)}, {"a": 3, "b": 1}, 0), 4000)
    )
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_an_environment_without_tasks_is_an_error():
    """No silent spin over nothing."""
    with pytest.raises(ValueError, match="no tasks in b"):
        next(task_stream({"a": tasks("a", 1), "b": []}, {"a": 1.0, "b": 1.0}, 0))


def test_an_endless_environment_is_taken_in_its_order():
    """Beside others, by their ratio: no task twice, none left out, and the same again by drawing as many."""

    def stream():
        sources = {"a": tasks("a", 3), "b": tasks_of_env("b", EndlessTasks("b-12"))}
        return task_stream(sources, {"a": 1.0, "b": 1.0}, 0)

    drawn = take(stream(), 40)
    endless = [task for task in drawn if task.env == "b"]
    assert [task.index for task in endless] == list(range(len(endless)))
    assert endless[7] == Task("b", 7, "b-12/7")
    resumed = stream()
    take(resumed, 25)
    assert take(resumed, 15) == drawn[25:]


def test_an_endless_environment_has_no_pools():
    with pytest.raises(UserError, match="environment 'b' is endless: .* leave `curriculum` out"):
        Curriculum({"b": tasks_of_env("b", EndlessTasks("b"))}, {"b": CurriculumConfig()}, 0)


def test_request_seeds_are_stable_and_distinct():
    """A request's seed depends on the run's seed, its subject and its number, and fits what the engine takes."""
    seeds = {request_seed(run, str(group), number) for run in range(2) for group in range(50) for number in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, "2", 3) == request_seed(1, "2", 3)
