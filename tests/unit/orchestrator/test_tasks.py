"""The task stream: endless, seeded, resumable by a count. Difficulty pools: how often whose tasks come; their state."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from prime_rl.config.orchestrator import CurriculumConfig
from prime_rl.errors import UserError
from prime_rl.orchestrator.scheduler import Task
from prime_rl.orchestrator.tasks import Pools, request_seed, task_stream


def tasks(env: str, count: int) -> list[Task]:
    return [Task(env, i, f"{env}-{i}") for i in range(count)]


def take(stream: Iterator[Task], count: int) -> list[Task]:
    return list(itertools.islice(stream, count))


def test_every_task_comes_once_an_epoch_in_an_order_of_the_seeds() -> None:
    """Two epochs hold each task twice, in different orders; one seed gives one stream, another seed another."""
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


TASKS = tasks("env", 20)


def make_pools(count: int = 20, **settings: float) -> Pools:
    return Pools(TASKS[:count], CurriculumConfig(**settings), "0/env")


def test_pools_by_the_latest_mean_reward() -> None:
    """From `easy` on easy, up to `hard` hard; the next group may move a task, one that is gone moves nothing."""
    pools = make_pools(easy=0.8, hard=0.2)
    for index, reward in enumerate([0.8, 0.79, 0.21, 0.2, 1.5, -1.0]):
        pools.observe(index, reward)
    pools.observe(99, 1.0)
    assert pools.shares() == {"new": 14 / 20, "easy": 2 / 20, "normal": 2 / 20, "hard": 2 / 20}
    pools.observe(0, 0.0)
    assert pools.shares() == {"new": 14 / 20, "easy": 1 / 20, "normal": 2 / 20, "hard": 3 / 20}


def test_new_tasks_in_flight_come_again_as_late_as_possible() -> None:
    """Contract: whatever is drawn and becomes known meanwhile, no new task comes twice before all others that are still
    new have come; as long as nothing is known every task comes once an epoch, in an order of the seed's."""
    pools, new, drawn = make_pools(easy_weight=2.0), set(range(20)), list[int]()
    first = [draws.draw().index for draws in [make_pools()] for _ in range(40)]
    assert first[:20] == first[20:] != sorted(first[:20]) == list(range(20))
    for number in range(300):
        index = pools.draw().index
        if index in new and index in drawn:
            since = drawn[len(drawn) - drawn[::-1].index(index) :]
            assert new - {index} <= set(since), f"task {index} came again after {since}"
        drawn.append(index)
        if number % 20 == 19:
            pools.observe(min(new), 1.0)
            new.remove(min(new))
    assert len(new) == 5


def make_stream() -> tuple[Pools, Iterator[Task]]:
    """Pools of one environment, and the stream of it and of another one."""
    pools, both = make_pools(), {"env": TASKS, "other": tasks("other", 3)}
    return pools, task_stream(both, {"env": 2.0, "other": 1.0}, 0, {"env": pools})


def test_a_run_goes_on_from_its_state() -> None:
    """Contract: with the state after a batch, through JSON, it draws like an uninterrupted one: of earlier draws
    only their number counts. A state of another version is refused: its pools are not taken for new ones."""
    whole, draws = make_stream()
    left: list[Task] = []
    for number, task in enumerate(itertools.islice(draws, 60)):
        if task.env == "env" and task.index % 4:  # of the others nothing is known
            left.append(task)
        if number % 6 == 5:
            for task in left:
                whole.observe(task.index, task.index % 3 / 2)
            left = []
    assert all(share > 0 for share in whole.shares().values())
    kept = json.loads(json.dumps(whole.state()))
    again, resumed = make_stream()
    assert {task.env for task in itertools.islice(resumed, 60)} == {"env", "other"}
    again.load(kept)
    assert again.shares() == whole.shares()
    assert take(resumed, 100) == take(draws, 100)
    assert again.state() == whole.state()
    with pytest.raises(UserError, match="difficulty pools are kept in a way"):
        again.load({"0": 0.5})


def test_tasks_that_came_and_went() -> None:
    """Contract: a state of fewer or more tasks leaves the others where they were; a new one is new."""
    few, many = make_pools(5), make_pools()
    for pools in (few, many):
        pools.observe(1, 1.0)
        pools.observe(4, 0.0)
    many.observe(19, 1.0)
    grown, shrunk = make_pools(), make_pools(5)
    grown.load(few.state())
    shrunk.load(many.state())
    assert grown.shares() == {"new": 18 / 20, "easy": 1 / 20, "normal": 0.0, "hard": 1 / 20}
    assert shrunk.shares() == few.shares()
