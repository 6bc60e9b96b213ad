"""Which task comes next: seeded, endless.

Difficulty pools (`curriculum`): a task is *new* until a group of it was batched or rejected; then it is *easy*, *hard*
or *normal* by that group's mean reward. A draw takes a pool in proportion to its tasks times its weight, then one of
its tasks: the new ones in turn, of the others any. Pools change only when a batch is committed, by all groups that were
batched or rejected since the batch before, in the order of their numbers: what is drawn follows from the seed and from
committed batches, not from who finished first. The saved state is each task's pool, the number of draws, and the
position among new tasks.
"""

import base64
import itertools
import random
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from prime_rl.errors import UserError
from prime_rl.orchestrator.scheduler import Task

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import CurriculumConfig


_NAMES = ("new", "easy", "normal", "hard")
NEW, EASY, NORMAL, HARD = range(4)


class Pools:
    """The tasks of one environment, each in one pool."""

    def __init__(self, tasks: Sequence[Task], config: "CurriculumConfig", seed: str) -> None:
        self._config, self._seed = config, seed
        self._weights = (1.0, config.easy_weight, 1.0, config.hard_weight)
        self._order = list(tasks)
        random.Random(f"{seed}/0").shuffle(self._order)
        self._place = {task.index: place for place, task in enumerate(self._order)}
        self._codes = bytearray(max(self._place, default=-1) + 1)  # the pool of each task, by the task's index
        # Places in that order, ascending: a draw depends on which tasks a pool holds, not on how they came there.
        self._pools: list[list[int]] = [list(range(len(tasks))), [], [], []]
        self._drawn = 0
        self._turn = 0  # position where the search for the next new task starts

    def draw(self) -> Task:
        """The next task."""
        rng = random.Random(f"{self._seed}/draw/{self._drawn}")
        self._drawn += 1
        weights = [len(pool) * weight for pool, weight in zip(self._pools, self._weights, strict=True)]
        (code,) = rng.choices(range(len(weights)), weights)
        pool = self._pools[code]
        if code != NEW:
            return self._order[rng.choice(pool)]
        place = pool[bisect_left(pool, self._turn) % len(pool)]
        self._turn = place + 1  # past it, so that what is in flight comes again after all other new ones
        return self._order[place]

    def observe(self, index: int, reward: float) -> None:
        """Move task `index` to the pool for `reward`, the mean of one of its groups. Unknown tasks are ignored."""
        if index not in self._place:
            return
        place, before = self._place[index], self._pools[self._codes[index]]
        del before[bisect_left(before, place)]
        code = EASY if reward >= self._config.easy else HARD if reward <= self._config.hard else NORMAL
        self._codes[index] = code
        insort(self._pools[code], place)

    def task(self, index: int) -> Task | None:
        """The task of that index, if it is one of these."""
        return self._order[self._place[index]] if index in self._place else None

    def shares(self) -> dict[str, float]:
        """Return the share of the tasks in each pool."""
        return {name: len(pool) / len(self._order) for name, pool in zip(_NAMES, self._pools, strict=True)}

    def state(self) -> dict[str, Any]:
        """Save as plain data, for `load`. Compressed, a task takes some two bits."""
        codes = base64.b64encode(zlib.compress(self._codes)).decode()
        return {"drawn": self._drawn, "turn": self._turn, "codes": codes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Tasks that it lacks are new; others that it has are passed over.

        Raises:
            UserError: it is not such a state.
        """
        try:
            codes = zlib.decompress(base64.b64decode(state["codes"]))
            self._drawn, self._turn = int(state["drawn"]), int(state["turn"])
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            unknown = f"the difficulty pools are kept in a way that this version does not know ({error!r})"
            raise UserError(f"{unknown}: resume with the version that wrote them") from error
        self._codes = bytearray(codes[: len(self._codes)].ljust(len(self._codes), b"\0"))
        self._pools = [[], [], [], []]
        for place, task in enumerate(self._order):
            self._pools[self._codes[task.index]].append(place)


def task_stream(
    tasks: Mapping[str, Sequence[Task]],
    ratios: Mapping[str, float],
    seed: int,
    pools: Mapping[str, Pools] | None = None,
) -> Iterator[Task]:
    """Tasks for ever: environments drawn by their ratio, each one's tasks shuffled anew every epoch.

    Args:
        tasks: Of each environment. The same seed gives the same stream: a resumed run draws what was drawn before.
        ratios: Relative weight of each environment.
        pools: Environments that draw by difficulty instead of uniformly. What they give depends on what is observed.
    """

    def epochs(name: str, own: Sequence[Task]) -> Iterator[Task]:
        for epoch in itertools.count():
            order = list(own)
            random.Random(f"{seed}/{name}/{epoch}").shuffle(order)
            yield from order

    names, pools = sorted(tasks), pools or {}
    if empty := [name for name in names if not tasks[name]]:
        raise ValueError(f"no tasks in {', '.join(empty)}")
    choose, weights = random.Random(f"{seed}/environments"), [ratios[name] for name in names]
    streams = {name: epochs(name, own) for name, own in tasks.items()}
    while True:
        name = choose.choices(names, weights)[0] if len(names) > 1 else names[0]
        yield pools[name].draw() if name in pools else next(streams[name])


def request_seed(seed: int, subject: str, number: int) -> int:
    """Return a 31-bit seed for attempt `number` at `subject`: the same in every run of `seed`, unrelated to others."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{subject}/{number}".encode()) & 0x7FFFFFFF
