"""Difficulty pools: which task of an environment comes next, by what its attempts were worth the last time.

A task is *new* until a group of it is complete; then it is *easy*, *hard* or *normal* by that group's mean reward. A draw takes a pool in proportion
to its tasks times its weight, then one of its tasks: the new ones in turn, of the others any. It depends on the seed, the number of the draw and
the pools, so that all there is to checkpoint is the latest mean reward of each task.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prime_rl.orchestrator.core import Task

if TYPE_CHECKING:
    from prime_rl.config.filters import CurriculumConfig

NEW, EASY, NORMAL, HARD = "new", "easy", "normal", "hard"


class Pools:
    """The tasks of one environment, each in one pool."""

    def __init__(self, tasks: Sequence[Task], config: "CurriculumConfig", seed: str) -> None:
        self._config, self._seed = config, seed
        self._weights = {NEW: 1.0, EASY: config.easy_weight, NORMAL: config.normal_weight, HARD: config.hard_weight}
        self._order = list(tasks)
        random.Random(f"{seed}/0").shuffle(self._order)
        self._place = {task.index: place for place, task in enumerate(self._order)}
        # Places in that order, ascending: a draw depends on which tasks a pool holds, not on how they came there.
        self._pools: dict[str, list[int]] = {NEW: list(range(len(tasks))), EASY: [], NORMAL: [], HARD: []}
        self._drawn = 0
        self.rewards: dict[int, float] = {}  # latest mean reward, by the task's index

    def draw(self) -> Task:
        """The next task."""
        number, self._drawn = self._drawn, self._drawn + 1
        chance = random.Random(f"{self._seed}/draw/{number}")
        names = [name for name, pool in self._pools.items() if pool]
        (name,) = chance.choices(names, [len(self._pools[name]) * self._weights[name] for name in names])
        pool = self._pools[name]
        if name == NEW:  # in turn, so that what is in flight comes again as late as possible
            return self._order[pool[bisect_left(pool, number % len(self._order)) % len(pool)]]
        return self._order[chance.choice(pool)]

    def observe(self, index: int, reward: float) -> None:
        """A group of task `index` is complete: its attempts' mean reward is `reward`. One that is not there is passed over."""
        if index not in self._place:
            return
        place, before = self._place[index], self._pools[self._pool_of(index)]
        del before[bisect_left(before, place)]
        self.rewards[index] = reward
        insort(self._pools[self._pool_of(index)], place)

    def holds(self, task: Task) -> bool:
        """Whether `task` is one of these."""
        return task.index in self._place and self._order[self._place[task.index]] == task

    def shares(self) -> dict[str, float]:
        """The share of the tasks in each pool."""
        return {name: len(pool) / len(self._order) for name, pool in self._pools.items()}

    def _pool_of(self, index: int) -> str:
        reward = self.rewards.get(index)
        if reward is None:
            return NEW
        return EASY if reward >= self._config.easy else HARD if reward <= self._config.hard else NORMAL


class Curriculum:
    """The difficulty pools of those environments that have any.

    Args:
        tasks: The tasks of each environment.
        configs: Of the environments with pools.
    """

    def __init__(
        self, tasks: Mapping[str, Sequence[Task]], configs: Mapping[str, "CurriculumConfig"], seed: int
    ) -> None:
        self.pools = {env: Pools(tasks[env], config, f"{seed}/{env}") for env, config in configs.items()}

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """A group of `task` is complete, whose finished attempts were worth `rewards`."""
        if rewards and task.env in self.pools:
            self.pools[task.env].observe(task.index, sum(rewards) / len(rewards))

    def state(self) -> dict[str, dict[str, float]]:
        """The latest mean rewards, by environment and index."""
        return {
            env: {str(index): reward for index, reward in sorted(pools.rewards.items())}
            for env, pools in self.pools.items()
        }

    def load(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from `state`. What it tells of tasks or environments that are not there any more is passed over."""
        for env, rewards in state.items():
            for index, reward in rewards.items():
                if env in self.pools:
                    self.pools[env].observe(int(index), reward)

    def metrics(self) -> dict[str, float]:
        """`curriculum/<env>/pool/<name>`: the share of its tasks in each pool."""
        return {
            f"curriculum/{env}/pool/{name}": share
            for env, pools in self.pools.items()
            for name, share in pools.shares().items()
        }
