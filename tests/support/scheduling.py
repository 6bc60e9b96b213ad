"""A scheduler with its ledger in a random world, without clock or network."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from prime_rl.config import OrchestratorConfig
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.orchestrator.checkpoint import OrchestratorState, resume_point
from prime_rl.orchestrator.ledger import Ledger, batch_extra, restore
from prime_rl.orchestrator.scheduler import Batch, Drop, Limits, Scheduler, Start, Task
from prime_rl.orchestrator.tasks import task_stream
from prime_rl.transport.protocol import newest_version
from support.committing import commit_empty
from support.samples import sample_tokens

TASKS = {
    "env": [Task("env", i, f"task-{i}") for i in range(5)],
    "other": [Task("other", i, f"o-{i}") for i in range(3)],
}


def endless_tasks() -> Iterator[Task]:
    return (Task("env", i, f"task-{i}") for i in itertools.count())


class World:
    """A trainer, a fleet and an orchestrator in one thread, driven by chance. Batches are committed in `directory`; a
    crash forgets all that is not in it, and comes with probability `crash_rate` at each point of a commit, and
    between."""

    def __init__(
        self,
        limits: Limits,
        seed: int,
        directory: Path,
        *,
        failure_rate: float = 0.2,
        turned_away: float = 0.0,
        crash_rate: float = 0.0,
    ) -> None:
        self.limits, self.random, self.directory = limits, random.Random(seed), directory
        self.failure_rate, self.turned_away, self.crash_rate = failure_rate, turned_away, crash_rate
        self.clock = 0.0
        self.incarnations, self.versions = {0: 0}, {0: 0}
        self.batches: list[tuple[Batch[EpisodeResult], set[str]]] = []  # each with what is trained of it
        self.crashes = 0
        self.start()

    @property
    def newest(self) -> int:
        version = newest_version(self.versions, self.incarnations)
        assert version is not None
        return version

    def start(self) -> None:
        """A new incarnation of the orchestrator."""
        self.running: dict[str, Start] = {}
        config = OrchestratorConfig(output_dir=self.directory, recover=self.crashes > 0, environment={"id": "env"})
        progress, incarnation = resume_point(config), max(self.incarnations)
        self.ledger = Ledger(self.directory / "ledger.sqlite")
        self.ledger._db.execute("PRAGMA synchronous = OFF")  # no power fails here
        stream = task_stream(TASKS, {"env": 2.0, "other": 1.0}, 0)
        self.scheduler = Scheduler[EpisodeResult](
            self.limits, stream, progress.step, self.newest, incarnation, self.ledger.record, self.gate
        )
        rollouts = self.directory / "rollouts"
        restore(self.scheduler, self.ledger, rollouts, progress, stream, self.newest, {})
        self.scheduler.begin_incarnation(incarnation, self.incarnations)
        self.check()

    def gate(self, group: object) -> str | None:
        return "dull" if self.random.random() < self.turned_away else None

    def check(self) -> None:
        """Nothing is lost or counted twice, as the scheduler and, once it is written, the ledger have it."""
        assert len(self.scheduler._running) == len(self.running) <= self.limits.max_concurrent
        self.ledger.flush()
        self.ledger.check(self.scheduler.held)

    def run(self) -> None:
        weights = {"land": 10, "prove": 2, "train": 2, "serve": 3, "ship": 3, "doubt": 0.3, "rewind": 0.3, "check": 2}
        weights["crash"] = 6 * self.crash_rate
        actions = [getattr(self, name) for name in weights]
        for _ in range(20_000):
            if self.scheduler.done:
                return
            self.fill()
            self.random.choices(actions, list(weights.values()))[0]()
        raise AssertionError("the run did not end: it is stuck")

    def fill(self) -> None:
        """Start what may start: each on a version that the async level allows for its step (DESIGN, "async level")."""
        self.clock += self.random.choice([0.0, 0.1, 1.0, 30.0])
        while (start := self.scheduler.next_start(self.clock)) is not None:
            assert start.episode not in self.running
            self.running[start.episode] = start
            before = list(self.scheduler._groups).index(start.group)
            step = self.scheduler.step + before // self.limits.groups_per_batch
            assert start.version >= max(0, step - self.limits.async_level)
            assert step < (self.limits.max_steps or 0)

    def land(self) -> None:
        if not self.running:
            return
        episode = self.random.choice(sorted(self.running))
        self.running.pop(episode)
        if self.random.random() < self.failure_rate:
            self.scheduler.fail(episode, Drop.ERRORED, retry=self.random.random() < 0.5)
        else:
            samples = [sample_tokens([1], [2], [-1.0])]
            self.scheduler.finish(episode, EpisodeResult(episode, "env", "t", Outcome.OK, reward=0.5, samples=samples))

    def prove(self) -> None:
        self.scheduler.verify(self.scheduler.unverified())

    def doubt(self) -> None:
        """Start a server again, the only one or one of several: its unverified samples are made again."""
        several = self.random.random() < 0.5
        others = {name for name in self.running if several and self.random.random() < 0.5}
        lost = self.scheduler.invalidate("gone", self.scheduler.running_or_unverified() - others)
        assert {start.episode for start in lost} == self.running.keys() - others
        self.forget(lost)
        if not several:
            self.scheduler.retract()

    def train(self) -> None:
        """The trainer commits a version, if there is a batch for it."""
        if self.newest < len(self.batches):
            self.versions[self.newest + 1] = max(self.incarnations)

    def serve(self) -> None:
        if self.newest > self.scheduler.version and not self.scheduler.must_go_back:
            self.forget(self.scheduler.serve(self.newest))

    def trainer_dies(self) -> int:
        """It goes on from an earlier version."""
        incarnation, back_to = max(self.incarnations) + 1, self.random.choice(sorted(self.versions))
        self.incarnations[incarnation] = back_to
        self.versions = {version: made for version, made in self.versions.items() if version <= back_to}
        return back_to

    def rewind(self) -> None:
        """The orchestrator notices a new incarnation."""
        back_to = self.trainer_dies()
        self.forget(self.scheduler.begin_incarnation(max(self.incarnations), self.incarnations))
        if self.scheduler.must_go_back:
            self.scheduler.go_back(back_to)

    def ship(self) -> None:
        """Cut a batch and commit it; a crash may come at any point of that."""
        self.prove()
        batch = self.scheduler.ready_batch()
        if batch is None:
            return
        names = sorted(batch.episodes)
        filtered = names[: self.random.randint(0, len(names) - 1)]
        batched = batch.committed(names[len(filtered) :], filtered)
        if self.crashed():
            return
        self.ledger.flush()
        if self.crashed():
            return
        state = OrchestratorState(batch.step + 1, groups_opened=self.scheduler.groups_opened)
        extra = batch_extra(batched) | {"state": asdict(state)}
        commit_empty(self.directory / "rollouts" / f"step_{batch.step}", batch.step, "orchestrator", **extra)
        self.batches.append((batch, set(batched.trained)))
        if not self.crashed():
            self.scheduler.advance(batched)

    def crashed(self) -> bool:
        if crash := self.random.random() < self.crash_rate:
            self.crash()
        return crash

    def crash(self) -> None:
        self.crashes += 1
        self.ledger.close()
        if self.random.random() < 0.1:  # somebody removed a damaged ledger
            self.ledger.path.unlink()
        if self.random.random() < 0.3:  # both died
            self.trainer_dies()
        self.start()

    def forget(self, starts: list[Start]) -> None:
        for start in starts:
            del self.running[start.episode]
