"""Difficulty pools: who is drawn how often, and that nothing but the latest rewards has to be remembered."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from prime_rl.config.filters import CurriculumConfig
from prime_rl.orchestrator.core import Task
from prime_rl.orchestrator.curriculum import Curriculum, Pools
from prime_rl.orchestrator.tasks import task_stream

TASKS = [Task("env", i, f"task-{i}") for i in range(20)]


def pools(**settings: float) -> Pools:
    return Pools(TASKS, CurriculumConfig(**settings), "0/env")


def test_new_tasks_come_in_turn() -> None:
    """Contract: as long as nothing is known every task comes once an epoch, in an order of the seed's."""
    drawn = [pools_.draw().index for pools_ in [pools()] for _ in range(40)]
    assert sorted(drawn[:20]) == list(range(20))
    assert drawn[:20] == drawn[20:]
    assert drawn[:20] != list(range(20))


def test_pools_by_the_latest_mean_reward() -> None:
    """From `easy` on easy, up to `hard` hard; the next group may move a task."""
    found = pools(easy=0.8, hard=0.2)
    for index, reward in enumerate([0.8, 0.79, 0.21, 0.2, 1.5, -1.0]):
        found.observe(index, reward)
    assert found.shares() == {"new": 14 / 20, "easy": 2 / 20, "normal": 2 / 20, "hard": 2 / 20}
    found.observe(0, 0.0)
    assert found.shares()["hard"] == 3 / 20
    found.observe(99, 1.0)  # of a task that is not there any more
    assert sum(found.shares().values()) == pytest.approx(1.0)


def test_weights() -> None:
    """Contract: a task is drawn in proportion to its pool's weight, whatever the size of the pools; every task of a pool alike."""
    found = pools(easy_weight=0.5, normal_weight=2.0, hard_weight=1.0)
    for index in range(20):
        found.observe(index, 1.0 if index < 10 else 0.5 if index < 15 else 0.0)
    drawn = Counter(found.draw().index for _ in range(20_000))
    total = 10 * 0.5 + 5 * 2.0 + 5 * 1.0
    for index in range(20):
        weight = 0.5 if index < 10 else 2.0 if index < 15 else 1.0
        assert drawn[index] / 20_000 == pytest.approx(weight / total, rel=0.15)


def test_nothing_but_rewards_is_remembered() -> None:
    """Contract: a run that goes on from a checkpoint draws as one that was never interrupted."""

    def stream(curriculum: Curriculum) -> Iterator[Task]:
        both = {"env": TASKS, "other": [Task("other", i, str(i)) for i in range(3)]}
        return task_stream(both, {"env": 2.0, "other": 1.0}, 0, curriculum.pools)

    whole = Curriculum({"env": TASKS}, {"env": CurriculumConfig()}, 0)
    draws = stream(whole)
    for number, task in enumerate(itertools.islice(draws, 60)):
        whole.observe(task, [number % 7 / 7, number % 3 / 3])
    kept = json.loads(json.dumps(whole.state()))
    again = Curriculum({"env": TASKS}, {"env": CurriculumConfig()}, 0)
    again.load({**kept, "gone": {"0": 1.0}})
    resumed = stream(again)
    known = list(itertools.islice(resumed, 60))
    assert {task.env for task in known} == {"env", "other"}
    assert again.metrics() == whole.metrics()
    assert list(itertools.islice(resumed, 100)) == list(itertools.islice(draws, 100))


def test_who_it_holds() -> None:
    found = pools()
    assert found.holds(TASKS[3])
    assert not found.holds(Task("env", 3, "another"))
    assert not found.holds(Task("env", 20, "task-20"))
