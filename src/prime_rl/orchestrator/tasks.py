"""Which task comes next: seeded, endless; how many were drawn is all of its state.

An endless environment's tasks come in the order in which it gives them, none twice: how many of its tasks were drawn is the cursor.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from prime_rl.envs.protocol import EndlessTasks, TaskInfo
from prime_rl.orchestrator.curriculum import Pools
from prime_rl.orchestrator.scheduler import Task


def task_stream(
    tasks: Mapping[str, Sequence[Task] | Iterator[Task]],
    ratios: Mapping[str, float],
    seed: int,
    pools: Mapping[str, Pools] | None = None,
) -> Iterator[Task]:
    """Tasks for ever: environments drawn by their ratio, each one's tasks shuffled anew every epoch.

    Args:
        tasks: The tasks of each environment; of an endless one an iterator, from its first task.
        ratios: Relative weight of each environment.
        seed: The run's seed; the same seed gives the same stream, so that a resumed run goes on by drawing what was drawn before.
        pools: Of environments whose tasks are drawn by how hard they are, instead of all alike. What they give depends on what is observed.
    """
    names = sorted(tasks)
    if empty := [name for name in names if not tasks[name]]:
        raise ValueError(f"no tasks in {', '.join(empty)}")
    choose = random.Random(f"{seed}/environments")
    streams = {
        name: own if isinstance(own, Iterator) else _epochs(own, f"{seed}/{name}") for name, own in tasks.items()
    }
    weights = [ratios[name] for name in names]
    pools = pools or {}
    while True:
        name = choose.choices(names, weights)[0] if len(names) > 1 else names[0]
        yield pools[name].draw() if name in pools else next(streams[name])


def count(tasks: list[TaskInfo] | EndlessTasks) -> str:
    """How many, for people."""
    return "endless" if isinstance(tasks, EndlessTasks) else str(len(tasks))


def tasks_of_env(env: str, tasks: list[TaskInfo] | EndlessTasks) -> Sequence[Task] | Iterator[Task]:
    """What a pool says of an environment's tasks, as `task_stream` takes them."""
    if isinstance(tasks, EndlessTasks):
        return (Task(env, index, tasks[index].task_id) for index in itertools.count())
    return [Task(env, task.index, task.task_id) for task in tasks]


def _epochs(tasks: Sequence[Task], seed: str) -> Iterator[Task]:
    for epoch in itertools.count():
        order = list(tasks)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
