"""`max_concurrent = "auto"`: look at the servers' own counters, and let `concurrency` say how many episodes may be in flight."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
from loguru import logger

from prime_rl.fleet.replicas import ReplicaPool
from prime_rl.orchestrator.concurrency import Concurrency, Load
from prime_rl.orchestrator.scheduler import Scheduler

LOOK_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # a server that is busier than that is not looked at this time

Fetch = Callable[[str], Awaitable[str]]


def read_load(metrics: str) -> Load:
    """A server's load, from the text of its /metrics; where it has several engines the fullest cache counts.

    Raises:
        ValueError: it is not the text of a vLLM server.
    """
    return Load(
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
