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
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
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
        self._by_index = {task.index: task for task in tasks}
        self._indices = np.array([task.index for task in self._order], dtype=np.int64)
        self._codes = np.zeros(max(self._by_index, default=-1) + 1, np.uint8)  # the pool of each task, by its index
        self._drawn = 0
        self._turn = 0  # position where the search for the next new task starts

    def draw(self) -> Task:
        rng = random.Random(f"{self._seed}/draw/{self._drawn}")
        self._drawn += 1
        codes = self._codes[self._indices]
        weights = np.bincount(codes, minlength=len(_NAMES)) * self._weights
        (code,) = rng.choices(range(len(_NAMES)), weights.tolist())
        pool = np.flatnonzero(codes == code)  # ascending places: how the tasks came there does not count
        if code != NEW:
            return self._order[pool[rng.randrange(len(pool))]]
        place = int(pool[np.searchsorted(pool, self._turn) % len(pool)])
        self._turn = place + 1  # past it, so that what is in flight comes again after all other new ones
        return self._order[place]

    def observe(self, index: int, reward: float) -> None:
        """Move task `index` to the pool for `reward`, the mean of one of its groups. Unknown tasks are ignored."""
        if index in self._by_index:
            easy, hard = reward >= self._config.easy, reward <= self._config.hard
            self._codes[index] = EASY if easy else HARD if hard else NORMAL

    def task(self, index: int) -> Task | None:
        """The task of that index, if it is one of these."""
        return self._by_index.get(index)

    def shares(self) -> dict[str, float]:
        codes = self._codes[self._indices]
        return {name: float(np.mean(codes == code)) for code, name in enumerate(_NAMES)}

    def state(self) -> dict[str, Any]:
        """Save as plain data, for `load`. Compressed, a task takes some two bits."""
        codes = base64.b64encode(zlib.compress(self._codes.tobytes())).decode()
        return {"drawn": self._drawn, "turn": self._turn, "codes": codes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Tasks that it lacks are new; others that it has are passed over.
        Raises UserError: it is not such a state."""
        try:
            codes = zlib.decompress(base64.b64decode(state["codes"]))
            self._drawn, self._turn = int(state["drawn"]), int(state["turn"])
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            unknown = f"the difficulty pools are kept in a way that this version does not know ({error!r})"
            raise UserError(f"{unknown}: resume with the version that wrote them") from error
        size = len(self._codes)
        self._codes = np.frombuffer(codes[:size].ljust(size, b"\0"), np.uint8).copy()


def task_stream(
    tasks: Mapping[str, Sequence[Task]],
    ratios: Mapping[str, float],
    seed: int,
    pools: Mapping[str, Pools] | None = None,
) -> Iterator[Task]:
    """Tasks for ever: environments drawn by their ratio, each one's tasks shuffled anew every epoch.

    Args:
        tasks: Of each environment. The same seed gives the same stream: a resumed run draws what was drawn before.
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
