"""How many episodes may be in flight: what the configuration allows, and the controller of `max_concurrent = "auto"`.

The controller follows the servers' own counters. It judges by *turns*: as many episodes end as may be in flight, so that contexts reach their usual
length, and a few looks at least.

* A turn without pressure in which the limit was reached raises it by a quarter, but only as far as the fullest cache stays below its mark, and never
  above the *ceiling*.
* Pressure ends a turn at once: a preemption that no update explains, a cache that is nearly full, a queue that stands. The limit falls to a little
  less than the share of it that was served, by half at most, and that is the ceiling from then on.
* A queue stands if every look finds it, while the limit is reached, until as many episodes have ended as waited in it when it was longest. A burst
  (the first prompts, contexts that are computed again after an update, a group that starts) is served before that, however slow the server is.
* After three turns in a row at its ceiling, with room in the cache, the limit is tried a quarter higher. If that is too much it goes back at once, and
  twice as many turns pass before the next try; if not, the ceiling is lifted.
* Nothing is judged while an evaluation keeps the servers busy, or while more is in flight than a new limit allows.

Under a steady load the limit comes to rest where it fits, and tries become rarer with the logarithm of time; a limit that was cut for a reason that is
gone recovers after about as many turns as have passed. `Concurrency` is pure: no clock, no network; `LoadWatch` asks the servers.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from loguru import logger

from prime_rl.config.shared import ORCHESTRATOR_STEPS
from prime_rl.envs.worker_pool import worker_range
from prime_rl.fleet.replicas import ReplicaPool
from prime_rl.orchestrator.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

GROWTH = 1.25
CUT = 0.9  # of what was served when it was too much
LEAST_KEPT = 0.5  # of the limit, whatever was served
FULL = 0.95  # share of the cache in use from which on the next token may preempt
MARK = 0.85  # growth stops short of it
PATIENCE = 3  # turns at a ceiling, with room in the cache for more, before the first try
LOOKS = 4  # of a turn, and of a queue, at least: fewer could miss the moment at which the cache is fullest, or the queue empty
QUEUE = 0.05  # of what runs: as much waits for the engine's next step where many come and go
REACHED = 0.95  # of the limit in flight: the limit holds the number back, not the steps that may run ahead


def limits(config: "OrchestratorConfig") -> Limits:
    """The scheduler's numbers. A benchmark has no trainer: it may run ahead for all of its few steps."""
    level = steps_ahead(config)
    fixed = None if config.max_concurrent == "auto" else config.max_concurrent  # `LoadWatch` finds it
    return Limits(
        batch_size=config.batch_size,
        group_size=config.rollouts_per_example,
        async_level=level,
        max_off_policy_steps=max(config.max_off_policy_steps, level),
        max_concurrent=min(fixed or config.batch_size * (config.async_level + 1), slots(config)),
        max_steps=ORCHESTRATOR_STEPS if config.bench else config.max_steps,
    )


def steps_ahead(config: "OrchestratorConfig") -> int:
    """Steps that sampling may run ahead: all of them where no trainer takes part."""
    if config.bench:
        return ORCHESTRATOR_STEPS
    return config.async_level if config.trainer else config.max_steps or sys.maxsize


def most_in_flight(config: "OrchestratorConfig") -> int:
    """As many episodes as the steps that may be sampled hold, and the workers run: no number lets more start."""
    return min(config.batch_size * (steps_ahead(config) + 1), slots(config))


def slots(config: "OrchestratorConfig") -> int:
    """Episodes that the workers run at once, as many workers as there may be. More would wait for a slot and grow old."""
    return sum(worker_range(env.workers, env.max_workers)[1] * env.max_concurrent for env in config.environments)


@dataclass(frozen=True)
class ServerLoad:
    """A server as its /metrics describe it: requests that run and that wait, share of the cache in use, preemptions ever."""

    running: float
    waiting: float
    cache: float
    preempted: float


@dataclass
class _Queue:
    """One that was there at every look since it was seen first."""

    waited: float = 0.0  # at most
    landed: int = 0  # before that
    looks: int = 0

    def note(self, waiting: float, landed: int) -> None:
        self.looks += 1
        if waiting > self.waited:
            self.waited, self.landed = waiting, landed

    def stands(self, landed: int) -> bool:
        return self.looks >= LOOKS and landed - self.landed >= self.waited


class Concurrency:
    """The limit, and what it was learned from.

    Args:
        start: The first limit.
        most: The limit is never above it.
    """

    def __init__(self, start: int, most: int) -> None:
        self.limit = min(start, most)
        self._most = most
        self._ceiling = most
        self._stood: int | None = None  # the limit of the last turn without pressure, if it was raised then
        self._trying = False  # the limit is above its ceiling, for a try
        self._patience = PATIENCE
        self._light = 0  # turns in a row at the ceiling in which there was room for more
        self._raised = False  # a try went well, and nothing was too much since
        self._servers = 0
        self._preempted = 0.0
        self._queue: _Queue | None = None
        self._turn_ends = self._looks = self._reached = 0
        self._fullest = self._ran = 0.0  # at most, in this turn

    def look(
        self,
        loads: Sequence[ServerLoad],
        *,
        in_flight: int,
        landed: int,
        updating: bool = False,
        evaluating: bool = False,
    ) -> int:
        """Take in one look at all servers that are given work; gives the limit.

        Args:
            in_flight: Episodes now.
            landed: Episodes that have ended so far, ever.
            updating: Weights are, or were since the last look, being loaded: that preempts what runs, and is no pressure.
            evaluating: Episodes that are not counted in `in_flight` are, or were since the last look, at the servers.
        """
        if not loads:
            return self.limit
        if len(loads) != self._servers:
            self._rescale(len(loads), landed)
        preempted = sum(load.preempted for load in loads)
        preempting = preempted > self._preempted and not updating  # of servers that were started again it is less
        self._preempted = preempted
        if evaluating or in_flight > self.limit:
            self._queue = None
            if not evaluating:
                self._begin_turn(landed)
            return self.limit
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        reached, cache = in_flight >= REACHED * self.limit, max(load.cache for load in loads)
        self._fullest, self._ran = max(self._fullest, cache), max(self._ran, running)
        self._looks, self._reached = self._looks + 1, self._reached + reached
        self._note_queue(waiting if reached and waiting > 1 + QUEUE * running else 0.0, landed)
        if preempting or cache >= FULL or (self._queue is not None and self._queue.stands(landed)):
            self._cut(in_flight * min(1.0, self._ran / max(running + waiting, 1.0)), landed)
        elif landed >= self._turn_ends and self._looks >= LOOKS and self._queue is None:
            self._end_calm_turn(landed)
        return self.limit

    def _note_queue(self, waiting: float, landed: int) -> None:
        if not waiting:
            self._queue = None
            return
        self._queue = self._queue or _Queue()
        self._queue.note(waiting, landed)

    def _cut(self, served: float, landed: int) -> None:
        """`served`: of the episodes in flight."""
        if self._raised or self._trying:
            self._patience *= 2
        fallen = max(1, int(LEAST_KEPT * self.limit), min(int(CUT * served), self.limit - 1))
        self.limit = fallen if self._stood is None else self._stood
        self._ceiling, self._light = self.limit, 0
        self._stood, self._trying, self._raised = None, False, False
        self._begin_turn(landed)

    def _end_calm_turn(self, landed: int) -> None:
        if 2 * self._reached >= self._looks:
            if self._trying:
                self._ceiling, self._trying, self._raised = self._most, False, True
            room = MARK / self._fullest if self._fullest else GROWTH
            wanted = int(self.limit * min(GROWTH, room)) + (1 if room >= GROWTH else 0)
            wanted = max(self.limit, min(wanted, self._most))
            self._light = self._light + 1 if wanted > self._ceiling <= self.limit else 0
            if self._light >= self._patience:
                self._trying, self._light = True, 0
            else:
                wanted = min(wanted, self._ceiling)
            self._stood = self.limit if wanted > self.limit else None
            self.limit = wanted
        self._begin_turn(landed)

    def _rescale(self, servers: int, landed: int) -> None:
        """Servers have come or gone: each takes what it took."""
        self._stood, self._trying = None, False
        if self._servers:
            share = servers / self._servers
            self.limit = max(1, min(self._most, round(self.limit * share)))
            self._ceiling = max(self.limit, min(self._most, round(self._ceiling * share)))
        self._servers, self._preempted, self._queue = servers, float("inf"), None  # the counters are of others
        self._begin_turn(landed)

    def _begin_turn(self, landed: int) -> None:
        self._turn_ends = landed + self.limit
        self._looks = self._reached = 0
        self._fullest, self._ran, self._queue = 0.0, 0.0, None  # evidence is of one turn


LOOK_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # a server that is busier than that is not looked at this time

Fetch = Callable[[str], Awaitable[str]]


def read_load(metrics: str) -> ServerLoad:
    """A server's load, from the text of its /metrics; where it has several engines the fullest cache counts.

    Raises:
        ValueError: it is not the text of a vLLM server.
    """
    return ServerLoad(
        running=sum(_values(metrics, "vllm:num_requests_running")),
        waiting=sum(_values(metrics, "vllm:num_requests_waiting")),
        cache=max(_values(metrics, "vllm:kv_cache_usage_perc")),
        preempted=sum(_values(metrics, "vllm:num_preemptions_total")),
    )


def _values(metrics: str, name: str) -> list[float]:
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not lines:
        raise ValueError(f"no {name}")
    return [float(line.rpartition(" ")[2]) for line in lines]


class LoadWatch:
    """Sets how many episodes `scheduler` may have in flight, from looks at the servers that are given work."""

    def __init__(
        self,
        fleet: ReplicaPool,
        scheduler: Scheduler[Any],
        most: int,
        evaluating: Callable[[], bool],
        behind: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Begins with a step's worth, at most `most`.

        Args:
            evaluating: Whether others than the scheduler's episodes are at the servers.
            behind: The servers that a router leads to, by its address; they are looked at in its place.
        """
        self._fleet, self._scheduler, self._behind = fleet, scheduler, behind or {}
        self._control = Concurrency(scheduler.limits.batch_size, most)
        self._evaluating = evaluating
        # At the last look: the version served, whether another one was being loaded, whether there was an evaluation.
        self._seen = (scheduler.version, False, False)
        self._said = False
        scheduler.allow(self._control.limit)

    async def run(self, key: str = "") -> None:
        """Look every few seconds, until it is cancelled. `key`: the servers' API key, which whatever is before them may ask for."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, headers=headers, trust_env=False) as http:

            async def fetch(url: str) -> str:
                return (await http.get(url)).raise_for_status().text

            while True:  # bounded: the run cancels it at its end
                await asyncio.sleep(LOOK_SECONDS)
                await self.look(fetch)

    async def look(self, fetch: Fetch) -> None:
        """One look at all; none where one of them does not answer."""
        try:
            roots = [root for replica in self._fleet.serving for root in self._behind.get(replica.name, [replica.name])]
            texts = await asyncio.gather(*(fetch(f"{root}/metrics") for root in roots))
            loads = [read_load(text) for text in texts]
        except (httpx.HTTPError, ValueError) as error:
            if not self._said:
                self._said = True
                logger.warning(
                    "max_concurrent = auto: a server does not say how busy it is, the limit stays for now: {!r}", error
                )
            return
        scheduler = self._scheduler
        before = self._seen
        version, loading, evaluating = self._seen = (
            scheduler.version,
            self._fleet.loading is not None,
            self._evaluating(),
        )
        limit = self._control.look(
            loads,
            in_flight=scheduler.in_flight,
            landed=scheduler.ended,
            updating=loading or before[:2] != (version, loading),
            evaluating=evaluating or before[2],
        )
        if limit != scheduler.limits.max_concurrent:
            waiting, cache = sum(load.waiting for load in loads), max((load.cache for load in loads), default=0.0)
            logger.info(
                "{} episodes may be in flight now ({:.0f} wait, cache {:.0f} % full)", limit, waiting, 100 * cache
            )
            scheduler.allow(limit)
