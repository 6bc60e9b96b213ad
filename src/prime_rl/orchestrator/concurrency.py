"""How many episodes may be in flight: what the configuration allows, and the controller of `max_concurrent = "auto"`.

The controller has one rule, applied once a *turn*, in which as many episodes end as may be in flight (contexts reach their usual length):

    pressure: limit = 0.9 x the episodes the servers were actually running (half of the limit at least)
    calm:     limit = 1.1 x limit, no further than the fullest cache stays below its mark

Pressure is a preemption that no update explains, or a cache that is nearly full; both end the turn at once. So is a
queue that every look of a turn finds while at the limit; queues from first prompts or recomputed contexts clear faster.
A turn in which the limit was not reached, in which an evaluation ran, or which has more in flight than a new limit
allows, says nothing.

Under a steady load the limit stays within a fifth below and a tenth above what the servers take. `Concurrency` is pure;
`LoadWatch` asks the servers.
"""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from loguru import logger

from prime_rl.envs.pool import worker_range
from prime_rl.fleet.replicas import ReplicaPool
from prime_rl.orchestrator.scheduler import Limits, Scheduler

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig
    from prime_rl.config.shared import EnvConfig

GROWTH = 1.1
CUT = 0.9  # of what was served when it was too much
LEAST_KEPT = 0.5  # of the limit, whatever was served
FULL = 0.95  # KV-cache usage above which the next token may cause a preemption
MARK = 0.85  # KV-cache usage that growth must not exceed
LOOKS = 4  # of a turn, at least: fewer could miss the moment at which the cache is fullest, or the queue empty
QUEUE = 0.05  # queue length, as a share of running requests, that is normal churn
REACHED = 0.95  # of the limit in flight: then the limit is the bottleneck, not the async level
LOOK_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # a server that is busier than that is not looked at this time


def limits(config: "OrchestratorConfig") -> Limits:
    """Make the scheduler's numbers."""
    level = steps_ahead(config)
    return Limits(
        batch_size=config.batch_size,
        group_size=config.rollouts_per_example,
        async_level=level,
        max_off_policy_steps=max(config.max_off_policy_steps, level),
        max_concurrent=concurrent_episodes(config, config.environments),
        max_steps=config.max_steps,
    )


def concurrent_episodes(config: "OrchestratorConfig", environments: "Sequence[EnvConfig]") -> int:
    """Episodes of `environments` in flight at once, as configured; with "auto" until `LoadWatch` has looked."""
    fixed = None if config.max_concurrent == "auto" else config.max_concurrent
    return min(fixed or config.batch_size * (config.async_level + 1), slots(environments))


def steps_ahead(config: "OrchestratorConfig") -> int:
    """Steps that sampling may run ahead: all of them where no trainer takes part."""
    return config.async_level if config.trainer else config.max_steps or sys.maxsize


def most_in_flight(config: "OrchestratorConfig") -> int:
    """The most episodes that can ever be in flight: bounded by the async level and by worker slots."""
    return min(config.batch_size * (steps_ahead(config) + 1), slots(config.environments))


def slots(environments: "Sequence[EnvConfig]") -> int:
    """Episodes that as many workers of `environments` as there may be run at once. More would wait, and grow old."""
    return sum(worker_range(env.workers, env.max_workers)[1] * env.max_concurrent for env in environments)


@dataclass(frozen=True)
class ServerLoad:
    """A server as its /metrics describe it: requests that run and that wait, share of the cache in use, preemptions ever."""

    running: float
    waiting: float
    cache: float
    preempted: float


class Concurrency:
    """The limit, and what was seen in this turn.

    Args:
        start: The first limit.
        most: The limit is never above it.
    """

    def __init__(self, start: int, most: int) -> None:
        self.limit = min(start, most)
        self._most = most
        self._servers = 0
        self._preempted = 0.0
        # Per turn: polls, polls at the limit, polls with a queue; peak cache usage, peak running requests.
        self._turn_ends = self._looks = self._reached = self._queued = 0
        self._fullest = self._ran = 0.0

    def look(
        self,
        loads: Sequence[ServerLoad],
        *,
        in_flight: int,
        ended: int,
        updating: bool = False,
        evaluating: bool = False,
    ) -> int:
        """Take in one look at all servers that are given work. Returns the limit.

        Args:
            in_flight: Episodes now.
            ended: Episodes that have ended so far, ever.
            updating: Weights are, or were since the last look, being loaded: what that preempts is no pressure.
            evaluating: Episodes that are not counted in `in_flight` are, or were since the last look, at the servers.
        """
        if not loads:
            return self.limit
        if len(loads) != self._servers:
            self._rescale(len(loads), ended)
        preempted = sum(load.preempted for load in loads)
        preempting = preempted > self._preempted and not updating  # of servers that were started again it is less
        self._preempted = preempted
        if evaluating or in_flight > self.limit:
            self._begin_turn(ended)
            return self.limit
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        cache, reached = max(load.cache for load in loads), in_flight >= REACHED * self.limit
        self._fullest, self._ran = max(self._fullest, cache), max(self._ran, running)
        self._looks, self._reached = self._looks + 1, self._reached + reached
        self._queued += reached and waiting > 1 + QUEUE * running
        turn_over = ended >= self._turn_ends and self._looks >= LOOKS
        if preempting or cache >= FULL or (turn_over and self._queued == self._looks):
            served = in_flight * min(1.0, self._ran / max(running + waiting, 1.0))
            self.limit = max(1, int(LEAST_KEPT * self.limit), min(int(CUT * served), self.limit - 1))
            self._begin_turn(ended)
        elif turn_over:
            if 2 * self._reached >= self._looks:
                room = MARK / self._fullest if self._fullest else GROWTH
                self.limit = max(self.limit, min(math.ceil(self.limit * min(GROWTH, room)), self._most))
            self._begin_turn(ended)
        return self.limit

    def _rescale(self, servers: int, ended: int) -> None:
        """Rescale the limit when the number of servers changes; the load per server stays the same."""
        if self._servers:
            self.limit = max(1, min(self._most, round(self.limit * servers / self._servers)))
        self._servers, self._preempted = servers, math.inf  # the counters are of others
        self._begin_turn(ended)

    def _begin_turn(self, ended: int) -> None:
        self._turn_ends = ended + self.limit
        self._looks = self._reached = self._queued = 0
        self._fullest = self._ran = 0.0


Fetch = Callable[[str], Awaitable[str]]


def read_load(metrics: str) -> ServerLoad:
    """Read a server's load from the text of its /metrics; where it has several engines the fullest cache counts.

    Raises:
        ValueError: it is not the text of a vLLM server.
    """

    def values(name: str) -> list[float]:
        lines = [line for line in metrics.splitlines() if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))]
        if not lines:
            raise ValueError(f"no vllm:{name}")
        return [float(line.rpartition(" ")[2]) for line in lines]

    return ServerLoad(
        running=sum(values("num_requests_running")),
        waiting=sum(values("num_requests_waiting")),
        cache=max(values("kv_cache_usage_perc")),
        preempted=sum(values("num_preemptions_total")),
    )


class LoadWatch:
    """Sets how many episodes `scheduler` may have in flight, from looks at the servers that are given work.

    It begins with a step's worth, at most `most`.

    Args:
        evaluating: Whether others than the scheduler's episodes are at the servers.
        behind: The servers that a router leads to, by its address; they are looked at in its place.
    """

    def __init__(
        self,
        fleet: ReplicaPool,
        scheduler: Scheduler[Any],
        most: int,
        evaluating: Callable[[], bool],
        behind: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._fleet, self._scheduler, self._behind = fleet, scheduler, behind or {}
        self._control = Concurrency(scheduler.limits.batch_size, most)
        self._evaluating = evaluating
        # At the last look: the version served and whether another one was being loaded; whether there was an evaluation.
        self._seen = ((scheduler.version, False), False)
        self._warned = False
        scheduler.allow(self._control.limit)

    async def run(self, key: str = "") -> None:
        """Look every few seconds, until it is cancelled. `key`: the servers' API key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS, headers=headers, trust_env=False) as http:

            async def fetch(url: str) -> str:
                return (await http.get(url)).raise_for_status().text

            while True:  # bounded: the run cancels it at its end
                await asyncio.sleep(LOOK_SECONDS)
                await self.look(fetch)

    async def look(self, fetch: Fetch) -> None:
        """Look at all servers once; change nothing where one of them does not answer."""
        try:
            roots = [root for replica in self._fleet.ready for root in self._behind.get(replica.name, [replica.name])]
            loads = [read_load(text) for text in await asyncio.gather(*(fetch(f"{root}/metrics") for root in roots))]
        except (httpx.HTTPError, ValueError) as error:
            if not self._warned:
                logger.warning(
                    "max_concurrent = auto: a server does not say how busy it is, the limit stays: {!r}", error
                )
            self._warned = True
            return
        scheduler, (weights, evaluating) = self._scheduler, self._seen
        self._seen = ((scheduler.version, self._fleet.loading is not None), self._evaluating())
        limit = self._control.look(
            loads,
            in_flight=scheduler.in_flight,
            ended=scheduler.ended,
            updating=self._fleet.loading is not None or weights != self._seen[0],
            evaluating=evaluating or self._seen[1],
        )
        if limit != scheduler.limits.max_concurrent:
            waiting, cache = sum(load.waiting for load in loads), max((load.cache for load in loads), default=0.0)
            logger.info(
                "{} episodes may be in flight now ({:.0f} wait, cache {:.0f} % full)", limit, waiting, 100 * cache
            )
            scheduler.allow(limit)
