"""All attempts at one target: several environments at once within one bound, each attempt kept once the servers have proven what sampled it."""

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.envs.pool import EnvPool
from prime_rl.envs.protocol import EpisodeResult, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals.servers import Servers
from prime_rl.evals.store import Store
from prime_rl.orchestrator.evals import EvalPlan, attempt, reply_tokens

if TYPE_CHECKING:
    from prime_rl.config import EvalConfig
    from prime_rl.fleet.replicas import RoutedEnvPool

PROOF_SECONDS = 0.5  # between two questions what is served
FIRST_PAUSE_SECONDS = 1.0  # before an attempt that failed for want of a server is made again; doubled each time
_TRIES = 5  # at one attempt, of which all but the last failed for want of a server
_LAST_PROOF_SECONDS = 20.0  # for what has ended when all is given up
_VOIDS = 3  # times that one attempt is made again because nobody can prove what sampled it


class Denied(UserError):
    """The API accepts the key no more, or its budget is spent: no further attempt would fare better."""


@dataclass(frozen=True)
class Job:
    """One environment: what to run, on which tasks, and where it is kept."""

    plan: EvalPlan
    tasks: Sequence[TaskInfo]
    store: Store

    def missing(self) -> "Iterator[Attempt]":
        """What is still to be made: of each task all attempts together, as they share their prompt."""
        for task in self.tasks:
            for number in range(self.plan.rollouts_per_example):
                if not self.store.scored(task.task_id, number):
                    yield Attempt(self, task, number)

    @property
    def complete(self) -> bool:
        """Whether every attempt was made, well or not."""
        return all(len(attempts) == self.plan.rollouts_per_example for attempts in self.kept())

    def kept(self) -> list[list[EpisodeResult]]:
        """The attempts that there are, by task."""
        numbers = range(self.plan.rollouts_per_example)
        found = self.store.results
        return [
            [found[task.task_id, number] for number in numbers if (task.task_id, number) in found]
            for task in self.tasks
        ]


@dataclass(frozen=True)
class Attempt:
    """One attempt at one task."""

    job: Job
    task: TaskInfo
    number: int


class Round:
    """One target's attempts.

    Args:
        servers: Prove what they serve; None: an API that proves nothing.
        on_kept: Told of each attempt that is kept.
    """

    def __init__(
        self,
        config: "EvalConfig",
        pool: "EnvPool | RoutedEnvPool",
        jobs: Sequence[Job],
        version: int,
        servers: Servers | None,
        on_kept: Callable[[Job, EpisodeResult], None],
    ) -> None:
        self._config, self._pool, self._version = config, pool, version
        self._servers, self._on_kept = servers, on_kept
        self._todo = deque(attempt for attempt in _by_turns([job.missing() for job in jobs]))
        self._unverified: list[tuple[Attempt, EpisodeResult, int]] = []
        self._incarnation = 0  # raised when what is in flight is void
        self._voids: Counter[tuple[str, str, int]] = Counter()
        self._proving = asyncio.Lock()  # bounded: held for questions that have deadlines

    async def run(self) -> None:
        """Make all that is missing. Whatever ends it, what was finished and proven by then is kept.

        Raises:
            Denied: the API refused the key.
            UserError: a server was lost for good.
        """
        while self._todo:  # bounded: each attempt has its deadline, and is made again a few times at most
            try:
                await self._make_all()
            except BaseException:
                with contextlib.suppress(UserError, TimeoutError):  # what counts is why it ends
                    async with asyncio.timeout(_LAST_PROOF_SECONDS):
                        await self._verify()
                raise
            await self._verify()

    async def _make_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                proof = group.create_task(self._verify_periodically())
                seats = min(self._config.max_concurrent, len(self._todo))
                workers = [group.create_task(self._work()) for _ in range(seats)]
                await asyncio.wait(workers)  # bounded: each attempt has its deadline
                proof.cancel()
        except ExceptionGroup as several:
            raise _told_first(several) from several

    async def _work(self) -> None:
        while self._todo:
            attempted, incarnation = self._todo.popleft(), self._incarnation
            result = await self._make(attempted)
            result.output_tokens, result.samples = reply_tokens(result), []
            self._unverified.append((attempted, result, incarnation))
            if result.outcome is Outcome.ENGINE_DENIED:
                raise Denied(result.message)

    async def _make(self, attempted: Attempt) -> EpisodeResult:
        plan, config = attempted.job.plan, self._config
        for tried in range(1, _TRIES + 1):
            result = await attempt(
                self._pool, plan, attempted.task.index, attempted.number,
                version=self._version, seed=config.seed, timeout=config.rollout_timeout,
            )  # fmt: skip
            result.task_id = attempted.task.task_id
            if plan.chat or result.outcome is not Outcome.ENGINE_UNAVAILABLE or tried == _TRIES:
                break  # the client of an API has tried again and again already
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2.0 ** (tried - 1))
        return result

    async def _verify_periodically(self) -> None:
        while True:  # bounded: cancelled when all attempts have ended
            await asyncio.sleep(PROOF_SECONDS)
            await self._verify()

    async def _verify(self) -> None:
        """Keep what has ended, if the servers prove that they served this target all the time; else have it made again."""
        async with self._proving:
            ended, self._unverified = self._unverified, []
            try:
                proven = self._servers is None or await self._servers.verify()
            except BaseException:
                self._unverified = ended + self._unverified
                raise
            self._incarnation += not proven
            for attempted, result, incarnation in ended:
                if incarnation == self._incarnation:
                    attempted.job.store.add(attempted.number, result, self._version)
                    self._on_kept(attempted.job, result)
                else:
                    self._again(attempted)

    def _again(self, attempted: Attempt) -> None:
        key = attempted.job.plan.env, attempted.task.task_id, attempted.number
        self._voids[key] += 1
        if self._voids[key] > _VOIDS:
            raise UserError(
                f"the servers' weights were changed {_VOIDS} times by others, or the servers started again, during one attempt: are they another run's?"
            )
        self._todo.append(attempted)


def _by_turns(queues: Sequence[Iterator[Attempt]]) -> Iterator[Attempt]:
    """One of each in turn, so that no environment waits for the end of another."""
    for several in itertools.zip_longest(*queues):
        yield from (one for one in several if one is not None)


def _told_first(group: ExceptionGroup) -> BaseException:
    """The error that says most: a refused key, before what else the user can mend."""
    errors = sorted(group.exceptions, key=lambda error: (not isinstance(error, Denied), not isinstance(error, UserError)))  # fmt: skip
    return errors[0]
