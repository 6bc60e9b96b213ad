"""Which task comes next: seeded, endless; how many were drawn is all of its state."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from prime_rl.orchestrator.core import Task
from prime_rl.orchestrator.curriculum import Pools


def task_stream(
    tasks: Mapping[str, Sequence[Task]],
    ratios: Mapping[str, float],
    seed: int,
    pools: Mapping[str, Pools] | None = None,
) -> Iterator[Task]:
    """Tasks for ever: environments drawn by their ratio, each one's tasks shuffled anew every epoch.

    Args:
        tasks: The tasks of each environment.
        ratios: Relative weight of each environment.
        seed: The run's seed; the same seed gives the same stream, so that a resumed run goes on by drawing what was drawn before.
        pools: Of environments whose tasks are drawn by how hard they are, instead of all alike. What they give depends on what is observed.
    """
    names = sorted(tasks)
    if empty := [name for name in names if not tasks[name]]:
        raise ValueError(f"no tasks in {', '.join(empty)}")
    choose = random.Random(f"{seed}/environments")
    streams = {name: _epochs(tasks[name], f"{seed}/{name}") for name in names}
    weights = [ratios[name] for name in names]
    pools = pools or {}
    while True:
        name = choose.choices(names, weights)[0] if len(names) > 1 else names[0]
        yield pools[name].draw() if name in pools else next(streams[name])


def _epochs(tasks: Sequence[Task], seed: str) -> Iterator[Task]:
    for epoch in itertools.count():
        order = list(tasks)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from order
