"""Which task comes next: seeded, endless."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from prime_rl.orchestrator.scheduler import Task


def task_stream(tasks: Mapping[str, Sequence[Task]], ratios: Mapping[str, float], seed: int) -> Iterator[Task]:
    """Tasks for ever: environments drawn by their ratio, each one's tasks shuffled anew every epoch.

    Args:
        tasks: Of each environment. The same seed gives the same stream: a resumed run draws what was drawn before.
        ratios: Relative weight of each environment.
    """

    def epochs(name: str, own: Sequence[Task]) -> Iterator[Task]:
        for epoch in itertools.count():
            order = list(own)
            random.Random(f"{seed}/{name}/{epoch}").shuffle(order)
            yield from order

    names = sorted(tasks)
    if empty := [name for name in names if not tasks[name]]:
        raise ValueError(f"no tasks in {', '.join(empty)}")
    choose, weights = random.Random(f"{seed}/environments"), [ratios[name] for name in names]
    streams = {name: epochs(name, own) for name, own in tasks.items()}
    while True:
        name = choose.choices(names, weights)[0] if len(names) > 1 else names[0]
        yield next(streams[name])


def request_seed(seed: int, subject: str, number: int) -> int:
    """Return a 31-bit seed for attempt `number` at `subject`: the same in every run of `seed`, unrelated to others."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{subject}/{number}".encode()) & 0x7FFFFFFF
