"""The real scheduler in a simulated world with a virtual clock, and the shortest step that such a world allows.

The engine gives all requests the same rate, `tokens_per_second(n)` of `n` together; more than `seats` of them wait.
A batch at a time trains, in `train` seconds; a version is served `sync` seconds after its step; generation goes on.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from prime_rl.orchestrator.scheduler import Limits, Scheduler
from support.scheduling import endless_tasks


@dataclass(frozen=True)
class World:
    """Times in seconds, lengths in tokens."""

    level: int
    train: float
    sync: float
    batch: int = 32
    group: int = 4
    request_rate: float = 150.0  # of one request alone
    engine_rate: float = 20_000.0  # of as many as fill the engine
    gradual: bool = False  # n requests get engine_rate * n / (n + engine_rate / request_rate): it fills gradually
    seats: int = 10**9
    reply: float = 128.0  # mean length
    spread: float = 0.0  # of the lognormal lengths, at most four times as long as their mean; 0: all are equal

    def tokens_per_second(self, requests: float) -> float:
        """Of all together."""
        if self.gradual:
            return self.engine_rate * requests / (requests + self.engine_rate / self.request_rate)
        return min(self.engine_rate, self.request_rate * requests)

    def lengths(self, groups: int, seed: int = 0) -> np.ndarray:
        """Of the replies of so many groups."""
        normal = np.random.default_rng(seed).standard_normal((groups, self.group))
        return self.reply * np.minimum(np.exp(self.spread * normal - self.spread**2 / 2), 4.0)

    @property
    def steps(self) -> int:
        """As many as `simulate` looks at: the first are not counted, the others are many whole turns of the batches."""
        return 24 + self.counted

    @property
    def counted(self) -> int:
        return 24 * (self.level + 1)


@dataclass(frozen=True)
class Course:
    """What happened: when each step was trained."""

    ends: list[float]

    def step(self, counted: int) -> float:
        """Mean seconds of the last steps."""
        return (self.ends[-1] - self.ends[-1 - counted]) / counted


def simulate(world: World, *, max_concurrent: int = 10**9, paced: bool = True, steps: int | None = None) -> Course:
    """Run the scheduler in `world`.

    Args:
        steps: A run that ends after so many; else one without an end, whose first `world.steps` are looked at.
        paced: Whether the scheduler sees the clock; without it, it starts everything as early as it may.
    """
    limits = Limits(world.batch, world.group, world.level, max(8, world.level), max_concurrent, steps)
    steps = steps or world.steps
    core: Scheduler[None] = Scheduler(limits, endless_tasks())
    lengths = world.lengths((steps + 2 * world.level + 4) * limits.groups_per_batch).tolist()
    now = sampled = trainer_free = 0.0  # `sampled`: tokens of a request that was there all the time
    queue, running, versions = deque(), [], deque()  # running: (`sampled` at its end, episode)
    ends = []  # versions: (trained at, number)
    while len(ends) < steps:
        while (start := core.next_start(now if paced else 0.0)) is not None:
            queue.append(start)
        while queue and len(running) < world.seats:
            start = queue.popleft()
            heapq.heappush(running, (sampled + lengths[start.group][start.number], start.episode))
        rate = world.tokens_per_second(len(running)) / len(running) if running else 0.0
        landing = now + max(running[0][0] - sampled, 0.0) / rate if running else math.inf
        loading = versions[0][0] + world.sync if versions else math.inf
        due = math.inf if core.opens_at is None else core.opens_at
        then = min(landing, loading, due)
        assert then < math.inf, "nothing is in flight, and nothing to train"
        sampled, now = sampled + (then - now) * rate, then
        if loading <= now:
            began = now - world.sync
            while versions and (version := versions[0])[0] <= began + 1e-9:
                versions.popleft()
                newest = version[1]
            core.serve(newest)
        while running and running[0][0] <= sampled + 1e-9:
            core.finish(heapq.heappop(running)[1], None)
        core.verify(core.unverified())
        while (batch := core.ready_batch()) is not None:
            trainer_free = max(trainer_free, now) + world.train
            ends.append(trainer_free)
            versions.append((trainer_free, batch.step + 1))
            core.advance(batch.committed(batch.episodes))
    return Course(ends)


def shortest_step(world: World) -> float:
    """Return the least mean step at this async level, whatever the scheduler does. All replies have the mean length.

    1. The trainer trains one batch after the other: a step takes `train` at least.
    2. Of the groups that may start on version v (those of the first v + k + 1 batches) the cut batches are sampled
       already. While versions of m cut batches are not served yet, at most k + 1 - m batches are in flight. Each batch
       stays in that state for at least `train + sync`, so m is (train + sync) / step on average (Little's law), and a
       whole number at every moment. `tokens_per_second(n)` is concave, so the engine's mean rate with k + 1 - m
       batches is at most the piecewise linear function through its values at whole numbers of batches, taken at the
       mean of k + 1 - m. A step's tokens must be sampled in a step's time:

           batch * reply / step <= rate(k + 1 - (train + sync) / step)

       The left side falls with the step, the right side rises; they meet at the least step. At level 0 it is generation
       + train + sync; with an engine never full (latency + train + sync) / (k + 1); always full batch * reply / rate.
    """
    wait, tokens = world.train + world.sync, world.batch * world.reply

    def rate(batches: float) -> float:
        whole = math.floor(batches)
        below, above = (world.tokens_per_second(number * world.batch) for number in (whole, whole + 1))
        return below + (batches - whole) * (above - below)

    low, high = wait / (world.level + 1), wait + tokens / world.tokens_per_second(world.batch)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if middle * rate(world.level + 1 - wait / middle) >= tokens else (middle, high)
    return max(world.train, high)
