"""The task stream: endless, seeded, resumable by a count."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from prime_rl.orchestrator.scheduler import Task
from prime_rl.orchestrator.tasks import request_seed, task_stream


def tasks(env: str, count: int) -> list[Task]:
    return [Task(env, i, f"{env}-{i}") for i in range(count)]


def take(stream: Iterator[Task], count: int) -> list[Task]:
    return list(itertools.islice(stream, count))


def test_every_task_comes_once_an_epoch_in_an_order_of_the_seeds() -> None:
    """Two epochs hold each task twice, in different orders; the same seed gives the same stream, another one does not."""
    drawn = take(task_stream({"a": tasks("a", 20)}, {"a": 1.0}, 0), 40)
    assert sorted(task.index for task in drawn[:20]) == sorted(task.index for task in drawn[20:]) == list(range(20))
    assert drawn[:20] != drawn[20:]
    sources, ratios = {"a": tasks("a", 7), "b": tasks("b", 5)}, {"a": 2.0, "b": 1.0}
    whole = take(task_stream(sources, ratios, 3), 50)
    assert take(task_stream(sources, ratios, 3), 50) == whole
    assert take(task_stream(sources, ratios, 4), 50) != whole


def test_environments_are_drawn_by_their_ratio() -> None:
    """3 : 1 within sampling error of a fixed seed; one without tasks is an error, not a silent spin."""
    stream = task_stream({"a": tasks("a", 5), "b": tasks("b", 5)}, {"a": 3, "b": 1}, 0)
    assert Counter(task.env for task in take(stream, 4000))["a"] / 4000 == pytest.approx(0.75, abs=0.03)
    with pytest.raises(ValueError, match="no tasks in b"):
        next(task_stream({"a": tasks("a", 1), "b": []}, {"a": 1.0, "b": 1.0}, 0))


def test_request_seeds_are_stable_and_distinct() -> None:
    """A request's seed depends on the run's seed, its subject and its number, and fits what the engine takes."""
    seeds = {request_seed(run, str(group), number) for run in range(2) for group in range(50) for number in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, "2", 3) == request_seed(1, "2", 3)
