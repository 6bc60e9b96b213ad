"""The task stream: endless, seeded, and resumable by a count."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from prime_rl.config.orchestrator import CurriculumConfig
from prime_rl.errors import UserError
from prime_rl.orchestrator.scheduler import Task
from prime_rl.orchestrator.tasks import Curriculum, Pools, request_seed, task_stream


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


def test_request_seeds_are_stable_and_distinct():
    """A request's seed depends on the run's seed, its subject and its number, and fits what the engine takes."""
    seeds = {request_seed(run, str(group), number) for run in range(2) for group in range(50) for number in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(1, "2", 3) == request_seed(1, "2", 3)


# Difficulty pools: who is drawn how often, what changes them and when, and how little has to be remembered


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


def test_new_tasks_in_flight_come_again_as_late_as_possible() -> None:
    """Contract: whatever else is drawn and becomes known meanwhile, no new task comes twice before all others that are still new have come."""
    found, new, drawn = pools(easy_weight=2.0), set(range(20)), list[int]()
    for number in range(300):
        index = found.draw().index
        if index in new and index in drawn:
            since = drawn[len(drawn) - drawn[::-1].index(index) :]
            assert new - {index} <= set(since), f"task {index} came again after {since}"
        drawn.append(index)
        if number % 20 == 19:
            found.observe(min(new), 1.0)
            new.remove(min(new))
    assert len(new) == 5


def curriculum() -> Curriculum:
    return Curriculum({"env": TASKS}, {"env": CurriculumConfig()}, 0)


def stream(found: Curriculum) -> Iterator[Task]:
    both = {"env": TASKS, "other": [Task("other", i, str(i)) for i in range(3)]}
    return task_stream(both, {"env": 2.0, "other": 1.0}, 0, found.pools)


def test_a_run_goes_on_from_its_state() -> None:
    """Contract: with the state after a batch, through JSON, it draws as one that was never interrupted. Of earlier draws only their number counts."""
    whole = curriculum()
    draws = stream(whole)
    left: list[tuple[Task, list[float]]] = []
    for number, task in enumerate(itertools.islice(draws, 60)):
        if task.index % 4:  # of the others nothing is known
            left.append((task, [number % 3 / 2, number % 3 / 2]))
        if number % 6 == 5:
            whole.observe(left)
            left = []
    assert all(share > 0 for share in whole.pools["env"].shares().values())
    kept = json.loads(json.dumps(whole.state()))
    again = curriculum()
    resumed = stream(again)
    assert {task.env for task in itertools.islice(resumed, 60)} == {"env", "other"}
    again.load({**kept, "gone": {"of": "another version"}})
    assert again.metrics() == whole.metrics()
    assert list(itertools.islice(resumed, 100)) == list(itertools.islice(draws, 100))
    assert again.state() == whole.state()


def test_a_manifest_holds_little_of_many_tasks() -> None:
    """Contract: what every batch's manifest says of the pools is at most two bits a task and a third more for its text."""
    tasks = [Task("env", i, f"task-{i}") for i in range(20_001)]
    found, again = (Pools(tasks, CurriculumConfig(), "0/env") for _ in range(2))
    assert len(json.dumps(found.state())) < 300
    chance = random.Random(0)
    for index in chance.sample(range(len(tasks)), 15_000):
        found.observe(index, chance.choice([0.0, 0.5, 1.0]))
    kept = json.dumps(found.state())
    assert len(kept) < 7_000
    again.load(json.loads(kept))
    assert again.state() == found.state()
    assert [again.draw() for _ in range(100)] == [found.draw() for _ in range(100)]


def test_tasks_that_came_and_went() -> None:
    """Contract: a state of fewer or more tasks leaves the others where they were; a new one is new."""
    few, many = Pools(TASKS[:5], CurriculumConfig(), "0/env"), pools()
    for found in (few, many):
        found.observe(1, 1.0)
        found.observe(4, 0.0)
    many.observe(19, 1.0)
    grown, shrunk = pools(), Pools(TASKS[:5], CurriculumConfig(), "0/env")
    grown.load(few.state())
    shrunk.load(many.state())
    assert grown.shares() == {"new": 18 / 20, "easy": 1 / 20, "normal": 0.0, "hard": 1 / 20}
    assert shrunk.shares() == few.shares()


def test_a_state_of_another_version_is_refused() -> None:
    """Fail closed: pools that cannot be read are not taken for new ones."""
    with pytest.raises(UserError, match="difficulty pools of env"):
        curriculum().load({"env": {"0": 0.5}})
